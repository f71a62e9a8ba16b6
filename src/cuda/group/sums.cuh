// How the threads of a group norm's chunk, and the blocks of a cluster, reduce their sums.
//
// A thread has two sums for each of its channels, and so has a slot of its chunk: a line (channels
// first) or a channel's slice (channels last). From the slots of a group comes the group's part of
// the chunk, which blocks of a cluster send each other.
//
// The order of every sum depends on the split only.
#pragma once

#include "cuda/group/vectors.cuh"
#include "cuda/group/tuning.h"
#include "cuda/primitives/cluster.cuh"

namespace evenkeel::cuda {

// For counts of values: exact enough.
__device__ inline float ratio(float a, float b) { return __fdividef(a, b); }
__device__ inline double ratio(double a, double b) { return a / b; }

// The sums of slots, in shared memory: first partial sums, one for each warp, or for each row of threads
// where that is longer; then their sum. (Channels first there is one, and a line's threads are in one warp.)
//
template <GroupPolicy kPolicy, typename C>
struct SlotSums {
  using Position = Chunk<kPolicy.channels_last, kPolicy.vector>;
  static constexpr bool kChannelsLast = kPolicy.channels_last;
  static constexpr int kSums = kPolicy.sums(), kStride = kPolicy.slot_stride();

  C* data;
  int slots;

  __device__ C get(int which, int slot) const { return data[which * slots + slot]; }

  // Reduces the sums of threads. Ends with a barrier.
  __device__ void make(const GroupShape& s, const Position& chunk, C (&sums)[2][kSums]) const {
    const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % kWarp;
    if constexpr (kChannelsLast) {
      // Lanes with the same channels are `columns` apart. The first of them adds them up.
      const auto columns = static_cast<int>(s.columns.value);
      for (int distance = columns; distance < kWarp; distance *= 2) {
        const bool another = lane + distance < kWarp;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int k = 0; k < kSums; ++k) {
            const C other = __shfl_down_sync(0xffffffff, sums[i][k], distance);
            if (another) sums[i][k] += other;
          }
        }
      }
      const int partial_sum = columns <= kWarp ? thread / kWarp : s.columns.quotient(thread);
      if (columns <= kWarp ? lane < columns : partial_sum < s.rows) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          C* const to = data + (partial_sum * 2 + i) * slots + chunk.slot;
          constexpr int kWord = kSums * sizeof(C) % 16 == 0 ? 16 / sizeof(C) : 1;
          struct alignas(kWord * sizeof(C)) Word {
            C value[kWord];
          };
#pragma unroll
          for (int k = 0; k < kSums; k += kWord)
            *reinterpret_cast<Word*>(to + k) = *reinterpret_cast<const Word*>(sums[i] + k);
        }
      }
      __syncthreads();
      for (int i = thread * kStride; i < 2 * slots; i += threads * kStride) {
        C sum = 0;
#pragma unroll 8
        for (int b = 0; b < s.partial_sums; ++b) sum += data[b * 2 * slots + i];
        data[i] = sum;
      }
    } else {
      for (int distance = 1 << s.log_lanes >> 1; distance > 0; distance /= 2) {
        sums[0][0] += __shfl_down_sync(0xffffffff, sums[0][0], distance);
        sums[1][0] += __shfl_down_sync(0xffffffff, sums[1][0], distance);
      }
      if ((lane & ((1 << s.log_lanes) - 1)) == 0) {
        data[chunk.slot] = sums[0][0];
        data[slots + chunk.slot] = sums[1][0];
      }
    }
    __syncthreads();
  }
};

// Numbers of the chunk's channels, or lines, that all threads need, in shared memory.
template <GroupPolicy kPolicy, typename C>
struct Table {
  static constexpr int kNumbers = kPolicy.numbers(), kChannels = kPolicy.channels();

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

// A sub-warp tile: a power of two of a warp's lanes. kFew: so few that it pays to skip the shuffles that only
// larger ones need.
template <bool kFew>
struct SubWarpTile {
  int log_lanes;

  // One lane for each of `length` items, or a warp.
  __device__ explicit SubWarpTile(int length) { log_lanes = min(5, 32 - __clz(length - 1)); }
  __device__ int lanes() const { return 1 << log_lanes; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  // Sums over its lanes, for all of them.
  template <int kValues, typename C>
  __device__ void sum(C (&values)[kValues]) const {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      if (kFew && distance >= lanes()) continue;
#pragma unroll
      for (C& value : values) {
        const C other = __shfl_xor_sync(0xffffffff, value, distance);
        value += kFew || distance < lanes() ? other : C{0};
      }
    }
  }
  // Calls body(i, valid) for each i < count, one for each sub-warp tile of the block. Whole warps call it or
  // do not: a tile without an i of its own has the last one, and is not valid.
  template <typename Body>
  __device__ void each(int count, const Body& body) const {
    const auto thread = static_cast<int>(threadIdx.x);
    const int own = thread >> log_lanes, of_warp = kWarp >> log_lanes;
    const int first = own & -of_warp, sub_warps = static_cast<int>(blockDim.x) >> log_lanes;
    for (int away = 0; first + away < count; away += sub_warps)
      body(min(own + away, count - 1), own + away < count);
  }
};

// Parts that the blocks of a cluster send each other (primitives/cluster.cuh).
template <typename Part>
class GroupExchange {
 public:
  // memory: kGroupBarrierBytes for the mbarrier, then parts of each block and group.
  __device__ GroupExchange(char* memory, int blocks, int groups)
      : barrier_(reinterpret_cast<uint64_t*>(memory)),
        parts_(reinterpret_cast<Part*>(memory + kGroupBarrierBytes)),
        blocks_(blocks),
        groups_(groups) {
#if __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      mbarrier::init(barrier_);
      mbarrier::make_inits_visible();
    }
    cluster_arrive();
#endif
  }
  // Others can receive, from now on.
  __device__ void open() const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ == 1) return;
    cluster_wait();
    if (threadIdx.x == 0)
      mbarrier::expect(barrier_, blocks_ * groups_ * static_cast<int>(sizeof(Part)));
#endif
  }
  // A sub-warp tile's part, to all blocks.
  template <typename SubWarp>
  __device__ void send(int from, int group, const Part& part, const SubWarp& sub_warp, bool valid) {
#if __CUDA_ARCH__ >= 900
    if (!valid) return;
    auto* const to = reinterpret_cast<float*>(parts_ + from * groups_ + group);
    for (int block = sub_warp.lane(); block < blocks_; block += sub_warp.lanes()) {
#pragma unroll
      for (int v = 0; v < Part::kValues; ++v)
        mbarrier::send(static_cast<float>(part.value[v]), to + v, barrier_, block);
    }
#endif
  }
  __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
    mbarrier::wait<true>(barrier_, 0);
#endif
  }
  __device__ const Part& get(int from, int group) const { return parts_[from * groups_ + group]; }

 private:
  uint64_t* barrier_;
  Part* parts_;
  int blocks_, groups_;
};

}  // namespace evenkeel::cuda
