// How x comes into a forward tile: straight into registers, into shared memory to stay there (clusters), or,
// unaligned, through shared memory into registers. issue() starts the loads, finish() waits for what went to
// shared memory.
#pragma once

#include <type_traits>

#include "cuda/primitives/row_access.cuh"
#include "cuda/row/forward_tile.cuh"

namespace evenkeel::cuda {

template <typename X, ForwardPolicy kPolicy>
class Loader {
  using Tile = ForwardTile<X, kPolicy>;
  using Position = ForwardPosition<kPolicy>;
  using In = typename Tile::In;
  using Raw = typename Tile::Raw;
  using Fragment = typename Tile::Fragment;
  static constexpr int kSize = sizeof(X), kVectors = kPolicy.vectors();

 public:
  __device__ Loader(const ForwardArguments& arguments, const Position& position)
      : row(arguments.x, position.row, position.part), a(arguments), at(position) {}

  // slot: the row group's shared memory, if the row passes through it.
  template <typename Group>
  __device__ void issue(const Group& group, const Fragment& fragment, char* slot, Raw& raw) const {
    if constexpr (kPolicy.resident_in_shared()) {
      issue_to_shared(fragment);
      commit_copies();
    } else if constexpr (kPolicy.through_shared()) {
      copy_row(row, a.x, at.end - at.part, slot, group.thread(), group.size());
      commit_copies();
    } else {
      issue_to_registers(group, raw);
    }
  }

  template <typename Group>
  __device__ void finish(const Group& group, const Fragment&, const char* slot, Raw& raw) const {
    // A thread of an aligned row waits for its own copies only: no other thread reads them.
    if constexpr (kPolicy.through_shared()) wait_for_copies(0);
    if constexpr (!kPolicy.aligned) {
      group.sync();
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        raw[v] = In::load_unaligned_shared(slot + row.offset16() + (at.own + v * at.step) * kSize,
                                           at.valid(v));
    }
  }

 private:
  __device__ void issue_to_shared(const Fragment& fragment) const {
    const char* from = row.at + at.own * kSize;
#pragma unroll
    for (int v = 0; v < kVectors; ++v, from += at.step * kSize)
      fragment.template copy<true>(v, from, 0, at.inside(v));
  }
  template <typename Group>
  __device__ void issue_to_registers(const Group& group, Raw& raw) const {
    constexpr bool kEvictFirst = kPolicy.evict_first();
    // Not by way of the cursor: then the compiler would load the second vector first, which costs 7 %.
    const char* const from = at.address(a.x, kSize);
    const auto load = [&](auto wanted) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        raw[v] = In::template load_if<kEvictFirst>(wanted(v), from + at.distance(a.x, v, kSize));
    };
    // Of a block's warps all but the last have nothing but columns of the row. Without a condition for each
    // vector the compiler loads them in order.
    constexpr int kWarpCols = kWarp * kPolicy.elements;
    const int warp_end = Columns<kPolicy>::first(group.thread() / kWarp * kWarp) + kWarpCols;
    if (kPolicy.scope == Scope::kBlock && kPolicy.contiguous() && warp_end <= at.end) {
      load([](int) { return true; });
      asm volatile("" ::: "memory");  // or the compiler would merge both branches
    } else {
      load([&](int v) { return at.inside(v); });
    }
  }

  const Cursor<X> row;
  const ForwardArguments& a;
  const Position& at;
};

// The type of x beside a residual: y's, or where y has 8 bits, that of the sum.
template <typename X, typename Y>
using Summand = std::conditional_t<std::is_same_v<Y, EightBits>, X, Y>;

// One thread of a block prefetches the rows of a later block into L2. With a residual, x is a Summand.
template <typename X, typename Y, ForwardPolicy kPolicy, typename Group>
__device__ inline void prefetch_later_rows(const ForwardArguments& a, const Group& group,
                                           const ForwardPosition<kPolicy>& at) {
  if (kPolicy.evict_first() || threadIdx.x != 0 || a.prefetch_bytes == 0) return;
  constexpr int kBlockRows = kPolicy.row_groups() * kPolicy.rows;
  constexpr int kSize = sizeof(X), kXSize = kPolicy.residual ? sizeof(Summand<X, Y>) : kSize;
  const int64_t row = static_cast<int64_t>(group.cluster_index()) * kBlockRows;
  const int cols = kPolicy.scope == Scope::kWarp ? kBlockRows * at.end : at.end - at.part;
  prefetch_range(a.x.data + (row * a.x.row_stride + at.part) * kXSize + a.prefetch_bytes,
                 cols * kXSize, a.x.end);
  if constexpr (kPolicy.residual) {
    const int64_t offset = (row * a.residual.row_stride + at.part) * kSize;
    prefetch_range(a.residual.data + offset + a.residual_prefetch_bytes, cols * kSize,
                   a.residual.end);
  }
}

}  // namespace evenkeel::cuda
