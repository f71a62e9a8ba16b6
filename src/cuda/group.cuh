// The way of both passes of group norm: from a chunk's sums to the results of its groups, and from
// these to the outputs; for units that are kept, and for those that are read twice (group_tuning.h).
#pragma once

#include "cuda/group_sums.cuh"
#include "cuda/parameters.cuh"

namespace evenkeel::cuda {

// What a block does with units that are not kept: chunks in order, first for their sums; each is
// read again `lag` chunks later. Blocks start in order too, so whoever waits, waits for blocks that
// have started before it.
struct Item {
  int unit, chunk;
  bool again;

  __device__ Item(const GroupShape& s) {
    const auto block = static_cast<int>(blockIdx.x), turn = block - s.lag;
    const int all = s.units * static_cast<int>(s.chunks.value), alternating = 2 * (all - s.lag);
    again = turn >= alternating || (turn >= 0 && turn % 2 == 0);
    const int index = turn < 0              ? block
                      : turn >= alternating ? block - all
                      : again               ? turn / 2
                                            : s.lag + turn / 2;
    unit = s.chunks.quotient(index);
    chunk = index - unit * static_cast<int>(s.chunks.value);
    // What was read last is still in the cache.
    if (again) chunk = static_cast<int>(s.chunks.value) - 1 - chunk;
  }
};

// Whether all chunks of the unit have told their sums, this one as the last. One thread's fence is
// enough for what all wrote before the barrier, or will read after it.
__device__ inline bool is_last(GroupCounters& counters, int chunks) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&counters.arrived, 1) + 1 == static_cast<unsigned>(chunks);
    __threadfence();
  }
  return __syncthreads_or(last);
}
__device__ inline void announce(GroupCounters& counters) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicExch(&counters.ready, 1);
}
__device__ inline void wait_for(GroupCounters& counters) {
  if (threadIdx.x == 0) {
    while (*static_cast<volatile unsigned*>(&counters.ready) == 0) __nanosleep(64);
    __threadfence();
  }
  __syncthreads();
}

// Both passes: the chunk's sums, then those of groups, then the results. `pass` knows what they are:
//
//   load(unit, place, kept)      reads the chunk, perhaps into shared memory
//   prepare(unit, place, each)   the table's numbers that sum() needs; each(body) calls
//                                body(slot, channel of the unit). Ends with a barrier if it has to
//   sum(place, sums)             of the thread's channels
//   Part(pass, lanes, each)      of a group, for lane 0 of a team: each(body) calls body(slot, values,
//                                its two sums) for the slots of a lane. merge() adds another chunk's
//   keep(unit, channel, piece, ...)   a slot's sums, if keeps_sums()
//   finish(unit, group, part, results, writes)   a group's results; writes: the caller's, too
//   complete(slot, results)      a channel's numbers from its group's results
//   apply(unit, place)           the outputs of the chunk
template <bool kKeeps, bool kLast, typename Pass>
__device__ inline void run_group(Pass& pass, const GroupShape& shape, const GroupScratch& scratch) {
  using C = typename Pass::Compute;
  using Part = typename Pass::Part;
  using Place = typename Pass::Place;
  const Cluster cluster;
  const Item item(shape);
  const Unit unit(shape, kKeeps ? cluster.index() : item.unit);
  const int chunk = kKeeps ? cluster.rank() : item.chunk;
  const Place place(shape, unit, chunk);
  extern __shared__ __align__(16) char group_memory[];
  const int slots = Place::slots(shape);
  const int groups = shape.per_group.quotient(unit.channels);
  const auto chunks = static_cast<int>(shape.chunks.value);
  char* const mail_place = group_memory + (kKeeps ? shape.kept : 0);
  pass.table = {reinterpret_cast<C*>(mail_place + shape.mail), slots};
  Mail<Part> mail(mail_place, kKeeps ? chunks : 1, groups);
  wait_for_previous_kernel();
  pass.load(unit, place, group_memory);
  if constexpr (kKeeps) commit_copies();
  const auto each_slot = [&](auto body) {
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x)
      body(slot, min(place.line_of(shape, chunk, slot).channel, unit.channels - 1));
  };
  pass.prepare(unit, place, each_slot);
  C* const results = reinterpret_cast<C*>(scratch.results) + kGroupResults * unit.group(shape);
  Part* const parts =  // of units that are not kept
      reinterpret_cast<Part*>(scratch.parts) + unit.group(shape) * chunks;

  if (kKeeps || !item.again) {
    const SlotSums<kLast, C> slot_sums(shape, pass.table.end(), slots);
    {
      C sums[2][Place::kChannels] = {};
      if constexpr (kKeeps) wait_for_copies(0);
      pass.sum(place, sums);
      slot_sums.make(shape, place, sums, slot_sums.end());
    }
    const int slots_of_group = kLast ? static_cast<int>(shape.per_group.value) : slots;
    // From a group's part, in lane 0, to the results.
    const auto conclude = [&](int group, const Part& part, int lane, int lanes, bool valid) {
      C result[kGroupResults];
      pass.finish(unit, group, part, result, lane == 0 && valid && (!kKeeps || chunk == 0));
      if constexpr (kKeeps) {
#pragma unroll
        for (C& r : result) r = __shfl_sync(0xffffffff, r, 0, lanes);
        const auto of_group = place.slots_of(shape, unit, chunk, group);
        for (int slot = of_group.first + lane; slot < of_group.last && valid; slot += lanes)
          pass.complete(slot, result);
      } else if (lane == 0 && valid) {
#pragma unroll
        for (int i = 0; i < kGroupResults; ++i) results[group * kGroupResults + i] = result[i];
      }
    };
    if constexpr (kKeeps) mail.open();
    each_team(groups, slots_of_group, [&](int group, int lane, int lanes, bool valid) {
      auto of_group = place.slots_of(shape, unit, chunk, group);
      if (!valid) of_group.last = of_group.first;
      const Part part(pass, lanes, [&](auto body) {
        for (int slot = of_group.first + lane; slot < of_group.last; slot += lanes) {
          const int piece = place.line_of(shape, chunk, slot).piece;
          body(slot, static_cast<C>(Place::pixels_of(shape, piece)), slot_sums.get(0, slot),
               slot_sums.get(1, slot));
        }
      });
      if (chunks == 1) return conclude(group, part, lane, lanes, valid);
      if constexpr (kKeeps) {
        mail.send(chunk, group, part, lane, lanes, valid);
      } else if (lane == 0 && valid) {
        parts[int64_t{group} * chunks + chunk] = part;
      }
    });
    if (pass.keeps_sums()) {
      for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        const auto line = place.line_of(shape, chunk, slot);
        if (line.channel < unit.channels)
          pass.keep(unit, line.channel, line.piece, slot_sums.get(0, slot), slot_sums.get(1, slot));
      }
    }
    if (chunks > 1) {
      if constexpr (kKeeps) {
        mail.wait();
      } else if (!is_last(scratch.counters[unit.index], chunks)) {
        return;
      }
      each_team(
          groups, max(chunks, slots_of_group), [&](int group, int lane, int lanes, bool valid) {
            Part part;
#pragma unroll 4
            for (int i = lane; i < chunks; i += lanes)
              part.merge(kKeeps ? mail.get(i, group) : parts[int64_t{group} * chunks + i]);
            for (int distance = pow2_at_least(chunks, lanes) / 2; distance > 0; distance /= 2) {
              Part other;
#pragma unroll
              for (int v = 0; v < Part::kValues; ++v)
                other.value[v] = __shfl_down_sync(0xffffffff, part.value[v], distance, lanes);
              part.merge(other);
            }
            conclude(group, part, lane, lanes, valid);
          });
    }
    if constexpr (!kKeeps) return announce(scratch.counters[unit.index]);
  } else {
    wait_for(scratch.counters[unit.index]);
    each_slot([&](int slot, int channel) {
      pass.complete(slot, results + kGroupResults * shape.per_group.quotient(channel));
    });
  }
  __syncthreads();
  pass.apply(unit, place);
}

// A template, so that several files may have it.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    clear_counters(const __grid_constant__ ClearArguments a) {
  wait_for_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < a.count) a.counters[i] = {};
}

}  // namespace evenkeel::cuda
