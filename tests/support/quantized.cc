// Quantization for tests (quantized.h).
#include "support/quantized.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "support/half.h"

namespace evenkeel::support {
namespace {

// Without what no code stands for: e4m3 has no infinity, and its largest exponent holds numbers.
constexpr Format kFormatE4M3{3, -6, 8}, kFormatE5M2{2, -14, 15};

unsigned char float_code(float scaled, Format format, float largest, bool infinity) {
  const unsigned char sign = std::signbit(scaled) ? 0x80 : 0;
  if (std::isnan(scaled)) return 0x7f;
  if (std::isinf(scaled)) return infinity ? sign | 0x7c : 0x7f;
  const double magnitude = std::fabs(round_to(std::min(std::fabs(scaled), largest), format));
  const int exponent = exponent_in(magnitude, format);
  const int quanta = static_cast<int>(std::ldexp(magnitude, format.fraction_bits - exponent));
  const int above = exponent - format.min_exponent;
  return static_cast<unsigned char>(sign | ((above << format.fraction_bits) + quanta));
}

}  // namespace

float largest_of(ek_dtype dtype) {
  return dtype == EK_F8_E4M3 ? 448 : dtype == EK_F8_E5M2 ? 57344 : 127;
}

float tensor_scale(ek_dtype dtype) { return 3 / largest_of(dtype); }

unsigned char code_of(ek_dtype dtype, float scaled) {
  if (dtype == EK_F8_E4M3) return float_code(scaled, kFormatE4M3, largest_of(dtype), false);
  if (dtype == EK_F8_E5M2) return float_code(scaled, kFormatE5M2, largest_of(dtype), true);
  if (std::isnan(scaled)) return 0;
  const double rounded = std::nearbyint(std::clamp<double>(scaled, -128, 127));
  return static_cast<unsigned char>(static_cast<int>(rounded));
}

bool same_code(ek_dtype dtype, unsigned char a, unsigned char b) {
  const auto nan = [dtype](unsigned char code) {
    const int magnitude = code & 0x7f;
    return dtype == EK_F8_E4M3 ? magnitude == 0x7f : dtype == EK_F8_E5M2 && magnitude > 0x7c;
  };
  return a == b || (nan(a) && nan(b));
}

Problem make_unquantized(const Problem& problem) {
  Case c = problem.spec();
  c.y = {EK_F32, true, 0, 0};
  c.amax_bound = 0;
  return Problem(c, problem.inputs());
}

std::string compare_quantized(const Problem& problem, const Problem& norm) {
  const Case& c = problem.spec();
  for (const Vector vector : {Vector::kMean, Vector::kRstd}) {
    const std::vector<double> own = problem.read(vector), other = norm.read(vector);
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i] != other[i] && !(std::isnan(own[i]) && std::isnan(other[i])))
        return "a statistic is not that of the norm in float32";
    }
  }
  const float largest = largest_of(c.y.dtype);
  const std::vector<double> scales = problem.read(Vector::kRowScale);
  std::vector<double> y, own, other;
  char text[160];
  for (int64_t unit = 0; unit < unit_count(c); ++unit) {
    norm.read(Tensor::kY, unit, y);
    if (c.sum.present) {
      problem.read(Tensor::kSum, unit, own);
      norm.read(Tensor::kSum, unit, other);
      for (size_t i = 0; i < own.size(); ++i) {
        if (own[i] != other[i] && !(std::isnan(own[i]) && std::isnan(other[i])))
          return "the sum is not that of the norm in float32";
      }
    }
    float scale = tensor_scale(c.y.dtype);
    if (c.y_scale == YScale::kRows) {
      float amax = 0;
      for (const double value : y) {
        const float magnitude = std::fabs(static_cast<float>(value));
        if (std::isnan(magnitude) || magnitude > amax) amax = magnitude;
        if (std::isnan(amax)) break;
      }
      if (c.amax_bound > 0 && amax > static_cast<float>(c.amax_bound))
        amax = static_cast<float>(c.amax_bound);
      scale = amax / largest;
      if (scale < std::numeric_limits<float>::min()) scale = std::numeric_limits<float>::min();
      const auto found = static_cast<float>(scales[static_cast<size_t>(unit)]);
      if (found != scale && !(std::isnan(found) && std::isnan(scale))) {
        std::snprintf(text, sizeof text, "the scale of row %lld is %.9g, but must be %.9g",
                      static_cast<long long>(unit), found, scale);
        return text;
      }
    }
    const float inverse = 1 / scale;
    const std::vector<unsigned char> codes = problem.bytes(Tensor::kY, unit);
    for (size_t i = 0; i < y.size(); ++i) {
      const unsigned char expected = code_of(c.y.dtype, static_cast<float>(y[i]) * inverse);
      if (same_code(c.y.dtype, codes[i], expected)) continue;
      std::snprintf(text, sizeof text,
                    "y of row %lld, element %zu, is the code 0x%02x, but must be 0x%02x for %.9g",
                    static_cast<long long>(unit), i, codes[i], expected,
                    static_cast<double>(static_cast<float>(y[i]) * inverse));
      return text;
    }
  }
  return "";
}

}  // namespace evenkeel::support
