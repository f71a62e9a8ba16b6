// Layer norm and RMS norm, forward: one kernel for every way to split a row.
//
// A team of threads holds a row in registers. The statistics take two passes over it: each warp
// finds the mean of its own part, then the squares of what is left, and the warps' results are
// merged, so that a team meets once only.
#pragma once

#include <type_traits>

#include "cuda/parameters.cuh"
#include "cuda/team.cuh"

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

// From a centered row to its output.
template <typename X, bool kPlain, int W, typename C>
__device__ inline void apply(const ForwardArguments& a, const C (&x)[W], C rstd, C shift,
                             const C (&weight)[W], const C (&bias)[W], C (&y)[W]) {
#pragma unroll
  for (int k = 0; k < W; ++k) y[k] = x[k] * rstd + shift;
  if constexpr (!kPlain) {
    if (a.formula.rounds) {
#pragma unroll
      for (int k = 0; k < W; ++k) y[k] = Access<X, W, C>::round(y[k], a.x);
    }
  }
#pragma unroll
  for (int k = 0; k < W; ++k) y[k] = y[k] * weight[k] + bias[k];
  if constexpr (!kPlain) {
    if (a.formula.silu) {
#pragma unroll
      for (int k = 0; k < W; ++k) y[k] *= sigmoid(y[k]);
    }
  }
}

// The most threads of a block, as far as the compiler knows: a divisor of forward_threads().
template <Scope kScope>
inline constexpr int kForwardBound = kScope == Scope::kWarp    ? kForwardWarpThreads
                                     : kScope == Scope::kBlock ? 640
                                                               : kForwardBlockThreads;

// kPlain: neither an activation, nor a casting order, nor an offset of the weight.
template <typename X, typename Y, int W, Scope kScope, int kLanes, int kElements, bool kPlain>
__global__ void __launch_bounds__(kForwardBound<kScope>,
                                  forward_threads(kScope, kElements) / kForwardBound<kScope>)
    rows_forward(const __grid_constant__ ForwardArguments a) {
#if __CUDA_ARCH__ < 900
  if constexpr (kScope == Scope::kCluster) return;
#endif
  using In = Access<X, W, float>;
  using Out = Access<Y, W, float>;
  constexpr int kVectors = kElements / W;
  constexpr bool kHinted = forward_hints(sizeof(X), kElements);
  __shared__ __align__(16) char scratch[kScope == Scope::kWarp ? 1 : reduce_bytes(kScope)];
  const Formula& formula = a.formula;
  Team<kScope, kLanes, kScope != Scope::kWarp> team(scratch, blockDim.x);
  const int threads = team.size() * team.cluster();
  const int first = (team.block() * team.size() + team.thread()) * W, step = threads * W;
  const auto cols = static_cast<int>(a.cols);
  const int teams = kScope == Scope::kWarp ? kForwardWarpThreads / kLanes : 1;
  int64_t row = static_cast<int64_t>(blockIdx.x / team.cluster()) * teams + team.index();
  // Lanes without a row do what the last row's do, but store nothing.
  const bool stores = row < a.rows;
  row = min(row, a.rows - 1);
  prefetch_parameters(formula, a.cols);
  wait_for_previous_kernel();

  const char* from = a.x.data + (a.x.offset(row) + first) * static_cast<int64_t>(sizeof(X));
  typename In::Raw raw[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const char* at = from + v * step * static_cast<int>(sizeof(X));
    const bool valid = first + v * step < cols;
    raw[v] = In::template load_if<kHinted>(valid, at);
  }
  // Short rows are unpacked and centered once. For long rows every pass does that anew: to hold the
  // values would take twice the registers.
  constexpr bool kHolds = kScope == Scope::kWarp && kElements <= 32;
  float held[kHolds ? kVectors : 1][W];
  const auto subtract = [&](int v, float center, float(&x)[W]) {
    const float valid_center = first + v * step < cols ? center : 0;
#pragma unroll
    for (int k = 0; k < W; ++k) x[k] -= valid_center;
  };
  const auto values = [&](int v, float center, float(&x)[W]) {
    if constexpr (kHolds) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = held[v][k];
    } else {
      In::unpack(raw[v], x);
      subtract(v, center, x);
    }
  };
  const auto sum_over = [&](float center, auto sum_of_vector) {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[W];
      values(v, center, x);
      sum += sum_of_vector(x);
    }
    return sum;
  };
  const auto square = [](const float(&x)[W]) { return sum_of_squares(x); };
  if constexpr (kHolds) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) In::unpack(raw[v], held[v]);
  }

  // Each warp centers its own values; the rest of the way to the row's mean is `shift`.
  float center = 0, mean = 0, shift = 0, squares = 0;
  if (formula.centers) {
    const float sum = sum_over(0, [](const float(&x)[W]) { return sum_of(x); });
    int vectors = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors += first + v * step < cols;
    const float count = team.warp_count(vectors) * W;
    mean = center = team.warp_sum(sum) * __frcp_rn(fmaxf(count, 1));
    if constexpr (kHolds) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) subtract(v, center, held[v]);
    } else {
      In::forget(raw);
    }
    squares = team.warp_sum(sum_over(center, square));
    team.merge(count, formula.share, mean, squares);
    shift = center - mean;
  } else {
    float sum[1] = {sum_over(0, square)};
    team.sum(sum);
    squares = sum[0];
  }
  if constexpr (!kHolds) In::forget(raw);
  float variance = squares * static_cast<float>(formula.share);

  // Lanes of another row in the warp keep it company, but its bits must not depend on theirs.
  const bool correct = needs_correction(mean, variance);
  if (kScope == Scope::kWarp ? __any_sync(0xffffffff, correct) : correct) {
    float sums[2] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float z[W];
      values(v, center, z);
#pragma unroll
      for (int k = 0; k < W; ++k) z[k] = first + v * step < cols ? z[k] + shift : 0;
      sums[0] += sum_of(z);
      sums[1] += sum_of_squares(z);
    }
    team.sum(sums);
    const float rest = correct ? sums[0] * static_cast<float>(formula.share) : 0;
    // Never negative; NaN stays.
    if (correct)
      variance = fmaxf(sums[1] * static_cast<float>(formula.share) - rest * rest, sums[1] * 0);
    mean += rest;
    shift -= rest;
    if constexpr (!kHolds) In::forget(raw);
  }
  team.take_leave();
  const float rstd = reciprocal_root(variance + static_cast<float>(formula.eps));
  if (first == 0 && stores) {
    if (a.mean != nullptr) reinterpret_cast<float*>(a.mean)[row] = mean;
    if (a.rstd != nullptr) reinterpret_cast<float*>(a.rstd)[row] = rstd;
  }
  char* to = a.y.data + (a.y.offset(row) + first) * static_cast<int64_t>(sizeof(Y));
  shift *= rstd;
  // With kinds of parameters known at compile time, for the usual ones.
  const bool has_weight = formula.weight.data != nullptr, has_bias = formula.bias.data != nullptr;
  const auto finish = [&](auto type, auto known_weight, auto known_bias) {
    using Parameter = Access<decltype(type), W, float>;
    constexpr int kSize = sizeof type;
    const char* weights = formula.weight.data + first * kSize;
    const char* biases = formula.bias.data + first * kSize;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * step >= cols || !stores) continue;
      typename Parameter::Raw weight_raw = {}, bias_raw = {};
      if (known_weight || has_weight) weight_raw = Parameter::load(weights + v * step * kSize);
      if (known_bias || (!known_weight && has_bias))
        bias_raw = Parameter::load(biases + v * step * kSize);
      float weight[W], bias[W], y[W];
      Parameter::unpack(weight_raw, weight);
      Parameter::unpack(bias_raw, bias);
      if constexpr (!known_weight) {
        const float offset = has_weight ? formula.weight_offset.narrow : 1.0f;
#pragma unroll
        for (int k = 0; k < W; ++k) weight[k] += offset;
      }
      float x[W];
      values(v, center, x);
      apply<X, kPlain>(a, x, rstd, shift, weight, bias, y);
      Out::template store<kHinted>(to + v * step * static_cast<int>(sizeof(Y)), y);
    }
  };
  with_type(has_weight ? formula.weight.dtype : formula.bias.dtype, [&](auto type) {
    constexpr std::bool_constant<kPlain> kKnown;
    constexpr std::false_type kUnknown;
    if (kPlain && has_weight && has_bias) {
      finish(type, kKnown, kKnown);
    } else if (kPlain && has_weight) {
      finish(type, kKnown, kUnknown);
    } else {
      finish(type, kUnknown, kUnknown);
    }
  });
  team.leave();
}

}  // namespace evenkeel::cuda
