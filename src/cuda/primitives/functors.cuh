// The functions of single values that all kernels share, rows and groups, forward and backward: each term
// of the epilogue has its value and, for the backward pass, its gradient here and nowhere else.
//
//   z = casting(normalized) * (weight + offset) + bias,   y = activation(z)
#pragma once

#include "cuda/primitives/element.cuh"

namespace evenkeel::cuda {

// One Newton step from the approximation; there is none from 0, infinity or NaN.
__device__ inline float reciprocal_root(float value) {
  const float root = rsqrtf(value);
  const float better = root + 0.5f * root * (1.0f - value * root * root);
  return isfinite(better) ? better : root;
}
__device__ inline double reciprocal_root(double value) { return 1 / sqrt(value); }

// The division gives 0 for z below -87, where the result would be subnormal.
__device__ inline float sigmoid(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }
__device__ inline double sigmoid(double z) { return 1 / (1 + exp(-z)); }

struct Silu {
  template <typename C>
  static __device__ C value(C z) {
    return z * sigmoid(z);
  }
  template <typename C>
  static __device__ C gradient(C z) {
    const C s = sigmoid(z);
    return s * (1 + z * (1 - s));
  }
};

// Rounds the normalized value to x's dtype before it meets the weight. Its gradient passes through.
template <typename X>
struct RoundToX {
  template <int W, typename C>
  static __device__ void value(const DeviceTensor& x, const C (&normalized)[W], C (&out)[W]) {
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] = Access<X, W, C>::round(normalized[k], x);
  }
};

// The gradient of the offset weight is the weight's.
template <int W, typename C>
__device__ inline void add_weight_offset(const Formula& formula, C (&weight)[W]) {
  const C offset = formula.weight_offset;
  if (offset == 0) return;
#pragma unroll
  for (int k = 0; k < W; ++k) weight[k] += offset;
}

}  // namespace evenkeel::cuda
