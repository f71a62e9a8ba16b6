// What the forward kernels share of mean and variance: sums of a vector in a fixed order, and when the mean
// needs another pass.
#pragma once

namespace evenkeel::cuda {

// mean^2 / variance, beyond which the rounding of the mean's sum could be seen in the results.
inline constexpr float kCorrectedRatio = 16;

// Whether a row's mean has to be corrected by the mean of its centered values.
template <typename C>
__device__ inline bool needs_correction(C mean, C variance) {
  return mean * mean > kCorrectedRatio * variance;
}

// The sum of a vector's elements, in pairs.
template <int W, typename C>
__device__ inline C sum_of(const C (&x)[W]) {
  C sum[W];
#pragma unroll
  for (int k = 0; k < W; ++k) sum[k] = x[k];
#pragma unroll
  for (int distance = W / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int k = 0; k < distance; ++k) sum[k] += sum[k + distance];
  }
  return sum[0];
}

template <int W, typename C>
__device__ inline C sum_of_squares(const C (&x)[W]) {
  C square[2] = {};
#pragma unroll
  for (int k = 0; k < W; ++k) square[k % 2] += x[k] * x[k];
  return square[0] + square[1];
}

}  // namespace evenkeel::cuda
