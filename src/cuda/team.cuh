// A team: the threads that share a row, and their sums.
//
// Every sum is made in a fixed order: within a warp by a butterfly, over warps and blocks one after
// the other, so all threads get the same bits in every run.
#pragma once

#include <cstdint>

#include "cuda/tuning.h"

namespace evenkeel::cuda {

// Programmatic dependent launch: our kernels may start while the one before them in the stream
// still runs, so each waits before it touches memory, and lets the next one start at once.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// __syncthreads() for some of a block's warps.
__device__ inline void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Waits for values that other blocks of a cluster store into this one's shared memory, without
// making them wait for anything else of ours: a barrier of the whole cluster would also wait for all
// stores to global memory. A block that has received all that it waits for may end: nothing more is
// on its way to it.
namespace exchange {
#if __CUDA_ARCH__ >= 900
__device__ inline void init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void make_inits_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline uint32_t remote(uint32_t address, int block) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(block));
  return result;
}
// Stores a value in another block, and counts its bytes on the barrier there.
__device__ inline void send(float value, float* to, uint64_t* barrier, int block) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   remote(shared_address(to), block)),
               "r"(__float_as_uint(value)), "r"(remote(shared_address(barrier), block))
               : "memory");
}
// kKeeps: the first cache keeps what it has; the fence is for shared memory only.
template <bool kKeeps>
__device__ inline void wait(uint64_t* barrier, int parity) {
  if constexpr (kKeeps) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "fence.acquire.sync_restrict::shared::cluster.cluster;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
  }
}
#endif
}  // namespace exchange

// The cluster of a block, which may be the block alone.
struct Cluster {
  __device__ int rank() const {
#if __CUDA_ARCH__ >= 900
    return static_cast<int>(__clusterRelativeBlockRank());
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

// Columns of a thread: vectors of W, a step apart. kTogether: all columns of a warp lie side by side;
// otherwise the first vectors of all threads do, then the second ones.
template <Scope kScope, int kLanes, int kElements, int W, bool kTogether>
struct Columns {
  static __device__ int first(int thread) {
    if constexpr (kScope == Scope::kWarp || !kTogether) return thread * W;
    return thread / kWarp * (kWarp * kElements) + thread % kWarp * W;
  }
  static __device__ int step(int team) { return (kTogether ? kLanes : team) * W; }
};

// kAlone: the block has one team. kForward: places of forward_place(), and parameters that may be found in
// the first cache (backward, where nothing is, it gains 10 % to empty it). kAhead: in a cluster another
// sum may begin before one is finished. kAdds: a block of a cluster adds up its own values before it
// sends them.
template <Scope kScope, int kLanes, bool kAlone, bool kForward = false, bool kAhead = false,
          int kMaxWarps = kRingThreads / kWarp, bool kAdds = false>
class Team {
 public:
  // `scratch` is shared memory for the sums (block and cluster): reduce_bytes() in all.
  __device__ Team(void* scratch, int size)
      : barriers_(static_cast<uint64_t*>(scratch)),
        scratch_(static_cast<char*>(scratch) + kBarrierBytes),
        size_(size),
        index_(static_cast<int>(threadIdx.x) / this->size()) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kScope == Scope::kCluster && kForward) {
      // Volatile, or the compiler would look it up for every sum.
      asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(block_));
    } else if constexpr (kScope == Scope::kCluster) {
      block_ = blockIdx.x % cluster();
    }
#endif
  }

  // Tells the other blocks of the team that this one can receive.
  __device__ void open() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kScope == Scope::kCluster) {
      if (threadIdx.x == 0) {
        for (int i = 0; i < kPlaces; ++i) exchange::init(barriers_ + i);
        exchange::make_inits_visible();
      }
      asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    }
#endif
  }

  // Waits until all of them can: before the first sum.
  __device__ void begin() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kScope == Scope::kCluster) asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
  }

  __device__ int size() const { return kScope == Scope::kWarp ? kLanes : size_; }
  __device__ int index() const { return kAlone ? 0 : index_; }  // in its block
  __device__ int thread() const { return kAlone ? threadIdx.x : threadIdx.x - index_ * size(); }
  __device__ int block() const {  // of the cluster
    return kScope == Scope::kCluster ? block_ : 0;
  }
  __device__ int cluster_index() const {  // in the grid
    return kScope == Scope::kCluster ? Cluster().index() : static_cast<int>(blockIdx.x);
  }
  __device__ int cluster() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kScope == Scope::kCluster) return static_cast<int>(__clusterSizeInBlocks());
#endif
    return 1;
  }

  // All threads of the team in this block arrive; what they wrote to shared memory before is visible
  // after.
  __device__ void sync() const {
    if constexpr (kScope == Scope::kWarp) {
      __syncwarp();
    } else if constexpr (kAlone) {
      __syncthreads();
    } else {
      barrier(1 + index(), size_);
    }
  }

  // Sums each of the values over the team; all threads get the results.
  template <int K, typename C>
  __device__ void sum(C (&values)[K]) {
    begin_sum(values);
    finish_sum(values);
  }
  // The same in two parts.
  template <int K, typename C>
  __device__ void begin_sum(C (&values)[K]) {
    butterfly<kScope == Scope::kWarp ? kLanes : kWarp>(values);
    if constexpr (kAdds) add_own_warps(values);
    if constexpr (kScope != Scope::kWarp) {
      Parts<K, C> mine;
#pragma unroll
      for (int k = 0; k < K; ++k) mine.value[k] = values[k];
      give(mine);
    }
  }
  template <int K, typename C>
  __device__ void finish_sum(C (&values)[K]) {
    if constexpr (kScope != Scope::kWarp) {
      const Parts<K, C>* parts = take<Parts<K, C>>();
#pragma unroll
      for (int k = 0; k < K; ++k) values[k] = 0;
      add_warps(parts, values, [&](const Parts<K, C>& part) {
#pragma unroll
        for (int k = 0; k < K; ++k) values[k] += part.value[k];
      });
    }
  }

  // The sum over the lanes of this warp that belong to the team.
  __device__ float warp_sum(float value) const {
    float values[1] = {value};
    butterfly<kScope == Scope::kWarp ? kLanes : kWarp>(values);
    return values[0];
  }

  // The same of small counts.
  __device__ float warp_count(int value) const {
    if constexpr (kScope == Scope::kWarp && kLanes < kWarp)
      return warp_sum(static_cast<float>(value));
    return static_cast<float>(__reduce_add_sync(0xffffffff, value));
  }

  // Each warp brings the number of its values, their mean, and the sum of their squared distances
  // from it; all threads get mean and sum of squares of the team. share: 1 / all values.
  __device__ void merge(float count, float share, float& mean, float& squares) {
    static_assert(!kAdds);
    if constexpr (kScope != Scope::kWarp) {
      give(Parts<3, float>{{mean, squares, count}});
      const auto* parts = take<Parts<3, float>>();
      float sum[1] = {};
      add_warps(parts, sum,
                [&](const Parts<3, float>& part) { sum[0] += part.value[0] * part.value[2]; });
      mean = sum[0] * share;
      sum[0] = 0;
      add_warps(parts, sum, [&](const Parts<3, float>& part) {
        const float distance = part.value[0] - mean;
        sum[0] += part.value[1] + part.value[2] * (distance * distance);
      });
      squares = sum[0];
    }
  }

 private:
  template <int K, typename C>
  struct alignas(K * sizeof(C) % 8 == 0 ? 8 : 4) Parts {
    C value[K];
  };

  // Places of what is exchanged, in turn. Nobody can be a whole exchange ahead of a reader. Where
  // somebody may give twice before he takes, all others have given for the third time when he gives
  // for the fifth, so they have taken what was given first.
  static constexpr int kPlaces = exchange_places(kAhead);
  __device__ int place_bytes() const {
    return kForward ? forward_place(kScope, size_, cluster()) : kMostPlaceBytes;
  }
  template <typename Part>
  __device__ Part* place(unsigned turn) const {
    return reinterpret_cast<Part*>(scratch_ + turn % kPlaces * place_bytes());
  }
  // A warp's values (those of its lane 0) for all threads of the team.
  template <typename Part>
  __device__ void give(const Part& mine) {
    const int warps = size_ / kWarp, lane = threadIdx.x % kWarp, warp = thread() / kWarp;
    Part* const parts = place<Part>(given_);
    if constexpr (kScope == Scope::kBlock) {
      if (lane == 0) parts[index() * warps + warp] = mine;
    } else {
#if __CUDA_ARCH__ >= 900
      const int blocks = cluster(), givers = kAdds ? 1 : warps;
      uint64_t* const barrier = barriers_ + given_ % kPlaces;
      if (threadIdx.x == 0)
        exchange::expect(barrier, blocks * givers * static_cast<int>(sizeof mine));
      // A lane for each block of the cluster.
      if (lane < blocks && warp < givers) {
        constexpr int kValues = sizeof(Part) / sizeof(float);
#pragma unroll
        for (int k = 0; k < kValues; ++k)
          exchange::send(mine.value[k], parts[block() * givers + warp].value + k, barrier, lane);
      }
#endif
    }
    ++given_;
  }
  // What all warps of the team have given.
  template <typename Part>
  __device__ const Part* take() {
    const Part* parts = place<Part>(taken_);
    if constexpr (kScope == Scope::kBlock) {
      parts += index() * (size_ / kWarp);
      sync();
    } else {
#if __CUDA_ARCH__ >= 900
      exchange::wait<kForward>(barriers_ + taken_ % kPlaces, taken_ / kPlaces % 2);
#endif
    }
    ++taken_;
    return parts;
  }

  // The first warp's values become sums over all warps of the block.
  template <int K, typename C>
  __device__ void add_own_warps(C (&values)[K]) const {
    const int warps = size_ / kWarp, lane = threadIdx.x % kWarp, warp = thread() / kWarp;
    auto* const own = place<Parts<K, C>>(given_) + cluster();  // behind what blocks send
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) own[warp].value[k] = values[k];
    }
    sync();
    if (warp > 0) return;
    const Parts<K, C> part = own[min(lane, warps - 1)];
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = lane < warps ? part.value[k] : 0;
    butterfly<kReaders>(values);
  }

  // Lanes that share the reading of what the warps exchanged; a block with rings has 16 warps.
  static constexpr int kReaders = kMaxWarps <= 16 ? 16 : 32;

  // Adds up the parts of the team's warps: body(part) adds one to `sums`.
  template <typename Part, int K, typename C, typename Body>
  __device__ void add_warps(const Part* parts, C (&sums)[K], const Body& body) const {
    const int warps = size_ / kWarp, lane = threadIdx.x % kReaders;
    if constexpr (kScope == Scope::kBlock) {
      const Part part = parts[min(lane, warps - 1)];
      if (lane < warps) body(part);
    } else {
      for (int w = lane; w < (kAdds ? 1 : warps) * cluster(); w += kReaders) body(parts[w]);
    }
    butterfly<kReaders>(sums);
  }

  // Sums over kWidth neighbouring lanes; all of them get the results.
  template <int kWidth, int K, typename C>
  static __device__ void butterfly(C (&values)[K]) {
#pragma unroll
    for (int distance = kWidth / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int k = 0; k < K; ++k) values[k] += __shfl_xor_sync(0xffffffff, values[k], distance);
    }
  }

  uint64_t* barriers_;  // cluster: one for each place
  char* scratch_;
  int size_, index_, block_ = 0;
  unsigned given_ = 0, taken_ = 0;
};

}  // namespace evenkeel::cuda
