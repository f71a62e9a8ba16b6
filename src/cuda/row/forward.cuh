// Layer norm and RMS norm, forward: one kernel for every way to split a row, out of the parts that its body
// names in order. A row group holds a row in registers, or a long row in shared memory.
#pragma once

#include <type_traits>

#include "cuda/primitives/parameters.cuh"
#include "cuda/row/epilogue.cuh"
#include "cuda/row/loader.cuh"
#include "cuda/row/policies.h"
#include "cuda/row/prologue.cuh"
#include "cuda/row/statistics.cuh"

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
  constexpr int kRowGroups = kPolicy.row_groups(), kEarly = kPolicy.early_weights();
  constexpr bool kAligned = kPolicy.aligned, kRms = kPolicy.is_rms(), kResidual = kPolicy.residual;
  constexpr bool kEvictFirst = kPolicy.evict_first(), kOnce = kPolicy.unpacks_once();
  using Tile = ForwardTile<X, kPolicy>;
  using Load = std::conditional_t<kPolicy.residual, AddResidual<X, Y, kPolicy>, Loader<X, kPolicy>>;
  using In = typename Tile::In;
  using Out = Access<Y, W, float>;
  const Formula& formula = a.formula;

  // Shared memory: a slot for each row group that has its row there, then what warps exchange.
  EVENKEEL_DYNAMIC_SHARED(uint4, shared, 128);
  char* const slots = reinterpret_cast<char*>(shared);
  const int slot_bytes =
      forward_slot_bytes(kScope, blockDim.x, kElements, a.part_cols, kSize, kAligned, kResidual);
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
  const ForwardPosition<kPolicy> at{part, end, own, first, step, row, stores};
  prefetch_parameters(formula, a.cols);
  wait_for_previous_kernel();

  // Load, and add the residual. One thread of a block prefetches the rows of a later block into L2; weights are loaded before the
  // reduction where there are registers for them.
  char* const slot = slots + group.index() * slot_bytes;
  const typename Tile::Fragment fragment(slots + at.own * kSize, at.step * kSize);
  typename Tile::Raw raw;
  Load load(a, at);
  load.issue(group, fragment, slot, raw);
  if (!kEvictFirst && threadIdx.x == 0 && a.prefetch_bytes != 0) {
    const int64_t block_row = static_cast<int64_t>(group.cluster_index()) * (kRowGroups * kRows);
    const int cols = kScope == Scope::kWarp ? kRowGroups * kRows * at.end : at.end - at.part;
    constexpr int kXSize = kResidual ? sizeof(Y) : kSize;
    prefetch_range(a.x.data + (block_row * a.x.row_stride + at.part) * kXSize + a.prefetch_bytes,
                   cols * kXSize, a.x.end);
    if constexpr (kResidual) {
      const int64_t offset = (block_row * a.residual.row_stride + at.part) * kSize;
      prefetch_range(a.residual.data + offset + a.residual_prefetch_bytes, cols * kSize,
                     a.residual.end);
    }
  }
  typename In::Raw early[kEarly == 0 ? 1 : kEarly];
  const auto load_early_weights = [&] {
    const char* const weights = formula.weight.data + at.first * kSize;
#pragma unroll
    for (int v = 0; v < kEarly; ++v)
      early[v] = In::load_if(at.inside(v), weights + v * at.step * kSize);
  };
  if constexpr (kResidual) {
    load.finish(group, fragment, slot, raw);
    load_early_weights();  // before it there were no registers for them
  } else {
    load_early_weights();
    // A thread of an aligned row waits for its own copies only: no other thread reads them.
    if constexpr (kPolicy.through_shared()) wait_for_copies(0);
    if constexpr (!kAligned) {
      group.sync();
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        raw[v] = In::load_unaligned_shared(
            slot + load.row.offset16() + (at.own + v * at.step) * kSize, at.valid(v));
    }
  }
  typename Tile::Unpacked unpacked;
  const Tile tile{at, fragment, raw, unpacked};
  tile.unpack();

  // Statistics.
  float center = 0, mean = 0, shift = 0, squares[kRows] = {};
  find_moments(formula, group, tile, center, mean, shift, squares);
  float variance = squares[0] * static_cast<float>(formula.inv_n);
  // A third pass where the mean is large beside the deviation. Other rows of the warp take part, but their
  // bits do not change.
  const bool correct = needs_correction(mean, variance);
  if (!kRms && (kScope == Scope::kWarp ? __any_sync(0xffffffff, correct) : correct)) {
    float sums[2] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float z[W];
      tile.values(v, center, z);
#pragma unroll
      for (int k = 0; k < W; ++k) z[k] = k < at.valid(v) ? z[k] + shift : 0;
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
  if (at.first == 0 && at.stores) {
    if (!kRms && a.mean != nullptr) reinterpret_cast<float*>(a.mean)[at.row] = mean;
    if (a.rstd != nullptr) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        reinterpret_cast<float*>(a.rstd)[at.row + r * kApart] = rstd[r];
    }
  }

  // Epilogue. An unaligned row goes out through its slot, too. The rows of a block are stored at the same time,
  // so that writes to one DRAM page come together.
  char* const to = kAligned ? at.address(a.y, sizeof(Y)) : slot + at.own * sizeof(Y);
  if constexpr (!kAligned) group.sync();  // all have read x
  if constexpr (kPolicy.full() && kScope == Scope::kWarp) __syncthreads();
  shift *= rstd[0];
  const bool has_weight = formula.weight.data != nullptr, has_bias = formula.bias.data != nullptr;
  // kWeight, kBias: it is known to be there. A known weight has no offset, and beside it an unknown bias is
  // absent.
  const auto store_row = [&](auto type, auto kWeight, auto kBias) {
    using Parameter = Access<decltype(type), W, float>;
    constexpr int kTypeSize = sizeof type;
    const char* weights = formula.weight.data + at.first * kTypeSize;
    const char* biases = formula.bias.data + at.first * kTypeSize;
    const auto load = [&](const char* vectors, int v) {
      const char* from = vectors + v * at.step * kTypeSize;
      return kAligned ? Parameter::load(from) : Parameter::load_partial(from, at.valid(v));
    };
    // Parameters come from L2, and a store keeps the compiler from loading those behind it earlier.
    constexpr int kEach = (kWeight && !kBias ? 1 : 2) * sizeof(typename Parameter::Raw);
    constexpr int kBatch = kPolicy.parameter_batch(kEach);
    static_assert(kVectors % kBatch == 0);
#pragma unroll
    for (int begin = 0; begin < kVectors; begin += kBatch) {
      if (!at.inside(begin) || !at.stores) continue;
      typename Parameter::Raw weight_raw[kBatch] = {}, bias_raw[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i > 0 && !at.inside(begin + i)) continue;
        if constexpr (kEarly > 0) {
          const int v = kRows == 1 ? begin + i : 0;
          if (v < kEarly) {
            weight_raw[i] = early[v];
            continue;
          }
        }
        if (kWeight || has_weight) weight_raw[i] = load(weights, begin + i);
        if (kBias || (!kWeight && has_bias)) bias_raw[i] = load(biases, begin + i);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int v = begin + i;
        if (i > 0 && !at.inside(v)) continue;
        float weight[W], bias[W], y[W];
        Parameter::unpack(weight_raw[i], weight);
        Parameter::unpack(bias_raw[i], bias);
        if constexpr (!kWeight) {
          const float offset = has_weight ? formula.weight_offset.narrow : 1.0f;
#pragma unroll
          for (int k = 0; k < W; ++k) weight[k] += offset;
        }
        float x[W];
        tile.values(v, center, x);
        evaluate_epilogue<X, kPolicy.terms>(a, x, rstd[kRows == 1 ? 0 : v], shift, weight, bias, y);
        Out::template store<kEvictFirst && kAligned>(to + at.distance(a.y, v, sizeof(Y)), y);
      }
    }
  };
  // Which parameters there are, and of which dtype, is found out before the loops.
  constexpr std::bool_constant<!kPolicy.terms.weight_offset> kKnown;
  constexpr std::false_type kUnknown;
  if constexpr (kRms) {
    store_row(X{}, kKnown, kUnknown);
  } else if constexpr (kPolicy.is_layer()) {
    store_row(X{}, kKnown, kKnown);
  } else {
    with_type_of<X, Y>(has_weight ? formula.weight.dtype : formula.bias.dtype, [&](auto type) {
      if (kKnown && has_weight && has_bias) {
        store_row(type, kKnown, kKnown);
      } else if (kKnown && has_weight) {
        store_row(type, kKnown, kUnknown);
      } else {
        store_row(type, kUnknown, kUnknown);
      }
    });
  }
  if constexpr (!kAligned) {
    group.sync();
    if (at.stores) {
      write_row(Cursor<Y>(a.y, at.row, at.part), at.end - at.part, slot, group.thread(),
                group.size());
    }
  }
}

}  // namespace evenkeel::cuda
