// A row group: the threads that share a row, and their reductions.
//
// Every sum has a fixed order: a butterfly within a warp, then over warps and blocks one after the other,
// so that all threads get the same bits in every run. Warps exchange their values through shared memory
// (row_group_policy.h): those of a block behind a barrier, those of a cluster by stores into each other's
// shared memory.
#pragma once

#include <cstdint>

#include "cuda/primitives/cluster.cuh"
#include "cuda/primitives/row_group_policy.h"

namespace evenkeel::cuda {

// Columns of a thread: vectors, a step apart. Where the columns of a warp are contiguous, so are those of
// its lanes' first vectors, then of the second ones; otherwise the first vectors of the whole row group.
template <auto kPolicy>
struct Columns {
  static constexpr int W = kPolicy.vector(), kLanes = kPolicy.lanes, kElements = kPolicy.elements;
  static constexpr bool kContiguous = kPolicy.contiguous();

  static __device__ int first(int thread) {
    if constexpr (kPolicy.scope == Scope::kWarp || !kContiguous) return thread * W;
    return thread / kWarp * (kWarp * kElements) + thread % kWarp * W;
  }
  static __device__ int step(int threads) { return (kContiguous ? kLanes : threads) * W; }
};

template <RowGroupPolicy kPolicy>
class RowGroup {
  static constexpr Scope kScope = kPolicy.scope;
  static constexpr int kLanes = kPolicy.lanes;
  static constexpr bool kSole = kPolicy.sole, kForward = kPolicy.forward;
  static constexpr bool kBlockFirst = kPolicy.block_first;

 public:
  static constexpr int kGroupsOfWarp = kLanes < kWarp ? kWarp / kLanes : 1;

  // scratch: exchange_bytes() of shared memory, unless the group is within a warp. size: threads of the
  // row group in one block.
  __device__ RowGroup(void* scratch, int size)
      : barriers_(static_cast<uint64_t*>(scratch)),
        scratch_(static_cast<char*>(scratch) + kExchangeBarrierBytes),
        size_(size),
        index_(static_cast<int>(threadIdx.x) / this->size()) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kScope == Scope::kCluster && kForward) {
      ptx::read_cluster_rank(block_);
    } else if constexpr (kScope == Scope::kCluster) {
      block_ = blockIdx.x % cluster();
    }
#endif
  }

  // Tells the other blocks of the row group that this one can receive.
  __device__ void open() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kScope == Scope::kCluster) {
      if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; ++i) mbarrier::init(barriers_ + i);
        mbarrier::make_inits_visible();
      }
      cluster_arrive();
    }
#endif
  }

  // Waits until all of them can: before the first sum.
  __device__ void begin() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kScope == Scope::kCluster) cluster_wait();
#endif
  }

  __device__ int size() const { return kScope == Scope::kWarp ? kLanes : size_; }
  __device__ int index() const { return kSole ? 0 : index_; }  // in its block
  __device__ int thread() const { return kSole ? threadIdx.x : threadIdx.x - index_ * size(); }
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

  // All threads of the row group in this block arrive; what they wrote to shared memory before is visible
  // after.
  __device__ void sync() const {
    if constexpr (kScope == Scope::kWarp) {
      __syncwarp();
    } else if constexpr (kSole) {
      __syncthreads();
    } else {
      ptx::barrier(1 + index(), size_);
    }
  }

  // Sums each of the values over the row group; all threads get the results.
  template <int K, typename C>
  __device__ void sum(C (&values)[K]) {
    begin_sum(values);
    finish_sum(values);
  }
  // The same in two parts.
  template <int K, typename C>
  __device__ void begin_sum(C (&values)[K]) {
    butterfly<kScope == Scope::kWarp ? kLanes : kWarp>(values);
    if constexpr (kBlockFirst) reduce_block(values);
    if constexpr (kScope != Scope::kWarp) {
      Partial<K, C> mine;
#pragma unroll
      for (int k = 0; k < K; ++k) mine.value[k] = values[k];
      send(mine);
    }
  }
  template <int K, typename C>
  __device__ void finish_sum(C (&values)[K]) {
    if constexpr (kScope != Scope::kWarp) {
      const Partial<K, C>* partials = receive<Partial<K, C>>();
#pragma unroll
      for (int k = 0; k < K; ++k) values[k] = 0;
      reduce_warps(partials, values, [&](const Partial<K, C>& partial) {
#pragma unroll
        for (int k = 0; k < K; ++k) values[k] += partial.value[k];
      });
    }
  }

  // The largest value of the row group; all threads get it.
  __device__ uint32_t max(uint32_t value) {
    static_assert(!kBlockFirst);
    uint32_t most[1] = {value};
    butterfly<kScope == Scope::kWarp ? kLanes : kWarp, Max>(most);
    if constexpr (kScope != Scope::kWarp) {
      send(Partial<1, float>{{__uint_as_float(most[0])}});
      const auto* partials = receive<Partial<1, float>>();
      most[0] = 0;
      reduce_warps<Max>(partials, most, [&](const Partial<1, float>& partial) {
        most[0] = Max::of(most[0], __float_as_uint(partial.value[0]));
      });
    }
    return most[0];
  }

  // The sum over the lanes of this warp that belong to the row group.
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

  // Chan's formula: each warp brings the number of its values, their mean, and the sum of their squared
  // distances from it; all threads get mean and sum of squares of the row. inv_n: 1 / all values.
  __device__ void merge(float count, float inv_n, float& mean, float& squares) {
    static_assert(!kBlockFirst);
    if constexpr (kScope != Scope::kWarp) {
      send(Partial<3, float>{{mean, squares, count}});
      const auto* partials = receive<Partial<3, float>>();
      float sum[1] = {};
      reduce_warps(partials, sum, [&](const Partial<3, float>& partial) {
        sum[0] += partial.value[0] * partial.value[2];
      });
      mean = sum[0] * inv_n;
      sum[0] = 0;
      reduce_warps(partials, sum, [&](const Partial<3, float>& partial) {
        const float distance = partial.value[0] - mean;
        sum[0] += partial.value[1] + partial.value[2] * (distance * distance);
      });
      squares = sum[0];
    }
  }

 private:
  struct Add {
    template <typename C>
    static __device__ C of(C a, C b) {
      return a + b;
    }
  };
  struct Max {
    static __device__ uint32_t of(uint32_t a, uint32_t b) { return a > b ? a : b; }
  };

  template <int K, typename C>
  struct alignas(K * sizeof(C) % 8 == 0 ? 8 : 4) Partial {
    C value[K];
  };

  // Slots are used in turn. No warp can be a whole exchange ahead of a reader. Where a warp may send twice
  // before it receives, all others have sent for the third time when it sends for the fifth, so they have
  // received what was sent first. (A test tries all orders.)
  static constexpr int kSlots = exchange_slots(kPolicy.overlapped);
  __device__ int slot_bytes() const {
    return kForward ? forward_exchange_slot_bytes(kScope, size_, cluster())
                    : kMostExchangeSlotBytes;
  }
  template <typename Value>
  __device__ Value* slot(unsigned turn) const {
    return reinterpret_cast<Value*>(scratch_ + turn % kSlots * slot_bytes());
  }
  // A warp's values (those of its lane 0), to all threads of the row group.
  template <typename Value>
  __device__ void send(const Value& mine) {
    const int warps = size_ / kWarp, lane = threadIdx.x % kWarp, warp = thread() / kWarp;
    Value* const partials = slot<Value>(sent_);
    if constexpr (kScope == Scope::kBlock) {
      if (lane == 0) partials[index() * warps + warp] = mine;
    } else {
#if __CUDA_ARCH__ >= 900
      const int blocks = cluster(), senders = kBlockFirst ? 1 : warps;
      uint64_t* const barrier = barriers_ + sent_ % kSlots;
      if (threadIdx.x == 0)
        mbarrier::expect(barrier, blocks * senders * static_cast<int>(sizeof mine));
      // A lane for each block of the cluster.
      if (lane < blocks && warp < senders) {
        constexpr int kValues = sizeof(Value) / sizeof(float);
#pragma unroll
        for (int k = 0; k < kValues; ++k)
          mbarrier::send(mine.value[k], partials[block() * senders + warp].value + k, barrier,
                         lane);
      }
#endif
    }
    ++sent_;
  }
  // What all warps of the row group have sent.
  template <typename Value>
  __device__ const Value* receive() {
    const Value* partials = slot<Value>(received_);
    if constexpr (kScope == Scope::kBlock) {
      partials += index() * (size_ / kWarp);
      sync();
    } else {
#if __CUDA_ARCH__ >= 900
      // Backward, where L1 has nothing of use, it gains 10 % to invalidate it.
      mbarrier::wait<kForward>(barriers_ + received_ % kSlots, received_ / kSlots % 2);
#endif
    }
    ++received_;
    return partials;
  }

  // The first warp's values become sums over all warps of the block.
  template <int K, typename C>
  __device__ void reduce_block(C (&values)[K]) const {
    const int warps = size_ / kWarp, lane = threadIdx.x % kWarp, warp = thread() / kWarp;
    auto* const own = slot<Partial<K, C>>(sent_) + cluster();  // behind what blocks send
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) own[warp].value[k] = values[k];
    }
    sync();
    if (warp > 0) return;
    const Partial<K, C> partial = own[min(lane, warps - 1)];
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = lane < warps ? partial.value[k] : 0;
    butterfly<kReaders>(values);
  }

  // Lanes that share the reading of what warps have sent.
  static constexpr int kReaders = kPolicy.max_warps <= 16 ? 16 : 32;

  // Adds up what the warps of the row group have sent: body(partial) adds one to `sums`.
  template <typename Op = Add, typename Value, int K, typename C, typename Body>
  __device__ void reduce_warps(const Value* partials, C (&sums)[K], const Body& body) const {
    const int warps = size_ / kWarp, lane = threadIdx.x % kReaders;
    if constexpr (kScope == Scope::kBlock) {
      const Value partial = partials[min(lane, warps - 1)];
      if (lane < warps) body(partial);
    } else {
      for (int w = lane; w < (kBlockFirst ? 1 : warps) * cluster(); w += kReaders)
        body(partials[w]);
    }
    butterfly<kReaders, Op>(sums);
  }

  // Sums over kWidth neighbouring lanes; all of them get the results.
  template <int kWidth, typename Op = Add, int K, typename C>
  static __device__ void butterfly(C (&values)[K]) {
#pragma unroll
    for (int distance = kWidth / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        values[k] = Op::of(values[k], __shfl_xor_sync(0xffffffff, values[k], distance));
    }
  }

  uint64_t* barriers_;  // cluster: one for each slot
  char* scratch_;
  int size_, index_, block_ = 0;
  unsigned sent_ = 0, received_ = 0;
};

}  // namespace evenkeel::cuda
