// The gradient of the epilogue, element by element, shared by the backward kernels of rows.
#pragma once

#include "cuda/primitives/parameters.cuh"
#include "cuda/row/policy.h"

namespace evenkeel::cuda {

template <typename X, int W, typename C>
struct Gradient {
  C normalized[W];  // (x - mean) * rstd
  C scaled[W];      // what the weight was multiplied with: normalized, perhaps rounded
  C dz[W];          // the gradient before the activation
  C g[W];           // dz * weight

  template <EpilogueTerms kTerms>
  static __device__ Gradient of(const BackwardArguments& a, const Formula& formula, int64_t column,
                                const C (&x)[W], const C (&dy)[W], const C (&weight)[W], C mean,
                                C rstd) {
    Gradient e;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      e.scaled[k] = e.normalized[k] = (x[k] - mean) * rstd;
      e.dz[k] = dy[k];
    }
    if constexpr (kTerms.casting) {
      if (a.formula.rounds) RoundToX<X>::value(a.x, e.normalized, e.scaled);
    }
    if constexpr (kTerms.activation) {
      if (a.formula.activation != EK_ACTIVATION_NONE) {
        C bias[W];
        parameters_at<X>(formula.bias, column, C{0}, bias);
        with_activation(a.formula, [&](auto activation) {
#pragma unroll
          for (int k = 0; k < W; ++k)
            e.dz[k] = activation.gradient(e.scaled[k] * weight[k] + bias[k], e.dz[k]);
        });
      }
    }
#pragma unroll
    for (int k = 0; k < W; ++k) e.g[k] = e.dz[k] * weight[k];
    return e;
  }
};

}  // namespace evenkeel::cuda
