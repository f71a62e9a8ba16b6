// Conversions, bit for bit, through calls that do nothing else.
//
// A row of zeros normalizes to zero, so y is the bias; x = +1, -1, +1, ... with eps = 0 normalizes
// to itself, so y is the weight with that sign. Going backward over a single row, dbias is dy; with
// x = 0 and a saved rstd of 1 the RMS norm's dx is dy, and with dy = 1 its dweight is x. That makes
// every load and store of the kernels visible: all 65536 numbers of the half types on the way in,
// and on the way out float32 numbers around every tie, with overflow, subnormal numbers, infinities
// and NaN.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/half.h"
#include "support/problem.h"

namespace evenkeel::support {
namespace {

constexpr int64_t kCount = 65536;

// The value at an index.
using Series = std::function<double(int64_t)>;

// Writes a whole input of a problem, whose buffers are shared but never written by calls.
void fill(const Buffer& buffer, ek_dtype dtype, const Series& value) {
  auto* data = const_cast<unsigned char*>(buffer.data());
  for (size_t i = 0; i < buffer.size() / size_of(dtype); ++i) {
    store(dtype, data + i * size_of(dtype), value(static_cast<int64_t>(i)));
  }
}

double constant_zero(int64_t) { return 0; }
double constant_one(int64_t) { return 1; }
double alternating(int64_t i) { return i % 2 == 0 ? 1 : -1; }

// A way through a call: from a source (x, dy, weight or bias) of one type to a result of another.
// The big tensors that are not on the way have the type `other`: with all of one type the kernels
// differ.
struct Path {
  const char* name;
  std::vector<double> (*run)(ek_dtype from, ek_dtype to, ek_dtype other, const Series& value);
};

Case row(const char* op, const std::string& keys) {
  return parse_case(std::string(op) + " rows=1 cols=" + std::to_string(kCount) + " " + keys);
}

std::string key(const char* name, ek_dtype dtype) {
  return std::string(" ") + name + "=" + name_of(dtype);
}

std::vector<double> read_row(const Problem& problem, Tensor tensor) {
  std::vector<double> values;
  problem.read(tensor, 0, values);
  return values;
}

std::vector<double> bias_to_y(ek_dtype from, ek_dtype to, ek_dtype other, const Series& value) {
  Problem problem(
      row("layer_norm", "weight=none" + key("bias", from) + key("y", to) + key("x", other)));
  fill(problem.inputs()->x, other, constant_zero);
  fill(problem.inputs()->bias, from, value);
  EXPECT_EQ(problem.forward(kCpu), "");
  return read_row(problem, Tensor::kY);
}

std::vector<double> weight_to_y(ek_dtype from, ek_dtype to, ek_dtype other, const Series& value) {
  Problem problem(
      row("layer_norm", "eps=0 bias=none" + key("weight", from) + key("y", to) + key("x", other)));
  fill(problem.inputs()->x, other, alternating);
  fill(problem.inputs()->weight, from, value);
  EXPECT_EQ(problem.forward(kCpu), "");
  std::vector<double> y = read_row(problem, Tensor::kY);
  for (size_t i = 1; i < y.size(); i += 2) y[i] = -y[i];
  return y;
}

// RMS norm going backward, with x = 0 and a saved rstd of 1.
Problem unit_problem(const std::string& keys) {
  Problem problem(row("rms_norm", "eps=1" + keys));
  fill(problem.inputs()->x, problem.spec().x.dtype, constant_zero);
  EXPECT_EQ(problem.save_statistics(kReference), "");
  return problem;
}

std::vector<double> dy_to_dx(ek_dtype from, ek_dtype to, ek_dtype other, const Series& value) {
  Problem problem =
      unit_problem(" weight=none" + key("dy", from) + key("dx", to) + key("x", other));
  fill(problem.inputs()->dy, from, value);
  EXPECT_EQ(problem.backward(kCpu), "");
  return read_row(problem, Tensor::kDx);
}

std::vector<double> dy_to_dbias(ek_dtype from, ek_dtype to, ek_dtype other, const Series& value) {
  Problem problem =
      unit_problem(" bias=f32 dx=none" + key("dy", from) + key("dbias", to) + key("x", other));
  fill(problem.inputs()->dy, from, value);
  EXPECT_EQ(problem.backward(kCpu), "");
  return problem.read(Vector::kDbias);
}

std::vector<double> x_to_dweight(ek_dtype from, ek_dtype to, ek_dtype other, const Series& value) {
  Problem problem =
      unit_problem(" dx=none" + key("x", from) + key("dweight", to) + key("dy", other));
  fill(problem.inputs()->x, from, value);
  fill(problem.inputs()->dy, other, constant_one);
  EXPECT_EQ(problem.backward(kCpu), "");
  return problem.read(Vector::kDweight);
}

const Path kPaths[] = {{"bias to y", bias_to_y},
                       {"weight to y", weight_to_y},
                       {"dy to dx", dy_to_dx},
                       {"dy to dbias", dy_to_dbias},
                       {"x to dweight", x_to_dweight}};

// Infinity times zero is NaN, so the path that sums over the row (dy to dx) is given finite
// numbers.
void expect_exact(const Path& path, ek_dtype from, ek_dtype to, const Series& value) {
  const bool sums = path.run == dy_to_dx;
  const auto given = [&](int64_t i) {
    const double v = value(i);
    return sums && !std::isfinite(v) ? 0 : v;
  };
  const ek_dtype half = size_of(to) == 2 ? to : from;
  for (const ek_dtype other : {EK_F32, half}) {
    const std::vector<double> results = path.run(from, to, other, given);
    int failures = 0;
    for (int64_t i = 0; i < kCount && failures < 5; ++i) {
      const double expected = round_to(given(i), format_of(to));
      const double result = results[static_cast<size_t>(i)];
      if (std::isnan(expected) ? std::isnan(result) : result == expected) continue;
      ++failures;
      ADD_FAILURE() << path.name << ", " << name_of(from) << " to " << name_of(to) << " beside "
                    << name_of(other) << ": " << given(i) << " gives " << result << " instead of "
                    << expected;
    }
  }
}

TEST(Dtype, EveryHalfNumberIsReadExactly) {
  for (const Path& path : kPaths) {
    for (const ek_dtype to : {EK_F32, EK_F64}) {
      expect_exact(path, EK_F16, to,
                   [](int64_t i) { return f16_to_double(static_cast<uint16_t>(i)); });
      expect_exact(path, EK_BF16, to,
                   [](int64_t i) { return bf16_to_double(static_cast<uint16_t>(i)); });
    }
  }
}

TEST(Dtype, EveryHalfNumberIsWrittenExactly) {
  for (const Path& path : kPaths) {
    expect_exact(path, EK_F16, EK_F16,
                 [](int64_t i) { return f16_to_double(static_cast<uint16_t>(i)); });
    expect_exact(path, EK_BF16, EK_BF16,
                 [](int64_t i) { return bf16_to_double(static_cast<uint16_t>(i)); });
  }
}

// Next to each half number: a float32 a little above it, just below, at and just above the middle
// to the next, and just below the next.
TEST(Dtype, FloatsAreRoundedToTheNearestHalfAndTiesToEven) {
  for (const Path& path : kPaths) {
    for (const ek_dtype to : {EK_F16, EK_BF16}) {
      for (const int place : {-2, -1, 0, 1, 2}) {
        expect_exact(path, EK_F32, to, [&](int64_t i) -> double {
          const auto decode = to == EK_F16 ? f16_to_double : bf16_to_double;
          const auto bits = static_cast<uint16_t>(i);
          const double low = decode(bits), high = decode(static_cast<uint16_t>(bits ^ 1));
          if (!std::isfinite(low) || !std::isfinite(high)) {
            // Beyond the largest number: around the overflow threshold, infinity and NaN.
            constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
            const double limit = to == EK_F16 ? 65520 : 0x1.ffp127;
            const double others[] = {kNaN, std::nextafterf(static_cast<float>(limit), 0.0f), limit,
                                     HUGE_VAL, -limit};
            return others[place + 2];
          }
          const auto middle =
              static_cast<float>(0.5 * (low + decode(static_cast<uint16_t>(bits + 1))));
          const auto next = decode(static_cast<uint16_t>(bits + 1));
          if (!std::isfinite(next) || std::signbit(next) != std::signbit(low)) return low;
          const auto toward = [&](float from, double goal) {
            return std::nextafterf(from, static_cast<float>(goal));
          };
          switch (place) {
            case -2:
              return toward(static_cast<float>(low), next);
            case -1:
              return toward(middle, low);
            case 0:
              return middle;
            case 1:
              return toward(middle, next);
            default:
              return toward(static_cast<float>(next), low);
          }
        });
      }
    }
  }
}

// Patterns of all float32 numbers, one in about 4000, the lower bits scrambled.
TEST(Dtype, ArbitraryFloatsAreRounded) {
  for (const ek_dtype to : {EK_F16, EK_BF16}) {
    for (uint32_t round = 0; round < 16; ++round) {
      expect_exact(kPaths[0], EK_F32, to, [&](int64_t i) -> double {
        const auto high = static_cast<uint32_t>(i) << 16;
        return std::bit_cast<float>(
            high | ((static_cast<uint32_t>(i) * 40503u + round * 4097u) & 0xffffu));
      });
    }
  }
}

// A row of one element is its own mean.
TEST(Dtype, TheMeanOfOneElementIsTheElement) {
  for (const ek_dtype from : {EK_F16, EK_BF16}) {
    Problem problem(
        parse_case("layer_norm rows=65536 cols=1 pass=forward x=" + std::string(name_of(from))));
    const auto decode = from == EK_F16 ? f16_to_double : bf16_to_double;
    fill(problem.inputs()->x, from, [&](int64_t i) { return decode(static_cast<uint16_t>(i)); });
    ASSERT_EQ(problem.forward(kCpu), "");
    const std::vector<double> mean = problem.read(Vector::kMean);
    for (int64_t i = 0; i < kCount; ++i) {
      const double expected = decode(static_cast<uint16_t>(i)),
                   result = mean[static_cast<size_t>(i)];
      if (std::isfinite(expected)) {
        ASSERT_EQ(result, expected) << i;
      } else {
        ASSERT_FALSE(std::isfinite(result)) << i;
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel::support
