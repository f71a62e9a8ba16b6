// The table of policies: the only list of the row kernels that exist. Instances are generated from it
// (row/instances.cuh), tuning looks up in it, tests read it. A call whose policy is not served by an
// entry goes to the kernels that look dtypes up at run time, and ek_explain says so.
//
// A general kernel takes any row that its row group can hold; a specialized one takes less for less time.
#pragma once

#include <initializer_list>

#include "cuda/primitives/policy_list.h"
#include "cuda/row/policy.h"

namespace evenkeel::cuda {

// --- Forward

struct ForwardSplit {
  Scope scope;
  int lanes, elements;
  int rows = 1;
  bool wide_block = false;
};
inline constexpr bool kWideBlock = true;

// RMS norm of 128 half values: a row of 16 lanes with one vector each, so that loads of a warp are
// coalesced; four rows at once where the number of rows allows it.
inline constexpr int kForwardShortRms = 128;

// Short rows first, in the order in which tuning tries them.
inline constexpr ForwardSplit kForwardHalf[] = {
    {Scope::kWarp, 4, 16},      {Scope::kWarp, 4, 32},      {Scope::kWarp, 8, 32},
    {Scope::kWarp, 16, 32},     {Scope::kWarp, kWarp, 32},  {Scope::kWarp, kWarp, 64},
    {Scope::kBlock, kWarp, 32}, {Scope::kBlock, kWarp, 64}, {Scope::kCluster, kWarp, 64}};
inline constexpr ForwardSplit kForwardFloat[] = {{Scope::kWarp, 4, 16},
                                                 {Scope::kWarp, 4, 32},
                                                 {Scope::kWarp, 8, 32},
                                                 {Scope::kWarp, 16, 32},
                                                 {Scope::kWarp, kWarp, 32},
                                                 {Scope::kBlock, kWarp, 16},
                                                 {Scope::kBlock, kWarp, 16, 1, kWideBlock},
                                                 {Scope::kCluster, kWarp, 32}};
inline constexpr ForwardSplit kForwardHalfRms[] = {{Scope::kWarp, 4, 16},
                                                   {Scope::kWarp, 8, 32},
                                                   {Scope::kWarp, 16, 32},
                                                   {Scope::kWarp, kWarp, 32},
                                                   {Scope::kWarp, 16, 8},
                                                   {Scope::kWarp, 16, 32, 4},
                                                   {Scope::kBlock, kWarp, 16},
                                                   {Scope::kBlock, kWarp, 32},
                                                   {Scope::kBlock, kWarp, 32, 1, kWideBlock},
                                                   {Scope::kCluster, kWarp, 64}};
inline constexpr ForwardSplit kForwardHalfLayer[] = {
    {Scope::kWarp, 4, 16},     {Scope::kWarp, 4, 32},     {Scope::kWarp, 8, 32},
    {Scope::kWarp, 16, 32},    {Scope::kWarp, kWarp, 32}, {Scope::kBlock, kWarp, 16},
    {Scope::kBlock, kWarp, 32}};
inline constexpr ForwardSplit kForwardFloatSpecialized[] = {{Scope::kWarp, 4, 16},
                                                            {Scope::kBlock, kWarp, 16}};

inline constexpr EpilogueTerms kOffsetOnly{.weight_offset = true};

constexpr ForwardPolicy forward_policy(const ForwardSplit& split, int x_size, int y_size,
                                       bool aligned, const EpilogueTerms& terms,
                                       Specialization specialization = Specialization::kNone,
                                       bool residual = false, bool modulated = false) {
  return {.x_size = x_size,
          .y_size = y_size,
          .scope = split.scope,
          .lanes = split.lanes,
          .elements = split.elements,
          .rows = split.rows,
          .wide_block = split.wide_block,
          .aligned = aligned,
          .terms = terms,
          .specialization = specialization,
          .residual = residual,
          .modulated = modulated};
}

// Of x and y with such elements. A mix of sizes and unaligned rows have general kernels without further terms
// only, unaligned rows of a mix where x is the larger one. The multi-pass kernels take every term.
//
// With a scale or a shift of each sample, aligned rows that are general, and have no further terms but an offset: that of a
// scale, which is read as a weight. x is no smaller than y.
//
// With a residual, x_size is that of the sum. The same list, but for the multi-pass kernels, so that a sum is
// normalized in the same order of operations, with the same bits, whether it was added before or in the kernel.
constexpr PolicyList<ForwardPolicy> forward_policies(int x_size, int y_size) {
  PolicyList<ForwardPolicy> list;
  bool residual = false, modulated = false;
  const auto add_all = [&](const auto& splits, bool aligned, const EpilogueTerms& terms,
                           Specialization specialization = Specialization::kNone) {
    for (const ForwardSplit& split : splits) {
      if (aligned || !split.wide_block)
        list.add(forward_policy(split, x_size, y_size, aligned, terms, specialization, residual,
                                modulated));
    }
  };
  const auto add_general = [&](bool aligned, const EpilogueTerms& terms) {
    x_size == 2 ? add_all(kForwardHalf, aligned, terms) : add_all(kForwardFloat, aligned, terms);
  };
  const auto add_resident = [&] {
    add_general(true, kNoTerms);
    if (x_size == y_size) add_general(true, kAllTerms);
    if (x_size >= y_size) add_general(false, kNoTerms);
    if (x_size != y_size) return;
    if (x_size == 2) {
      add_all(kForwardHalfRms, true, kNoTerms, Specialization::kRms);
      add_all(kForwardHalfLayer, true, kNoTerms, Specialization::kLayer);
    } else {
      add_all(kForwardFloatSpecialized, true, kNoTerms, Specialization::kRms);
      add_all(kForwardFloatSpecialized, true, kNoTerms, Specialization::kLayer);
    }
  };
  add_resident();
  const ForwardSplit multi_pass{Scope::kBlock, kWarp, 0};
  list.add(forward_policy(multi_pass, x_size, y_size, true, kAllTerms));
  if (x_size >= y_size) list.add(forward_policy(multi_pass, x_size, y_size, false, kAllTerms));
  residual = true;
  if (x_size >= y_size) add_resident();
  if (x_size < y_size) return list;
  residual = false;
  modulated = true;
  add_general(true, kOffsetOnly);
  return list;
}

// Of y in 8 bits, aligned rows of half types, whose residual has the dtype of x. The same splits as those of a float32
// y: it has the bits that y is quantized from.
constexpr PolicyList<ForwardPolicy> quantizing_policies() {
  PolicyList<ForwardPolicy> list;
  for (const bool residual : {false, true}) {
    for (const ForwardSplit& split : kForwardHalf)
      list.add(forward_policy(split, 2, 1, true, kNoTerms, Specialization::kNone, residual));
  }
  return list;
}

inline constexpr PolicyList<ForwardPolicy> kForwardHalfToEightBits = quantizing_policies(),
                                           kForwardFloatToEightBits;
inline constexpr auto kForwardHalfToHalf = forward_policies(2, 2);
inline constexpr auto kForwardHalfToFloat = forward_policies(2, 4);
inline constexpr auto kForwardFloatToHalf = forward_policies(4, 2);
inline constexpr auto kForwardFloatToFloat = forward_policies(4, 4);
constexpr const PolicyList<ForwardPolicy>& forward_policies_of(int x_size, int y_size) {
  if (y_size == 1) return x_size == 2 ? kForwardHalfToEightBits : kForwardFloatToEightBits;
  if (x_size == 2) return y_size == 2 ? kForwardHalfToHalf : kForwardHalfToFloat;
  return y_size == 2 ? kForwardFloatToHalf : kForwardFloatToFloat;
}

// Kernels have the index of their policy as template argument: nvcc's host code cannot spell a struct.
template <typename X, typename Y, int kIndex>
inline constexpr ForwardPolicy kForwardPolicy =
    forward_policies_of(sizeof(X), sizeof(Y)).entries[kIndex];

// --- Backward

struct BackwardSplit {
  Scope scope;
  int lanes, elements;
  bool block_first = false;
};
inline constexpr bool kBlockFirst = true;

inline constexpr BackwardSplit kBackwardGeneral[] = {
    {Scope::kWarp, 4, kBackwardElements},
    {Scope::kWarp, 8, kBackwardElements},
    {Scope::kWarp, 16, kBackwardElements},
    {Scope::kWarp, kWarp, kBackwardElements},
    {Scope::kBlock, kWarp, kBackwardElements},
    {Scope::kCluster, kWarp, kBackwardElements},
    {Scope::kCluster, kWarp, kBackwardElements, kBlockFirst},
    {Scope::kCluster, kWarp, kBackwardMostElements, kBlockFirst}};
// Rows of 768 and 1024 elements of one warp: no warp waits for another then.
inline constexpr BackwardSplit kBackwardOneWarp[] = {{Scope::kWarp, kWarp, 24},
                                                     {Scope::kWarp, kWarp, 32}};
// A row of 4 lanes gains nothing.
inline constexpr BackwardSplit kBackwardHalfSpecialized[] = {
    {Scope::kWarp, 8, kBackwardElements},
    {Scope::kWarp, 16, kBackwardElements},
    {Scope::kWarp, kWarp, kBackwardElements},
    {Scope::kBlock, kWarp, kBackwardElements}};

constexpr BackwardPolicy backward_policy(const BackwardSplit& split, int x_size, int dy_size,
                                         bool aligned, const EpilogueTerms& terms,
                                         Specialization specialization = Specialization::kNone,
                                         bool residual = false, bool modulated = false) {
  return {.x_size = x_size,
          .dy_size = dy_size,
          .scope = split.scope,
          .lanes = split.lanes,
          .elements = split.elements,
          .block_first = split.block_first,
          .aligned = aligned,
          .terms = terms,
          .specialization = specialization,
          .residual = residual,
          .modulated = modulated};
}

// The weight's offset is added when the weight is loaded, once for all rows of a block, so that every kernel has it.
// With a scale or a shift of each sample, the general kernels of aligned rows whose x is no smaller than dy.
constexpr PolicyList<BackwardPolicy> backward_policies(int x_size, int dy_size) {
  PolicyList<BackwardPolicy> list;
  bool residual = false, modulated = false;
  const auto add_all = [&](const auto& splits, bool aligned, const EpilogueTerms& terms,
                           Specialization specialization = Specialization::kNone) {
    for (const BackwardSplit& split : splits) {
      // Of float32 three such rows do not fit into shared memory.
      if (residual && x_size + dy_size == 8 && split.elements == kBackwardMostElements &&
          split.scope == Scope::kCluster)
        continue;
      list.add(backward_policy(split, x_size, dy_size, aligned, terms, specialization, residual,
                               modulated));
    }
  };
  const auto add_resident = [&] {
    add_all(kBackwardGeneral, true, kOffsetOnly);
    if (x_size == dy_size) add_all(kBackwardGeneral, true, kAllTerms);
    if (x_size >= dy_size) add_all(kBackwardGeneral, false, kOffsetOnly);
    if (x_size != dy_size) return;
    for (const Specialization s : {Specialization::kRms, Specialization::kLayer}) {
      add_all(kBackwardOneWarp, true, kOffsetOnly, s);
      if (x_size == 2) add_all(kBackwardHalfSpecialized, true, kOffsetOnly, s);
    }
  };
  add_resident();
  const BackwardSplit multi_pass{Scope::kBlock, kWarp, 0};
  list.add(backward_policy(multi_pass, x_size, dy_size, true, kAllTerms));
  if (x_size >= dy_size) list.add(backward_policy(multi_pass, x_size, dy_size, false, kAllTerms));
  residual = true;
  if (x_size >= dy_size) add_resident();
  if (x_size < dy_size) return list;
  residual = false;
  modulated = true;
  add_all(kBackwardGeneral, true, kOffsetOnly);
  return list;
}

inline constexpr auto kBackwardHalfFromHalf = backward_policies(2, 2);
inline constexpr auto kBackwardHalfFromFloat = backward_policies(2, 4);
inline constexpr auto kBackwardFloatFromHalf = backward_policies(4, 2);
inline constexpr auto kBackwardFloatFromFloat = backward_policies(4, 4);
constexpr const PolicyList<BackwardPolicy>& backward_policies_of(int x_size, int dy_size) {
  if (x_size == 2) return dy_size == 2 ? kBackwardHalfFromHalf : kBackwardHalfFromFloat;
  return dy_size == 2 ? kBackwardFloatFromHalf : kBackwardFloatFromFloat;
}

template <typename X, typename D, int kIndex>
inline constexpr BackwardPolicy kBackwardPolicy =
    backward_policies_of(sizeof(X), sizeof(D)).entries[kIndex];

}  // namespace evenkeel::cuda
