// Large pages under large results, for the frameworks whose memory comes from malloc.
//
// From 32 MB on malloc maps new memory for every call, and unmaps it afterwards. All of it is about to
// be written, and touching it for the first time in pages of 4 KB takes longer than a norm: 16384x4096
// float32 100 ms of a processor, 21 with pages of 2 MB.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace evenkeel {

// Advice: where the system does not know it, or the memory is not of that kind, nothing happens.
inline void advise_large_pages([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr size_t kLarge = size_t{4} << 20;  // NumPy's limit for the same
  constexpr uintptr_t kPage = 4096;
  if (bytes < kLarge) return;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = (address + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace evenkeel
