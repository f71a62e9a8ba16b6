// Memory: what calls in place give, what strided outputs leave alone, how large the workspace is.
//
// Guards, gaps and the exact workspace size are checked by every run of a Problem, in all suites;
// here is what takes more than one run or a special arrangement.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "support/problem.h"

namespace evenkeel::support {
namespace {

class InPlaceRun : public testing::TestWithParam<Case> {};

TEST_P(InPlaceRun, GivesTheSameBits) {
  Case apart = GetParam();
  Problem expected(apart);
  ASSERT_EQ(expected.forward(kCpu), "");
  ASSERT_EQ(expected.save_statistics(kCpu), "");
  ASSERT_EQ(expected.backward(kCpu), "");
  for (const InPlace in_place : {InPlace::kDy, InPlace::kX}) {
    Case c = apart;
    c.in_place = in_place;
    Problem problem(c, expected.inputs());
    ASSERT_EQ(problem.forward(kCpu), "");
    EXPECT_TRUE(problem.buffer(Tensor::kY) == expected.buffer(Tensor::kY));
    EXPECT_TRUE(problem.buffer(Vector::kRstd) == expected.buffer(Vector::kRstd));
    problem.take_statistics(expected);
    ASSERT_EQ(problem.backward(kCpu), "");
    EXPECT_TRUE(problem.buffer(Tensor::kDx) == expected.buffer(Tensor::kDx));
    EXPECT_TRUE(problem.buffer(Vector::kDweight) == expected.buffer(Vector::kDweight));
    EXPECT_TRUE(problem.buffer(Vector::kDbias) == expected.buffer(Vector::kDbias));
  }
}

INSTANTIATE_TEST_SUITE_P(Memory, InPlaceRun,
                         testing::ValuesIn(parse_cases(R"(
layer_norm rows=70 cols=1,7,64,1000,5000 x=f32,bf16,f64
layer_norm rows=3 cols=100000 x=f32,bf16
layer_norm rows=20 cols=65 x=bf16 activation=silu
rms_norm rows=70 cols=7,129,5000 x=f32,f16
group_norm samples=3 channels=12 spatial=49,3000 groups=3 layout=nchw,nhwc x=f32,bf16
group_norm samples=1 channels=4 spatial=60001 groups=1 layout=nchw,nhwc x=f32 activation=silu
)",
                                                       "in place")));

class InputsOfARun : public testing::TestWithParam<Case> {};

TEST_P(InputsOfARun, AreOnlyRead) {
  Problem problem(GetParam());
  const auto bytes = [&] {
    std::string all;
    for (const Buffer* buffer : {&problem.inputs()->x, &problem.inputs()->dy,
                                 &problem.inputs()->weight, &problem.inputs()->bias}) {
      all.append(reinterpret_cast<const char*>(buffer->data()), buffer->size());
    }
    return all;
  };
  const std::string before = bytes();
  ASSERT_EQ(problem.forward(kCpu), "");
  ASSERT_EQ(problem.save_statistics(kCpu), "");
  ASSERT_EQ(problem.backward(kCpu), "");
  EXPECT_TRUE(bytes() == before);
}

INSTANTIATE_TEST_SUITE_P(Memory, InputsOfARun,
                         testing::ValuesIn(parse_cases(R"(
layer_norm rows=40 cols=65 x=f32,bf16 x_row_stride=70 dy_row_stride=66
rms_norm rows=40 cols=5000 x=f16 casting=llama
group_norm samples=2 channels=12 spatial=49 groups=3 layout=nchw,nhwc x=f32,bf16
)",
                                                       "inputs")));

// x and y may be two column slices of one wider tensor: their rows interleave without touching.
TEST(Memory, InterleavedSlicesAreApart) {
  constexpr int64_t kRows = 5, kCols = 33, kWide = 2 * kCols + 1;
  Problem expected(parse_case("layer_norm rows=5 cols=33"));
  ASSERT_EQ(expected.forward(kCpu), "");
  std::vector<float> wide(kRows * kWide, -1);
  for (int64_t row = 0; row < kRows; ++row) {
    std::memcpy(wide.data() + row * kWide, expected.inputs()->x.data() + row * kCols * 4,
                kCols * 4);
  }
  ek_forward_args args = expected.forward_args();
  args.x.data = wide.data();
  args.y.data = wide.data() + kCols;
  args.x.row_stride = args.y.row_stride = kWide;
  ek_execution execution;
  ASSERT_EQ(expected.prepare(kCpu, false, &execution), "");
  ASSERT_EQ(ek_forward(&expected.problem(), &args, &execution), EK_OK) << ek_last_error();
  for (int64_t row = 0; row < kRows; ++row) {
    const float* start = wide.data() + row * kWide;
    EXPECT_EQ(std::memcmp(start, expected.inputs()->x.data() + row * kCols * 4, kCols * 4), 0);
    EXPECT_EQ(
        std::memcmp(start + kCols, expected.buffer(Tensor::kY).data() + row * kCols * 4, kCols * 4),
        0);
    EXPECT_EQ(start[kWide - 1], -1);
  }
}

// --- The workspace
// --------------------------------------------------------------------------------

// Addresses far from each other that nothing lies at: a query reads structs only.
void* nowhere(uintptr_t index) { return reinterpret_cast<void*>(index << 44); }

size_t queried(Case c, int64_t items, bool backward, int threads) {
  (c.op == EK_GROUP_NORM ? c.samples : c.rows) = items;
  const ek_problem problem = problem_of(c);
  ek_execution execution = EK_EXECUTION_INIT;
  execution.threads = threads;
  size_t bytes = SIZE_MAX;
  const auto tensor = [&](uintptr_t index) {
    return ek_tensor{nowhere(index), 0, 0, c.x.dtype, 0};
  };
  const auto vector = [&](uintptr_t index) { return ek_vector{nowhere(index), EK_F32, 0}; };
  ek_status status;
  if (backward) {
    ek_backward_args args = EK_BACKWARD_ARGS_INIT;
    args.dy = tensor(1);
    args.x = tensor(2);
    args.dx = tensor(3);
    args.weight = vector(4);
    args.dweight = vector(5);
    args.dbias = vector(6);
    args.mean = c.op == EK_RMS_NORM ? nullptr : nowhere(7);
    args.rstd = nowhere(8);
    status = ek_backward_workspace(&problem, &args, &execution, &bytes);
  } else {
    ek_forward_args args = EK_FORWARD_ARGS_INIT;
    args.x = tensor(1);
    args.y = tensor(2);
    args.weight = vector(3);
    status = ek_forward_workspace(&problem, &args, &execution, &bytes);
  }
  EXPECT_EQ(status, EK_OK) << ek_last_error();
  return bytes;
}

class Workspace : public testing::TestWithParam<Case> {};

// Rows are summed in parts of whole rows, so the number of parts varies a little. Narrow rows have
// the most of them, and reach that number at some thousand rows.
TEST_P(Workspace, DoesNotGrowWithTheNumberOfRows) {
  for (const bool backward : {false, true}) {
    for (const int threads : {1, 2, 16}) {
      const size_t some = queried(GetParam(), 100000, backward, threads);
      for (const int64_t rows : {1000000, 100000000})
        EXPECT_LE(queried(GetParam(), rows, backward, threads), some + some / 16) << rows;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Memory, Workspace,
                         testing::ValuesIn(parse_cases(R"(
layer_norm rows=1 cols=8,1024,20001 x=f32,bf16
rms_norm rows=1 cols=8,1024 x=f32
group_norm samples=1 channels=64 spatial=64 groups=8 layout=nchw,nhwc x=f32,bf16
)",
                                                       "workspace")));

}  // namespace

void PrintTo(const Case& c, std::ostream* out) { *out << to_string(c); }

}  // namespace evenkeel::support
