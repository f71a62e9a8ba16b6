// A y of 8 bits: conversions of numbers that need no norm, the scale of a row, results that depend on nothing else,
// and what goes wrong with it. Cases of tests/cases compare all mixes with the norm in float32.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "broken_call.h"
#include "support/compare.h"
#include "support/half.h"
#include "support/quantized.h"

namespace evenkeel::support {
namespace {

constexpr ek_dtype kFormats[] = {EK_F8_E4M3, EK_F8_E5M2, EK_I8};

// The number that a code stands for, from the formats' definitions.
double number_of(ek_dtype dtype, unsigned char code) {
  if (dtype == EK_I8) return static_cast<signed char>(code);
  const int mantissa_bits = dtype == EK_F8_E4M3 ? 3 : 2, bias = dtype == EK_F8_E4M3 ? 7 : 15;
  const int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                    : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return code & 0x80 ? -magnitude : magnitude;
}

// Codes of the positive numbers, in their order.
std::vector<unsigned char> positive_codes(ek_dtype dtype) {
  std::vector<unsigned char> codes;
  for (int code = 0; code < 0x80; ++code) {
    const auto byte = static_cast<unsigned char>(code);
    if (number_of(dtype, byte) <= largest_of(dtype)) codes.push_back(byte);
  }
  return codes;
}

// y = 0 * -1 + bias: any numbers can be quantized, -0 too.
std::vector<unsigned char> quantize(const Runner& runner, ek_dtype dtype, std::vector<float> y,
                                    float scale) {
  const auto cols = static_cast<int64_t>(y.size());
  std::vector<float> x(y.size(), 1), weight(y.size(), -1);
  std::vector<unsigned char> codes(y.size());
  ek_problem problem = EK_PROBLEM_INIT;
  problem.rows = 1;
  problem.cols = cols;
  ek_forward_args args = EK_FORWARD_ARGS_INIT;
  args.x.data = x.data();
  args.y = {codes.data(), 0, 0, dtype, 0};
  args.weight.data = weight.data();
  args.bias.data = y.data();
  args.y_scale = &scale;
  ek_execution execution = EK_EXECUTION_INIT;
  execution.backend = runner.backend;
  size_t bytes = 0;
  EXPECT_EQ(ek_forward_workspace(&problem, &args, &execution, &bytes), EK_OK) << ek_last_error();
  std::vector<char> workspace(bytes);
  execution.workspace = workspace.data();
  execution.workspace_size = bytes;
  EXPECT_EQ(ek_forward(&problem, &args, &execution), EK_OK) << ek_last_error();
  return codes;
}

class Quantized : public testing::TestWithParam<Runner> {};

// Each number, and just below, at and just above the middle between it and the next one.
TEST_P(Quantized, RoundsToTheNearestAndTiesToEven) {
  for (const ek_dtype dtype : kFormats) {
    const std::vector<unsigned char> codes = positive_codes(dtype);
    std::vector<float> values;
    std::vector<unsigned char> expected;
    const auto expect = [&](double value, unsigned char code) {
      const auto number = static_cast<float>(value);
      const auto negative = dtype == EK_I8 ? static_cast<unsigned char>(-code)
                                           : static_cast<unsigned char>(code | 0x80);
      values.push_back(number), expected.push_back(code);
      values.push_back(-number), expected.push_back(negative);
    };
    for (size_t i = 0; i < codes.size(); ++i) {
      expect(number_of(dtype, codes[i]), codes[i]);
      if (i + 1 == codes.size()) break;
      const unsigned char low = codes[i], high = codes[i + 1];
      const auto middle =
          static_cast<float>(0.5 * (number_of(dtype, low) + number_of(dtype, high)));
      expect(std::nextafter(middle, 0.0f), low);
      expect(middle, low % 2 == 0 ? low : high);
      expect(std::nextafter(middle, 1e9f), high);
    }
    EXPECT_EQ(quantize(GetParam(), dtype, values, 1), expected) << name_of(dtype);
  }
}

TEST_P(Quantized, SaturatesButKeepsInfinityAndNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {449, -1e6f, 3e38f, kInfinity, -kInfinity, NAN, -NAN, -0.0f};
  const auto codes = [&](ek_dtype dtype) { return quantize(GetParam(), dtype, values, 1e-3f); };
  using Codes = std::vector<unsigned char>;
  // 3e38 / 1e-3 is beyond float32: infinity.
  EXPECT_EQ(codes(EK_F8_E4M3), (Codes{0x7e, 0xfe, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x80}));
  EXPECT_EQ(codes(EK_F8_E5M2), (Codes{0x7b, 0xfb, 0x7c, 0x7c, 0xfc, 0x7f, 0x7f, 0x80}));
  EXPECT_EQ(codes(EK_I8), (Codes{127, 0x80, 127, 127, 0x80, 0, 0, 0}));
}

// A row's scale takes its largest value to the format's largest number, is never zero, and shows what is not finite.
TEST_P(Quantized, ScalesOfRows) {
  for (const ek_dtype dtype : kFormats) {
    const auto run = [&](const char* values, double bound) {
      Case c = parse_case(std::string("rms_norm rows=4 cols=100 y=") + name_of(dtype) +
                          " values=" + values);
      c.amax_bound = bound;
      auto problem = std::make_unique<Problem>(c);
      EXPECT_EQ(problem->forward(GetParam()), "");
      return problem;
    };
    const auto normal = run("normal", 0), bounded = run("normal", 0.25), zero = run("zero", 0),
               nan = run("nan", 0.25);
    for (int64_t row = 0; row < 4; ++row) {
      const auto codes = normal->bytes(Tensor::kY, row);
      double most = 0;
      for (const unsigned char code : codes)
        most = std::max(most, std::fabs(number_of(dtype, code)));
      EXPECT_EQ(most, largest_of(dtype));
    }
    EXPECT_EQ(bounded->read(Vector::kRowScale)[0], static_cast<double>(0.25f / largest_of(dtype)));
    EXPECT_EQ(zero->read(Vector::kRowScale)[0], std::ldexp(1.0, -126));
    for (const unsigned char code : zero->bytes(Tensor::kY, 0)) EXPECT_EQ(code & 0x7f, 0);
    EXPECT_TRUE(std::isnan(nan->read(Vector::kRowScale)[1]));
    EXPECT_FALSE(std::isnan(nan->read(Vector::kRowScale)[0]));
  }
}

// The same bits for any number of threads, and for a row alone as among others.
TEST_P(Quantized, DependsOnTheRowAlone) {
  for (const char* line : {"layer_norm rows=600 cols=129 x=bf16 y=e4m3",
                           "rms_norm rows=600 cols=64 x=f32 residual=bf16 y=i8",
                           "layer_norm rows=3 cols=50001 x=f32 y=e5m2 y_scale=tensor",
                           "layer_norm rows=3 cols=50001 x=f32 y=e5m2"}) {
    SCOPED_TRACE(line);
    const Case c = parse_case(line);
    Problem whole(c);
    ASSERT_EQ(whole.forward(GetParam()), "");
    Runner threads = GetParam();
    threads.threads = 4;
    Problem split(c, whole.inputs());
    ASSERT_EQ(split.forward(threads), "");
    EXPECT_TRUE(split.buffer(Tensor::kY) == whole.buffer(Tensor::kY));
    EXPECT_TRUE(split.buffer(Vector::kRowScale) == whole.buffer(Vector::kRowScale));
    Case few = c;
    few.rows = 2;
    Problem first(few, whole.inputs());
    ASSERT_EQ(first.forward(GetParam()), "");
    for (int64_t row = 0; row < 2; ++row)
      EXPECT_EQ(first.bytes(Tensor::kY, row), whole.bytes(Tensor::kY, row));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Quantized, testing::Values(kCpu, kReference),
                         [](const auto& runner) { return std::string(runner.param.backend); });

TEST(Quantized, IsSeenInTheExplanation) {
  Problem problem(parse_case("rms_norm rows=3 cols=8 y=e4m3"));
  ek_execution execution;
  ASSERT_EQ(problem.prepare(Runner{}, false, &execution), "");
  char text[1024];
  ASSERT_EQ(ek_explain_forward(&problem.problem(), &problem.forward_args(), &execution, nullptr,
                               text, sizeof text),
            EK_OK);
  EXPECT_NE(std::string(text).find("y quantized to e4m3"), std::string::npos) << text;
}

constexpr char kByRows[] = "rms_norm rows=3 cols=8 y=e4m3";
constexpr char kByTensor[] = "rms_norm rows=3 cols=8 y=i8 y_scale=tensor";

TEST(Errors, OfAQuantizedY) {
  const Broken<ek_forward_args> forward[] = {
      {"group norm",
       kGroups,
       [](Forward& c) { c.args.y.dtype = EK_I8; },
       {"y.dtype is 6", "group norm does not quantize", "EK_BF16"}},
      {"y dtype",
       kByRows,
       [](Forward& c) { c.args.y.dtype = 7; },
       {"y.dtype is 7", "EK_BF16", "EK_F8_E4M3 (4)", "EK_I8 (6)"}},
      {"x of 8 bits",
       kByRows,
       [](Forward& c) { c.args.x.dtype = EK_F8_E5M2; },
       {"x.dtype is 5", "only y can have 8 bits", "EK_F32"}},
      {"weight of 8 bits",
       kByRows,
       [](Forward& c) { c.args.weight.dtype = EK_F8_E4M3; },
       {"weight.dtype is 4", "only y can have 8 bits", "EK_F32"}},
      {"no scale",
       kByRows,
       [](Forward& c) { c.args.y_row_scale = nullptr; },
       {"y_scale and y_row_scale are NULL", "y.dtype is 4"}},
      {"two scales",
       kByRows,
       [](Forward& c) { c.args.y_scale = c.args.y_row_scale; },
       {"y_scale is", "y_row_scale is", "one of them must be NULL"}},
      {"scale of a wide y",
       kRows,
       [](Forward& c) { c.args.y_scale = static_cast<float*>(c.args.rstd); },
       {"y_scale is", "y.dtype is 0", "NULL"}},
      {"row scale of a wide y",
       kRows,
       [](Forward& c) { c.args.y_row_scale = static_cast<float*>(c.args.rstd); },
       {"y_row_scale is", "y.dtype is 0", "NULL"}},
      {"negative bound",
       kByRows,
       [](Forward& c) { c.args.y_amax_bound = -1; },
       {"y_amax_bound is -1", "finite"}},
      {"NaN bound",
       kByRows,
       [](Forward& c) { c.args.y_amax_bound = NAN; },
       {"y_amax_bound is", "finite"}},
      {"bound without rows",
       kByTensor,
       [](Forward& c) { c.args.y_amax_bound = 2; },
       {"y_amax_bound is 2", "without y_row_scale"}},
      {"in place",
       kByRows,
       [](Forward& c) { c.args.y.data = c.args.x.data; },
       {"y at", "overlaps x", "exactly it"}},
      {"row scales over the statistics",
       kByRows,
       [](Forward& c) { c.args.y_row_scale = static_cast<float*>(c.args.rstd); },
       {"rstd", "overlaps y_row_scale"}},
      {"y over the scale",
       kByTensor,
       [](Forward& c) { c.args.y_scale = static_cast<float*>(c.args.y.data); },
       {"y at", "overlaps y_scale"}}};
  for (const auto& broken : forward) check(broken, false);
  const Broken<ek_backward_args> backward[] = {{"dy of 8 bits",
                                                kRows,
                                                [](Backward& c) { c.args.dy.dtype = EK_F8_E4M3; },
                                                {"dy.dtype is 4", "only y can have 8 bits"}},
                                               {"dx of 8 bits",
                                                kRows,
                                                [](Backward& c) { c.args.dx.dtype = EK_I8; },
                                                {"dx.dtype is 6", "only y can have 8 bits"}}};
  for (const auto& broken : backward) check(broken, true);
}

}  // namespace
}  // namespace evenkeel::support
