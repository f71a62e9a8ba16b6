// What the inputs of a case are filled with: a seeded generator, cheap enough for the largest
// shapes.
#ifndef EVENKEEL_TESTS_SUPPORT_VALUES_H_
#define EVENKEEL_TESTS_SUPPORT_VALUES_H_

#include <cstdint>

#include "support/problem.h"

namespace evenkeel::support {

// splitmix64: one multiply-xor chain per number. The seed is scrambled first: without that the streams
// of neighbouring seeds would be one stream, shifted.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(scramble(seed)) {}

  uint64_t bits() { return scramble(state_ += 0x9e3779b97f4a7c15u); }
  // In [0, bound).
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound));
  }
  bool chance(int one_in) { return below(one_in) == 0; }
  // Mean 0, spread 1, and close enough to normal: the sum of four uniform numbers.
  double normal() {
    const uint64_t b = bits();
    const auto sum = static_cast<int64_t>((b & 0xffff) + ((b >> 16) & 0xffff) +
                                          ((b >> 32) & 0xffff) + (b >> 48));
    return static_cast<double>(sum - 131070) * (1.7320508075688772 / 65536);
  }

 private:
  static uint64_t scramble(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  uint64_t state_;
};

// Fills the inputs that are allocated already; sum is what x + residual gives in its type.
void fill_inputs(const Case& c, Inputs& inputs);
void fill_sum(const Case& c, Inputs& inputs);

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_VALUES_H_
