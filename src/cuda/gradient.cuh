// The gradient's formula for single elements, shared by the backward kernels.
#pragma once

#include "cuda/parameters.cuh"

namespace evenkeel::cuda {

template <typename X, int W, typename C>
struct Gradient {
  C normalized[W];  // (x - mean) * rstd
  C scaled[W];      // what the weight was multiplied with: normalized, perhaps rounded
  C dz[W];          // the gradient before the activation
  C g[W];           // dz * weight

  // kPlain: neither an activation nor a casting order.
  template <bool kPlain>
  static __device__ Gradient of(const BackwardArguments& a, int64_t column, const C (&x)[W],
                                const C (&dy)[W], const C (&weight)[W], C mean, C rstd) {
    Gradient e;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      e.scaled[k] = e.normalized[k] = (x[k] - mean) * rstd;
      e.dz[k] = dy[k];
    }
    if constexpr (!kPlain) {
      if (a.formula.rounds) {
#pragma unroll
        for (int k = 0; k < W; ++k) e.scaled[k] = Access<X, W, C>::round(e.normalized[k], a.x);
      }
      if (a.formula.silu) {
        C bias[W];
        parameters_at<X>(a.formula.bias, column, C{0}, bias);
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const C z = e.scaled[k] * weight[k] + bias[k], s = sigmoid(z);
          e.dz[k] *= s * (1 + z * (1 - s));
        }
      }
    }
#pragma unroll
    for (int k = 0; k < W; ++k) e.g[k] = e.dz[k] * weight[k];
    return e;
  }
};

}  // namespace evenkeel::cuda
