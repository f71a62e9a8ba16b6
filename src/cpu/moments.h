// Statistics in double: what the kernels' sums are turned into, and how those of two pieces become
// one.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

namespace evenkeel {

// How many spans are worked on at a time: a multiple of every vector of doubles.
inline constexpr int64_t kBatch = 16;

// Of values minus a shift.
struct Sums {
  double sum;
  double squares;
};

struct SumsBatch {
  double sum[kBatch];
  double squares[kBatch];

  Sums operator[](int64_t i) const { return {sum[i], squares[i]}; }
};

// deviations is the sum of (x - mean)^2; where nothing is centered, mean is 0.
struct Moments {
  double count;
  double mean;
  double deviations;
};

struct MomentsBatch {
  double count;
  double mean[kBatch];
  double deviations[kBatch];

  Moments operator[](int64_t i) const { return {count, mean[i], deviations[i]}; }
  void set(int64_t i, const Moments& value) {
    count = value.count;
    mean[i] = value.mean;
    deviations[i] = value.deviations;
  }
};

// sum(dz * weight), sum(dz * weight * normalized).
struct GradientSums {
  double sum;
  double product;
};

struct GradientSumsBatch {
  double sum[kBatch];
  double product[kBatch];

  GradientSums operator[](int64_t i) const { return {sum[i], product[i]}; }
  void set(int64_t i, const GradientSums& value) {
    sum[i] = value.sum;
    product[i] = value.product;
  }
};

inline GradientSums operator+(const GradientSums& a, const GradientSums& b) {
  return {a.sum + b.sum, a.product + b.product};
}

// normalized = (x - shift) * scale + offset. The shift is the mean rounded to the compute type, and
// the offset makes up for that rounding, so a large mean costs no accuracy.
struct Normalizer {
  double shift;
  double scale;
  double offset;
};

struct NormalizerBatch {
  double shift[kBatch];
  double scale[kBatch];
  double offset[kBatch];
};

inline Moments from_sums(const Sums& sums, int64_t count, double shift) {
  const auto n = static_cast<double>(count);
  const double off = sums.sum / n;
  const double deviations = sums.squares - off * sums.sum;
  // Rounding can leave a tiny negative; NaN must pass.
  return {n, shift + off, deviations < 0 ? 0 : deviations};
}

// The shift is off by no more than a standard deviation, so at most one bit is lost in the
// difference of the sums.
inline bool shift_was_good(const Sums& sums, int64_t count) {
  return sums.sum * sums.sum <= 0.5 * sums.squares * static_cast<double>(count);
}

// The largest and the least sums of squares that neither overflowed nor lost small terms to underflow.
template <class Compute>
constexpr std::pair<double, double> safe_squares() {
  using Limits = std::numeric_limits<Compute>;
  if constexpr (sizeof(Compute) == 8) return {Limits::infinity(), 0};
  return {static_cast<double>(Limits::max()) / 2, static_cast<double>(Limits::min()) * 0x1p26};
}

// Underflow does no harm where `floor`, which is about to be added, hides it. NaN is not safe.
template <class Compute>
bool in_safe_range(double squares, double floor) {
  const auto [largest, least] = safe_squares<Compute>();
  return squares <= largest && squares >= least - floor;
}

// Chan's formula.
inline Moments merge(const Moments& a, const Moments& b) {
  const double count = a.count + b.count;
  const double between = b.mean - a.mean;
  const double share = b.count / count;
  return {count, a.mean + between * share,
          a.deviations + b.deviations + between * between * a.count * share};
}

}  // namespace evenkeel
