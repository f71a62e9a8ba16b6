// A list of policies: what a family of kernels is compiled for. Instances are generated from it, and what is
// not in it does not exist.
#pragma once

namespace evenkeel::cuda {

template <typename Policy>
struct PolicyList {
  static constexpr int kMost = 128;
  Policy entries[kMost] = {};
  int count = 0;

  constexpr void add(const Policy& policy) { entries[count++] = policy; }
  // The index of the entry that serves a policy; -1: there is none.
  constexpr int find(const Policy& wanted) const {
    for (int i = 0; i < count; ++i) {
      if (entries[i].serves(wanted)) return i;
    }
    return -1;
  }
  constexpr const Policy* begin() const { return entries; }
  constexpr const Policy* end() const { return entries + count; }
};

}  // namespace evenkeel::cuda
