// What a row kernel is compiled for: one structural type for each pass, used as the one template
// parameter beside the element types. Fields say how a row is split and what the kernel takes; member
// functions derive the rest, each with the gain that was measured (H200, docs/performance.md).
//
// A row group is the set of threads that share a row: lanes of a warp, warps of a block, or blocks of a
// cluster. row/policies.h lists the policies that exist, row/*_tuning.h choose among them.
#pragma once

#include <cstdint>

#include "cuda/primitives/row_group_policy.h"

namespace evenkeel::cuda {

// What a kernel may take for granted: all big tensors have one dtype and all rows one stride; forward,
// the parameters have the same dtype.
enum class Specialization {
  kNone,
  kRms,    // RMS norm without a bias (forward: with a weight)
  kLayer,  // layer norm (forward: with weight and bias)
};

// Terms of the epilogue that a kernel evaluates if the call has them, which it tests at run time. A term
// that is false here is absent from the kernel's code.
struct EpilogueTerms {
  bool activation = false;
  bool casting = false;  // round the normalized value to x's dtype before the weight
  bool weight_offset = false;

  constexpr bool cover(const EpilogueTerms& needed) const {
    return (activation || !needed.activation) && (casting || !needed.casting) &&
           (weight_offset || !needed.weight_offset);
  }
  bool operator==(const EpilogueTerms&) const = default;
};

inline constexpr EpilogueTerms kNoTerms{};
inline constexpr EpilogueTerms kAllTerms{
    .activation = true, .casting = true, .weight_offset = true};

// Elements that a thread of a forward kernel holds: 64 bytes, or 128 (long rows of a warp, of half types
// in a block, and of clusters, where they are resident in shared memory).
constexpr int forward_elements(int x_size) { return 64 / x_size; }
constexpr int forward_most_elements(int x_size) { return 128 / x_size; }

// Threads of a forward block whose row groups are within a warp.
constexpr int forward_warp_threads(int x_size, int elements) {
  const int bytes = x_size * elements;
  return bytes == 16 || bytes == 64 ? 64 : 128;
}

inline constexpr int kForwardBlockThreads = 512;  // the most
// Bytes of parameters that a thread loads before the first of them is used: the registers that are left.
inline constexpr int kForwardParameterBytes = 64;

// Shared memory of a row group's part of a row: none, unless it is copied there
// (ForwardPolicy::through_shared). threads: of the row group in one block.
// Beside an unaligned x, which is no larger than the sum, lies the residual.
constexpr int forward_slot_bytes(Scope scope, int threads, int elements, int64_t part_cols,
                                 int x_size, bool aligned, bool residual) {
  if (scope != Scope::kCluster && aligned) return 0;
  if (aligned) return threads * elements * x_size;
  return (residual ? 2 : 1) * static_cast<int>(slot_part_bytes(part_cols, x_size, aligned));
}

struct ForwardPolicy {
  int x_size = 0, y_size = 0;  // bytes of an element; 0: the dtype is looked up at run time
  Scope scope = Scope::kBlock;
  int lanes = kWarp;  // scope kWarp: threads per row
  int elements = 0;   // of a row in a thread; 0: multi-pass, the row is read anew in every pass
  int rows = 1;       // that a row group has at once, with one vector of a thread each
  bool wide_block = false;  // compiled for blocks of more threads
  bool aligned = false;     // every row begins at a multiple of 16 bytes and has a length to match
  EpilogueTerms terms;
  Specialization specialization = Specialization::kNone;
  bool residual = false;   // the prologue adds one (prologue.cuh)
  bool modulated = false;  // weight and bias are the row's sample's

  bool operator==(const ForwardPolicy&) const = default;

  // Whether a kernel of this policy computes what one of the other would, the same way.
  constexpr bool serves(const ForwardPolicy& wanted) const {
    return elements == wanted.elements && lanes == wanted.lanes && scope == wanted.scope &&
           specialization == wanted.specialization && aligned == wanted.aligned &&
           rows == wanted.rows && wide_block == wanted.wide_block && x_size == wanted.x_size &&
           y_size == wanted.y_size && residual == wanted.residual &&
           modulated == wanted.modulated && terms.cover(wanted.terms);
  }

  constexpr bool multi_pass() const { return elements == 0; }
  constexpr bool quantizes() const { return y_size == 1; }
  constexpr bool is_rms() const { return specialization == Specialization::kRms; }
  constexpr bool is_layer() const { return specialization == Specialization::kLayer; }
  constexpr bool is_specialized() const { return specialization != Specialization::kNone; }

  // Elements of a vector: 16 bytes of x. Of a smaller y a warp still stores whole sectors, which half of a
  // wider vector of float32 would not be.
  constexpr int vector() const { return 16 / x_size; }
  constexpr int vectors() const { return elements / vector(); }
  constexpr int bytes() const { return elements * x_size; }

  // Whether a row is copied into shared memory. There aligned rows of clusters stay; unaligned rows go on
  // into registers.
  constexpr bool through_shared() const { return scope == Scope::kCluster || !aligned; }
  constexpr bool resident_in_shared() const { return through_shared() && aligned; }

  // Whether rows are known to fill their row groups.
  constexpr bool full() const {
    if (scope == Scope::kWarp) return is_specialized();
    return scope == Scope::kBlock && (is_layer() || (is_rms() && (wide_block || bytes() < 64)));
  }

  // Whether the columns of a warp are contiguous. It gains 1 to 5 %, and loses 1 % where blocks of half
  // types know that rows fill them.
  constexpr bool contiguous() const { return scope != Scope::kBlock || x_size == 4 || !full(); }

  // Whether loads and stores carry the hint that x and y are used once: it gains 4 to 7 % where a thread
  // of a warp holds much, and loses up to 7 % elsewhere.
  constexpr bool evict_first() const { return scope == Scope::kWarp && bytes() >= 128; }

  // Whether values are unpacked and centered once. Long rows are unpacked anew in every pass: the values
  // would take twice the registers.
  constexpr bool unpacks_once() const {
    return !is_specialized() && (scope == Scope::kWarp || !aligned) && elements <= 32;
  }

  // Vectors of the weight that are loaded before the reduction: as many as there are registers for. There
  // are none for a bias beside it.
  constexpr int early_weights() const {
    if (!is_rms()) return 0;
    return scope == Scope::kCluster ? 2 : vectors() / rows;
  }
  // Vectors whose parameters, of so many bytes each, are loaded together.
  constexpr int parameter_batch(int bytes_each) const {
    if (!resident_in_shared() && !full()) return 1;
    const int batch = kForwardParameterBytes / bytes_each;
    return batch < 1 ? 1 : batch > vectors() ? vectors() : batch;
  }

  constexpr int row_groups() const {  // of a block
    return scope == Scope::kWarp ? forward_warp_threads(x_size, elements) / lanes : 1;
  }
  // Row groups of a warp; several rows of one of them take turns with those of the others.
  constexpr int groups_per_warp() const { return scope == Scope::kWarp ? kWarp / lanes : 1; }

  constexpr RowGroupPolicy group() const {
    return {.scope = scope,
            .lanes = lanes,
            .sole = scope != Scope::kWarp,
            .forward = true,
            .overlapped = false,
            .max_warps = kForwardBlockThreads / kWarp,
            .block_first = is_rms() && scope == Scope::kCluster};
  }

  // Threads that an SM shall hold at least, which leaves 40 to 80 registers for each.
  // Beside a residual each thread needs more, and has twice the bytes in flight.
  constexpr int resident_threads() const {
    if (residual && scope == Scope::kWarp && !is_specialized() && (x_size == 2 || !aligned))
      return 768;
    if (residual) return 1024;
    if (!aligned) return 1024;
    if (is_specialized() && scope == Scope::kBlock && bytes() < 64) return 1536;
    if (is_rms() && scope == Scope::kBlock) return wide_block ? 1152 : 1024;
    if (is_rms() && scope == Scope::kWarp) return 1024;
    if (is_layer() && scope == Scope::kWarp)
      return bytes() < 64 ? 1280 : lanes < kWarp ? 768 : 1024;
    if (is_layer()) return 1024;
    if (wide_block) return 1536;
    if (scope == Scope::kCluster) return 1280;
    if (scope == Scope::kBlock) return elements == forward_elements(x_size) ? 1280 : 1024;
    return elements == 16 ? 1280 : 1024;
  }
  // For __launch_bounds__: the most threads of a block, and the least blocks of an SM.
  constexpr int block_threads() const {
    if (scope == Scope::kWarp) return forward_warp_threads(x_size, elements);
    const int all = resident_threads();
    return all % kForwardBlockThreads == 0 ? kForwardBlockThreads : all / 2;
  }
  constexpr int resident_blocks() const { return resident_threads() / block_threads(); }
};

// Backward, the weight and the sums of dweight and dbias stay in registers beside the row.
inline constexpr int kBackwardElements = 16;
inline constexpr int kBackwardMostElements = 32;  // of clusters: the weight is in shared memory

struct BackwardPolicy {
  int x_size = 0, dy_size = 0;
  Scope scope = Scope::kBlock;
  int lanes = kWarp;
  int elements = 0;
  bool block_first = false;  // RowGroupPolicy's
  bool aligned = false;
  EpilogueTerms terms;
  Specialization specialization = Specialization::kNone;
  bool residual = false;   // dsum, which has x's dtype, is added to dx, which may be stored twice
  bool modulated = false;  // weight and bias, and the sums of columns, are those of a sample

  bool operator==(const BackwardPolicy&) const = default;

  constexpr bool serves(const BackwardPolicy& wanted) const {
    return elements == wanted.elements && lanes == wanted.lanes && scope == wanted.scope &&
           specialization == wanted.specialization && aligned == wanted.aligned &&
           block_first == wanted.block_first && x_size == wanted.x_size &&
           dy_size == wanted.dy_size && residual == wanted.residual &&
           modulated == wanted.modulated && terms.cover(wanted.terms);
  }

  constexpr bool multi_pass() const { return elements == 0; }
  constexpr bool is_rms() const { return specialization == Specialization::kRms; }
  // Rows are known to fill their row groups, then, and to have one stride.
  constexpr bool is_specialized() const { return specialization != Specialization::kNone; }

  // Elements of a vector: 16 bytes of the smaller type; of unaligned rows, 16 bytes of x at most are put
  // together at once.
  constexpr int vector() const { return 16 / (aligned && dy_size < x_size ? dy_size : x_size); }
  constexpr int vectors() const { return elements / vector(); }
  constexpr bool contiguous() const { return true; }  // the columns of a warp
  constexpr int groups_per_warp() const { return lanes < kWarp ? kWarp / lanes : 1; }

  // Threads of a block: with more sums each needs more registers.
  constexpr int block_threads() const {
    return scope == Scope::kWarp && elements > kBackwardElements ? kRingThreads / 2 : kRingThreads;
  }
  // Otherwise it is in shared memory.
  constexpr bool weight_in_registers() const {
    return scope != Scope::kCluster || elements <= kBackwardElements;
  }
  // Whether x and dy, which are used twice, stay in registers: if they are small enough beside the sums,
  // and where an unaligned row would have to be put together twice.
  constexpr bool row_in_registers() const {
    const int few = block_threads() == kRingThreads ? 64 : x_size == 4 ? 256 : 96;
    return scope != Scope::kCluster && (!aligned || elements * (x_size + dy_size) <= few);
  }
  // Whether dx of a row is computed while the sums of the next one are exchanged, which takes a while in a
  // cluster. (Rings of longer rows have no slot for that.)
  constexpr bool pipelined() const {
    return scope == Scope::kCluster && elements <= kBackwardElements;
  }
  // Whether the ring is known to have kMaxStages: those of float32 are shorter.
  constexpr bool knows_stages() const { return is_specialized() && x_size == 2; }
  // Sums of a row: of the products, and unless it is RMS norm for sure, of the gradients.
  constexpr int sums() const { return is_rms() ? 1 : 2; }

  constexpr RowGroupPolicy group() const {
    return {.scope = scope,
            .lanes = lanes,
            .sole = scope == Scope::kCluster,
            .forward = false,
            .overlapped = pipelined(),
            .max_warps = kRingThreads / kWarp,
            .block_first = block_first};
  }
};

}  // namespace evenkeel::cuda
