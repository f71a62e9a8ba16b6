// What no norm can beat in ordinary stores: a copy, and a sum of two tensors into a third.
//
// Plain loops, vectorized by the compiler once for each width the machine may have. memcpy would
// not do: for large sizes it takes non-temporal stores. The sum is of 32-bit integers whatever the
// tensors' type is: it moves the same bytes and never meets a subnormal number.
#ifndef EVENKEEL_BENCH_HOST_CEILING_H_
#define EVENKEEL_BENCH_HOST_CEILING_H_

#include <cstddef>
#include <cstdint>

namespace evenkeel::bench {

void copy_words(uint32_t* out, const uint32_t* a, size_t words);
void add_words(uint32_t* out, const uint32_t* a, const uint32_t* b, size_t words);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_BENCH_HOST_CEILING_H_
