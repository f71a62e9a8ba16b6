// Makes a GroupKernelSet: an instance for each entry of the table of policies, found by its index.
#pragma once

#include <utility>

#include "cuda/group/backward.cuh"
#include "cuda/group/forward.cuh"
#include "cuda/group/policies.h"
#include "cuda/primitives/reduce_partials.cuh"
#include "cuda/runtime/instance.cuh"

namespace evenkeel::cuda {

// X: the type of all big tensors, or RuntimeDtype. Arithmetic in C.
template <typename X, typename C>
struct GroupInstances {
  static constexpr const auto& kPolicies = group_policies_for<X>();

  template <int kIndex>
  static Kernel& instance() {
    if constexpr (kGroupPolicy<X, kIndex>.backward) {
      return kernel<group_backward<X, C, kIndex>>("group_backward", SharedMemory::kRing);
    } else {
      return kernel<group_forward<X, C, kIndex>>("group_forward", SharedMemory::kRing);
    }
  }

  using Find = Kernel& (*)();
  template <int... kIndex>
  static Kernel& at(int policy, std::integer_sequence<int, kIndex...>) {
    static constexpr Find kFind[] = {instance<kIndex>...};
    return kFind[policy]();
  }

  static Kernel& find_main(int policy) {
    return at(policy, std::make_integer_sequence<int, kPolicies.count>());
  }
  static Kernel& find_clear() { return kernel<clear_counters<kClearThreads>>("clear_counters"); }
  static Kernel& find_reduce_partials() {
    return kernel<reduce_partials<C>>("reduce_partials", SharedMemory::kAfterRing);
  }

  static constexpr GroupKernelSet kSet = {find_main, find_clear, find_reduce_partials};
};

}  // namespace evenkeel::cuda
