// What kernels need of Hopper: programmatic dependent launch, and stores into the shared memory of other
// blocks of a cluster, counted by an mbarrier there. On older GPUs a cluster is one block.
#pragma once

#include <cstdint>

namespace evenkeel::cuda {

// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs, so
// each waits before it touches memory, and lets the next one start at once.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
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
    unsigned index;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return static_cast<int>(index);
#else
    return blockIdx.x;
#endif
  }
};

#if __CUDA_ARCH__ >= 900
// Tells the other blocks of the cluster that this one's mbarriers are ready; wait: that theirs are.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Waits for values that other blocks of a cluster store into this one's shared memory, and for nothing
// else: a barrier of the whole cluster would also wait for all stores to global memory. A block that has
// received all that it waits for may end: nothing more is in flight to it.
namespace mbarrier {
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
// Stores a value in another block, and counts its bytes on the mbarrier there.
__device__ inline void send(float value, float* to, uint64_t* barrier, int block) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   remote(shared_address(to), block)),
               "r"(__float_as_uint(value)), "r"(remote(shared_address(barrier), block))
               : "memory");
}
// kKeepsL1: the fence is for shared memory only, so that L1 is not invalidated.
template <bool kKeepsL1>
__device__ inline void wait(uint64_t* barrier, int parity) {
  if constexpr (kKeepsL1) {
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
}  // namespace mbarrier
#endif

}  // namespace evenkeel::cuda
