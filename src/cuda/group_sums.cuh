// How the threads of a group norm's chunk, and the blocks of a cluster, add up what they know.
//
// A thread has two sums for each of its channels, and so has a slot of its chunk: a line (channels
// first) or a channel's piece (channels last). From the slots of a group comes the group's part of
// the chunk, which blocks of a cluster send each other.
//
// Every sum is made in an order that the split alone decides.
#pragma once

#include <cooperative_groups.h>

#include "cuda/group_chunk.cuh"
#include "cuda/group_tuning.h"
#include "cuda/team.cuh"

namespace evenkeel::cuda {

// Of numbers of values: exact enough.
__device__ inline float ratio(float a, float b) { return __fdividef(a, b); }
__device__ inline double ratio(double a, double b) { return a / b; }

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

// Calls body(i, lane, lanes, valid) with a team of `lanes` threads of a warp for each i < count. Whole
// warps call it or do not: a team without an i of its own has the last one, and is not valid.
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

}  // namespace evenkeel::cuda
