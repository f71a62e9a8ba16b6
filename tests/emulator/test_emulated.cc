// Every CUDA kernel on the host (grid.h): the case list that scripts/gpu runs under compute-sanitizer against the
// oracle, a residual bit by bit, and the emulator's own alarms.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
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

// What a sample has by itself, bit by bit: parameters as they are given, made before, and the fallback.
TEST(Emulated, ASampleDoesNotDependOnTheOthers) {
  const std::vector<Case> cases = parse_cases(R"(
layer_norm rows=150 cols=64,256,1152 samples=3 x=bf16 scale=bf16 shift=bf16 weight=none bias=none
layer_norm rows=150 cols=256 samples=3 x=f32 scale=f32 shift=f32
rms_norm rows=60 cols=4096 samples=2 x=bf16 scale=f32 shift=bf16 weight=bf16
layer_norm rows=1200 cols=130 samples=3 x=f16 scale=f16 shift=f16 activation=silu
)",
                                              "samples");
  for (const Case& c : cases) {
    SCOPED_TRACE(to_string(c));
    Problem all(c);
    ASSERT_EQ(all.forward(kCuda), "");
    ASSERT_EQ(all.save_statistics(kCuda), "");
    ASSERT_EQ(all.backward(kCuda), "");
    for (int64_t sample = 0; sample < c.samples; ++sample) {
      Case own = c;
      own.rows = c.rows / c.samples;
      own.samples = 1;
      Problem alone(own);
      auto& inputs = const_cast<Inputs&>(*alone.inputs());
      // Dense buffers: a sample's part is as long as its own buffer.
      const auto part = [&](const Buffer& whole, const Buffer& of_sample) {
        return whole.data() + static_cast<size_t>(sample) * of_sample.size();
      };
      const Inputs& from = *all.inputs();
      for (const auto& [to, whole] : {std::pair{&inputs.x, &from.x},
                                      {&inputs.dy, &from.dy},
                                      {&inputs.scale, &from.scale},
                                      {&inputs.shift, &from.shift}}) {
        std::copy_n(part(*whole, *to), to->size(), to->data());
      }
      inputs.weight.copy_from(from.weight);
      inputs.bias.copy_from(from.bias);
      ASSERT_EQ(alone.forward(kCuda), "");
      ASSERT_EQ(alone.save_statistics(kCuda), "");
      ASSERT_EQ(alone.backward(kCuda), "");
      const auto same = [&](const Buffer& of_sample, const Buffer& whole) {
        return std::equal(of_sample.data(), of_sample.data() + of_sample.size(),
                          part(whole, of_sample));
      };
      EXPECT_TRUE(same(alone.buffer(Tensor::kY), all.buffer(Tensor::kY))) << sample;
      EXPECT_TRUE(same(alone.buffer(Tensor::kDx), all.buffer(Tensor::kDx))) << sample;
      for (const Vector vector : {Vector::kDscale, Vector::kDshift})
        EXPECT_TRUE(same(alone.buffer(vector), all.buffer(vector))) << sample;
    }
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
