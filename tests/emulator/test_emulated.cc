// Every CUDA kernel on the host (grid.h): the case list that scripts/gpu runs under compute-sanitizer against the
// oracle, a residual bit by bit, and the emulator's own alarms.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/runtime/kernel.h"
#include "grid.h"
#include "support/compare.h"

namespace evenkeel::support {
namespace {

constexpr Runner kCuda{"cuda", 1, nullptr, EK_CUDA};

// Three SMs take longer for many rows, and the host for many elements: cases that only have more of them.
bool is_small(const Case& c) { return element_count(c) <= 1 << 21; }

TEST(Emulated, TiersAgreeWithTheReference) {
  int checked = 0, large = 0;
  for (const Case& c : read_cases(std::string(EVENKEEL_CASES_DIR) + "/gpu_tiers.txt")) {
    if (!is_small(c)) {
      ++large;
      continue;
    }
    ++checked;
    EXPECT_EQ(check_case(c, kCuda), "");
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(checked, 300);
  std::printf("%d cases on the host, %d too large for it\n", checked, large);
}

// y, sum and statistics are those of an addition and a norm, in the kernel or before it.
TEST(Emulated, AResidualIsAnAdditionAndANorm) {
  const std::vector<Case> cases = parse_cases(R"(
layer_norm rows=9 cols=64,129,1000,4096 x=f32,f16,bf16 residual=f32,f16,bf16 y=f32,bf16
rms_norm rows=9 cols=64,129,1024,4096 x=f16,bf16 residual=f32,f16,bf16 sum=f32,bf16 weight=bf16 casting=none,llama
rms_norm rows=3 cols=40000,40001 x=bf16 residual=f32,bf16 weight=bf16
layer_norm rows=9 cols=1000 x=bf16 residual=f32,bf16 sum=f64 activation=silu
)",
                                              "residual");
  for (const Case& c : cases) {
    SCOPED_TRACE(to_string(c));
    Problem fused(c);
    Case alone = c;
    alone.x = normalized(c);
    alone.residual = alone.sum = kAbsent;
    Problem norm(alone);
    auto& inputs = const_cast<Inputs&>(*norm.inputs());
    inputs.x.copy_from(fused.inputs()->sum);
    inputs.weight.copy_from(fused.inputs()->weight);
    inputs.bias.copy_from(fused.inputs()->bias);
    ASSERT_EQ(fused.forward(kCuda), "");
    ASSERT_EQ(norm.forward(kCuda), "");
    EXPECT_TRUE(fused.buffer(Tensor::kSum) == norm.buffer(Tensor::kX));
    EXPECT_TRUE(fused.buffer(Tensor::kY) == norm.buffer(Tensor::kY));
    EXPECT_TRUE(fused.buffer(Vector::kMean) == norm.buffer(Vector::kMean));
    EXPECT_TRUE(fused.buffer(Vector::kRstd) == norm.buffer(Vector::kRstd));
  }
}

TEST(EmulatorDeathTest, AWriteBehindSharedMemoryIsFound) {
  EXPECT_DEATH(emulator::run({.threads = 32, .shared = 128},
                             [] { emulator::current->own->shared[128] = 0; }),
               "behind its shared memory");
}

TEST(EmulatorDeathTest, ThreadsThatWaitForeverAreFound) {
  EXPECT_DEATH(emulator::run({.threads = 2},
                             [] {
                               if (emulator::current->thread.x == 0)
                                 emulator::wait(emulator::current->own->barrier, 2);
                             }),
               "forever");
}

}  // namespace
}  // namespace evenkeel::support
