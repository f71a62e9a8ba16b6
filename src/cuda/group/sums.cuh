// How the threads of a group norm's chunk, and the blocks of a cluster, add up what they know.
//
// A thread has two sums for each of its channels, and so has a slot of its chunk: a line (channels
// first) or a channel's piece (channels last). From the slots of a group comes the group's part of
// the chunk, which blocks of a cluster send each other.
//
// Every sum is made in an order that the split alone decides.
#pragma once

#include "cuda/group/chunk.cuh"
#include "cuda/group/tuning.h"
#include "cuda/primitives/cluster.cuh"

namespace evenkeel::cuda {

// Of numbers of values: exact enough.
__device__ inline float ratio(float a, float b) { return __fdividef(a, b); }
__device__ inline double ratio(double a, double b) { return a / b; }

// The sums of slots, in shared memory: first those of each bundle, then of all. A bundle is a warp, or
// a row of threads where that is longer. (Channels first there is one, and a line's threads are in
// one warp.)
//
// kStride: slots of which one has the sums of all.
template <bool kLast, int kStride, typename C>
struct SlotSums {
  C* data;
  int slots;

  __device__ C get(int which, int slot) const { return data[which * slots + slot]; }

  // Of the sums of a thread's channels. Ends with a barrier.
  template <int W>
  __device__ void make(const GroupShape& s, const Chunk<kLast, W>& chunk,
                       C (&sums)[2][Chunk<kLast, W>::kChannels / kStride]) const {
    constexpr int kSums = Chunk<kLast, W>::kChannels / kStride;
    const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % kWarp;
    if constexpr (kLast) {
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
      const int bundle = columns <= kWarp ? thread / kWarp : s.columns.quotient(thread);
      if (columns <= kWarp ? lane < columns : bundle < s.rows) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          C* const to = data + (bundle * 2 + i) * slots + chunk.slot;
          constexpr int kPiece = kSums * sizeof(C) % 16 == 0 ? 16 / sizeof(C) : 1;
          struct alignas(kPiece * sizeof(C)) Piece {
            C value[kPiece];
          };
#pragma unroll
          for (int k = 0; k < kSums; k += kPiece)
            *reinterpret_cast<Piece*>(to + k) = *reinterpret_cast<const Piece*>(sums[i] + k);
        }
      }
      __syncthreads();
      for (int i = thread * kStride; i < 2 * slots; i += threads * kStride) {
        C sum = 0;
#pragma unroll 8
        for (int b = 0; b < s.bundles; ++b) sum += data[b * 2 * slots + i];
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

// Some of a warp's lanes: a power of two. kFew: so few that it is worth to skip what others would do.
template <bool kFew>
struct Crew {
  int log_lanes;

  // One lane for each of `length` things, or a warp.
  __device__ explicit Crew(int length) { log_lanes = min(5, 32 - __clz(length - 1)); }
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
  // Calls body(i, valid) for each i < count, one for each crew of the block. Whole warps call it or do
  // not: a crew without an i of its own has the last one, and is not valid.
  template <typename Body>
  __device__ void each(int count, const Body& body) const {
    const auto thread = static_cast<int>(threadIdx.x);
    const int own = thread >> log_lanes, of_warp = kWarp >> log_lanes;
    const int first = own & -of_warp, crews = static_cast<int>(blockDim.x) >> log_lanes;
    for (int away = 0; first + away < count; away += crews)
      body(min(own + away, count - 1), own + away < count);
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
  // A crew's part to all blocks.
  template <typename AnyCrew>
  __device__ void send(int from, int group, const Part& part, const AnyCrew& crew, bool valid) {
#if __CUDA_ARCH__ >= 900
    if (!valid) return;
    auto* const to = reinterpret_cast<float*>(parts_ + from * groups_ + group);
    for (int block = crew.lane(); block < blocks_; block += crew.lanes()) {
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
