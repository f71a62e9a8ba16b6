// The steps of run_group() (pipeline.cuh): loads and sums of vectors, the table, the parts of groups and their
// results. They refer to its variables, as closures do, so that the compiler sees one function. Registers and
// schedule depend on how they are cut and on the order of members: compare the machine code after a change.
#pragma once

#include "cuda/group/sums.cuh"
#include "cuda/primitives/parameters.cuh"

namespace evenkeel::cuda {

// The vectors of a resident chunk arrive in parts: one is summed while the next ones are in flight.
template <GroupPolicy kPolicy, typename Position>
struct ResidentParts {
  static constexpr int kParts = kPolicy.parts();
  const Position& position;

  __device__ int end_of(int part) const {
    return part + 1 == kParts ? position.count
                              : min(max(position.count * (part + 1) / kParts, 2), position.count);
  }
  // Issues the loads of the chunk's vectors, and load_table() before or among them.
  template <typename Pass, typename LoadTable>
  __device__ void load(Pass& pass, const LoadTable& load_table) const {
    if constexpr (kPolicy.loads_table_first()) load_table();
    each([&](int part, int from, int to) {
      pass.load(from, to);
      if constexpr (kPolicy.resident) commit_copies();
      if (kPolicy.resident && !kPolicy.loads_table_first() && part == 0) load_table();
    });
  }
  // Adds the vectors to the sums of the thread, as they arrive.
  template <typename Pass, typename Sums>
  __device__ void sum(Pass& pass, Sums& sums) const {
    each([&](int part, int from, int to) {
      if constexpr (kPolicy.resident) wait_for_copies(kParts - 1 - part);
      if (part == 0) pass.begin_sums();
      pass.sum(from, to, sums);
    });
  }
  // Calls body(part, first, last). Two parts in a loop compile to slower code.
  template <typename Body>
  __device__ void each(const Body& body) const {
    if constexpr (kParts == 2) {
      body(0, 0, end_of(0));
      body(1, end_of(0), position.count);
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        body(part, part == 0 ? 0 : end_of(part - 1), end_of(part));
    }
  }
};

// The numbers of a chunk's table, each loaded by another thread.
template <typename Pass>
struct TableLoad {
  using Position = typename Pass::Position;
  using Loads = typename Pass::Loads;

  const GroupShape& shape;
  const GroupSet& set;
  const Position& position;
  const int &chunk, &slots;
  const int& last;  // the end of the entries that are loaded
  Pass& pass;
  Loads& loads;

  // Calls body(number, slot) for the thread's entries from `first` on.
  template <typename Body>
  __device__ void each(int first, int last, const Body& body) const {
    for (int i = first; i < last; i += blockDim.x) {
      int number = 0, slot = i;
      for (; slot >= slots; slot -= slots) ++number;
      body(number, slot);
    }
  }
  __device__ int channel_of(int slot) const {
    return min(position.line_of(shape, chunk, slot, blockDim.x).channel, set.channels - 1);
  }
  __device__ void issue(int number, int slot) const { pass.issue(number, channel_of(slot), loads); }

  // Completes the table from the results of groups, of a set that is read for the second time.
  template <typename C>
  __device__ void complete(const C* results) const {
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x)
      pass.complete(slot, results + kGroupResults * shape.per_group.quotient(channel_of(slot)));
  }
  // Issues the load of the thread's first entry, among those of resident vectors.
  __device__ void issue_first() const {
    each(static_cast<int>(threadIdx.x), min(last, static_cast<int>(blockDim.x)),
         [&](int number, int slot) { issue(number, slot); });
  }
  // Stores the thread's entries. Those that are not in flight yet are loaded here.
  __device__ void finish() const {
    const auto thread = static_cast<int>(threadIdx.x);
    each(thread, last, [&](int number, int slot) {
      if (!Pass::kPolicy.resident || number * slots + slot != thread) issue(number, slot);
      pass.table.at(number, slot) = pass.value(number, loads);
    });
  }
};

// From a group's part to its results.
template <typename Pass>
struct GroupConclusion {
  static constexpr bool kResident = Pass::kPolicy.resident;
  using C = typename Pass::Compute;
  using Part = typename Pass::Part;
  using Position = typename Pass::Position;

  const GroupShape& shape;
  const GroupSet& set;
  const Position& position;
  const int& chunk;
  const Pass& pass;
  C* const& results;

  template <typename SubWarp>
  __device__ void operator()(int group, const Part& part, const SubWarp& sub_warp,
                             bool valid) const {
    C result[kGroupResults];
    pass.finish(part, result);
    if constexpr (kResident) {
      __syncwarp();  // the sub-warp tile's other lanes have read the table
      const auto of_group = position.slots_of(shape, set, chunk, group, blockDim.x);
      if constexpr (Pass::kPolicy.completes_in_threads()) {
        if (sub_warp.lane() == 0 && valid) pass.store_results(of_group.first, result);
      } else {
        for (int slot = of_group.first + sub_warp.lane(); slot < of_group.last && valid;
             slot += sub_warp.lanes())
          pass.complete(slot, result);
      }
    }
    if (sub_warp.lane() != 0 || !valid) return;
    if constexpr (!kResident) {
#pragma unroll
      for (int i = 0; i < kGroupResults; ++i) results[group * kGroupResults + i] = result[i];
    }
    if (!kResident || chunk == 0) pass.publish(group, result);
  }
};

// From the sums of a chunk's slots to the parts of its groups, and from the parts of all chunks to their results.
template <typename Pass>
struct SlotReduction {
  static constexpr GroupPolicy kPolicy = Pass::kPolicy;
  static constexpr bool kResident = kPolicy.resident;
  using C = typename Pass::Compute;
  using Part = typename Pass::Part;
  using Position = typename Pass::Position;
  static constexpr int kStride = kPolicy.slot_stride();

  const GroupConclusion<Pass>& conclude;
  const GroupShape& shape;
  const GroupSet& set;
  const Position& position;
  const int &chunk, &groups, &chunks;
  const Pass& pass;
  GroupExchange<Part>& exchange;
  const SlotSums<kPolicy, C>& slot_sums;
  Part* const& parts;
  const int& slots_of_group;

  // Parts are concluded if there is one chunk, else sent to the other blocks, or stored.
  __device__ void reduce_slots() const {
    // A resident group has one sub-warp tile, for its slots here and its parts from all blocks: the lane that
    // overwrites a number is the one that used it.
    const SubWarpTile<kPolicy.one_group> of_slots(
        kResident && chunks > 1 ? max(chunks, slots_of_group) : slots_of_group);
    of_slots.each(groups, [&](int group, bool valid) {
      auto of_group = position.slots_of(shape, set, chunk, group, blockDim.x);
      if (!valid) of_group.last = of_group.first;
      const Part part(of_slots, [&](auto body) {
        for (int slot = of_group.first + of_slots.lane() * kStride; slot < of_group.last;
             slot += of_slots.lanes() * kStride) {
          const int pixels =
              Position::pixels_of(shape, position.line_of(shape, chunk, slot, blockDim.x).slice);
          pass.contribute(slot, static_cast<C>(kStride * pixels), slot_sums.get(0, slot),
                          slot_sums.get(1, slot), body);
        }
      });
      if (chunks == 1) return conclude(group, part, of_slots, valid);
      if constexpr (kResident) {
        exchange.send(chunk, group, part, of_slots, valid);
      } else if (of_slots.lane() == 0 && valid) {
        parts[int64_t{group} * chunks + chunk] = part;
      }
    });
  }
  // Merges the parts of all chunks, which have arrived.
  __device__ void merge_chunks() const {
    const SubWarpTile<kPolicy.one_group> of_chunks(kResident ? max(chunks, slots_of_group)
                                                             : chunks);
    of_chunks.each(groups, [&](int group, bool valid) {
      const Part part(of_chunks, [&](auto body) {
#pragma unroll(kResident ? 1 : 8)
        for (int i = of_chunks.lane(); i < chunks; i += of_chunks.lanes())
          (kResident ? exchange.get(i, group) : parts[int64_t{group} * chunks + i])
              .contribute(body);
      });
      conclude(group, part, of_chunks, valid);
    });
  }
};

// Backward: a chunk's partials of dweight and dbias.
template <typename Pass, typename Sums>
__device__ inline void store_partials(const GroupShape& shape, const GroupSet& set,
                                      const typename Pass::Position& position, const int& chunk,
                                      const Pass& pass, const Sums& slot_sums, const int& slots) {
  for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    const auto line = position.line_of(shape, chunk, slot, blockDim.x);
    if (line.channel < set.channels)
      pass.store_partials(line.channel, line.slice, slot_sums.get(0, slot), slot_sums.get(1, slot));
  }
}

}  // namespace evenkeel::cuda
