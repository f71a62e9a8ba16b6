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

// Of the tile's rows. Tile values are relative to `center`, the mean of the warp's part; `shift` leads from
// there to values relative to the row's mean.
template <ForwardPolicy kPolicy>
struct Moments {
  float center = 0, mean = 0, shift = 0;
  float squares[kPolicy.rows] = {};  // sums of squares of centered values
  float variance = 0;                // of the first row
  float rstd[kPolicy.rows];
};

// Sums of squares, and, of layer norm, the row's mean.
template <typename X, ForwardPolicy kPolicy, typename Group>
__device__ inline void find_sums(const Formula& formula, Group& group,
                                 const ForwardTile<X, kPolicy>& tile, Moments<kPolicy>& m) {
  auto& [center, mean, shift, squares, variance, rstd] = m;
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

// A third pass where the mean is large beside the deviation. Other rows of the warp take part, but their
// bits do not change.
template <typename X, ForwardPolicy kPolicy, typename Group>
__device__ inline void correct_mean(const Formula& formula, Group& group,
                                    const ForwardTile<X, kPolicy>& tile, Moments<kPolicy>& m) {
  constexpr int W = kPolicy.vector();
  const bool correct = needs_correction(m.mean, m.variance);
  if (kPolicy.is_rms() ||
      !(kPolicy.scope == Scope::kWarp ? __any_sync(0xffffffff, correct) : correct))
    return;
  float sums[2] = {};
#pragma unroll
  for (int v = 0; v < kPolicy.vectors(); ++v) {
    float z[W];
    tile.values(v, m.center, z);
#pragma unroll
    for (int k = 0; k < W; ++k) z[k] = k < tile.at.valid(v) ? z[k] + m.shift : 0;
    sums[0] += sum_of(z);
    sums[1] += sum_of_squares(z);
  }
  group.sum(sums);
  const float rest = correct ? sums[0] * static_cast<float>(formula.inv_n) : 0;
  // Never negative; NaN stays.
  if (correct)
    m.variance = fmaxf(sums[1] * static_cast<float>(formula.inv_n) - rest * rest, sums[1] * 0);
  m.mean += rest;
  m.shift -= rest;
  if constexpr (!kPolicy.unpacks_once()) Access<X, W, float>::discard_unpacked(tile.raw);
}

template <typename X, ForwardPolicy kPolicy, typename Group>
__device__ inline Moments<kPolicy> find_moments(const Formula& formula, Group& group,
                                                const ForwardTile<X, kPolicy>& tile) {
  Moments<kPolicy> m;
  find_sums(formula, group, tile, m);
  m.variance = m.squares[0] * static_cast<float>(formula.inv_n);
  correct_mean(formula, group, tile, m);
#pragma unroll
  for (int r = 0; r < kPolicy.rows; ++r) {
    const float variance = r > 0 ? m.squares[r] * static_cast<float>(formula.inv_n) : m.variance;
    m.rstd[r] = reciprocal_root(variance + static_cast<float>(formula.eps));
  }
  return m;
}

template <ForwardPolicy kPolicy>
__device__ inline void store_moments(const ForwardArguments& a, const ForwardPosition<kPolicy>& at,
                                     const Moments<kPolicy>& m) {
  if (at.first != 0 || !at.stores) return;
  if (!kPolicy.is_rms() && a.mean != nullptr) reinterpret_cast<float*>(a.mean)[at.row] = m.mean;
  if (a.rstd != nullptr) {
#pragma unroll
    for (int r = 0; r < kPolicy.rows; ++r)
      reinterpret_cast<float*>(a.rstd)[at.row + r * kPolicy.groups_per_warp()] = m.rstd[r];
  }
}

}  // namespace evenkeel::cuda
