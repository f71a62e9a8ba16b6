// Makes a GroupKernelSet (kernels.h).
#pragma once

#include <type_traits>

#include "cuda/fold.cuh"
#include "cuda/group_backward.cuh"
#include "cuda/group_forward.cuh"
#include "cuda/kernel.cuh"

namespace evenkeel::cuda {

// X: the type of all big tensors, or Any.
template <typename X, typename C>
struct Groups {
  template <bool kLast, bool kKeeps>
  static constexpr int kVector = group_vector(kLast, kKeeps, sizeof(X));

  template <int W, bool kLast, bool kKeeps>
  static Kernel& forward() {
    return kernel<group_forward<X, X, C, W, kLast, kKeeps>>("group_forward", SharedMemory::kRing);
  }
  template <int W, bool kLast, bool kKeeps>
  static Kernel& backward() {
    return kernel<group_backward<X, X, C, W, kLast, kKeeps>>("group_backward", SharedMemory::kRing);
  }

  // Only vectors are kept (group_tile).
  static Kernel& find_forward(bool last, bool aligned, bool keeps) {
    if constexpr (!std::is_same_v<X, Any>) {
      if (keeps)
        return last ? forward<kVector<true, true>, true, true>()
                    : forward<kVector<false, true>, false, true>();
      if (aligned)
        return last ? forward<kVector<true, false>, true, false>()
                    : forward<kVector<false, false>, false, false>();
    }
    return last ? forward<1, true, false>() : forward<1, false, false>();
  }
  static Kernel& find_backward(bool last, bool aligned, bool keeps) {
    if constexpr (!std::is_same_v<X, Any>) {
      if (keeps)
        return last ? backward<kVector<true, true>, true, true>()
                    : backward<kVector<false, true>, false, true>();
      if (aligned)
        return last ? backward<kVector<true, false>, true, false>()
                    : backward<kVector<false, false>, false, false>();
    }
    return last ? backward<1, true, false>() : backward<1, false, false>();
  }
  static Kernel& find_clear() { return kernel<clear_counters<kClearThreads>>("clear_counters"); }
  static Kernel& find_fold() {
    return kernel<fold_partials<C>>("fold_partials", SharedMemory::kAfterRing);
  }

  static constexpr GroupKernelSet kSet = {find_forward, find_backward, find_clear, find_fold};
};

}  // namespace evenkeel::cuda
