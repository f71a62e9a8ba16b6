// Layer norm and RMS norm, forward: one kernel for every way to split a row.
//
// A row group holds a row in registers, or a long row in shared memory. The statistics take two passes over
// it: each warp finds the mean of its own part, then the squares of what is left, and the warps' results are
// merged, so that a row group exchanges once only. Parts in order: loader, statistics, epilogue.
#pragma once

#include <type_traits>

#include "cuda/primitives/parameters.cuh"
#include "cuda/primitives/row_access.cuh"
#include "cuda/primitives/row_group.cuh"
#include "cuda/row/epilogue.cuh"
#include "cuda/row/moments.cuh"
#include "cuda/row/policies.h"

namespace evenkeel::cuda {

template <typename X, typename Y, int kIndex>
__global__ void __launch_bounds__(kForwardPolicy<X, Y, kIndex>.block_threads(),
                                  kForwardPolicy<X, Y, kIndex>.resident_blocks())
    rows_forward(const __grid_constant__ ForwardArguments a) {
  constexpr ForwardPolicy kPolicy = kForwardPolicy<X, Y, kIndex>;
#if __CUDA_ARCH__ < 900
  if constexpr (kPolicy.scope == Scope::kCluster) return;
#endif
  constexpr Scope kScope = kPolicy.scope;
  constexpr int W = kPolicy.vector(), kElements = kPolicy.elements, kVectors = kPolicy.vectors();
  constexpr int kRows = kPolicy.rows, kApart = kPolicy.groups_per_warp(), kSize = sizeof(X);
  constexpr bool kAligned = kPolicy.aligned, kFull = kPolicy.full();
  constexpr bool kRms = kPolicy.is_rms(), kLayer = kPolicy.is_layer();
  constexpr bool kInShared = kPolicy.resident_in_shared(), kOnce = kPolicy.unpacks_once();
  constexpr bool kEvictFirst = kPolicy.evict_first();
  using In = Access<X, W, float>;
  using Out = Access<Y, W, float>;
  extern __shared__ __align__(128) uint4 shared[];
  const Formula& formula = a.formula;
  // Shared memory: a slot for each row group that has its row there, then what warps exchange.
  char* const slots = reinterpret_cast<char*>(shared);
  const int slot_bytes =
      forward_slot_bytes(kScope, blockDim.x, kElements, a.part_cols, kSize, kAligned);
  constexpr int kRowGroups = kPolicy.row_groups();
  RowGroup<kPolicy.group()> group(slots + kRowGroups * slot_bytes, blockDim.x);
  group.open();
  const int part = kScope == Scope::kCluster ? group.block() * a.part_cols : 0;
  auto end = static_cast<int>(a.cols);
  if constexpr (kScope == Scope::kCluster) end = min(end, part + a.part_cols);
  using Own = Columns<kPolicy>;
  const int own = Own::first(group.thread()), first = part + own, step = Own::step(group.size());
  // Rows of a row group take turns with those of the warp's other row groups.
  int64_t row = static_cast<int64_t>(group.cluster_index()) * (kRowGroups * kRows) + group.index() +
                group.index() / kApart * (kApart * (kRows - 1));
  // Lanes without a row do what those of the last row do, but store nothing.
  const bool stores = kScope == Scope::kCluster || kRows > 1 || row < a.rows;
  if constexpr (kScope != Scope::kCluster && kRows == 1) row = min(row, a.rows - 1);
  // Of the thread's first vector in a tensor, and the distance from there to vector v.
  const auto address = [&](const DeviceTensor& tensor, int64_t size) {
    const int64_t offset = kPolicy.is_specialized() ? row * tensor.row_stride : tensor.offset(row);
    return tensor.data + (offset + first) * size;
  };
  const auto distance = [&](const DeviceTensor& tensor, int v, int size) {
    if constexpr (kRows == 1)
      return v * step * size;
    else
      return v * (kApart * tensor.row_stride * size);
  };
  prefetch_parameters(formula, a.cols);
  wait_for_previous_kernel();

  char* const slot = slots + group.index() * slot_bytes;
  const SharedFragment<W * kSize> fragment(slots + own * kSize, step * kSize);
  const Cursor<X> x_at(a.x, row, part);
  const auto inside = [&](int v) { return kFull || first + v * step < end; };
  // The elements of a vector that are in the row.
  const auto valid = [&](int v) {
    return kAligned ? (inside(v) ? W : 0) : end - (first + v * step);
  };
  typename In::Raw raw[kInShared ? 1 : kVectors];
  if constexpr (kInShared) {
    const char* from = x_at.at + own * kSize;
#pragma unroll
    for (int v = 0; v < kVectors; ++v, from += step * kSize)
      fragment.template copy<true>(v, from, 0, inside(v));
    commit_copies();
  } else if constexpr (kPolicy.through_shared()) {
    copy_row(x_at, a.x, end - part, slot, group.thread(), group.size());
    commit_copies();
  } else {
    // Not by way of x_at: then the compiler would load the second vector first, which costs 7 %.
    const char* const from = address(a.x, kSize);
    const auto load = [&](auto wanted) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        raw[v] = In::template load_if<kEvictFirst>(wanted(v), from + distance(a.x, v, kSize));
    };
    // Of a block's warps all but the last have nothing but columns of the row. Without a condition for
    // each vector the compiler loads them in order.
    const int warp_end = Own::first(group.thread() / kWarp * kWarp) + kWarp * kElements;
    if (kScope == Scope::kBlock && kPolicy.contiguous() && warp_end <= end) {
      load([](int) { return true; });
      asm volatile("" ::: "memory");  // or the compiler would merge both branches
    } else {
      load(inside);
    }
  }
  if (!kEvictFirst && threadIdx.x == 0 && a.prefetch_bytes != 0) {
    const int64_t block_row = static_cast<int64_t>(group.cluster_index()) * (kRowGroups * kRows);
    const int cols = kScope == Scope::kWarp ? kRowGroups * kRows * end : end - part;
    prefetch_range(a.x.data + (block_row * a.x.row_stride + part) * kSize + a.prefetch_bytes,
                   cols * kSize, a.x.end);
  }
  constexpr int kEarly = kPolicy.early_weights();
  typename In::Raw early[kEarly == 0 ? 1 : kEarly];
  if constexpr (kEarly > 0) {
    const char* const weights = formula.weight.data + first * kSize;
#pragma unroll
    for (int v = 0; v < kEarly; ++v) early[v] = In::load_if(inside(v), weights + v * step * kSize);
  }
  // A thread of an aligned row waits for its own copies only: no other thread reads them.
  if constexpr (kPolicy.through_shared()) wait_for_copies(0);
  if constexpr (!kAligned) {
    group.sync();
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      raw[v] =
          In::load_unaligned_shared(slot + x_at.offset16() + (own + v * step) * kSize, valid(v));
  }
  float unpacked[kOnce ? kVectors : 1][W];
  const auto subtract = [&](int v, float center, float(&x)[W]) {
    // What is cut off stays 0: few threads have any of it, so the others only test for it.
    constexpr bool kLater = kOnce && !kAligned;
#pragma unroll
    for (int k = 0; k < W; ++k) x[k] -= kLater || k < valid(v) ? center : 0;
    if (kLater && valid(v) < W) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = k < valid(v) ? x[k] : 0;
    }
  };
  const auto values = [&](int v, float center, float(&x)[W]) {
    if constexpr (kOnce) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = unpacked[v][k];
    } else {
      if constexpr (kInShared) fragment.get(v, raw[0]);
      In::unpack(raw[kInShared ? 0 : v], x);
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
  if constexpr (kOnce) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) In::unpack(raw[v], unpacked[v]);
  }

  // Each warp centers its own values; `shift` leads from there to values relative to the row's mean.
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
    group.begin();
    group.sum(squares);
  };
  if constexpr (kRms) {
    sum_squares();
  } else if (kLayer || formula.centers) {
    const float sum = sum_over(0, [](const float(&x)[W]) { return sum_of(x); });
    int elements = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) elements += max(0, min(valid(v), W));
    const float count =
        kFull ? static_cast<float>(kElements * (kScope == Scope::kWarp ? kPolicy.lanes : kWarp))
              : group.warp_count(elements);
    mean = center = group.warp_sum(sum) * __frcp_rn(fmaxf(count, 1));
    if constexpr (kOnce) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) subtract(v, center, unpacked[v]);
    } else {
      In::discard_unpacked(raw);
    }
    squares[0] = group.warp_sum(sum_over(center, square));
    group.begin();
    group.merge(count, formula.inv_n, mean, squares[0]);
    shift = center - mean;
  } else {
    sum_squares();
  }
  if constexpr (!kOnce) In::discard_unpacked(raw);
  float variance = squares[0] * static_cast<float>(formula.inv_n);

  // A third pass where the mean is large beside the deviation. Other rows of the warp take part, but their
  // bits do not change.
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
    group.sum(sums);
    const float rest = correct ? sums[0] * static_cast<float>(formula.inv_n) : 0;
    // Never negative; NaN stays.
    if (correct)
      variance = fmaxf(sums[1] * static_cast<float>(formula.inv_n) - rest * rest, sums[1] * 0);
    mean += rest;
    shift -= rest;
    if constexpr (!kOnce) In::discard_unpacked(raw);
  }
  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0) variance = squares[r] * static_cast<float>(formula.inv_n);
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
  char* const to = kAligned ? address(a.y, kSizeY) : slot + own * kSizeY;
  if constexpr (!kAligned) group.sync();  // all have read x
  // The rows of a block are stored at the same time, so that writes to one DRAM page come together.
  if constexpr (kFull && kScope == Scope::kWarp) __syncthreads();
  shift *= rstd[0];
  // Which parameters there are, and of which dtype, is found out before the loops. With a known weight an
  // unknown bias is absent.
  const bool has_weight = formula.weight.data != nullptr, has_bias = formula.bias.data != nullptr;
  const auto finish = [&](auto type, auto known_weight, auto known_bias) {
    using Parameter = Access<decltype(type), W, float>;
    constexpr int kTypeSize = sizeof type;
    const char* weights = formula.weight.data + first * kTypeSize;
    const char* biases = formula.bias.data + first * kTypeSize;
    const auto load = [&](const char* vectors, int v) {
      const char* at = vectors + v * step * kTypeSize;
      return kAligned ? Parameter::load(at) : Parameter::load_partial(at, valid(v));
    };
    // Parameters come from L2, and a store keeps the compiler from loading those behind it earlier.
    constexpr int kEach = (known_weight && !known_bias ? 1 : 2) * sizeof(typename Parameter::Raw);
    constexpr int kBatch = kPolicy.parameter_batch(kEach);
    static_assert(kVectors % kBatch == 0);
#pragma unroll
    for (int at = 0; at < kVectors; at += kBatch) {
      if (!inside(at) || !stores) continue;
      typename Parameter::Raw weight_raw[kBatch] = {}, bias_raw[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
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
      for (int i = 0; i < kBatch; ++i) {
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
        evaluate_epilogue<X, kPolicy.terms>(a, x, rstd[kRows == 1 ? 0 : v], shift, weight, bias, y);
        Out::template store<kEvictFirst && kAligned>(to + distance(a.y, v, kSizeY), y);
      }
    }
  };
  constexpr std::bool_constant<!kPolicy.terms.weight_offset> kKnown;
  constexpr std::false_type kUnknown;
  if constexpr (kRms) {
    finish(X{}, kKnown, kUnknown);
  } else if constexpr (kLayer) {
    finish(X{}, kKnown, kKnown);
  } else {
    with_type_of<X, Y>(has_weight ? formula.weight.dtype : formula.bias.dtype, [&](auto type) {
      if (kKnown && has_weight && has_bias) {
        finish(type, kKnown, kKnown);
      } else if (kKnown && has_weight) {
        finish(type, kKnown, kUnknown);
      } else {
        finish(type, kUnknown, kUnknown);
      }
    });
  }
  if constexpr (!kAligned) {
    group.sync();
    if (stores)
      write_row(Cursor<Y>(a.y, row, part), end - part, slot, group.thread(), group.size());
  }
}

}  // namespace evenkeel::cuda
