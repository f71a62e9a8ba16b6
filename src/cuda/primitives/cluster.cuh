// What kernels need of Hopper: programmatic dependent launch, and stores into the shared memory of other
// blocks of a cluster, counted by an mbarrier there. On older GPUs a cluster is one block.
#pragma once

#include <cstdint>

#include "cuda/primitives/ptx.cuh"

namespace evenkeel::cuda {

// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs, so
// each waits before it touches memory, and lets the next one start at once.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

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
    return ptx::cluster_index();
#else
    return blockIdx.x;
#endif
  }
};

#if __CUDA_ARCH__ >= 900
// Tells the other blocks of the cluster that this one's mbarriers are ready; wait: that theirs are.
__device__ inline void cluster_arrive() { ptx::cluster_arrive(); }
__device__ inline void cluster_wait() { ptx::cluster_wait(); }

// Waits for values that other blocks of a cluster store into this one's shared memory, and for nothing
// else: a barrier of the whole cluster would also wait for all stores to global memory. A block that has
// received all that it waits for may end: nothing more is in flight to it.
namespace mbarrier {
__device__ inline void init(uint64_t* barrier) { ptx::mbarrier_init(shared_address(barrier)); }
__device__ inline void make_inits_visible() { ptx::fence_mbarrier_init(); }
__device__ inline void expect(uint64_t* barrier, int bytes) {
  ptx::mbarrier_expect(shared_address(barrier), bytes);
}
// Stores a value in another block, and counts its bytes on the mbarrier there.
__device__ inline void send(float value, float* to, uint64_t* barrier, int block) {
  ptx::store_remote(ptx::remote(shared_address(to), block), value,
                    ptx::remote(shared_address(barrier), block));
}
// kKeepsL1: L1 is not invalidated.
template <bool kKeepsL1>
__device__ inline void wait(uint64_t* barrier, int parity) {
  ptx::mbarrier_wait<kKeepsL1>(shared_address(barrier), parity);
}
}  // namespace mbarrier
#endif

}  // namespace evenkeel::cuda
