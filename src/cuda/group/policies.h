// The table of policies: the only list of the group norm kernels that exist. Instances are generated from it
// (group/instances.cuh), tuning looks up in it, tests read it. A tile that no entry serves goes to the kernels
// that read single elements twice, and ek_explain says so.
#pragma once

#include <type_traits>

#include "cuda/group/policy.h"
#include "cuda/primitives/policy_list.h"

namespace evenkeel::cuda {

// For each pass and layout: sets that are read twice, as single elements or as vectors; and resident ones, which
// are vectors always. All of them twice, for cheap activations and for all. A dtype that is looked up at run time has
// single elements only, and no kernels for cheap activations.
constexpr PolicyList<GroupPolicy> group_policies(int x_size) {
  PolicyList<GroupPolicy> list;
  const auto add = [&](GroupPolicy policy) {
    policy.x_size = x_size;
    for (const Activations activations : {Activations::kCheap, Activations::kAll}) {
      if (x_size == 0 && activations == Activations::kCheap) continue;
      policy.activations = activations;
      list.add(policy);
    }
  };
  for (const bool last : {false, true}) {
    add({.backward = false, .channels_last = last, .vector = 1});
    add({.backward = true, .channels_last = last, .vector = 1});
  }
  if (x_size == 0) return list;
  for (const bool last : {false, true}) {
    const int few = group_vector(last, false, x_size), most = group_vector(last, true, x_size);
    add({.backward = false, .channels_last = last, .vector = few});
    add({.backward = false, .channels_last = last, .resident = true, .vector = most});
    add({.backward = true, .channels_last = last, .vector = few});
    add({.backward = true, .channels_last = last, .resident = true, .vector = most});
    add({.backward = true,
         .channels_last = last,
         .resident = true,
         .vector = most,
         .reloads_dy = true});
  }
  const int most = group_vector(true, true, x_size);
  add({.backward = false,
       .channels_last = true,
       .resident = true,
       .vector = most,
       .one_group = true});
  return list;
}

inline constexpr auto kGroupsOfHalf = group_policies(2);
inline constexpr auto kGroupsOfFloat = group_policies(4);
inline constexpr auto kGroupsOfRuntimeDtype = group_policies(0);
constexpr const PolicyList<GroupPolicy>& group_policies_of(int x_size) {
  return x_size == 2 ? kGroupsOfHalf : x_size == 4 ? kGroupsOfFloat : kGroupsOfRuntimeDtype;
}

struct RuntimeDtype;  // primitives/element.cuh
template <typename X>
constexpr const PolicyList<GroupPolicy>& group_policies_for() {
  if constexpr (std::is_same_v<X, RuntimeDtype>) {
    return group_policies_of(0);
  } else {
    return group_policies_of(sizeof(X));
  }
}

// Kernels have the index of their policy as template argument: nvcc's host code cannot spell a struct.
template <typename X, int kIndex>
inline constexpr GroupPolicy kGroupPolicy = group_policies_for<X>().entries[kIndex];

}  // namespace evenkeel::cuda
