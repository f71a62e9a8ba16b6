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

  // What the block works on: a chunk of a set, for the first or the second time.
  const GroupShape& shape = arguments.shape;
  const GroupScratch& scratch = arguments.scratch;
  const Cluster cluster;
  const WorkItem item(shape, blockIdx.x);
  const GroupSet set(shape, kResident ? cluster.index() : item.set);
  const int chunk = kResident ? cluster.rank() : item.chunk;
  const Position position(shape, set, chunk, threadIdx.x, blockDim.x,
                          kPolicy.second_pass_backwards() && item.second_pass);
  const int slots = Position::slots(shape, blockDim.x);
  const int groups = shape.per_group.quotient(set.channels);
  const auto chunks = static_cast<int>(shape.chunks.value);

  // Shared memory: resident vectors, what blocks of a cluster send each other, the table, sums of slots.
  EVENKEEL_DYNAMIC_SHARED(char, group_memory, 16);
  char* const exchange_memory = group_memory + (kResident ? shape.resident : 0);
  GroupExchange<Part> exchange(exchange_memory, kResident ? chunks : 1, groups);
  Pass pass(arguments, set, position, group_memory,
            reinterpret_cast<C*>(exchange_memory + shape.exchange));
  const ResidentParts<kPolicy, Position> in_parts{position};
  wait_for_previous_kernel();

  // Load vectors and table.
  typename Pass::Loads numbers;
  const bool sums = kResident || !item.second_pass;
  const int last = (sums ? kPolicy.numbers_for_sums() : kPolicy.numbers_for_outputs()) * slots;
  const TableLoad<Pass> table{shape, set, position, chunk, slots, last, pass, numbers};
  in_parts.load(pass, [&] { table.issue_first(); });
  table.finish();
  if constexpr (kPolicy.sums_need_numbers()) __syncthreads();

  // Sum, and reduce the sums of slots to parts of groups, and these to results; or wait for the results.
  C* const results = reinterpret_cast<C*>(scratch.results) + kGroupResults * set.group(shape);
  Part* const parts =  // of sets that are read twice
      reinterpret_cast<Part*>(scratch.parts) + set.group(shape) * chunks;
  if (sums) {
    const SlotSums<kPolicy, C> slot_sums{pass.table.end(), slots};
    {
      C of_thread[2][kPolicy.sums()] = {};
      in_parts.sum(pass, of_thread);
      slot_sums.make(shape, position, of_thread);
    }
    const int slots_of_group =
        kChannelsLast ? static_cast<int>(shape.per_group.value) / kPolicy.slot_stride() : slots;
    const GroupConclusion<Pass> conclude{shape, set, position, chunk, pass, results};
    const SlotReduction<Pass> reduction{conclude, shape,     set,    position,
                                        chunk,    groups,    chunks, pass,
                                        exchange, slot_sums, parts,  slots_of_group};
    if constexpr (kResident) exchange.open();
    reduction.reduce_slots();
    if (pass.wants_partials()) store_partials(shape, set, position, chunk, pass, slot_sums, slots);
    if (chunks > 1) {
      if constexpr (kResident) {
        exchange.wait();
      } else if (!is_last_chunk(scratch.counters[set.index], chunks)) {
        return;
      }
      reduction.merge_chunks();
    }
    if constexpr (!kResident) return signal_ready(scratch.counters[set.index]);
  } else {
    wait_until_ready(scratch.counters[set.index]);
    table.complete(results);
  }
  __syncthreads();

  // Outputs.
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
