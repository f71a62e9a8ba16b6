// The C++ wrapper: what it adds to the C ABI (lengths, constness, types of statistics, exceptions,
// the workspace), and that everything else reaches the library unchanged.
//
// The numbers themselves are the business of the other tests; here a row is known by hand.
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "evenkeel/evenkeel.hpp"

namespace {

using evenkeel::BackwardArgs;
using evenkeel::Error;
using evenkeel::ForwardArgs;
using evenkeel::Input;
using evenkeel::Output;

// Constness and element types are settled by the compiler.
static_assert(std::is_constructible_v<Input, const std::vector<float>&>);
static_assert(std::is_constructible_v<Input, std::span<const double>>);
static_assert(std::is_constructible_v<Output, std::vector<double>&>);
static_assert(std::is_constructible_v<Output, std::span<float>>);
static_assert(!std::is_constructible_v<Output, const std::vector<float>&>);
static_assert(!std::is_constructible_v<Output, std::span<const float>>);
static_assert(!std::is_constructible_v<Output, const void*, std::size_t, ek_dtype>);
static_assert(!std::is_constructible_v<Input, std::vector<int>&>);
static_assert(!std::is_constructible_v<Input, std::vector<std::uint16_t>&>);

template <typename Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(EK_OK, "nothing was thrown");
}

TEST(Wrapper, ForwardAndBackwardReachTheLibrary) {
  const std::vector<double> x = {1, 3, -2, 2}, weight = {2, 3}, bias = {10, 20};
  std::vector<double> y(4), mean(2), rstd(2);
  const auto problem = evenkeel::layer_norm(2, 2, 0.0);
  evenkeel::forward(problem,
                    {.x = x, .y = y, .weight = weight, .bias = bias, .mean = mean, .rstd = rstd});
  EXPECT_EQ(y, (std::vector<double>{8, 23, 8, 23}));
  EXPECT_EQ(mean, (std::vector<double>{2, 0}));
  EXPECT_EQ(rstd, (std::vector<double>{1, 0.5}));

  const std::vector<double> dy = {1, 2, 3, 5};
  std::vector<double> dx(4), dweight(2), dbias(2);
  evenkeel::backward(problem, {.dy = dy,
                               .x = x,
                               .weight = weight,
                               .mean = mean,
                               .rstd = rstd,
                               .dx = dx,
                               .dweight = dweight,
                               .dbias = dbias});
  EXPECT_EQ(dx, (std::vector<double>{0, 0, 0, 0}));  // two values always normalize to -1 and 1
  EXPECT_EQ(dweight, (std::vector<double>{-4, 7}));
  EXPECT_EQ(dbias, (std::vector<double>{4, 7}));
}

TEST(Wrapper, MakesEveryProblem) {
  const auto rms = evenkeel::rms_norm(3, 4, 0.25);
  EXPECT_EQ(rms.op, EK_RMS_NORM);
  EXPECT_EQ(rms.struct_size, sizeof(ek_problem));
  EXPECT_EQ(rms.rows, 3);
  EXPECT_EQ(rms.cols, 4);
  EXPECT_EQ(rms.eps, 0.25);
  const auto group = evenkeel::group_norm(2, 6, 5, 3, EK_NHWC, 0.5);
  EXPECT_EQ(group.op, EK_GROUP_NORM);
  EXPECT_EQ(group.layout, EK_NHWC);
  EXPECT_EQ(group.samples, 2);
  EXPECT_EQ(group.channels, 6);
  EXPECT_EQ(group.spatial, 5);
  EXPECT_EQ(group.groups, 3);
  EXPECT_EQ(group.eps, 0.5);
}

TEST(Wrapper, HalfTypesAreNamed) {
  const std::array<std::uint16_t, 2> x = {0x3f80, 0x4040};  // 1 and 3 in bfloat16
  std::array<float, 2> y = {};
  evenkeel::forward(evenkeel::layer_norm(1, 2, 0.0), {.x = {x.data(), x.size(), EK_BF16}, .y = y});
  EXPECT_EQ(y, (std::array<float, 2>{-1, 1}));
}

TEST(Wrapper, QuantizesY) {
  const std::array<float, 2> x = {1, 3}, scale = {0.5, 0};
  std::array<unsigned char, 2> y = {};
  std::array<float, 1> row_scale = {};
  const auto problem = evenkeel::layer_norm(1, 2, 0.0);
  const evenkeel::Output codes{y.data(), y.size(), EK_I8};
  evenkeel::forward(problem, {.x = x, .y = codes, .y_scale = scale});
  EXPECT_EQ(y, (std::array<unsigned char, 2>{0xfe, 2}));
  evenkeel::forward(problem, {.x = x, .y = codes, .y_row_scale = row_scale});
  EXPECT_EQ(y, (std::array<unsigned char, 2>{0x81, 127}));
  EXPECT_EQ(row_scale[0], 1.0f / 127);
  std::vector<double> wide(1);
  const Error error =
      error_of([&] { evenkeel::forward(problem, {.x = x, .y = codes, .y_row_scale = wide}); });
  EXPECT_STREQ(error.what(), "y_row_scale must be float");
}

TEST(Wrapper, ModulatesSamples) {
  const std::array<float, 4> x = {1, 3, 3, 1}, dy = {1, 2, 3, 4};
  const std::array<float, 5> wide = {1, 2, 9, 3, 4};  // samples lie 3 apart
  std::array<float, 4> y = {}, dx = {}, dscale = {}, dshift = {};
  std::array<float, 2> mean = {}, rstd = {};
  auto problem = evenkeel::layer_norm(2, 2, 0.0);
  problem.samples = 2;
  const evenkeel::Input scale(wide, 3);
  evenkeel::forward(problem,
                    {.x = x, .y = y, .mean = mean, .rstd = rstd, .scale = scale, .shift = x});
  EXPECT_EQ(y, (std::array<float, 4>{-1, 6, 7, -4}));
  evenkeel::backward(problem, {.dy = dy,
                               .x = x,
                               .mean = mean,
                               .rstd = rstd,
                               .dx = dx,
                               .scale = scale,
                               .dscale = dscale,
                               .dshift = dshift});
  EXPECT_EQ(dscale, (std::array<float, 4>{-1, 2, 3, -4}));
  EXPECT_EQ(dshift, dy);
  const std::array<float, 4> few = {1, 2, 9, 3};
  const Error error = error_of(
      [&] { evenkeel::forward(problem, {.x = x, .y = y, .scale = evenkeel::Input(few, 3)}); });
  EXPECT_STREQ(error.what(), "scale has 4 elements; the problem needs 5");
}

TEST(Wrapper, LibraryErrorsBecomeExceptions) {
  std::vector<float> x(4), y(4);
  const Error error =
      error_of([&] { evenkeel::forward(evenkeel::layer_norm(2, 0), {.x = x, .y = y}); });
  EXPECT_EQ(error.status(), EK_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.what()).find("cols"), std::string::npos) << error.what();
  EXPECT_STREQ(error.what(), ek_last_error());
}

// Every array of a call, one element too short, is refused by its name; all together are enough.
TEST(Wrapper, ShortArraysAreRefused) {
  std::vector<float> tensor(6), parameter(3), statistic(2);
  std::vector<float> out_a(6), out_b(3), out_c(3), out_d(2), out_e(2);
  const auto problem = evenkeel::layer_norm(2, 3);

  const ForwardArgs forward = {.x = tensor,
                               .y = out_a,
                               .weight = parameter,
                               .bias = parameter,
                               .mean = out_d,
                               .rstd = out_e};
  EXPECT_NO_THROW(evenkeel::forward(problem, forward));
  const auto forward_error = [&](auto field) {
    ForwardArgs args = forward;
    --(args.*field).size;
    return std::string(error_of([&] { evenkeel::forward(problem, args); }).what());
  };
  EXPECT_EQ(forward_error(&ForwardArgs::x), "x has 5 elements; the problem needs 6");
  EXPECT_EQ(forward_error(&ForwardArgs::y), "y has 5 elements; the problem needs 6");
  EXPECT_EQ(forward_error(&ForwardArgs::weight), "weight has 2 elements; the problem needs 3");
  EXPECT_EQ(forward_error(&ForwardArgs::bias), "bias has 2 elements; the problem needs 3");
  EXPECT_EQ(forward_error(&ForwardArgs::mean), "mean has 1 elements; the problem needs 2");
  EXPECT_EQ(forward_error(&ForwardArgs::rstd), "rstd has 1 elements; the problem needs 2");

  const BackwardArgs backward = {.dy = tensor,
                                 .x = tensor,
                                 .weight = parameter,
                                 .bias = parameter,
                                 .mean = statistic,
                                 .rstd = statistic,
                                 .dx = out_a,
                                 .dweight = out_b,
                                 .dbias = out_c};
  EXPECT_NO_THROW(evenkeel::backward(problem, backward));
  const auto backward_error = [&](auto field) {
    BackwardArgs args = backward;
    --(args.*field).size;
    return std::string(error_of([&] { evenkeel::backward(problem, args); }).what());
  };
  EXPECT_EQ(backward_error(&BackwardArgs::dy), "dy has 5 elements; the problem needs 6");
  EXPECT_EQ(backward_error(&BackwardArgs::x), "x has 5 elements; the problem needs 6");
  EXPECT_EQ(backward_error(&BackwardArgs::weight), "weight has 2 elements; the problem needs 3");
  EXPECT_EQ(backward_error(&BackwardArgs::bias), "bias has 2 elements; the problem needs 3");
  EXPECT_EQ(backward_error(&BackwardArgs::mean), "mean has 1 elements; the problem needs 2");
  EXPECT_EQ(backward_error(&BackwardArgs::rstd), "rstd has 1 elements; the problem needs 2");
  EXPECT_EQ(backward_error(&BackwardArgs::dx), "dx has 5 elements; the problem needs 6");
  EXPECT_EQ(backward_error(&BackwardArgs::dweight), "dweight has 2 elements; the problem needs 3");
  EXPECT_EQ(backward_error(&BackwardArgs::dbias), "dbias has 2 elements; the problem needs 3");
}

// The last element that a strided or grouped tensor touches is the last one it must have.
TEST(Wrapper, SizesFollowStridesAndLayouts) {
  auto blocks = evenkeel::layer_norm(6, 4);
  blocks.inner_rows = 3;  // 2 blocks
  struct {
    evenkeel::Problem problem;
    std::int64_t row_stride, outer_stride;
    std::size_t needed;
  } cases[] = {
      {evenkeel::layer_norm(0, 4), 0, 0, 0},
      {evenkeel::layer_norm(3, 4), 10, 0, 24},
      {blocks, 0, 0, 24},
      {blocks, 5, 100, 114},
      {evenkeel::group_norm(2, 4, 3, 2), 0, 0, 24},
      {evenkeel::group_norm(2, 4, 3, 2), 7, 50, 74},
      {evenkeel::group_norm(2, 4, 3, 2, EK_NHWC), 0, 0, 24},
      {evenkeel::group_norm(2, 4, 3, 2, EK_NHWC), 7, 50, 68},
  };
  for (const auto& c : cases) {
    std::vector<float> x(200), y(200);
    const auto run = [&](std::size_t size) {
      evenkeel::forward(c.problem, {.x = {std::span(x).first(size), c.row_stride, c.outer_stride},
                                    .y = {y, c.row_stride, c.outer_stride}});
    };
    EXPECT_NO_THROW(run(c.needed)) << c.needed;
    if (c.needed > 0) {
      EXPECT_EQ(error_of([&] { run(c.needed - 1); }).what(),
                "x has " + std::to_string(c.needed - 1) + " elements; the problem needs " +
                    std::to_string(c.needed));
    }
  }
}

TEST(Wrapper, StatisticsHaveTheirOwnType) {
  std::vector<double> x64(4), y64(4), mean64(2);
  std::vector<float> x32(4), y32(4), mean32(2);
  const auto problem = evenkeel::layer_norm(2, 2);
  EXPECT_NO_THROW(evenkeel::forward(problem, {.x = x64, .y = y64, .mean = mean64}));
  EXPECT_STREQ(
      error_of([&] { evenkeel::forward(problem, {.x = x64, .y = y64, .mean = mean32}); }).what(),
      "mean must be double: x is");
  EXPECT_STREQ(
      error_of([&] { evenkeel::forward(problem, {.x = x32, .y = y32, .rstd = mean64}); }).what(),
      "rstd must be float: x is not double");
}

TEST(Wrapper, WorkspaceGrowsAndIsKept) {
  evenkeel::Workspace workspace;
  EXPECT_EQ(workspace.size(), 0u);
  void* const large = workspace.at_least(1000);
  EXPECT_EQ(workspace.size(), 1000u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large) % 64, 0u);
  EXPECT_EQ(workspace.at_least(10), large);
  EXPECT_EQ(workspace.size(), 1000u);
  EXPECT_NE(workspace.at_least(2000), nullptr);
  EXPECT_EQ(workspace.size(), 2000u);
}

TEST(Wrapper, ExecutionIsPassedOn) {
  std::vector<float> x = {1, 3}, y(2);
  const auto problem = evenkeel::layer_norm(1, 2);
  evenkeel::Execution execution;
  execution.backend = "reference";
  const std::string text = evenkeel::explain(problem, ForwardArgs{.x = x, .y = y}, execution);
  EXPECT_NE(text.find("reference: runs"), std::string::npos) << text;
  execution.backend = "nobody";
  EXPECT_EQ(error_of([&] { evenkeel::forward(problem, {.x = x, .y = y}, execution); }).status(),
            error_of([&] {
              evenkeel::explain(problem, ForwardArgs{.x = x, .y = y}, execution);
            }).status());
  EXPECT_NE(error_of([&] { evenkeel::forward(problem, {.x = x, .y = y}, execution); }).status(),
            EK_OK);
}

}  // namespace
