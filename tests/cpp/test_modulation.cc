// A scale and a shift for each sample: a norm of one sample is the plain norm with them for weight and bias; a sample's
// results are those that it has alone, bit by bit; and what goes wrong is named.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "broken_call.h"
#include "support/half.h"

namespace evenkeel::support {
namespace {

using Bytes = std::vector<unsigned char>;

Bytes bytes_of(const Buffer& buffer) { return {buffer.data(), buffer.data() + buffer.size()}; }

class Modulation : public testing::TestWithParam<Runner> {};

INSTANTIATE_TEST_SUITE_P(Backends, Modulation, testing::Values(kCpu, Runner{"cpu", 3}, kReference),
                         [](const auto& runner) {
                           return std::string(runner.param.backend) +
                                  std::to_string(runner.param.threads);
                         });

TEST_P(Modulation, OfOneSampleIsAPlainNorm) {
  for (const char* line :
       {"layer_norm rows=70 cols=129 x=f32 weight=none bias=none scale=f32 shift=f32",
        "layer_norm rows=7 cols=1000 x=bf16 weight=none bias=none scale=bf16 shift=bf16",
        "rms_norm rows=70 cols=64 x=bf16 weight=none scale=bf16 shift=f32 activation=silu",
        "layer_norm rows=2 cols=70001 x=f32 weight=none bias=none scale=f32 shift=f32"}) {
    SCOPED_TRACE(line);
    Problem modulated(parse_case(line));
    ASSERT_EQ(modulated.forward(GetParam()), "");
    ASSERT_EQ(modulated.save_statistics(GetParam()), "");
    ASSERT_EQ(modulated.backward(GetParam()), "");
    Case plain = modulated.spec();
    plain.weight = {plain.scale.dtype, true};
    plain.bias = {plain.shift.dtype, true};
    plain.dweight = plain.weight;
    plain.dbias = plain.bias;
    plain.offset = 1;
    plain.scale = plain.shift = plain.dscale = plain.dshift = SampleSpec{};
    plain.samples = 0;
    Problem norm(plain);
    auto& inputs = const_cast<Inputs&>(*norm.inputs());
    inputs.weight.copy_from(modulated.inputs()->scale);
    inputs.bias.copy_from(modulated.inputs()->shift);
    ASSERT_EQ(norm.forward(GetParam()), "");
    ASSERT_EQ(norm.save_statistics(GetParam()), "");
    ASSERT_EQ(norm.backward(GetParam()), "");
    EXPECT_TRUE(modulated.buffer(Tensor::kY) == norm.buffer(Tensor::kY));
    EXPECT_TRUE(modulated.buffer(Tensor::kDx) == norm.buffer(Tensor::kDx));
  }
}

// Calls for one sample of a problem, dense, whose outputs are in memory of their own.
struct Alone {
  Bytes y, dx, dscale, dshift, mean, rstd, workspace;

  Alone(const Problem& all, int64_t sample, const Runner& runner) {
    const Case& c = all.spec();
    ek_problem problem = all.problem();
    const int64_t rows = c.rows / c.samples;
    problem.rows = rows;
    problem.samples = 1;
    ek_execution execution = EK_EXECUTION_INIT;
    execution.backend = runner.backend;
    execution.threads = runner.threads;
    const auto part = [&](const ek_tensor& t, int64_t elements) {
      ek_tensor moved = t;
      const auto size = static_cast<int64_t>(size_of(static_cast<ek_dtype>(t.dtype)));
      if (t.data != nullptr) moved.data = static_cast<char*>(t.data) + sample * elements * size;
      return moved;
    };
    const auto own = [&](ek_tensor& t, Bytes& bytes, int64_t elements) {
      bytes.assign(static_cast<size_t>(elements) * size_of(static_cast<ek_dtype>(t.dtype)), 0);
      t.data = bytes.data();
    };
    const auto run = [&](auto prepare, const auto& args) {
      ek_prepared prepared;
      ASSERT_EQ(prepare(&problem, &args, &execution, &prepared), EK_OK) << ek_last_error();
      workspace.assign(prepared.workspace_size, 0);
      ASSERT_EQ(ek_run(&prepared, workspace.data(), workspace.size()), EK_OK) << ek_last_error();
    };
    const int64_t elements = rows * c.cols;
    const size_t statistics = static_cast<size_t>(rows) * (c.x.dtype == EK_F64 ? 8 : 4);
    mean.resize(statistics), rstd.resize(statistics);
    ek_forward_args forward = all.forward_args();
    forward.x = part(forward.x, elements);
    forward.scale = part(forward.scale, c.cols);
    forward.shift = part(forward.shift, c.cols);
    own(forward.y, y, elements);
    forward.mean = c.op == EK_RMS_NORM ? nullptr : mean.data();
    forward.rstd = rstd.data();
    run(ek_prepare_forward, forward);
    ek_backward_args backward = all.backward_args();
    backward.dy = part(backward.dy, elements);
    backward.x = part(backward.x, elements);
    backward.scale = part(backward.scale, c.cols);
    backward.shift = part(backward.shift, c.cols);
    backward.mean = forward.mean;
    backward.rstd = forward.rstd;
    backward.dweight.data = backward.dbias.data = nullptr;
    own(backward.dx, dx, elements);
    own(backward.dscale, dscale, c.cols);
    own(backward.dshift, dshift, c.cols);
    run(ek_prepare_backward, backward);
  }
};

TEST_P(Modulation, ASampleDoesNotDependOnTheOthers) {
  for (const char* line :
       {"layer_norm rows=21 cols=129 samples=3 x=f32 scale=f32 shift=f32",
        "layer_norm rows=600 cols=64 samples=6 x=bf16 scale=bf16 shift=f32 weight=none bias=none",
        "rms_norm rows=1300 cols=40 samples=2 x=f32 scale=f32 shift=bf16 activation=gelu",
        "rms_norm rows=9 cols=1000 samples=9 x=f16 scale=f16 shift=none dshift=f32",
        "layer_norm rows=4 cols=40001 samples=2 x=f32 scale=f32 shift=f32"}) {
    SCOPED_TRACE(line);
    Problem all(parse_case(line));
    ASSERT_EQ(all.forward(GetParam()), "");
    ASSERT_EQ(all.save_statistics(GetParam()), "");
    ASSERT_EQ(all.backward(GetParam()), "");
    for (int64_t sample = 0; sample < all.spec().samples; ++sample) {
      const Alone alone(all, sample, GetParam());
      const auto same = [&](const Bytes& own, const Buffer& buffer) {
        const Bytes bytes = bytes_of(buffer);
        const auto begin = bytes.begin() + sample * static_cast<int64_t>(own.size());
        return Bytes(begin, begin + static_cast<int64_t>(own.size())) == own;
      };
      EXPECT_TRUE(same(alone.y, all.buffer(Tensor::kY))) << sample;
      EXPECT_TRUE(same(alone.dx, all.buffer(Tensor::kDx))) << sample;
      EXPECT_TRUE(same(alone.dscale, all.buffer(Vector::kDscale))) << sample;
      EXPECT_TRUE(same(alone.dshift, all.buffer(Vector::kDshift))) << sample;
    }
  }
}

// Chunks of one wide array: shift, scale and their gradients lie between each other.
TEST_P(Modulation, ReadsAndWritesChunksOfOneArray) {
  constexpr int64_t kSamples = 3, kRows = 6, kCols = 5;
  std::vector<float> x(kRows * kCols), y(x.size()), dx(x.size()), mean(kRows), rstd(kRows);
  std::vector<float> wide(kSamples * 2 * kCols), gradients(wide.size(), 7);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * i % 11);
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<float>(i % 4);
  ek_problem problem = EK_PROBLEM_INIT;
  problem.op = EK_LAYER_NORM;
  problem.rows = kRows;
  problem.cols = kCols;
  problem.samples = kSamples;
  ek_execution execution = EK_EXECUTION_INIT;
  execution.backend = GetParam().backend;
  std::vector<char> workspace(1 << 20);
  execution.workspace = workspace.data();
  execution.workspace_size = workspace.size();
  const auto chunk = [&](std::vector<float>& of, int64_t at) {
    return ek_tensor{of.data() + at * kCols, 2 * kCols, 0, EK_F32, 0};
  };
  ek_forward_args forward = EK_FORWARD_ARGS_INIT;
  forward.x.data = x.data();
  forward.y.data = y.data();
  forward.mean = mean.data();
  forward.rstd = rstd.data();
  forward.shift = chunk(wide, 0);
  forward.scale = chunk(wide, 1);
  ASSERT_EQ(ek_forward(&problem, &forward, &execution), EK_OK) << ek_last_error();
  ek_backward_args backward = EK_BACKWARD_ARGS_INIT;
  backward.dy.data = x.data();
  backward.x.data = x.data();
  backward.mean = mean.data();
  backward.rstd = rstd.data();
  backward.shift = forward.shift;
  backward.scale = forward.scale;
  backward.dx.data = dx.data();
  backward.dshift = chunk(gradients, 0);
  backward.dscale = chunk(gradients, 1);
  ASSERT_EQ(ek_backward(&problem, &backward, &execution), EK_OK) << ek_last_error();
  for (int64_t sample = 0; sample < kSamples; ++sample) {
    for (int64_t col = 0; col < kCols; ++col) {
      double dscale = 0, dshift = 0;
      for (int64_t row = 2 * sample; row < 2 * sample + 2; ++row) {
        const auto at = static_cast<size_t>(row * kCols + col), r = static_cast<size_t>(row);
        const double normalized = (x[at] - mean[r]) * rstd[r];
        const float* const first = wide.data() + sample * 2 * kCols;
        EXPECT_NEAR(y[at], normalized * (1 + first[kCols + col]) + first[col], 1e-5);
        dscale += x[at] * normalized;
        dshift += x[at];
      }
      const float* const found = gradients.data() + sample * 2 * kCols + col;
      EXPECT_NEAR(found[0], dshift, 1e-5);
      EXPECT_NEAR(found[kCols], dscale, 1e-5);
    }
  }
}

// Samples without rows have gradients, too: zeros.
TEST_P(Modulation, OfNoRowsHasGradientsOfZero) {
  Problem problem(parse_case("layer_norm rows=0 cols=7 samples=3 scale=f32 shift=bf16"));
  ASSERT_EQ(problem.backward(GetParam()), "");
  EXPECT_EQ(problem.read(Vector::kDscale), std::vector<double>(21, 0));
  EXPECT_EQ(problem.read(Vector::kDshift), std::vector<double>(21, 0));
}

TEST(ModulationInWords, IsExplained) {
  Problem problem(parse_case("layer_norm rows=6 cols=8 samples=3 scale=f32 shift=f32"));
  ek_execution execution = EK_EXECUTION_INIT;
  char text[1024];
  ASSERT_EQ(ek_explain_forward(&problem.problem(), &problem.forward_args(), &execution, nullptr,
                               text, sizeof text),
            EK_OK);
  EXPECT_NE(std::string(text).find("modulated by 3 samples"), std::string::npos) << text;
}

constexpr char kModulated[] = "layer_norm rows=6 cols=8 samples=3 scale=f32 shift=f32";

TEST(Errors, OfAScaleAndAShift) {
  const Broken<ek_forward_args> forward[] = {
      {"scale of group norm",
       kGroups,
       [](Forward& c) { c.args.scale = c.args.x; },
       {"scale", "group norm takes none", "NULL"}},
      {"no samples",
       kModulated,
       [](Forward& c) { c.problem.samples = 0; },
       {"problem.samples is 0", "scale", "at least 1", "problem.rows = 6"}},
      {"samples of no whole number of rows",
       kModulated,
       [](Forward& c) { c.problem.samples = 4; },
       {"problem.samples is 4", "scale", "divide problem.rows = 6"}},
      {"more samples than rows, beside a shift",
       kModulated,
       [](Forward& c) {
         c.problem.samples = 7;
         c.args.scale.data = nullptr;
       },
       {"problem.samples is 7", "shift", "divide"}},
      {"scale dtype",
       kModulated,
       [](Forward& c) { c.args.scale.dtype = EK_I8; },
       {"scale.dtype", "6", "EK_BF16"}},
      {"shift reserved",
       kModulated,
       [](Forward& c) { c.args.shift.reserved = 5; },
       {"shift.reserved", "5", "0"}},
      {"scale stride",
       kModulated,
       [](Forward& c) { c.args.scale.row_stride = 7; },
       {"scale.row_stride is 7", "0 (dense)", "problem.cols = 8"}},
      {"shift stride",
       kModulated,
       [](Forward& c) { c.args.shift.row_stride = -8; },
       {"shift.row_stride is -8", "0 (dense)", "problem.cols = 8"}},
      {"scale beyond 64 bits",
       kModulated,
       [](Forward& c) { c.args.scale.row_stride = INT64_MAX / 4; },
       {"scale.row_stride", "64 bits"}},
      {"scale with two strides",
       kModulated,
       [](Forward& c) { c.args.scale.outer_stride = 16; },
       {"scale.outer_stride is 16", "must be 0"}},
      {"y on the scale",
       kModulated,
       [](Forward& c) { c.args.y.data = c.args.scale.data; },
       {"y", "scale", "overlap"}},
      {"workspace is the shift",
       kModulated,
       [](Forward& c) { c.execution.workspace = c.args.shift.data; },
       {"execution.workspace", "shift", "overlap"},
       EK_INVALID_ARGUMENT,
       true},
  };
  for (const auto& broken : forward) check(broken, false);
  const Broken<ek_backward_args> backward[] = {
      {"dscale of group norm",
       kGroups,
       [](Backward& c) { c.args.dscale = c.args.dx; },
       {"dscale", "group norm takes none", "NULL"}},
      {"samples beside a dshift alone",
       kRows,
       [](Backward& c) {
         c.problem.samples = 2;
         c.args.dshift = c.args.dx;
         c.args.dx.data = nullptr;
       },
       {"problem.samples is 2", "dshift", "divide problem.rows = 3"}},
      {"dscale stride",
       kModulated,
       [](Backward& c) { c.args.dscale.row_stride = 1; },
       {"dscale.row_stride is 1", "problem.cols = 8"}},
      {"dscale is dshift",
       kModulated,
       [](Backward& c) { c.args.dscale.data = c.args.dshift.data; },
       {"dscale", "dshift", "overlap"}},
      {"dscale is the scale",
       kModulated,
       [](Backward& c) { c.args.dscale.data = c.args.scale.data; },
       {"dscale", "scale", "overlap"}},
      {"dshift reaches into dscale",
       kModulated,
       [](Backward& c) {
         c.args.dshift.data = static_cast<char*>(c.args.dscale.data) + 4;
         c.args.dshift.row_stride = c.args.dscale.row_stride = 8;
       },
       {"dscale", "dshift", "overlap"}},
      {"no gradient at all",
       kModulated,
       [](Backward& c) {
         c.args.dx.data = c.args.dweight.data = c.args.dbias.data = nullptr;
         c.args.dscale.data = c.args.dshift.data = nullptr;
       },
       {"dx", "dscale", "dshift", "NULL"}},
  };
  for (const auto& broken : backward) check(broken, true);
}

}  // namespace
}  // namespace evenkeel::support
