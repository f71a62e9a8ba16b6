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
  template <bool kChannelsLast, bool kResident>
  static constexpr int kVector = group_vector(kChannelsLast, kResident, sizeof(X));

  template <bool kChannelsLast, bool kResident, bool kOneGroup = false>
  static Kernel& forward() {
    return kernel<group_forward<X, X, C, kVector<kChannelsLast, kResident>, kChannelsLast,
                                kResident, kOneGroup>>("group_forward", SharedMemory::kRing);
  }
  template <bool kChannelsLast, bool kResident, bool kReloadsDy = false>
  static Kernel& backward() {
    return kernel<group_backward<X, X, C, kVector<kChannelsLast, kResident>, kChannelsLast,
                                 kResident, kReloadsDy>>("group_backward", SharedMemory::kRing);
  }

  // Only vectors are resident (group_tile).
  template <bool kChannelsLast>
  static Kernel& find_forward(const GroupTile& tile) {
    if constexpr (!std::is_same_v<X, RuntimeDtype>) {
      if (kChannelsLast && tile.one_group) return forward<kChannelsLast, true, kChannelsLast>();
      if (tile.resident) return forward<kChannelsLast, true>();
      if (tile.vector > 1) return forward<kChannelsLast, false>();
    }
    return kernel<group_forward<X, X, C, 1, kChannelsLast, false, false>>("group_forward",
                                                                          SharedMemory::kRing);
  }
  template <bool kChannelsLast>
  static Kernel& find_backward(const GroupTile& tile) {
    if constexpr (!std::is_same_v<X, RuntimeDtype>) {
      if (tile.reloads_dy) return backward<kChannelsLast, true, true>();
      if (tile.resident) return backward<kChannelsLast, true>();
      if (tile.vector > 1) return backward<kChannelsLast, false>();
    }
    return kernel<group_backward<X, X, C, 1, kChannelsLast, false, false>>("group_backward",
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
