// Scalar conversions between double and the four storage types, round to nearest even.
//
// The tests' own view of the number formats: written from the format definitions and not from the
// library's code, so that a wrong rounding there cannot hide behind the same mistake here. Every
// rounding starts from a double and happens once.
#ifndef EVENKEEL_TESTS_SUPPORT_HALF_H_
#define EVENKEEL_TESTS_SUPPORT_HALF_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "evenkeel/evenkeel.h"

namespace evenkeel::support {

struct Format {
  int fraction_bits;
  int min_exponent;  // of the smallest normal number
  int max_exponent;
};

inline constexpr Format kFormatF16{10, -14, 15};
inline constexpr Format kFormatBf16{7, -126, 127};
inline constexpr Format kFormatF32{23, -126, 127};
inline constexpr Format kFormatF64{52, -1022, 1023};

constexpr Format format_of(ek_dtype dtype) {
  return dtype == EK_F16    ? kFormatF16
         : dtype == EK_BF16 ? kFormatBf16
         : dtype == EK_F32  ? kFormatF32
                            : kFormatF64;
}

constexpr size_t size_of(ek_dtype dtype) {
  return dtype == EK_F64 ? 8 : dtype == EK_F32 ? 4 : dtype == EK_F16 || dtype == EK_BF16 ? 2 : 1;
}

constexpr const char* name_of(ek_dtype dtype) {
  return dtype == EK_F16       ? "f16"
         : dtype == EK_BF16    ? "bf16"
         : dtype == EK_F32     ? "f32"
         : dtype == EK_F64     ? "f64"
         : dtype == EK_F8_E4M3 ? "e4m3"
         : dtype == EK_F8_E5M2 ? "e5m2"
                               : "i8";
}

// 2^exponent, for exponents of normal doubles.
constexpr double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// The exponent of |value|, at least that of the format's smallest normal number.
inline int exponent_in(double value, Format format) {
  const int biased = static_cast<int>((std::bit_cast<uint64_t>(value) >> 52) & 0x7ff);
  return std::max(biased - 1023, format.min_exponent);
}

// Distance between neighbouring numbers of the format at `value`.
inline double ulp(double value, Format format) {
  return std::ldexp(1.0, exponent_in(value, format) - format.fraction_bits);
}

// The number of the format that is nearest to `value`; ties to even, overflow to infinity.
inline double round_to(double value, Format format) {
  if (format.fraction_bits == 52 || !std::isfinite(value)) return value;
  const double magnitude = std::fabs(value);
  double rounded;
  if (magnitude < power_of_two(format.min_exponent)) {
    // Subnormal: all numbers are multiples of one quantum, and adding 1.5 * 2^52 quanta rounds to
    // it.
    const double big = 1.5 * power_of_two(format.min_exponent - format.fraction_bits + 52);
    rounded = (magnitude + big) - big;
  } else {
    const int dropped = 52 - format.fraction_bits;
    uint64_t bits = std::bit_cast<uint64_t>(magnitude);
    bits += (uint64_t{1} << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
    bits &= ~((uint64_t{1} << dropped) - 1);
    rounded = std::bit_cast<double>(bits);
    if (exponent_in(rounded, format) > format.max_exponent) {
      rounded = std::numeric_limits<double>::infinity();
    }
  }
  return std::copysign(rounded, value);
}

inline double bf16_to_double(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline double f16_to_double(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double magnitude;
  if (exponent == 31) {
    magnitude = fraction ? std::numeric_limits<double>::quiet_NaN()
                         : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = fraction * power_of_two(-24);
  } else {
    magnitude = (1024 + fraction) * power_of_two(exponent - 25);
  }
  return (bits & 0x8000) ? -magnitude : magnitude;
}

inline uint16_t double_to_bf16(double value) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(round_to(value, kFormatBf16)));
  return static_cast<uint16_t>((bits >> 16) | (std::isnan(value) ? 0x40 : 0));
}

inline uint16_t double_to_f16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const double magnitude = std::fabs(round_to(value, kFormatF16));
  if (std::isinf(magnitude)) return sign | 0x7c00;
  const int exponent = exponent_in(magnitude, kFormatF16);
  const int quanta = static_cast<int>(magnitude * power_of_two(10 - exponent));
  // A subnormal has less than 1024 quanta and no implicit bit; a normal number's carries over into
  // the exponent field by the addition.
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + quanta));
}

// Scalar access by type. Addresses need no alignment.
inline double load(ek_dtype dtype, const void* address) {
  uint16_t half;
  float single;
  double value;
  switch (dtype) {
    case EK_F16:
      std::memcpy(&half, address, 2);
      return f16_to_double(half);
    case EK_BF16:
      std::memcpy(&half, address, 2);
      return bf16_to_double(half);
    case EK_F32:
      std::memcpy(&single, address, 4);
      return single;
    default:  // f64; types of 8 bits are in quantized.h
      break;
  }
  std::memcpy(&value, address, 8);
  return value;
}

inline void store(ek_dtype dtype, void* address, double value) {
  uint16_t half;
  float single;
  switch (dtype) {
    case EK_F16:
      half = double_to_f16(value);
      std::memcpy(address, &half, 2);
      return;
    case EK_BF16:
      half = double_to_bf16(value);
      std::memcpy(address, &half, 2);
      return;
    case EK_F32:
      single = static_cast<float>(value);
      std::memcpy(address, &single, 4);
      return;
    default:
      break;
  }
  std::memcpy(address, &value, 8);
}

// `count` neighbouring elements, with the type looked up once.
inline void load_span(ek_dtype dtype, const void* address, int64_t count, double* out) {
  const char* bytes = static_cast<const char*>(address);
  const auto each = [&](auto type) {
    constexpr ek_dtype kType = decltype(type)::value;
    for (int64_t i = 0; i < count; ++i) {
      out[i] = load(kType, bytes + i * static_cast<int64_t>(size_of(kType)));
    }
  };
  switch (dtype) {
    case EK_F16:
      return each(std::integral_constant<ek_dtype, EK_F16>());
    case EK_BF16:
      return each(std::integral_constant<ek_dtype, EK_BF16>());
    case EK_F32:
      return each(std::integral_constant<ek_dtype, EK_F32>());
    default:
      return each(std::integral_constant<ek_dtype, EK_F64>());
  }
}

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_HALF_H_
