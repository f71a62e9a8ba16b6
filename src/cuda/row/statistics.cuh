// Mean and variance, or mean square, of a row that is in a tile.
//
// Two passes over the tile, one exchange: each warp finds the mean of its own part, then the squares of what is
// left, and the warps' results are merged by Chan's formula.
#pragma once

#include "cuda/row/forward_tile.cuh"

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

// Sums of squares of the tile's rows, and, of layer norm, the row's mean. Tile values are relative to `center`,
// the mean of the warp's part; `shift` leads from there to values relative to the row's mean.
template <typename X, ForwardPolicy kPolicy, typename Group>
__device__ inline void find_moments(const Formula& formula, Group& group,
                                    const ForwardTile<X, kPolicy>& tile, float& center, float& mean,
                                    float& shift, float (&squares)[kPolicy.rows]) {
  constexpr int W = kPolicy.vector(), kVectors = kPolicy.vectors();
  constexpr bool kLayer = kPolicy.is_layer(), kFull = kPolicy.full(),
                 kOnce = kPolicy.unpacks_once();
  using In = Access<X, W, float>;
  const auto square = [](const float(&x)[W]) { return sum_of_squares(x); };
  const auto sum_squares = [&] {
    if constexpr (kPolicy.rows == 1) {
      squares[0] = tile.sum_over(0, square);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[W];
        tile.values(v, 0, x);
        squares[v] = square(x);
      }
    }
    group.begin();
    group.sum(squares);
  };
  if constexpr (kPolicy.is_rms()) {
    sum_squares();
  } else if (kLayer || formula.centers) {
    const float sum = tile.sum_over(0, [](const float(&x)[W]) { return sum_of(x); });
    int elements = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) elements += max(0, min(tile.at.valid(v), W));
    constexpr int kLanes = kPolicy.scope == Scope::kWarp ? kPolicy.lanes : kWarp;
    const float count =
        kFull ? static_cast<float>(kPolicy.elements * kLanes) : group.warp_count(elements);
    mean = center = group.warp_sum(sum) * __frcp_rn(fmaxf(count, 1));
    if constexpr (kOnce) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) tile.subtract(v, center, tile.unpacked[v]);
    } else {
      In::discard_unpacked(tile.raw);
    }
    squares[0] = group.warp_sum(tile.sum_over(center, square));
    group.begin();
    group.merge(count, formula.inv_n, mean, squares[0]);
    shift = center - mean;
  } else {
    sum_squares();
  }
  if constexpr (!kOnce) In::discard_unpacked(tile.raw);
}

}  // namespace evenkeel::cuda
