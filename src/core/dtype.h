// The element types: the one table of their names and sizes, and their scalar conversions.
//
// Conversions go through double and round once, to nearest even, so they are exact where the value
// fits and serve as the definition that SIMD code is tested against. Addresses need no alignment.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/quantize.h"
#include "evenkeel/evenkeel.h"

namespace evenkeel {

enum class Dtype : int32_t {
  kF32 = EK_F32,
  kF64 = EK_F64,
  kF16 = EK_F16,
  kBF16 = EK_BF16,
  kF8E4M3 = EK_F8_E4M3,
  kF8E5M2 = EK_F8_E5M2,
  kI8 = EK_I8
};

struct DtypeInfo {
  const char* name;
  int64_t size;
};

inline constexpr DtypeInfo kDtypes[] = {{"f32", 4},  {"f64", 8},  {"f16", 2}, {"bf16", 2},
                                        {"e4m3", 1}, {"e5m2", 1}, {"i8", 1}};
inline constexpr int32_t kDtypeCount = 7;
inline constexpr int32_t kWideDtypeCount = 4;  // those before them have 16 bits or more

inline const char* name_of(Dtype dtype) { return kDtypes[static_cast<int32_t>(dtype)].name; }
inline int64_t size_of(Dtype dtype) { return kDtypes[static_cast<int32_t>(dtype)].size; }
constexpr bool has_eight_bits(Dtype dtype) {
  return static_cast<int32_t>(dtype) >= kWideDtypeCount;
}

// A 16-bit binary format with kMantissa stored mantissa bits; the rest is exponent and sign.
template <int kMantissa>
struct HalfFormat {
  static constexpr int kExponentBits = 15 - kMantissa;
  static constexpr int kMinExponent = 2 - (1 << (kExponentBits - 1));
  static constexpr uint16_t kInfinity = ((1 << kExponentBits) - 1) << kMantissa;

  static uint16_t encode(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    const auto sign = static_cast<uint16_t>((bits >> 48) & 0x8000);
    const double magnitude = std::fabs(value);
    if (std::isnan(value)) return sign | kInfinity | (1 << (kMantissa - 1));
    if (magnitude >= power_of_two(2 - kMinExponent)) return sign | kInfinity;
    const int exponent = std::max(static_cast<int>((bits >> 52) & 0x7ff) - 1023, kMinExponent);
    // In units of the last place the value is below 2^(kMantissa + 1); adding and taking away 2^52
    // rounds it to even.
    const double rounded = (magnitude * power_of_two(kMantissa - exponent) + 0x1p52) - 0x1p52;
    // A carry out of the mantissa runs into the exponent, and out of the largest exponent into
    // infinity.
    return sign | static_cast<uint16_t>(((exponent - kMinExponent) << kMantissa) +
                                        static_cast<int>(rounded));
  }

  static double decode(uint16_t code) {
    const int magnitude = code & 0x7fff;
    const int mantissa = magnitude & ((1 << kMantissa) - 1);
    const int exponent = magnitude >> kMantissa;
    double value;
    if (magnitude >= kInfinity) {
      value = magnitude == kInfinity ? std::numeric_limits<double>::infinity()
                                     : std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
      value = mantissa * power_of_two(kMinExponent - kMantissa);
    } else {
      value = (mantissa + (1 << kMantissa)) * power_of_two(exponent - 1 + kMinExponent - kMantissa);
    }
    return code & 0x8000 ? -value : value;
  }

 private:
  static double power_of_two(int exponent) {
    return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
  }
};

using F16Format = HalfFormat<10>;
using BF16Format = HalfFormat<7>;

// Calls body with the format of a dtype of 8 bits.
template <typename Body>
constexpr auto with_eight_bits(Dtype dtype, const Body& body) {
  if (dtype == Dtype::kF8E4M3) return body(E4M3());
  if (dtype == Dtype::kF8E5M2) return body(E5M2());
  return body(Int8());
}

inline double load_scalar(const void* data, Dtype dtype, int64_t index = 0) {
  const char* at = static_cast<const char*>(data) + index * size_of(dtype);
  const auto read = [at](auto value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (dtype) {
    case Dtype::kF64:
      return read(double{});
    case Dtype::kF32:
      return read(float{});
    case Dtype::kF16:
      return F16Format::decode(read(uint16_t{}));
    case Dtype::kBF16:
      return BF16Format::decode(read(uint16_t{}));
    case Dtype::kF8E4M3:
    case Dtype::kF8E5M2:
    case Dtype::kI8:
      break;  // written only
  }
  return 0;
}

inline void store_scalar(void* data, Dtype dtype, int64_t index, double value) {
  char* at = static_cast<char*>(data) + index * size_of(dtype);
  const auto write = [at](auto stored) { std::memcpy(at, &stored, sizeof stored); };
  switch (dtype) {
    case Dtype::kF64:
      return write(value);
    case Dtype::kF32:
      return write(static_cast<float>(value));
    case Dtype::kF16:
      return write(F16Format::encode(value));
    case Dtype::kBF16:
      return write(BF16Format::encode(value));
    case Dtype::kF8E4M3:
    case Dtype::kF8E5M2:
    case Dtype::kI8:
      return write(with_eight_bits(
          dtype, [&](auto format) { return decltype(format)::encode(static_cast<float>(value)); }));
  }
}

inline double round_to(Dtype dtype, double value) {
  double stored;
  store_scalar(&stored, dtype, 0, value);
  return load_scalar(&stored, dtype);
}

}  // namespace evenkeel
