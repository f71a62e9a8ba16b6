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

  template <bool kPlain, bool kAligned, Scope kScope, int kLanes, int kElements,
            bool kLarge = false, Usual kUsual = Usual::kNone, int kRows = 1>
  static Kernel& forward_instance() {
    return kernel<rows_forward<X, Y, kVector, kScope, kLanes, kElements, kPlain, kAligned, kLarge,
                               kUsual, kRows>>(
        "rows_forward", kScope == Scope::kCluster ? SharedMemory::kRing : SharedMemory::kLittle);
  }
  // Of tiles that forward_usual() gives.
  template <Usual kUsual, Scope kScope, int kLanes, int kElements, bool kLarge = false,
            int kRows = 1>
  static Kernel& usual_instance() {
    return forward_instance<true, true, kScope, kLanes, kElements, kLarge, kUsual, kRows>();
  }
  template <Usual kUsual, size_t kLine = 0>
  static Kernel& usual_forward(const Tile& tile) {
    constexpr int kFew = forward_elements(sizeof(X)), kMost = forward_most(sizeof(X));
    if constexpr (kLine < std::size(kForwardShort)) {
      constexpr ForwardShort kShort = kForwardShort[kLine];
      constexpr bool kSpread =
          kUsual == Usual::kRms && kShort.team * kShort.elements == kForwardSpread * 8;
      if constexpr (kShort.elements <= kFew && !(kSpread && sizeof(X) == 2)) {
        if (tile.scope == Scope::kWarp && tile.rows == 1 && tile.team == kShort.team &&
            tile.elements == kShort.elements)
          return usual_instance<kUsual, Scope::kWarp, kShort.team, kShort.elements>();
      }
      return usual_forward<kUsual, kLine + 1>(tile);
    } else {
      if constexpr (kUsual == Usual::kRms && sizeof(X) == 2) {
        if (tile.rows > 1)
          return usual_instance<kUsual, Scope::kWarp, kForwardSpread, kFew, false,
                                kFew / kVector>();
        if (tile.scope == Scope::kWarp)
          return usual_instance<kUsual, Scope::kWarp, kForwardSpread, kVector>();
        if (tile.scope == Scope::kCluster)
          return usual_instance<kUsual, Scope::kCluster, kWarp, kMost>();
        if (tile.team > kForwardSmallBlock)
          return usual_instance<kUsual, Scope::kBlock, kWarp, kFew, true>();
      }
      if constexpr (sizeof(X) == 2) {
        if (tile.elements < kFew) return usual_instance<kUsual, Scope::kBlock, kWarp, kFew / 2>();
      }
      return usual_instance<kUsual, Scope::kBlock, kWarp, kFew>();
    }
  }
  template <bool kPlain, bool kAligned, size_t kLine = 0>
  static Kernel& forward(const Tile& tile) {
    constexpr int kMost = forward_most(sizeof(X));
    if constexpr (kLine < std::size(kForwardShort)) {
      constexpr ForwardShort kShort = kForwardShort[kLine];
      if constexpr (kShort.elements <= kMost) {
        if (tile.scope == Scope::kWarp && tile.team == kShort.team &&
            tile.elements == kShort.elements)
          return forward_instance<kPlain, kAligned, Scope::kWarp, kShort.team, kShort.elements>();
      }
      return forward<kPlain, kAligned, kLine + 1>(tile);
    } else {
      if (tile.streams())
        return kernel<rows_forward_streamed<X, Y, float, kAligned ? kVector : 1>>(
            "rows_forward_streamed");
      constexpr int kFew = forward_elements(sizeof(X));
      if (tile.scope == Scope::kCluster)
        return forward_instance<kPlain, kAligned, Scope::kCluster, kWarp, kMost>();
      if constexpr (sizeof(X) == 2) {
        if (tile.elements == kMost)
          return forward_instance<kPlain, kAligned, Scope::kBlock, kWarp, kMost>();
      } else if constexpr (kAligned) {
        if (tile.team > kForwardLargeBlock)
          return forward_instance<kPlain, kAligned, Scope::kBlock, kWarp, kFew, true>();
      }
      return forward_instance<kPlain, kAligned, Scope::kBlock, kWarp, kFew>();
    }
  }

  template <bool kPlain, bool kAligned, Scope kScope, int kLanes, int kElements,
            Usual kUsual = Usual::kNone, bool kAdds = false>
  static Kernel& backward_instance() {
    return kernel<
        rows_backward<X, Y, kVector, kScope, kLanes, kElements, kPlain, kAligned, kUsual, kAdds>>(
        "rows_backward", SharedMemory::kRing);
  }
  // Of tiles that backward_usual() gives.
  template <Usual kUsual, size_t kLine = 0>
  static Kernel& usual_backward(const Tile& tile) {
    if constexpr (sizeof(X) == 2 && kLine < std::size(kBackwardTeams)) {
      constexpr int kTeam = kBackwardTeams[kLine];
      if constexpr (kTeam >= kBackwardUsualTeam) {
        if (tile.scope == Scope::kWarp && tile.team == kTeam && tile.elements == kBackwardElements)
          return backward_instance<true, true, Scope::kWarp, kTeam, kBackwardElements, kUsual>();
      }
      return usual_backward<kUsual, kLine + 1>(tile);
    } else {
      constexpr int kFew = kBackwardWarpElements[0], kMany = kBackwardWarpElements[1];
      if (tile.elements == kFew)
        return backward_instance<true, true, Scope::kWarp, kWarp, kFew, kUsual>();
      if constexpr (sizeof(X) == 2) {
        if (tile.scope == Scope::kBlock)
          return backward_instance<true, true, Scope::kBlock, kWarp, kBackwardElements, kUsual>();
      }
      return backward_instance<true, true, Scope::kWarp, kWarp, kMany, kUsual>();
    }
  }
  template <bool kPlain, bool kAligned, size_t kLine = 0>
  static Kernel& backward(const Tile& tile) {
    if constexpr (kLine < std::size(kBackwardTeams)) {
      constexpr int kTeam = kBackwardTeams[kLine];
      if (tile.scope == Scope::kWarp && tile.team == kTeam)
        return backward_instance<kPlain, kAligned, Scope::kWarp, kTeam, kBackwardElements>();
      return backward<kPlain, kAligned, kLine + 1>(tile);
    } else {
      if (tile.streams())
        return kernel<rows_backward_streamed<X, Y, float, kAligned ? kVector : 1>>(
            "rows_backward_streamed");
      if (tile.scope == Scope::kBlock)
        return backward_instance<kPlain, kAligned, Scope::kBlock, kWarp, kBackwardElements>();
      constexpr int kFew = kBackwardElements, kMost = kBackwardMostElements;
      if (!backward_adds(tile.elements, tile.cluster))
        return backward_instance<kPlain, kAligned, Scope::kCluster, kWarp, kFew>();
      return tile.elements == kFew ? backward_instance<kPlain, kAligned, Scope::kCluster, kWarp,
                                                       kFew, Usual::kNone, true>()
                                   : backward_instance<kPlain, kAligned, Scope::kCluster, kWarp,
                                                       kMost, Usual::kNone, true>();
    }
  }

  // Which combinations there are is said in plan.cc (why_untyped): mixed types have aligned, plain
  // kernels only, and rows that are not aligned have plain ones.
  static Kernel& find_forward(bool plain, bool aligned, const Tile& tile) {
    if constexpr (std::is_same_v<X, Y>) {
      if (!aligned) return forward<true, false>(tile);
      if (!plain) return forward<false, true>(tile);
      if (tile.usual == Usual::kRms) return usual_forward<Usual::kRms>(tile);
      if (tile.usual == Usual::kLayer) return usual_forward<Usual::kLayer>(tile);
    }
    return forward<true, true>(tile);
  }
  static Kernel& find_backward(bool plain, bool aligned, const Tile& tile) {
    if constexpr (std::is_same_v<X, Y>) {
      if (!aligned) return backward<true, false>(tile);
      if (!plain) return backward<false, true>(tile);
      if (tile.usual == Usual::kRms) return usual_backward<Usual::kRms>(tile);
      if (tile.usual == Usual::kLayer) return usual_backward<Usual::kLayer>(tile);
    }
    return backward<true, true>(tile);
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
