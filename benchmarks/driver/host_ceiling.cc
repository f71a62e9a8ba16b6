// The loops of host_ceiling.h. CMakeLists.txt compiles this file so that they stay loops
// (-fno-tree-loop-distribute-patterns) and become vectors (-O3).
#include "host_ceiling.h"

namespace evenkeel::bench {
namespace {

[[gnu::always_inline]] inline void copy_loop(uint32_t* __restrict out, const uint32_t* __restrict a,
                                             size_t words) {
  for (size_t i = 0; i < words; ++i) out[i] = a[i];
}

[[gnu::always_inline]] inline void add_loop(uint32_t* __restrict out, const uint32_t* __restrict a,
                                            const uint32_t* __restrict b, size_t words) {
  for (size_t i = 0; i < words; ++i) out[i] = a[i] + b[i];
}

struct Loops {
  void (*copy)(uint32_t*, const uint32_t*, size_t);
  void (*add)(uint32_t*, const uint32_t*, const uint32_t*, size_t);
};

void copy_plain(uint32_t* out, const uint32_t* a, size_t words) { copy_loop(out, a, words); }
void add_plain(uint32_t* out, const uint32_t* a, const uint32_t* b, size_t words) {
  add_loop(out, a, b, words);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void copy_avx2(uint32_t* out, const uint32_t* a, size_t words) {
  copy_loop(out, a, words);
}
[[gnu::target("avx2")]] void add_avx2(uint32_t* out, const uint32_t* a, const uint32_t* b,
                                      size_t words) {
  add_loop(out, a, b, words);
}
[[gnu::target("avx512f,prefer-vector-width=512")]] void copy_avx512(uint32_t* out,
                                                                    const uint32_t* a,
                                                                    size_t words) {
  copy_loop(out, a, words);
}
[[gnu::target("avx512f,prefer-vector-width=512")]] void add_avx512(uint32_t* out, const uint32_t* a,
                                                                   const uint32_t* b,
                                                                   size_t words) {
  add_loop(out, a, b, words);
}
#endif

Loops widest_loops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {copy_avx512, add_avx512};
  if (__builtin_cpu_supports("avx2")) return {copy_avx2, add_avx2};
#endif
  return {copy_plain, add_plain};
}

const Loops kLoops = widest_loops();

}  // namespace

void copy_words(uint32_t* out, const uint32_t* a, size_t words) { kLoops.copy(out, a, words); }

void add_words(uint32_t* out, const uint32_t* a, const uint32_t* b, size_t words) {
  kLoops.add(out, a, b, words);
}

}  // namespace evenkeel::bench
