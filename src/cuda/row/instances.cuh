// Makes a KernelSet: an instance for each entry of the table of policies, found by its index.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/primitives/reduce_partials.cuh"
#include "cuda/row/backward.cuh"
#include "cuda/row/forward.cuh"
#include "cuda/row/multi_pass.cuh"
#include "cuda/row/policies.h"
#include "cuda/row/samples.cuh"
#include "cuda/runtime/instance.cuh"

namespace evenkeel::cuda {

template <typename X, typename Y>
struct RowInstances {
  static constexpr const auto& kForward = forward_policies_of(sizeof(X), sizeof(Y));
  static constexpr const auto& kBackward = backward_policies_of(sizeof(X), sizeof(Y));

  template <int kIndex>
  static Kernel& forward_instance() {
    constexpr ForwardPolicy kPolicy = kForwardPolicy<X, Y, kIndex>;
    if constexpr (kPolicy.multi_pass()) {
      return kernel<rows_forward_multi_pass<X, Y, float, kPolicy.aligned ? kPolicy.vector() : 1>>(
          "rows_forward_multi_pass");
    } else {
      // An unaligned x and its residual may need more than a kernel has without asking for it.
      constexpr bool kMuch =
          kPolicy.scope == Scope::kCluster || (kPolicy.residual && !kPolicy.aligned);
      return kernel<rows_forward<X, Y, kIndex>>(
          "rows_forward", kMuch ? SharedMemory::kRing : SharedMemory::kLittle);
    }
  }
  template <int kIndex>
  static Kernel& backward_instance() {
    constexpr BackwardPolicy kPolicy = kBackwardPolicy<X, Y, kIndex>;
    if constexpr (kPolicy.multi_pass()) {
      return kernel<rows_backward_multi_pass<X, Y, float, kPolicy.aligned ? kPolicy.vector() : 1>>(
          "rows_backward_multi_pass");
    } else {
      return kernel<rows_backward<X, Y, kIndex>>("rows_backward", SharedMemory::kRing);
    }
  }

  using Find = Kernel& (*)();
  template <int... kIndex>
  static Kernel& forward_at(int policy, std::integer_sequence<int, kIndex...>) {
    static constexpr Find kFind[] = {forward_instance<kIndex>...};
    return kFind[policy]();
  }
  template <int... kIndex>
  static Kernel& backward_at(int policy, std::integer_sequence<int, kIndex...>) {
    static constexpr Find kFind[] = {backward_instance<kIndex>...};
    return kFind[policy]();
  }

  static Kernel& find_forward(int policy) {
    return forward_at(policy, std::make_integer_sequence<int, kForward.count>());
  }
  static Kernel& find_backward(int policy) {
    return backward_at(policy, std::make_integer_sequence<int, kBackward.count>());
  }
  static Kernel& find_column_sums() { return kernel<column_sums<X, Y, float>>("column_sums"); }
  static Kernel& find_reduce_partials() {
    return kernel<reduce_partials<float>>("reduce_partials", SharedMemory::kAfterRing);
  }

  static constexpr KernelSet kSet = {find_forward, find_backward, find_column_sums,
                                     find_reduce_partials};
};

// Dtypes looked up at run time; arithmetic in C.
template <typename C, bool kModulated = false>
struct RuntimeDtypeInstances {
  using Any = RuntimeDtype;
  static Kernel& find_forward(int) {
    return kernel<rows_forward_multi_pass<Any, Any, C, 1, kModulated>>("rows_forward_multi_pass");
  }
  static Kernel& find_backward(int) {
    return kernel<rows_backward_multi_pass<Any, Any, C, 1, kModulated>>("rows_backward_multi_pass");
  }
  static Kernel& find_column_sums() {
    return kernel<column_sums<Any, Any, C, kModulated>>("column_sums");
  }
  static Kernel& find_reduce_partials() { return kernel<reduce_partials<C>>("reduce_partials"); }

  static constexpr KernelSet kSet = {find_forward, find_backward, find_column_sums,
                                     find_reduce_partials};
};

}  // namespace evenkeel::cuda
