// Makes a GroupKernelSet (runtime/kernel.h).
#pragma once

#include <type_traits>

#include "cuda/primitives/reduce_partials.cuh"
#include "cuda/group/backward.cuh"
#include "cuda/group/forward.cuh"
#include "cuda/runtime/instance.cuh"

namespace evenkeel::cuda {

// X: the type of all big tensors, or RuntimeDtype.
template <typename X, typename C>
struct Groups {
  template <bool kLast, bool kKeeps>
  static constexpr int kVector = group_vector(kLast, kKeeps, sizeof(X));

  template <bool kLast, bool kKeeps, bool kWhole = false>
  static Kernel& forward() {
    return kernel<group_forward<X, X, C, kVector<kLast, kKeeps>, kLast, kKeeps, kWhole>>(
        "group_forward", SharedMemory::kRing);
  }
  template <bool kLast, bool kKeeps, bool kRereads = false>
  static Kernel& backward() {
    return kernel<group_backward<X, X, C, kVector<kLast, kKeeps>, kLast, kKeeps, kRereads>>(
        "group_backward", SharedMemory::kRing);
  }

  // Only vectors are kept (group_tile).
  template <bool kLast>
  static Kernel& find_forward(const GroupTile& tile) {
    if constexpr (!std::is_same_v<X, RuntimeDtype>) {
      if (kLast && tile.whole) return forward<kLast, true, kLast>();
      if (tile.keeps) return forward<kLast, true>();
      if (tile.vector > 1) return forward<kLast, false>();
    }
    return kernel<group_forward<X, X, C, 1, kLast, false, false>>("group_forward",
                                                                  SharedMemory::kRing);
  }
  template <bool kLast>
  static Kernel& find_backward(const GroupTile& tile) {
    if constexpr (!std::is_same_v<X, RuntimeDtype>) {
      if (tile.rereads) return backward<kLast, true, true>();
      if (tile.keeps) return backward<kLast, true>();
      if (tile.vector > 1) return backward<kLast, false>();
    }
    return kernel<group_backward<X, X, C, 1, kLast, false, false>>("group_backward",
                                                                   SharedMemory::kRing);
  }
  static Kernel& find_forward(bool last, const GroupTile& tile) {
    return last ? find_forward<true>(tile) : find_forward<false>(tile);
  }
  static Kernel& find_backward(bool last, const GroupTile& tile) {
    return last ? find_backward<true>(tile) : find_backward<false>(tile);
  }
  static Kernel& find_clear() { return kernel<clear_counters<kClearThreads>>("clear_counters"); }
  static Kernel& find_reduce_partials() {
    return kernel<reduce_partials<C>>("reduce_partials", SharedMemory::kAfterRing);
  }

  static constexpr GroupKernelSet kSet = {find_forward, find_backward, find_clear,
                                          find_reduce_partials};
};

}  // namespace evenkeel::cuda
