// The steps of group norm, the same in both passes: from a chunk's sums to the results of its groups, and from
// these to the outputs; for sets that are resident, and for those that are read twice (tuning.h).
#pragma once

#include "cuda/group/parts.cuh"

namespace evenkeel::cuda {

// Whether all chunks of the set have stored their sums, this one as the last. One thread's fence is enough for
// what all wrote before the barrier, or will read after it.
__device__ inline bool is_last_chunk(GroupCounters& counters, int chunks) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&counters.arrived, 1) + 1 == static_cast<unsigned>(chunks);
    __threadfence();
  }
  return __syncthreads_or(last);
}
__device__ inline void signal_ready(GroupCounters& counters) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicExch(&counters.ready, 1);
}
__device__ inline void wait_until_ready(GroupCounters& counters) {
  if (threadIdx.x == 0) {
    while (*static_cast<volatile unsigned*>(&counters.ready) == 0) __nanosleep(64);
    __threadfence();
  }
  __syncthreads();
}

// Both passes: the chunk's sums, then those of groups, then the results. Pass says what they are:
//
//   load(first, last)      loads some vectors of the chunk, perhaps into shared memory
//   issue(i, channel, loads), value(i, loads)   a number of the table: starts its load, waits for it
//   begin_sums(), sum(first, last, sums)   of each of the thread's channels, or (one_group) of all
//   contribute(slot, values, its two sums, body)   calls body with what a Part takes
//   Part(sub_warp, each)   of a group: each(body) calls body for what a lane of the sub-warp tile has. All
//                          lanes get it. contribute(body) is for a Part of parts
//   store_partials(channel, slice, ...)   a slot's sums, if wants_partials()
//   finish(part, results)  a group's results; publish(group, results) gives them to the caller
//   complete(slot, results)   a channel's numbers from its group's results; or (completes_in_threads())
//   store_results(slot, results)   a group's results into the table, at its first slot
//   apply()                the outputs of the chunk
template <typename Pass, typename Arguments>
__device__ inline void run_group(const Arguments& arguments) {
  constexpr GroupPolicy kPolicy = Pass::kPolicy;
  constexpr bool kResident = kPolicy.resident, kChannelsLast = kPolicy.channels_last;
  using C = typename Pass::Compute;
  using Part = typename Pass::Part;
  using Position = typename Pass::Position;
  const GroupShape& shape = arguments.shape;
  const GroupScratch& scratch = arguments.scratch;
  const Cluster cluster;
  const WorkItem item(shape, blockIdx.x);
  const GroupSet set(shape, kResident ? cluster.index() : item.set);
  const int chunk = kResident ? cluster.rank() : item.chunk;
  const Position position(shape, set, chunk, threadIdx.x, blockDim.x,
                          kPolicy.second_pass_backwards() && item.second_pass);
  extern __shared__ __align__(16) char group_memory[];
  const int slots = Position::slots(shape, blockDim.x);
  const int groups = shape.per_group.quotient(set.channels);
  const auto chunks = static_cast<int>(shape.chunks.value);
  char* const exchange_memory = group_memory + (kResident ? shape.resident : 0);
  GroupExchange<Part> exchange(exchange_memory, kResident ? chunks : 1, groups);
  Pass pass(arguments, set, position, group_memory,
            reinterpret_cast<C*>(exchange_memory + shape.exchange));
  const ResidentParts<kPolicy, Position> in_parts{position};
  wait_for_previous_kernel();
  // Numbers of the table, each by another thread, which issues the load before those of the vectors, or after
  // the first part of them: their addresses take a while to compute.
  typename Pass::Loads numbers;
  const TableLoad<Pass> table{shape, set, position, chunk, slots, pass, numbers};
  const bool sums = kResident || !item.second_pass;
  const auto thread = static_cast<int>(threadIdx.x);
  const int last = (sums ? kPolicy.numbers_for_sums() : kPolicy.numbers_for_outputs()) * slots;
  const auto load_first = [&] {
    table.each(thread, min(last, static_cast<int>(blockDim.x)),
               [&](int number, int slot) { table.issue(number, slot); });
  };
  if constexpr (kPolicy.loads_table_first()) load_first();
  in_parts.each([&](int part, int from, int to) {
    pass.load(from, to);
    if constexpr (kResident) commit_copies();
    if (kResident && !kPolicy.loads_table_first() && part == 0) load_first();
  });
  table.each(thread, last, [&](int number, int slot) {
    if (!kResident || number * slots + slot != thread) table.issue(number, slot);
    pass.table.at(number, slot) = pass.value(number, numbers);
  });
  if constexpr (kPolicy.sums_need_numbers()) __syncthreads();
  C* const results = reinterpret_cast<C*>(scratch.results) + kGroupResults * set.group(shape);
  Part* const parts =  // of sets that are read twice
      reinterpret_cast<Part*>(scratch.parts) + set.group(shape) * chunks;

  if (sums) {
    const SlotSums<kPolicy, C> slot_sums{pass.table.end(), slots};
    {
      C of_thread[2][kPolicy.sums()] = {};
      in_parts.each([&](int part, int from, int to) {
        if constexpr (kResident) wait_for_copies(kPolicy.parts() - 1 - part);
        if (part == 0) pass.begin_sums();
        pass.sum(from, to, of_thread);
      });
      slot_sums.make(shape, position, of_thread);
    }
    const int slots_of_group =
        kChannelsLast ? static_cast<int>(shape.per_group.value) / kPolicy.slot_stride() : slots;
    const GroupConclusion<Pass> conclude{shape, set, position, chunk, pass, results};
    const SlotReduction<Pass> reduction{shape,     set,    position,       chunk,
                                        groups,    chunks, pass,           exchange,
                                        slot_sums, parts,  slots_of_group, conclude};
    if constexpr (kResident) exchange.open();
    reduction.run();
    if (pass.wants_partials()) {
      for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        const auto line = position.line_of(shape, chunk, slot, blockDim.x);
        if (line.channel < set.channels)
          pass.store_partials(line.channel, line.slice, slot_sums.get(0, slot),
                              slot_sums.get(1, slot));
      }
    }
    if (chunks > 1) {
      if constexpr (kResident) {
        exchange.wait();
      } else if (!is_last_chunk(scratch.counters[set.index], chunks)) {
        return;
      }
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
    if constexpr (!kResident) return signal_ready(scratch.counters[set.index]);
  } else {
    wait_until_ready(scratch.counters[set.index]);
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      pass.complete(slot,
                    results + kGroupResults * shape.per_group.quotient(table.channel_of(slot)));
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
