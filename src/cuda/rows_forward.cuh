// Layer norm and RMS norm, forward: one kernel for every way to split a row.
//
// A team of threads holds a row in registers, or a long row in shared memory. The statistics take two
// passes over it: each warp finds the mean of its own part, then the squares of what is left, and the
// warps' results are merged, so that a team meets once only.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/parameters.cuh"
#include "cuda/ring.cuh"

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

// What the compiler is told: the most threads of a block, and how many such blocks a multiprocessor shall
// hold at least.
struct ForwardBounds {
  int threads, blocks;
};
constexpr ForwardBounds forward_bounds(Scope scope, int team, int x_size, int elements,
                                       bool aligned, bool large, Usual usual) {
  const int all = forward_threads(scope, team, x_size, elements, aligned, large, usual);
  const int block = scope == Scope::kWarp             ? forward_warp_threads(x_size, elements)
                    : all % kForwardBlockThreads == 0 ? kForwardBlockThreads
                                                      : all / 2;
  return {block, all / block};
}

// kPlain: neither an activation, nor a casting order, nor an offset of the weight. Rows that are not
// aligned pass through shared memory on their way in and out, and their last vector may be cut off;
// X and Y are the same type. kLarge: blocks of more threads. kRows: Tile's.
template <typename X, typename Y, int W, Scope kScope, int kLanes, int kElements, bool kPlain,
          bool kAligned, bool kLarge, Usual kUsual, int kRows>
__global__ void __launch_bounds__(
    forward_bounds(kScope, kLanes, sizeof(X), kElements, kAligned, kLarge, kUsual).threads,
    forward_bounds(kScope, kLanes, sizeof(X), kElements, kAligned, kLarge, kUsual).blocks)
    rows_forward(const __grid_constant__ ForwardArguments a) {
#if __CUDA_ARCH__ < 900
  if constexpr (kScope == Scope::kCluster) return;
#endif
  using In = Access<X, W, float>;
  using Out = Access<Y, W, float>;
  constexpr int kVectors = kElements / W;
  constexpr bool kRms = kUsual == Usual::kRms;
  constexpr bool kFull = forward_full(kScope, sizeof(X), kElements, kLarge, kUsual);
  constexpr bool kHinted = forward_hints(kScope, sizeof(X), kElements);
  constexpr bool kCopied = forward_copies(kScope, kAligned);
  constexpr bool kStays = kCopied && kAligned;  // in shared memory
  constexpr int kSize = sizeof(X);
  extern __shared__ __align__(128) uint4 shared[];
  const Formula& formula = a.formula;
  // Rows, then what warps exchange.
  char* const slots = reinterpret_cast<char*>(shared);
  const int slot_bytes = forward_slot(kScope, blockDim.x, kElements, a.part_cols, kSize, kAligned);
  const int teams =
      kScope == Scope::kWarp ? forward_warp_threads(sizeof(X), kElements) / kLanes : 1;
  constexpr bool kAdds = kRms && kScope == Scope::kCluster;
  Team<kScope, kLanes, kScope != Scope::kWarp, true, false, kForwardBlockThreads / kWarp, kAdds>
      team(slots + teams * slot_bytes, blockDim.x);
  team.open();
  const int part = kScope == Scope::kCluster ? team.block() * a.part_cols : 0;
  auto end = static_cast<int>(a.cols);
  if constexpr (kScope == Scope::kCluster) end = min(end, part + a.part_cols);
  constexpr bool kTogether = forward_together(kScope, kSize, kFull);
  using Own = Columns<kScope, kLanes, kElements, W, kTogether>;
  const int own = Own::first(team.thread()), first = part + own, step = Own::step(team.size());
  // Rows of a team take turns with those of the warp's other teams.
  constexpr int kApart = kScope == Scope::kWarp ? kWarp / kLanes : 1;
  int64_t row = static_cast<int64_t>(team.cluster_index()) * (teams * kRows) + team.index() +
                team.index() / kApart * (kApart * (kRows - 1));
  // Lanes without a row do what the last row's do, but store nothing.
  const bool stores = kScope == Scope::kCluster || kRows > 1 || row < a.rows;
  if constexpr (kScope != Scope::kCluster && kRows == 1) row = min(row, a.rows - 1);
  const auto place = [&](const DeviceTensor& tensor, int64_t size) {
    const int64_t offset = kUsual == Usual::kNone ? tensor.offset(row) : row * tensor.row_stride;
    return tensor.data + (offset + first) * size;
  };
  // From a thread's first vector to another.
  const auto away = [&](const DeviceTensor& tensor, int v, int size) {
    if constexpr (kRows == 1)
      return v * step * size;
    else
      return v * (kApart * tensor.row_stride * size);
  };
  prefetch_parameters(formula, a.cols);
  wait_for_previous_kernel();

  char* const slot = slots + team.index() * slot_bytes;
  const Drawer<W * kSize> drawer(slots + own * kSize, step * kSize);
  const Cursor<X> x_at(a.x, row, part);
  const auto inside = [&](int v) { return kFull || first + v * step < end; };
  // The elements of a vector that are in the row.
  const auto valid = [&](int v) {
    return kAligned ? (inside(v) ? W : 0) : end - (first + v * step);
  };
  typename In::Raw raw[kStays ? 1 : kVectors];
  if constexpr (kStays) {
    const char* from = x_at.at + own * kSize;
#pragma unroll
    for (int v = 0; v < kVectors; ++v, from += step * kSize)
      drawer.template copy<true>(v, from, 0, inside(v));
    commit_copies();
  } else if constexpr (kCopied) {
    copy_row(x_at, a.x, end - part, slot, team.thread(), team.size());
    commit_copies();
  } else {
    // Not by way of x_at: then the compiler would load the second vector first, which costs 7 %.
    const char* const from = place(a.x, kSize);
    const auto load = [&](auto wanted) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        raw[v] = In::template load_if<kHinted>(wanted(v), from + away(a.x, v, kSize));
    };
    // Of a block's warps all but the last have nothing but columns of the row. Without a condition for
    // each vector the compiler loads them in order.
    const int warp_end = Own::first(team.thread() / kWarp * kWarp) + kWarp * kElements;
    if (kScope == Scope::kBlock && kTogether && warp_end <= end) {
      load([](int) { return true; });
      asm volatile("" ::: "memory");  // or it would make one of both ways
    } else {
      load(inside);
    }
  }
  if (!kHinted && threadIdx.x == 0 && a.ahead != 0) {
    const int64_t block_row = static_cast<int64_t>(team.cluster_index()) * (teams * kRows);
    const int cols = kScope == Scope::kWarp ? teams * kRows * end : end - part;
    fetch_ahead(a.x.data + (block_row * a.x.row_stride + part) * kSize + a.ahead, cols * kSize,
                a.x.end);
  }
  constexpr int kEarly = forward_early(kScope, kVectors / kRows, kUsual);
  typename In::Raw early[kEarly == 0 ? 1 : kEarly];
  if constexpr (kEarly > 0) {
    const char* const weights = formula.weight.data + first * kSize;
#pragma unroll
    for (int v = 0; v < kEarly; ++v) early[v] = In::load_if(inside(v), weights + v * step * kSize);
  }
  // A thread of an aligned row waits for its own copies only: nobody else reads them.
  if constexpr (kCopied) wait_for_copies(0);
  if constexpr (!kAligned) {
    team.sync();
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      raw[v] = In::load_loose(slot + x_at.place() + (own + v * step) * kSize, valid(v));
  }
  // Short rows are unpacked and centered once, and those that are not aligned: they have the registers.
  // For long rows every pass does that anew: to hold the values would take twice the registers.
  constexpr bool kHolds =
      kUsual == Usual::kNone && (kScope == Scope::kWarp || !kAligned) && kElements <= 32;
  float held[kHolds ? kVectors : 1][W];
  const auto subtract = [&](int v, float center, float(&x)[W]) {
    // What is cut off stays 0: few threads have any of it, and none should pay for it.
    constexpr bool kLater = kHolds && !kAligned;
#pragma unroll
    for (int k = 0; k < W; ++k) x[k] -= kLater || k < valid(v) ? center : 0;
    if (kLater && valid(v) < W) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = k < valid(v) ? x[k] : 0;
    }
  };
  const auto values = [&](int v, float center, float(&x)[W]) {
    if constexpr (kHolds) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = held[v][k];
    } else {
      if constexpr (kStays) drawer.get(v, raw[0]);
      In::unpack(raw[kStays ? 0 : v], x);
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
  float center = 0, mean = 0, shift = 0, squares[kRows] = {};
  const auto sum_squares = [&] {
    if constexpr (kRows == 1) {
      squares[0] = sum_over(0, square);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float x[W];
        values(v, 0, x);
        squares[v] = square(x);
      }
    }
    team.begin();
    team.sum(squares);
  };
  if constexpr (kRms) {
    sum_squares();
  } else if (kUsual == Usual::kLayer || formula.centers) {
    const float sum = sum_over(0, [](const float(&x)[W]) { return sum_of(x); });
    int elements = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) elements += max(0, min(valid(v), W));
    const float count =
        kFull ? static_cast<float>(kElements * (kScope == Scope::kWarp ? kLanes : kWarp))
              : team.warp_count(elements);
    mean = center = team.warp_sum(sum) * __frcp_rn(fmaxf(count, 1));
    if constexpr (kHolds) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) subtract(v, center, held[v]);
    } else {
      In::forget(raw);
    }
    squares[0] = team.warp_sum(sum_over(center, square));
    team.begin();
    team.merge(count, formula.share, mean, squares[0]);
    shift = center - mean;
  } else {
    sum_squares();
  }
  if constexpr (!kHolds) In::forget(raw);
  float variance = squares[0] * static_cast<float>(formula.share);

  // Lanes of another row in the warp keep it company, but its bits must not depend on theirs.
  const bool correct = needs_correction(mean, variance);
  if (!kRms && (kScope == Scope::kWarp ? __any_sync(0xffffffff, correct) : correct)) {
    float sums[2] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float z[W];
      values(v, center, z);
#pragma unroll
      for (int k = 0; k < W; ++k) z[k] = k < valid(v) ? z[k] + shift : 0;
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
  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0) variance = squares[r] * static_cast<float>(formula.share);
    rstd[r] = reciprocal_root(variance + static_cast<float>(formula.eps));
  }
  if (first == 0 && stores) {
    if (!kRms && a.mean != nullptr) reinterpret_cast<float*>(a.mean)[row] = mean;
    if (a.rstd != nullptr) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) reinterpret_cast<float*>(a.rstd)[row + r * kApart] = rstd[r];
    }
  }
  constexpr int kSizeY = sizeof(Y);
  char* const to = kAligned ? place(a.y, kSizeY) : slot + own * kSizeY;
  if constexpr (!kAligned) team.sync();  // all have read x
  // A block's rows go out together: memory likes neighbours at the same time.
  if constexpr (kFull && kScope == Scope::kWarp) __syncthreads();
  shift *= rstd[0];
  // With kinds of parameters known at compile time, for the usual ones.
  const bool has_weight = formula.weight.data != nullptr, has_bias = formula.bias.data != nullptr;
  const auto finish = [&](auto type, auto known_weight, auto known_bias) {
    using Parameter = Access<decltype(type), W, float>;
    constexpr int kTypeSize = sizeof type;
    const char* weights = formula.weight.data + first * kTypeSize;
    const char* biases = formula.bias.data + first * kTypeSize;
    const auto load = [&](const char* vectors, int v) {
      const char* at = vectors + v * step * kTypeSize;
      return kAligned ? Parameter::load(at) : Parameter::load_some(at, valid(v));
    };
    // They come from the second cache, and a store keeps the compiler from asking for those behind it.
    constexpr int kEach = (known_weight && !known_bias ? 1 : 2) * sizeof(typename Parameter::Raw);
    constexpr int kAtOnce = kStays || kFull ? kForwardParameters / kEach : 1;
    constexpr int kTogether = std::clamp(kAtOnce, 1, kVectors);
    static_assert(kVectors % kTogether == 0);
#pragma unroll
    for (int at = 0; at < kVectors; at += kTogether) {
      if (!inside(at) || !stores) continue;
      typename Parameter::Raw weight_raw[kTogether] = {}, bias_raw[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (i > 0 && !inside(at + i)) continue;
        if constexpr (kEarly > 0) {
          const int v = kRows == 1 ? at + i : 0;
          if (v < kEarly) {
            weight_raw[i] = early[v];
            continue;
          }
        }
        if (known_weight || has_weight) weight_raw[i] = load(weights, at + i);
        if (known_bias || (!known_weight && has_bias)) bias_raw[i] = load(biases, at + i);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int v = at + i;
        if (i > 0 && !inside(v)) continue;
        float weight[W], bias[W], y[W];
        Parameter::unpack(weight_raw[i], weight);
        Parameter::unpack(bias_raw[i], bias);
        if constexpr (!known_weight) {
          const float offset = has_weight ? formula.weight_offset.narrow : 1.0f;
#pragma unroll
          for (int k = 0; k < W; ++k) weight[k] += offset;
        }
        float x[W];
        values(v, center, x);
        apply<X, kPlain>(a, x, rstd[kRows == 1 ? 0 : v], shift, weight, bias, y);
        Out::template store<kHinted && kAligned>(to + away(a.y, v, kSizeY), y);
      }
    }
  };
  constexpr std::bool_constant<kPlain> kKnown;
  constexpr std::false_type kUnknown;
  if constexpr (kRms) {
    finish(X{}, kKnown, kUnknown);
  } else if constexpr (kUsual == Usual::kLayer) {
    finish(X{}, kKnown, kKnown);
  } else {
    with_type_of<X, Y>(has_weight ? formula.weight.dtype : formula.bias.dtype, [&](auto type) {
      if (kPlain && has_weight && has_bias) {
        finish(type, kKnown, kKnown);
      } else if (kPlain && has_weight) {
        finish(type, kKnown, kUnknown);
      } else {
        finish(type, kUnknown, kUnknown);
      }
    });
  }
  if constexpr (!kAligned) {
    team.sync();
    if (stores) write_row(Cursor<Y>(a.y, row, part), end - part, slot, team.thread(), team.size());
  }
}

}  // namespace evenkeel::cuda
