// The instructions and registers of a GPU that kernels name themselves: the only file with PTX. (tests/emulator has
// the same functions for a host.)
#pragma once

#include <cstdint>

// The dynamic shared memory of a block, as an array.
#define EVENKEEL_DYNAMIC_SHARED(type, name, alignment) \
  extern __shared__ __align__(alignment)               \
  type name[]

namespace evenkeel::cuda {

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

namespace ptx {

// --- Asynchronous copies of 16 bytes into shared memory

__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Of the first `bytes` of them, and zeros.
__device__ inline void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- Shared memory, by its own addresses

__device__ inline void load_shared(uint32_t at, uint4& word) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(at));
}
__device__ inline void store_shared(uint32_t at, const uint4& word) {
  asm volatile("st.shared.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w), "r"(at)
               : "memory");
}

// --- Prefetches into L2

__device__ inline void prefetch_line(const char* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
// From a multiple of 16 on, so many bytes.
__device__ inline void prefetch_range([[maybe_unused]] const char* from,
                                      [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// --- Barriers

// __syncthreads() for some of a block's warps.
__device__ inline void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// --- Clusters

__device__ inline int cluster_index() {  // in the grid
  unsigned index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return static_cast<int>(index);
}
// Volatile, or the compiler would read the special register for every use.
__device__ inline void read_cluster_rank(int& rank) {
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
}
__device__ inline uint32_t remote(uint32_t address, int block) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(block));
  return result;
}

// --- mbarriers, by their addresses in shared memory

__device__ inline void mbarrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Stores a value, and counts its bytes on a barrier, both in another block of the cluster.
__device__ inline void store_remote(uint32_t to, float value, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}
// kKeepsL1: the fence is for shared memory only, so that L1 is not invalidated.
template <bool kKeepsL1>
__device__ inline void mbarrier_wait(uint32_t barrier, int parity) {
  if constexpr (kKeepsL1) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "fence.acquire.sync_restrict::shared::cluster.cluster;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
}
#endif

}  // namespace ptx
}  // namespace evenkeel::cuda
