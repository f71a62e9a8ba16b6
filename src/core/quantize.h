// Quantization of y to 8 bits, as evenkeel.h defines it: the formats, and the scale of a row. Kernels on a GPU call
// these functions, vectors on the CPU do the same lane by lane.
#pragma once

#include <bit>
#include <cstdint>

namespace evenkeel {

inline constexpr uint32_t kFloatMagnitude = 0x7fffffff, kFloatInfinity = 0x7f800000;

// Beyond the largest number, what is not infinite becomes that number.
constexpr float saturate(float value, float least, float largest) {
  if ((std::bit_cast<uint32_t>(value) & kFloatMagnitude) >= kFloatInfinity) return value;
  return value > largest ? largest : value < least ? least : value;
}

// A floating format of 8 bits with kMantissa stored mantissa bits.
template <int kMantissa, bool kHasInfinity>
struct Float8 {
  static constexpr int kBias = (1 << (6 - kMantissa)) - 1;
  static constexpr float kLargest = kHasInfinity ? 57344 : 448;
  static constexpr uint8_t kNan = 0x7f;
  static constexpr uint8_t kInfinity = kHasInfinity ? 0x7c : kNan;

  // In a float's bits: how many are cut off, what rebias takes away, and the smallest normal number.
  static constexpr int kCut = 23 - kMantissa;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kLeastNormal = static_cast<uint32_t>(128 - kBias) << 23;
  // Its last place is the step of the subnormal numbers, so adding it rounds to them.
  static constexpr float kRoundsSubnormal =
      std::bit_cast<float>(static_cast<uint32_t>(127 + 1 - kBias - kMantissa + 23) << 23);

  // To nearest even. The sign of a NaN is dropped.
  static constexpr uint8_t encode(float value) {
    const auto bits = std::bit_cast<uint32_t>(saturate(value, -kLargest, kLargest));
    const uint32_t magnitude = bits & kFloatMagnitude;
    const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
    if (magnitude > kFloatInfinity) return kNan;
    if (magnitude == kFloatInfinity) return kHasInfinity ? sign | kInfinity : kNan;
    uint32_t code;
    if (magnitude < kLeastNormal) {
      code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kRoundsSubnormal) -
             std::bit_cast<uint32_t>(kRoundsSubnormal);
    } else {
      const uint32_t half = (1u << (kCut - 1)) - 1 + (magnitude >> kCut & 1);
      code = (magnitude - kRebias + half) >> kCut;
    }
    return sign | static_cast<uint8_t>(code);
  }
};
using E4M3 = Float8<3, false>;
using E5M2 = Float8<2, true>;

struct Int8 {
  static constexpr float kLargest = 127, kLeast = -128;
  static constexpr float kRounds = 12582912;  // 1.5 * 2^23: its last place is 1

  static constexpr uint8_t encode(float value) {
    if (value != value) return 0;
    const float within = value > kLargest ? kLargest : value < kLeast ? kLeast : value;
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(within + kRounds) -
                                std::bit_cast<uint32_t>(kRounds));
  }
};

// Absolute values are compared as integers: so a NaN is the largest, and stays.
constexpr uint32_t magnitude_bits(float value) {
  return std::bit_cast<uint32_t>(value) & kFloatMagnitude;
}

// The least scale: its reciprocal is finite, so that zeros stay zeros.
inline constexpr float kLeastScale = 0x1p-126f;

// Of a row whose largest absolute value has these bits. bound: infinity for none. largest: of the format.
constexpr float row_scale_of(uint32_t amax_bits, float bound, float largest) {
  const auto amax = std::bit_cast<float>(amax_bits);
  const float scale = (amax > bound ? bound : amax) / largest;
  return scale < kLeastScale ? kLeastScale : scale;
}

}  // namespace evenkeel
