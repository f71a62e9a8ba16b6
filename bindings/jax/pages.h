// Huge pages under large results. malloc takes such memory from the system for every call of a
// program and gives it back afterwards; touching it for the first time in pages of 4 KB takes longer than
// a norm (float32 rows of 4096 x 4096 on two cores: 26 ms instead of 10).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace evenkeel::jax_binding {

// Advice: where the system does not know it, or the memory is not of that kind, nothing happens.
inline void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr size_t kLarge = size_t{4} << 20;  // NumPy's limit for the same
  constexpr uintptr_t kPage = 4096;
  if (bytes < kLarge) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace evenkeel::jax_binding
