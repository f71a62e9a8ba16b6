// Layer norm and RMS norm, backward: dx, and the sums of dweight and dbias, in one pass over x and dy.
//
// Blocks are persistent. Each row group takes row after row out of its ring (ring.cuh), whose slots hold
// [x | dy], and with a residual dsum. A thread has the same columns all the time, so that its sums of dweight and
// dbias stay in registers; at the end the row groups of a block write one row of partials (partials.cuh). Parts in
// order: fetch, load, gradient of the epilogue, row sums, column sums, dx (+ dsum), partials.
//
// The fetch and what it refers to are in the kernel's body for their schedule: with a function of its own, the
// kernel has the same instructions, but no longer issues its copies together, and takes 10 % longer for layer norm
// of 16384 x 4096 and RMS norm of 256 x 262144 (H200).
#pragma once

#include "cuda/row/dx.cuh"
#include "cuda/row/partials.cuh"
#include "cuda/row/policies.h"

namespace evenkeel::cuda {

// compute-sanitizer tells races by how many barriers each thread has passed: here those of rows that other row
// groups of the block have, and this one has not.
template <BackwardPolicy kPolicy, typename Group, typename Rows>
__device__ inline void pass_barriers_of_others(const Group& group, const Rows& rows,
                                               bool wants_dx) {
  if constexpr (kPolicy.scope == Scope::kBlock) {
    for (int i = rows.steps; i < rows.block_steps; ++i) {
      if constexpr (!kPolicy.aligned) group.sync();
      group.sync();
      if (!kPolicy.aligned && wants_dx) group.sync();
    }
  }
}

template <typename X, typename D, int kIndex>
__global__ void __launch_bounds__(kBackwardPolicy<X, D, kIndex>.block_threads(), 1)
    rows_backward(const __grid_constant__ BackwardArguments a) {
  constexpr BackwardPolicy kPolicy = kBackwardPolicy<X, D, kIndex>;
#if __CUDA_ARCH__ < 900
  if constexpr (kPolicy.scope == Scope::kCluster) return;
#endif
  constexpr Scope kScope = kPolicy.scope;
  constexpr int W = kPolicy.vector(), kElements = kPolicy.elements, kVectors = kPolicy.vectors();
  constexpr int kSums = kPolicy.sums();
  constexpr bool kAligned = kPolicy.aligned, kSpecialized = kPolicy.is_specialized();
  // Row groups of a warp may have one row more than others of it, which get zeros meanwhile.
  constexpr bool kSharesWarp = kPolicy.groups_per_warp() > 1;
  constexpr bool kRowInRegisters = kPolicy.row_in_registers(), kPipelined = kPolicy.pipelined();
  using In = Access<X, W, float>;
  using InDy = Access<D, W, float>;
  EVENKEEL_DYNAMIC_SHARED(uint4, shared, 128);
  char* const scratch = reinterpret_cast<char*>(shared);
  char* const rings = scratch + exchange_bytes(kPipelined);
  RowGroup<kPolicy.group()> group(scratch, a.threads_per_row);
  group.open();
  using Rows = RowPartition<kPolicy.groups_per_warp(), kPolicy.modulated>;
  const Rows rows(group, a.stride, a.rows, a.samples, a.cols, a.part_cols);
  decltype(auto) formula = formula_of<kPolicy.modulated>(a, rows.before);
  using Own = Columns<kPolicy>;
  const int first = Own::first(group.thread()), step = Own::step(group.size());
  const float inv_n = formula.inv_n;
  const int part_cols = kSpecialized ? group.size() * kElements : a.part_cols;
  const int stages = kPolicy.knows_stages() ? kMaxStages : a.stages;
  const auto x_bytes = static_cast<int>(slot_part_bytes(part_cols, sizeof(X), kAligned));
  using Incoming = Dsum<X, D, kPolicy, Rows>;
  const int slot_bytes = x_bytes +
                         static_cast<int>(slot_part_bytes(part_cols, sizeof(D), kAligned)) +
                         Incoming::bytes(part_cols);
  char* const slots = rings + group.index() * stages * slot_bytes;
  Ring ring(slot_bytes, stages);
  // What a thread has of the first slot, if rows are aligned.
  const SharedFragment<W * sizeof(X)> x_fragment(slots + first * sizeof(X), step * sizeof(X));
  const SharedFragment<W * sizeof(D)> dy_fragment(slots + x_bytes + first * sizeof(D),
                                                  step * sizeof(D));
  const BackwardColumns<kPolicy, Rows> columns{first, step, rows};

  wait_for_previous_kernel();
  const bool even = kSpecialized || a.stride.inner == 0;
  const int64_t in_block = even ? 0 : rows.row % a.stride.inner;
  // Of aligned rows, the thread's own columns.
  const int64_t column = rows.part + (kAligned ? first : 0);
  Cursor<X> next_x(a.x, rows.row, column);
  Cursor<D> next_dy(a.dy, rows.row, column);
  Incoming dsum(a, rows, columns, column, slots, slot_bytes);
  RowIterator next_rows{in_block};
  int to_fetch = rows.steps;
  const auto fetch = [&](int slot) {
    const bool mine = to_fetch-- > 0;
    if (!kSharesWarp && !mine) return;
    if constexpr (kAligned) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!columns.inside(v)) continue;
        const int at = v * step;
        x_fragment.template copy<kSharesWarp>(v, next_x.at + at * static_cast<int>(sizeof(X)), slot,
                                              mine);
        dy_fragment.template copy<kSharesWarp>(v, next_dy.at + at * static_cast<int>(sizeof(D)),
                                               slot, mine);
      }
    } else if (mine) {
      copy_row(next_x, a.x, rows.cols, slots + slot, group.thread(), group.size());
      copy_row(next_dy, a.dy, rows.cols, slots + slot + x_bytes, group.thread(), group.size());
    }
    dsum.fetch(group, slot, mine);
    // The ring has room for one row in flight: the one after it is prefetched into L2.
    if (kScope == Scope::kCluster && !kPipelined && even && first == 0) {
      prefetch_range(next_x.at + a.x_step.bytes, rows.cols * static_cast<int>(sizeof(X)), a.x.end);
      prefetch_range(next_dy.at + a.dy_step.bytes, rows.cols * static_cast<int>(sizeof(D)),
                     a.dy.end);
      dsum.prefetch();
    }
    const bool wraps = !even && next_rows.move(a.stride);
    next_x.move(a.x_step, wraps);
    next_dy.move(a.dy_step, wraps);
    dsum.advance_fetch(wraps);
  };
  float next_mean = 0, next_rstd = 0;
  int64_t next_row = rows.row;
  const StatisticsFetch<kPolicy> fetch_statistics{a, next_row, next_mean, next_rstd};
  fetch_statistics();

  BackwardWeights<X, D, kPolicy> weights{
      {}, {rings + stages * slot_bytes, group.thread(), group.size()}};
  weights.load(formula, columns, [&] { ring.fill(fetch); });
  float dweight[kElements] = {}, dbias[kElements] = {};
  group.begin();

  Cursor<X> dx_at(a.dx, rows.row, column);
  RowIterator iterator{in_block};
  Cursor<X> x_at(a.x, rows.row, column);  // of unaligned rows
  Cursor<D> dy_at(a.dy, rows.row, column);
  typename In::Raw x_raw[kRowInRegisters ? kVectors : 1];
  typename InDy::Raw dy_raw[kRowInRegisters ? kVectors : 1];
  const BackwardTile<X, D, kPolicy, Rows> tile{a,           rows,    first,   step,
                                               slots,       x_bytes, columns, x_fragment,
                                               dy_fragment, x_raw,   dy_raw,  weights};
  const auto store = [&](const BackwardRow& row, const float(&sums)[kSums]) {
    store_dx(a, group, rows, first, step, columns, slots, tile, dsum, inv_n, dx_at, row, sums);
  };
  const UnalignedRows<X, D, kPolicy> unaligned{a, x_at, dy_at};
  BackwardRow last;  // whose dx is to be computed (kPipelined)
  for (int i = 0; i < rows.warp_steps; ++i) {
    BackwardRow row{.mine = !kSharesWarp || i < rows.steps, .mean = next_mean, .rstd = next_rstd};
    fetch_statistics();
    row.slot = ring.arrived();
    row.wraps = !even && iterator.move(a.stride);
    if constexpr (!kAligned) {
      unaligned.locate(row);
      dsum.advance_row(row.wraps);
      group.sync();
    }
    if constexpr (kRowInRegisters) {
      tile.load_all(row);
      ring.advance(fetch);
    }

    float sums[kSums] = {};
    tile.each(row, GradientAccumulator<kPolicy>{sums, dweight, dbias});
    group.begin_sum(sums);
    if (!kPipelined || i > 0) {
      group.finish_sum(sums);
      store(kPipelined ? last : row, sums);
    }
    last = row;
    if constexpr (!kRowInRegisters) {
      if constexpr (kPipelined && !kAligned) group.sync();  // all have read the slot
      ring.advance(fetch);
    }
  }
  if (kPipelined && rows.warp_steps > 0) {
    float sums[kSums];
    group.finish_sum(sums);
    if constexpr (!kAligned) dsum.advance_row(false);
    store(last, sums);
  }

  pass_barriers_of_others<kPolicy>(group, rows, Incoming::wants_dx(a));
  write_partials<kPolicy>(a, group, rows, rings, dweight, dbias);
}

}  // namespace evenkeel::cuda
