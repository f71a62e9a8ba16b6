// The way of both passes of group norm: from a chunk's sums to the results of its groups, and from
// these to the outputs; for units that are kept, and for those that are read twice (group/tuning.h).
#pragma once

#include "cuda/group/sums.cuh"
#include "cuda/primitives/parameters.cuh"

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

// Both passes: the chunk's sums, then those of groups, then the results. Pass knows what they are:
//
//   load(first, last)      reads some vectors of the chunk, perhaps into shared memory
//   ask(i, channel, numbers), answer(i, numbers)   a number of the table, before and after its way
//   begin_sums(), sum(first, last, sums)   of each of the thread's channels, or (kSums = 1) of all
//   tell(slot, values, its two sums, body)   calls body with what a Part takes
//   Part(crew, each)       of a group: each(body) calls body for what a lane of the crew knows. All
//                          lanes get it. tell(body) is for a Part of parts
//   keep(channel, piece, ...)   a slot's sums, if keeps_sums()
//   finish(part, results)  a group's results; publish(group, results) gives them to the caller
//   complete(slot, results)   a channel's numbers from its group's results; or (kDirect)
//   leave(slot, results)   a group's results, for those who will use them, at its first slot
//   apply()                the outputs of the chunk
template <bool kKeeps, bool kLast, typename Pass, typename Arguments>
__device__ inline void run_group(const Arguments& arguments) {
  using C = typename Pass::Compute;
  using Part = typename Pass::Part;
  using Place = typename Pass::Place;
  const GroupShape& shape = arguments.shape;
  const GroupScratch& scratch = arguments.scratch;
  const Cluster cluster;
  const Item item(shape);
  const Unit unit(shape, kKeeps ? cluster.index() : item.unit);
  const int chunk = kKeeps ? cluster.rank() : item.chunk;
  // What was read last is still in the cache.
  const Place place(shape, unit, chunk, !kKeeps && kLast && item.again);
  extern __shared__ __align__(16) char group_memory[];
  const int slots = Place::slots(shape);
  const int groups = shape.per_group.quotient(unit.channels);
  const auto chunks = static_cast<int>(shape.chunks.value);
  char* const mail_place = group_memory + (kKeeps ? shape.kept : 0);
  Mail<Part> mail(mail_place, kKeeps ? chunks : 1, groups);
  Pass pass(arguments, unit, place, group_memory, reinterpret_cast<C*>(mail_place + shape.mail));
  // What is kept comes in parts: sums of one are made while the next ones are on their way.
  constexpr int kParts = kKeeps ? Pass::kKeptParts : 1;
  const auto end_of = [&](int part) {
    return part + 1 == kParts ? place.count
                              : min(max(place.count * (part + 1) / kParts, 2), place.count);
  };
  // Calls body(part, first, last). The compiler makes less of two parts in a loop.
  const auto each_part = [&](const auto& body) {
    if constexpr (kParts == 2) {
      body(0, 0, end_of(0));
      body(1, end_of(0), place.count);
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        body(part, part == 0 ? 0 : end_of(part - 1), end_of(part));
    }
  };
  wait_for_previous_kernel();
  // Numbers of the table, each by another thread, which asks for it before what is kept, or after the
  // first part of it: it takes a while to find out where they lie.
  typename Pass::Numbers numbers;
  const auto each_number = [&](int first, int last, const auto& body) {
    for (int i = first; i < last; i += blockDim.x) {
      int number = 0, slot = i;
      for (; slot >= slots; slot -= slots) ++number;
      body(number, slot);
    }
  };
  const auto channel_of = [&](int slot) {
    return min(place.line_of(shape, chunk, slot).channel, unit.channels - 1);
  };
  const auto ask = [&](int number, int slot) { pass.ask(number, channel_of(slot), numbers); };
  const bool sums = kKeeps || !item.again;
  const auto thread = static_cast<int>(threadIdx.x);
  const int last = (sums ? Pass::kForSums : Pass::kForOutputs) * slots;
  const auto ask_first = [&] { each_number(thread, min(last, static_cast<int>(blockDim.x)), ask); };
  if constexpr (kKeeps && Pass::kAsksFirst) ask_first();
  each_part([&](int part, int from, int to) {
    pass.load(from, to);
    if constexpr (kKeeps) commit_copies();
    if (kKeeps && !Pass::kAsksFirst && part == 0) ask_first();
  });
  each_number(thread, last, [&](int number, int slot) {
    if (!kKeeps || number * slots + slot != thread) ask(number, slot);
    pass.table.at(number, slot) = pass.answer(number, numbers);
  });
  if constexpr (Pass::kSumsNeedNumbers) __syncthreads();
  C* const results = reinterpret_cast<C*>(scratch.results) + kGroupResults * unit.group(shape);
  Part* const parts =  // of units that are not kept
      reinterpret_cast<Part*>(scratch.parts) + unit.group(shape) * chunks;

  if (sums) {
    constexpr int kStride = Place::kChannels / Pass::kSums;
    const SlotSums<kLast, kStride, C> slot_sums{pass.table.end(), slots};
    {
      C of_thread[2][Pass::kSums] = {};
      each_part([&](int part, int from, int to) {
        if constexpr (kKeeps) wait_for_copies(kParts - 1 - part);
        if (part == 0) pass.begin_sums();
        pass.sum(from, to, of_thread);
      });
      slot_sums.make(shape, place, of_thread);
    }
    const int slots_of_group = kLast ? static_cast<int>(shape.per_group.value) / kStride : slots;
    // From a group's part to the results.
    const auto conclude = [&](int group, const Part& part, const auto& crew, bool valid) {
      C result[kGroupResults];
      pass.finish(part, result);
      if constexpr (kKeeps) {
        __syncwarp();  // the crew's other lanes have read the table
        const auto of_group = place.slots_of(shape, unit, chunk, group);
        if constexpr (Pass::kDirect) {
          if (crew.lane() == 0 && valid) pass.leave(of_group.first, result);
        } else {
          for (int slot = of_group.first + crew.lane(); slot < of_group.last && valid;
               slot += crew.lanes())
            pass.complete(slot, result);
        }
      }
      if (crew.lane() != 0 || !valid) return;
      if constexpr (!kKeeps) {
#pragma unroll
        for (int i = 0; i < kGroupResults; ++i) results[group * kGroupResults + i] = result[i];
      }
      if (!kKeeps || chunk == 0) pass.publish(group, result);
    };
    if constexpr (kKeeps) mail.open();
    // A group that is kept has one crew, for its slots here and its parts from all blocks: who changes
    // its numbers has used them before.
    const Crew<Pass::kDirect> of_slots(kKeeps && chunks > 1 ? max(chunks, slots_of_group)
                                                            : slots_of_group);
    of_slots.each(groups, [&](int group, bool valid) {
      auto of_group = place.slots_of(shape, unit, chunk, group);
      if (!valid) of_group.last = of_group.first;
      const Part part(of_slots, [&](auto body) {
        for (int slot = of_group.first + of_slots.lane() * kStride; slot < of_group.last;
             slot += of_slots.lanes() * kStride) {
          const int pixels = Place::pixels_of(shape, place.line_of(shape, chunk, slot).piece);
          pass.tell(slot, static_cast<C>(kStride * pixels), slot_sums.get(0, slot),
                    slot_sums.get(1, slot), body);
        }
      });
      if (chunks == 1) return conclude(group, part, of_slots, valid);
      if constexpr (kKeeps) {
        mail.send(chunk, group, part, of_slots, valid);
      } else if (of_slots.lane() == 0 && valid) {
        parts[int64_t{group} * chunks + chunk] = part;
      }
    });
    if (pass.keeps_sums()) {
      for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        const auto line = place.line_of(shape, chunk, slot);
        if (line.channel < unit.channels)
          pass.keep(line.channel, line.piece, slot_sums.get(0, slot), slot_sums.get(1, slot));
      }
    }
    if (chunks > 1) {
      if constexpr (kKeeps) {
        mail.wait();
      } else if (!is_last(scratch.counters[unit.index], chunks)) {
        return;
      }
      const Crew<Pass::kDirect> of_chunks(kKeeps ? max(chunks, slots_of_group) : chunks);
      of_chunks.each(groups, [&](int group, bool valid) {
        const Part part(of_chunks, [&](auto body) {
#pragma unroll(kKeeps ? 1 : 8)
          for (int i = of_chunks.lane(); i < chunks; i += of_chunks.lanes())
            (kKeeps ? mail.get(i, group) : parts[int64_t{group} * chunks + i]).tell(body);
        });
        conclude(group, part, of_chunks, valid);
      });
    }
    if constexpr (!kKeeps) return announce(scratch.counters[unit.index]);
  } else {
    wait_for(scratch.counters[unit.index]);
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      pass.complete(slot, results + kGroupResults * shape.per_group.quotient(channel_of(slot)));
    }
  }
  __syncthreads();
  pass.apply();
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
