// Asynchronous copies from global into shared memory (cp.async), 16 bytes at a time, and prefetches into
// L2.
#pragma once

#include <cstdint>

#include "cuda/primitives/cluster.cuh"
#include "cuda/primitives/row_group_policy.h"

namespace evenkeel::cuda {

__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Zeros unless `valid`.
__device__ inline void copy_async_if(bool valid, uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `pending` of this thread's committed groups are left.
__device__ inline void wait_for_copies(int pending) {
  static_assert(kMaxStages == 4);
  if (pending == 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (pending == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}

// One thread prefetches a range into L2, unless it ends behind `end`.
__device__ inline void prefetch_range(const char* from, int bytes, const char* end) {
#if __CUDA_ARCH__ >= 900
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
  from -= offset;
  bytes = (offset + bytes + 15) / 16 * 16;
  if (from + bytes <= end)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// A thread's own vectors of kBytes in shared memory, from `first` on, `pitch` bytes apart. Those of
// neighbouring threads are neighbours, so that there are no bank conflicts; and as nobody else reads them,
// the thread waits for its own copies only.
template <int kBytes>
class SharedFragment {
 public:
  __device__ SharedFragment(const char* first, int pitch)
      : at_(shared_address(first)), pitch_(pitch) {
    asm volatile("" : "+r"(at_));  // or the compiler would compute it for every use
  }
  // Asynchronously. slot: offset in bytes. kMayFill: zeros unless `valid`.
  template <bool kMayFill>
  __device__ void copy(int v, const char* from, int slot, bool valid) const {
    const uint32_t to = at_ + slot + v * pitch_;
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) {
      if constexpr (kMayFill) {
        copy_async_if(valid, to + i, from + i);
      } else {
        copy_async(to + i, from + i);
      }
    }
  }
  template <typename Raw>
  __device__ void put(int v, const Raw& raw) const {
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) {
      const uint4& word = reinterpret_cast<const uint4*>(&raw)[i / 16];
      asm volatile("st.shared.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(word.x), "r"(word.y),
                   "r"(word.z), "r"(word.w), "r"(at_ + v * pitch_ + i)
                   : "memory");
    }
  }
  template <typename Raw>
  __device__ void get(int v, Raw& raw, int slot = 0) const {
    uint32_t at = at_ + slot;
    asm volatile("" : "+r"(at));  // or the compiler would hold the addresses of all vectors
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) {
      uint4& word = reinterpret_cast<uint4*>(&raw)[i / 16];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                   : "r"(at + v * pitch_ + i));
    }
  }

 private:
  uint32_t at_;
  int pitch_;
};

}  // namespace evenkeel::cuda
