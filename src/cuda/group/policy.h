// What a group norm kernel is compiled for: one structural type, used as the one template parameter beside the
// element type and the type of arithmetic. Fields say which values a thread takes and where they wait; member
// functions derive the rest. group/policies.h lists the policies that exist, group/tuning.h chooses among them.
// Numbers were measured on an H200 (docs/performance.md).
#pragma once

#include "cuda/primitives/activations.h"

namespace evenkeel::cuda {

inline constexpr int kResidentBlock = 512;  // the most threads of a block that holds its chunk
inline constexpr int kTwoPassBlock = 256;   // of one that reads twice
inline constexpr int kClearThreads = 256;

// Elements of a vector: 16 bytes. Where a vector has a channel for each element, their numbers take registers,
// which are scarce in blocks that hold a chunk in registers.
constexpr int group_vector(bool channels_last, bool resident, int x_size) {
  return channels_last && !resident ? 4 : 16 / x_size;
}

// Numbers that a group's part is reduced to, from which its channels get theirs.
inline constexpr int kGroupResults = 3;

struct GroupPolicy {
  int x_size = 0;  // bytes of an element; 0: dtypes are looked up at run time
  bool backward = false;
  bool channels_last = false;
  bool resident = false;    // clusters hold sets in shared memory; otherwise they are read twice
  int vector = 1;           // elements that are loaded at once
  bool one_group = false;   // forward, channels last, resident: vectors lie in one group each
  bool reloads_dy = false;  // backward, resident: only x is, dy is loaded for each use
  // With code for all of them a norm without an activation took up to a third longer.
  Activations activations = Activations::kCheap;

  bool operator==(const GroupPolicy&) const = default;

  // Whether a kernel of this policy computes what one of the other would, the same way.
  constexpr bool serves(const GroupPolicy& wanted) const { return *this == wanted; }

  // Neighbouring channels of a thread, and how many of them are summed on their own: in one group they are
  // summed together.
  constexpr int channels() const { return channels_last ? vector : 1; }
  constexpr int sums() const { return one_group ? 1 : channels(); }
  // Neighbouring slots of which the first has the sums of all.
  constexpr int slot_stride() const { return channels() / sums(); }

  // Vectors of each tensor that a thread has in registers at once, if the set is not resident: 128 bytes in
  // all, or 8 single elements. Channels last it may have more of them, which take over registers.
  constexpr int vectors() const {
    return vector == 1 ? 8 : (backward ? 64 : 128) / (vector * x_size);
  }
  constexpr bool refills() const { return channels_last; }
  // What the first pass read last is still in L2, so that the second pass begins with it.
  constexpr bool second_pass_backwards() const { return !resident && channels_last; }
  // Parts in which a resident chunk arrives: one is summed while the next ones are in flight.
  constexpr int parts() const { return !resident ? 1 : backward ? 2 : 3; }
  constexpr int resident_tensors() const { return !resident ? 0 : backward && !reloads_dy ? 2 : 1; }

  // Values of a group's part.
  constexpr int part_values() const { return backward ? 2 : 4; }
  // Numbers of a slot in a chunk's table: all of them, those that are loaded where a block sums, and those that
  // are loaded where it only computes outputs.
  constexpr int numbers() const { return backward ? 5 : 3; }
  constexpr int numbers_for_sums() const { return backward ? 4 : channels_last ? 3 : 2; }
  constexpr int numbers_for_outputs() const { return backward ? 4 : 2; }
  constexpr bool sums_need_numbers() const { return backward || channels_last; }
  // Whether loads of the table are issued before those of resident vectors; otherwise after the first part of
  // them, because addresses take a while to compute.
  constexpr bool loads_table_first() const { return resident && backward && !channels_last; }
  // Whether the results of a group go into the table as they are, and threads apply them to their channels.
  constexpr bool completes_in_threads() const { return one_group; }

  // For __launch_bounds__: the most threads of a block, and the least blocks of an SM.
  constexpr int block_threads() const { return resident ? kResidentBlock : kTwoPassBlock; }
  constexpr int resident_blocks() const { return resident ? 1 : backward ? 3 : 4; }
};

}  // namespace evenkeel::cuda
