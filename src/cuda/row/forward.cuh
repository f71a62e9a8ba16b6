// Layer norm and RMS norm, forward: one kernel for every way to split a row, out of the parts that its body
// names in order. A row group holds a row in registers, or a long row in shared memory.
#pragma once

#include <type_traits>

#include "cuda/row/loader.cuh"
#include "cuda/row/output.cuh"
#include "cuda/row/policies.h"
#include "cuda/row/prologue.cuh"

namespace evenkeel::cuda {

template <typename X, typename Y, int kIndex>
__global__ void __launch_bounds__(kForwardPolicy<X, Y, kIndex>.block_threads(),
                                  kForwardPolicy<X, Y, kIndex>.resident_blocks())
    rows_forward(const __grid_constant__ ForwardArguments a) {
  constexpr ForwardPolicy kPolicy = kForwardPolicy<X, Y, kIndex>;
#if __CUDA_ARCH__ < 900
  if constexpr (kPolicy.scope == Scope::kCluster) return;
#endif
  constexpr bool kAligned = kPolicy.aligned, kResidual = kPolicy.residual;
  using Tile = ForwardTile<X, kPolicy>;
  using Load = std::conditional_t<kResidual, AddResidual<X, Y, kPolicy>, Loader<X, kPolicy>>;

  // Shared memory: a slot for each row group that has its row there, then what warps exchange.
  EVENKEEL_DYNAMIC_SHARED(uint4, shared, 128);
  char* const slots = reinterpret_cast<char*>(shared);
  const int slot_bytes = forward_slot_bytes(kPolicy.scope, blockDim.x, kPolicy.elements,
                                            a.part_cols, sizeof(X), kAligned, kResidual);
  RowGroup<kPolicy.group()> group(slots + kPolicy.row_groups() * slot_bytes, blockDim.x);
  group.open();
  const auto at = find_position<kPolicy>(a, group);
  prefetch_parameters(a.formula, a.cols);
  wait_for_previous_kernel();

  // Load, and add the residual, before which there are no registers for the weight.
  char* const slot = slots + group.index() * slot_bytes;
  const typename Tile::Fragment fragment(slots + at.own * sizeof(X), at.step * sizeof(X));
  typename Tile::Raw raw;
  Load load(a, at);
  load.issue(group, fragment, slot, raw);
  prefetch_later_rows<X, Y>(a, group, at);
  EarlyWeights<X, kPolicy> early;
  if constexpr (!kResidual) early.load(a.formula, at);
  load.finish(group, fragment, slot, raw);
  if constexpr (kResidual) early.load(a.formula, at);
  typename Tile::Unpacked unpacked;
  const Tile tile{at, fragment, raw, unpacked};
  tile.unpack();

  // Statistics.
  const Moments<kPolicy> moments = find_moments(a.formula, group, tile);
  store_moments(a, at, moments);

  // Epilogue. An unaligned row goes out through its slot, too. The rows of a block are stored at the same time,
  // so that writes to one DRAM page come together.
  char* const to = kAligned ? at.address(a.y, sizeof(Y)) : slot + at.own * sizeof(Y);
  if constexpr (!kAligned) group.sync();  // all have read x
  if constexpr (kPolicy.full() && kPolicy.scope == Scope::kWarp) __syncthreads();
  const float shift = moments.shift * moments.rstd[0];
  decltype(auto) formula = formula_of<kPolicy.modulated>(a, at.row);
  const RowOutput<X, Y, kPolicy> output{a, formula, at, tile, moments, early, to, shift};
  if constexpr (kPolicy.quantizes()) {
    output.quantize(group);
  } else {
    output.store();
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
