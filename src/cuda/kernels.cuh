// Makes a KernelSet: from a Tile at run time to the instance that was compiled for it.
#pragma once

#include <iterator>

#include "cuda/fold.cuh"
#include "cuda/kernel.cuh"
#include "cuda/rows_backward.cuh"
#include "cuda/rows_forward.cuh"
#include "cuda/streamed.cuh"

namespace evenkeel::cuda {

template <typename X, typename Y>
struct Typed {
  // Elements in a vector: 16 bytes of the smaller type.
  static constexpr int kVector = sizeof(X) == 4 && sizeof(Y) == 4 ? 4 : 8;

  template <int W, bool kPlain, Scope kScope, int kLanes, int kElements>
  static Kernel& forward_instance() {
    return kernel<rows_forward<X, Y, W, kScope, kLanes, kElements, kPlain>>("rows_forward");
  }
  template <int W, bool kPlain, size_t kLine = 0>
  static Kernel& forward(const Tile& tile) {
    constexpr auto kMost = [](Scope scope) { return forward_elements(scope, sizeof(X), W > 1); };
    if constexpr (kLine < forward_short(W > 1).size()) {
      constexpr ForwardShort kShort = forward_short(W > 1)[kLine];
      if constexpr (kShort.elements <= kMost(Scope::kWarp)) {
        if (tile.scope == Scope::kWarp && tile.team == kShort.team &&
            tile.elements == kShort.elements)
          return forward_instance<W, kPlain, Scope::kWarp, kShort.team, kShort.elements>();
      }
      return forward<W, kPlain, kLine + 1>(tile);
    } else {
      if (tile.streams())
        return kernel<rows_forward_streamed<X, Y, float, W>>("rows_forward_streamed");
      return tile.scope == Scope::kBlock
                 ? forward_instance<W, kPlain, Scope::kBlock, kWarp, kMost(Scope::kBlock)>()
                 : forward_instance<W, kPlain, Scope::kCluster, kWarp, kMost(Scope::kCluster)>();
    }
  }

  template <int W, bool kPlain, Scope kScope, int kLanes, int kElements>
  static Kernel& backward_instance() {
    return kernel<rows_backward<X, Y, W, kScope, kLanes, kElements, kPlain>>("rows_backward",
                                                                             SharedMemory::kRing);
  }
  template <int W, bool kPlain, size_t kLine = 0>
  static Kernel& backward(const Tile& tile) {
    if constexpr (kLine < std::size(kBackwardTeams)) {
      constexpr int kTeam = kBackwardTeams[kLine];
      if (tile.scope == Scope::kWarp && tile.team == kTeam)
        return backward_instance<W, kPlain, Scope::kWarp, kTeam, kBackwardElements>();
      return backward<W, kPlain, kLine + 1>(tile);
    } else {
      if (tile.streams())
        return kernel<rows_backward_streamed<X, Y, float, W>>("rows_backward_streamed");
      if constexpr (W == 1) {
        if (tile.scope == Scope::kBlock && tile.elements == kBackwardFewElements)
          return backward_instance<W, kPlain, Scope::kBlock, kWarp, kBackwardFewElements>();
      }
      if (tile.scope == Scope::kBlock)
        return backward_instance<W, kPlain, Scope::kBlock, kWarp, kBackwardElements>();
      return tile.elements == kBackwardElements
                 ? backward_instance<W, kPlain, Scope::kCluster, kWarp, kBackwardElements>()
                 : backward_instance<W, kPlain, Scope::kCluster, kWarp, kBackwardMostElements>();
    }
  }

  // Which combinations there are is said in plan.cc (why_untyped): mixed types have aligned, plain
  // kernels only.
  static Kernel& find_forward(bool plain, bool aligned, const Tile& tile) {
    if constexpr (std::is_same_v<X, Y>) {
      if (!aligned) return forward<1, false>(tile);
      if (!plain) return forward<kVector, false>(tile);
    }
    return forward<kVector, true>(tile);
  }
  static Kernel& find_backward(bool plain, bool aligned, const Tile& tile) {
    if constexpr (std::is_same_v<X, Y>) {
      if (!aligned) return backward<1, true>(tile);
      if (!plain) return backward<kVector, false>(tile);
    }
    return backward<kVector, true>(tile);
  }
  static Kernel& find_column_sums() { return kernel<column_sums<X, Y, float>>("column_sums"); }
  static Kernel& find_fold() {
    return kernel<fold_partials<float>>("fold_partials", SharedMemory::kAfterRing);
  }

  static constexpr KernelSet kSet = {find_forward, find_backward, find_column_sums, find_fold};
};

// Every tile streams.
template <typename C>
struct Untyped {
  static Kernel& find_forward(bool, bool, const Tile&) {
    return kernel<rows_forward_streamed<Any, Any, C, 1>>("rows_forward_streamed");
  }
  static Kernel& find_backward(bool, bool, const Tile&) {
    return kernel<rows_backward_streamed<Any, Any, C, 1>>("rows_backward_streamed");
  }
  static Kernel& find_column_sums() { return kernel<column_sums<Any, Any, C>>("column_sums"); }
  static Kernel& find_fold() { return kernel<fold_partials<C>>("fold_partials"); }

  static constexpr KernelSet kSet = {find_forward, find_backward, find_column_sums, find_fold};
};

}  // namespace evenkeel::cuda
