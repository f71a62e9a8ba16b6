// What group norm's two passes share: a thread's place in a chunk, and the way from its sums to the
// results of groups (group_tuning.h says what chunks, lines and pieces are).
//
// A thread has two sums for each of its channels, and so has a slot of its chunk: a line (channels
// first) or a channel's piece (channels last). From the slots of a group comes the group's part of
// the chunk, and from the parts of all chunks the group's results.
//
// Every sum is made in an order that the split alone decides.
#pragma once

#include <cooperative_groups.h>

#include "cuda/group_tuning.h"
#include "cuda/parameters.cuh"
#include "cuda/ring.cuh"
#include "cuda/team.cuh"

namespace evenkeel::cuda {

// Of numbers of values: exact enough.
__device__ inline float ratio(float a, float b) { return __fdividef(a, b); }
__device__ inline double ratio(double a, double b) { return a / b; }

// A unit's channels, and where they lie.
struct Unit {
  int index, sample, channel, channels;

  __device__ Unit(const GroupShape& s, int unit) : index(unit) {
    sample = s.spans.quotient(unit);
    channel = (unit - sample * static_cast<int>(s.spans.value)) * s.span;
    channels = min(s.span, s.channels - channel);
  }
  // The number of its first group among those of all samples.
  __device__ int64_t group(const GroupShape& s) const {
    return int64_t{sample} * s.groups + s.per_group.quotient(channel);
  }
};

// A thread's place in a chunk: vectors of W elements from a first one on, in even steps. Its channels
// are W neighbouring ones (kLast), or one.
template <bool kLast, int W>
struct Chunk {
  static constexpr int kChannels = kLast ? W : 1;

  int piece;
  int channel;  // of the first vector, in the unit
  int pixel;    // in the piece
  int count;    // of vectors
  int slot;     // of the first channel
  bool inside;

  __device__ Chunk(const GroupShape& s, const Unit& unit, int chunk) {
    const auto thread = static_cast<int>(threadIdx.x);
    int step;
    if constexpr (kLast) {
      const int row = s.columns.quotient(thread);
      piece = s.tiles.quotient(chunk);
      const int tile = chunk - piece * static_cast<int>(s.tiles.value);
      slot = (thread - row * static_cast<int>(s.columns.value)) * W;
      channel = tile * s.tile + slot;
      inside = channel < unit.channels && row < s.rows;
      pixel = row;
      step = s.rows;
    } else {
      slot = thread >> s.log_lanes;
      const int line = chunk * slots(s) + slot;
      channel = s.pieces.quotient(line);
      piece = line - channel * static_cast<int>(s.pieces.value);
      inside = channel < unit.channels;
      pixel = (thread - (slot << s.log_lanes)) * W;
      step = W << s.log_lanes;
    }
    const int pixels = pixels_of(s, piece);
    count = pixels == s.piece ? s.vectors : max(0, (pixels - pixel + step - 1) / step);
    if (!inside) count = 0;
  }

  static __device__ int slots(const GroupShape& s) {
    return kLast ? s.tile : static_cast<int>(blockDim.x) >> s.log_lanes;
  }
  static __device__ int pixels_of(const GroupShape& s, int piece) {
    return piece + 1 == static_cast<int>(s.pieces.value) ? s.last_piece : s.piece;
  }
  // What a slot stands for. There may be slots beyond the last channel.
  struct Line {
    int channel, piece;
  };
  __device__ Line line_of(const GroupShape& s, int chunk, int at) const {
    if constexpr (kLast) return {channel - slot + at, piece};
    const int line = chunk * slots(s) + at, found = s.pieces.quotient(line);
    return {found, line - found * static_cast<int>(s.pieces.value)};
  }
  // The slots of a group of the unit; none if last <= first.
  struct Slots {
    int first, last;
  };
  __device__ Slots slots_of(const GroupShape& s, const Unit& unit, int chunk, int group) const {
    const auto per_group = static_cast<int>(s.per_group.value);
    if constexpr (kLast) {
      const int tile = channel - slot, first = group * per_group - tile;
      return {max(first, 0), min(first + per_group, s.tile)};
    }
    const int lines = unit.channels * static_cast<int>(s.pieces.value);
    return {0, min(slots(s), lines - chunk * slots(s))};
  }

  __device__ int64_t offset(const GroupShape& s, const DeviceTensor& tensor,
                            const Unit& unit) const {
    const int64_t at = unit.channel + channel, first = int64_t{piece} * s.piece + pixel;
    return unit.sample * tensor.outer_stride +
           (kLast ? first * tensor.row_stride + at : at * tensor.row_stride + first);
  }
  static __device__ int64_t step(const GroupShape& s, const DeviceTensor& tensor) {
    return kLast ? s.rows * tensor.row_stride : int64_t{W} << s.log_lanes;
  }
};

// A thread's vectors of a tensor: in registers, or in its own part of the shared memory.
template <typename Access, int K, bool kKeeps>
struct Held {
  using Raw = typename Access::Raw;
  Raw raw[kKeeps ? 1 : K];
  const uint4* kept;

  template <typename Place>
  __device__ void load(const GroupShape& s, const DeviceTensor& tensor, const Unit& unit,
                       const Place& place, char* shared) {
    const int64_t first = place.offset(s, tensor, unit), step = Place::step(s, tensor);
    if constexpr (kKeeps) {
      constexpr int64_t kSize = sizeof(Raw) / Access::kWidth;
      kept = reinterpret_cast<const uint4*>(shared) + threadIdx.x;
      const char* from = tensor.data + first * kSize;
      auto to = static_cast<uint32_t>(__cvta_generic_to_shared(kept));
#pragma unroll 4
      for (int v = 0; v < place.count; ++v, from += step * kSize, to += blockDim.x * 16)
        copy_async(to, from);
    } else {
#pragma unroll
      for (int v = 0; v < K; ++v)
        raw[v] = Access::load_if(v < place.count, tensor, first + v * step);
    }
  }
  __device__ Raw get(int v) const {
    if constexpr (kKeeps) {
      Raw result;
      *reinterpret_cast<uint4*>(&result) = kept[v * blockDim.x];
      return result;
    } else {
      return raw[v];
    }
  }
  // Between two uses.
  __device__ void forget() {
    if constexpr (!kKeeps) Access::forget(raw);
  }
  // Calls body(v) for the first vectors.
  template <typename Body>
  static __device__ void each(int count, const Body& body) {
    if constexpr (kKeeps) {
#pragma unroll 2
      for (int v = 0; v < count; ++v) body(v);
    } else {
#pragma unroll
      for (int v = 0; v < K; ++v) {
        if (v < count) body(v);
      }
    }
  }
};

// The same for a tensor that is read again for every use.
template <typename Access>
struct Reread {
  const char* data;
  int64_t step;

  template <typename Place>
  __device__ void load(const GroupShape& s, const DeviceTensor& tensor, const Unit& unit,
                       const Place& place, char*) {
    constexpr int64_t kSize = sizeof(typename Access::Raw) / Access::kWidth;
    data = tensor.data + place.offset(s, tensor, unit) * kSize;
    step = Place::step(s, tensor) * kSize;
  }
  __device__ typename Access::Raw get(int v) const { return Access::load(data + v * step); }
  __device__ void forget() {}
};

// The sums of slots, in shared memory: those of a line, or of each segment of a channel's rows.
template <bool kLast, typename C>
struct SlotSums {
  C* data;
  int slots, segments;

  __device__ SlotSums(const GroupShape& s, C* place, int count)
      : data(place), slots(count), segments(kLast ? s.segments : 1) {}
  __device__ C get(int which, int slot) const {
    C sum = 0;
#pragma unroll 4
    for (int i = 0; i < segments; ++i) sum += data[(which * segments + i) * slots + slot];
    return sum;
  }
  __device__ C* end() const { return data + round_up(2 * segments * slots, 4); }

  // Of the sums of a thread's channels, in channels last with all threads' in `rows`. Ends with a
  // barrier.
  template <int W>
  __device__ void make(const GroupShape& s, const Chunk<kLast, W>& chunk,
                       C (&sums)[2][Chunk<kLast, W>::kChannels], C* rows) const {
    const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    if constexpr (kLast) {
      if (chunk.pixel < s.rows) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          C* const to = rows + i * s.rows * slots + thread * W;
          constexpr int kPiece = W * sizeof(C) % 16 == 0 ? 16 / sizeof(C) : 1;
          struct alignas(kPiece * sizeof(C)) Piece {
            C value[kPiece];
          };
#pragma unroll
          for (int k = 0; k < W; k += kPiece)
            *reinterpret_cast<Piece*>(to + k) = *reinterpret_cast<const Piece*>(sums[i] + k);
        }
      }
      __syncthreads();
      for (int i = thread; i < segments * slots; i += threads) {
        C sum[2] = {};
#pragma unroll 8
        for (int at = i; at < s.rows * slots; at += segments * slots) {
          sum[0] += rows[at];
          sum[1] += rows[s.rows * slots + at];
        }
        data[i] = sum[0];
        data[segments * slots + i] = sum[1];
      }
    } else {
      for (int distance = 1 << s.log_lanes >> 1; distance > 0; distance /= 2) {
        sums[0][0] += __shfl_down_sync(0xffffffff, sums[0][0], distance);
        sums[1][0] += __shfl_down_sync(0xffffffff, sums[1][0], distance);
      }
      if ((thread & ((1 << s.log_lanes) - 1)) == 0) {
        data[chunk.slot] = sums[0][0];
        data[slots + chunk.slot] = sums[1][0];
      }
    }
    __syncthreads();
  }
};

// Numbers of the chunk's channels, or lines, that all threads need, in shared memory.
template <int kNumbers, int kChannels, typename C>
struct Table {
  C* data;
  int slots;

  __device__ C& at(int number, int slot) const { return data[number * slots + slot]; }
  // Those of a thread's channels.
  __device__ void get(int number, int slot, C (&out)[kChannels]) const {
    const C* const from = data + number * slots + slot;
    if constexpr (kChannels * sizeof(C) % 16 == 0) {
#pragma unroll
      for (int k = 0; k < kChannels; k += 16 / sizeof(C))
        *reinterpret_cast<uint4*>(out + k) = *reinterpret_cast<const uint4*>(from + k);
    } else {
#pragma unroll
      for (int k = 0; k < kChannels; ++k) out[k] = from[k];
    }
  }
  __device__ C* end() const { return data + round_up(kNumbers * slots, 4); }
};

// Sums over a team of lanes; all of them get the results.
template <typename C>
__device__ inline C sum_over(int lanes, C value) {
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffff, value, distance);
  return value;
}

// Calls body(i, lane, lanes, valid) for i < count with a team of `lanes` threads of a warp for each; whole
// warps have something to do, or nothing.
template <typename Body>
__device__ inline void each_team(int count, int length, const Body& body) {
  const int lanes = pow2_at_least(length, kWarp), teams = static_cast<int>(blockDim.x) / lanes;
  const int of_warp = kWarp / lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int in_warp = static_cast<int>(threadIdx.x) % kWarp / lanes;
  for (int first = static_cast<int>(threadIdx.x) / kWarp * of_warp; first < count; first += teams)
    body(min(first + in_warp, count - 1), lane, lanes, first + in_warp < count);
}

// The blocks that hold a unit.
struct Cluster {
  __device__ int size() const {
#if __CUDA_ARCH__ >= 900
    return cooperative_groups::cluster_group::num_blocks();
#else
    return 1;
#endif
  }
  __device__ int rank() const {
#if __CUDA_ARCH__ >= 900
    return cooperative_groups::cluster_group::block_rank();
#else
    return 0;
#endif
  }
  __device__ int index() const {
#if __CUDA_ARCH__ >= 900
    unsigned index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return static_cast<int>(index);
#else
    return blockIdx.x;
#endif
  }
};

// Parts that the blocks of a cluster send each other (team.cuh).
template <typename Part>
class Mail {
 public:
  // place: kMailBytes for the barrier, then parts of each block and group.
  __device__ Mail(char* place, int blocks, int groups)
      : barrier_(reinterpret_cast<uint64_t*>(place)),
        parts_(reinterpret_cast<Part*>(place + kMailBytes)),
        blocks_(blocks),
        groups_(groups) {
#if __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      exchange::init(barrier_);
      exchange::make_inits_visible();
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  }
  // Others can receive, from now on.
  __device__ void open() const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ == 1) return;
    asm volatile("barrier.cluster.wait;" ::: "memory");
    if (threadIdx.x == 0)
      exchange::expect(barrier_, blocks_ * groups_ * static_cast<int>(sizeof(Part)));
#endif
  }
  // The part of lane 0 of a team to all blocks.
  __device__ void send(int from, int group, const Part& part, int lane, int lanes, bool valid) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int v = 0; v < Part::kValues; ++v) {
      const float value = __shfl_sync(0xffffffff, static_cast<float>(part.value[v]), 0, lanes);
      auto* const to = reinterpret_cast<float*>(parts_ + from * groups_ + group) + v;
      for (int block = lane; block < blocks_ && valid; block += lanes)
        exchange::send(value, to, barrier_, block);
    }
#endif
  }
  __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
    exchange::wait(barrier_, 0);
#endif
  }
  __device__ const Part& get(int from, int group) const { return parts_[from * groups_ + group]; }

 private:
  uint64_t* barrier_;
  Part* parts_;
  int blocks_, groups_;
};

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
  pass.prepare(unit, place, [&](auto body) {
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x)
      body(slot, min(place.line_of(shape, chunk, slot).channel, unit.channels - 1));
  });
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
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      const int channel = min(place.line_of(shape, chunk, slot).channel, unit.channels - 1);
      pass.complete(slot, results + kGroupResults * shape.per_group.quotient(channel));
    }
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
