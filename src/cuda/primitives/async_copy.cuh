// Asynchronous copies from global into shared memory (cp.async), 16 bytes at a time, and prefetches into
// L2.
#pragma once

#include <cstdint>

#include "cuda/primitives/cluster.cuh"
#include "cuda/primitives/row_group_policy.h"

namespace evenkeel::cuda {

__device__ inline void copy_async(uint32_t to, const void* from) { ptx::copy_async(to, from); }
// Zeros unless `valid`.
__device__ inline void copy_async_if(bool valid, uint32_t to, const void* from) {
  ptx::copy_async(to, from, valid ? 16 : 0);
}

__device__ inline void commit_copies() { ptx::commit_group(); }

// Until at most `pending` of this thread's committed groups are left.
__device__ inline void wait_for_copies(int pending) {
  static_assert(kMaxStages == 4);
  if (pending == 2) {
    ptx::wait_group<2>();
  } else if (pending == 1) {
    ptx::wait_group<1>();
  } else {
    ptx::wait_group<0>();
  }
}

// One thread prefetches a range into L2, unless it ends behind `end`.
__device__ inline void prefetch_range(const char* from, int bytes, const char* end) {
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
  from -= offset;
  bytes = (offset + bytes + 15) / 16 * 16;
  if (from + bytes <= end) ptx::prefetch_range(from, bytes);
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
      ptx::store_shared(at_ + v * pitch_ + i, word);
    }
  }
  template <typename Raw>
  __device__ void get(int v, Raw& raw, int slot = 0) const {
    uint32_t at = at_ + slot;
    asm volatile("" : "+r"(at));  // or the compiler would hold the addresses of all vectors
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) {
      uint4& word = reinterpret_cast<uint4*>(&raw)[i / 16];
      ptx::load_shared(at + v * pitch_ + i, word);
    }
  }

 private:
  uint32_t at_;
  int pitch_;
};

}  // namespace evenkeel::cuda
