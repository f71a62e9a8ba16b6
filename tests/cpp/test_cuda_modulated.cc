// How a row norm with a scale and a shift of each sample will run on a GPU (src/cuda/plan.h): with the split of the plain
// norm, by parameters that are read where they lie or made before; backward with blocks of which none has rows of two
// samples. On chips that need not be there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

#include "cuda/operands.h"
#include "cuda/plan.h"
#include "cuda_devices.h"
#include "cuda_kinds.h"
#include "support/cases.h"

namespace evenkeel::cuda {
namespace {

// A norm without parameters of its own, as in AdaLN.
Call modulated_call(Pass pass, int64_t samples, int64_t rows, int64_t cols, Dtype x, Dtype other,
                    Dtype of_samples) {
  Call call = make_call(pass, samples * rows, cols, x, other);
  call.weight = call.bias = call.dweight = call.dbias = {};
  call.samples = samples;
  call.scale = {nowhere(10), of_samples, 6 * cols, 0};
  call.shift = {nowhere(11), of_samples, 6 * cols, 0};
  if (pass == Pass::kBackward) {
    call.dscale = {nowhere(12), of_samples, 6 * cols, 0};
    call.dshift = {nowhere(13), of_samples, 6 * cols, 0};
  }
  return call;
}

// Modulated x's that are no smaller than y or dy have kernels.
constexpr Dtype kPairs[][2] = {{Dtype::kBF16, Dtype::kBF16},
                               {Dtype::kF16, Dtype::kF16},
                               {Dtype::kF32, Dtype::kF32},
                               {Dtype::kF32, Dtype::kF16},
                               {Dtype::kF32, Dtype::kBF16}};

template <typename Body>
void for_calls(Pass pass, const Body& body) {
  for (const NamedDevice& on : kDevices) {
    for (const auto& [x, other] : kPairs) {
      for (const int64_t cols : {64, 128, 512, 768, 1000, 1024, 1152, 3072, 4096, 8192, 16384}) {
        for (const Dtype of_samples : {Dtype::kF32, x}) {
          SCOPED_TRACE(std::string(on.name) + " " + name_of(x) + " " + name_of(other) + ", cols " +
                       std::to_string(cols));
          body(on.device, modulated_call(pass, 8, 256, cols, x, other, of_samples));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(CudaModulated, ForwardReadsParametersInThePlainNormsSplit) {
  for_calls(Pass::kForward, [](const DeviceProperties& device, const Call& call) {
    const Plan plan = make_plan(call, device);
    EXPECT_TRUE(plan.modulated);
    EXPECT_EQ(plan.parameters_made, nullptr);
    EXPECT_EQ(plan.workspace, 0);
    Call plain = call;
    plain.scale = plain.shift = {};
    plain.samples = 1;
    const Plan alone = make_plan(plain, device);
    EXPECT_TRUE(plan.tile == alone.tile);
    EXPECT_EQ(plan.runtime_dtype != nullptr, alone.tile.multi_pass());
    if (plan.runtime_dtype) return;
    const ForwardPolicy own = forward_policies_of(static_cast<int>(size_of(call.x.dtype)),
                                                  static_cast<int>(size_of(call.y.dtype)))
                                  .entries[plan.policy];
    EXPECT_TRUE(own.modulated && own.terms.weight_offset && !own.residual);
  });
}

TEST(CudaModulated, BackwardHasBlocksForEachSample) {
  for_calls(Pass::kBackward, [](const DeviceProperties& device, const Call& call) {
    const Plan plan = make_plan(call, device);
    EXPECT_TRUE(plan.modulated && plan.products && plan.gradients);
    EXPECT_EQ(plan.parameters_made, nullptr);
    EXPECT_GE(plan.sample_blocks, 1);
    EXPECT_EQ(plan.partials, call.samples * plan.sample_blocks);
    EXPECT_EQ(plan.workspace, 2 * plan.partials * call.width * 4 + 2 * kWorkspaceAlignment);
    EXPECT_EQ(plan.runtime_dtype != nullptr, plan.tile.multi_pass());
    if (plan.runtime_dtype) return;
    EXPECT_EQ(plan.groups, plan.partials);
    const BackwardPolicy own = backward_policies_of(static_cast<int>(size_of(call.x.dtype)),
                                                    static_cast<int>(size_of(call.dy.dtype)))
                                   .entries[plan.policy];
    EXPECT_TRUE(own.modulated && !own.residual);
    // A sample alone, and one of thousands, have the same blocks: their sums have the same order.
    for (const int64_t samples : {1, 5000}) {
      Call other = modulated_call(Pass::kBackward, samples, 256, call.width, call.x.dtype,
                                  call.dy.dtype, call.scale.dtype);
      const Plan its = make_plan(other, device);
      EXPECT_EQ(its.sample_blocks, plan.sample_blocks);
      EXPECT_TRUE(its.tile == plan.tile);
      EXPECT_EQ(its.policy, plan.policy);
    }
  });
}

TEST(CudaModulated, ParametersAreMadeWhereNoKernelReadsThem) {
  const auto why = [](Pass pass, const auto& change) {
    Call call = modulated_call(pass, 8, 256, 1024, Dtype::kBF16, Dtype::kBF16, Dtype::kBF16);
    change(call);
    const Plan plan = make_plan(call, kH200.device);
    EXPECT_FALSE(plan.runtime_dtype);
    EXPECT_GE(plan.workspace, call.samples * call.width * 4);
    return std::string(plan.parameters_made ? plan.parameters_made : "");
  };
  constexpr char kBeside[] = "there is a weight or a bias beside them";
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_EQ(why(pass, [](Call& c) { c.weight = {nowhere(2), Dtype::kF32}; }), kBeside);
    EXPECT_EQ(why(pass, [](Call& c) { c.bias = {nowhere(3), Dtype::kF32}; }), kBeside);
    EXPECT_EQ(why(pass, [](Call& c) { c.scale.row_stride = 1027; }),
              "rows are not aligned beside a scale or a shift");
    EXPECT_EQ(why(pass, [](Call& c) { c.scale.data += 1; }), "an address cuts elements apart");
  }
  EXPECT_EQ(why(Pass::kForward, [](Call& c) { c.shift.dtype = Dtype::kF32; }),
            "weight and bias have different types");
  EXPECT_EQ(why(Pass::kForward, [](Call& c) { c.scale.dtype = c.shift.dtype = Dtype::kF16; }),
            "a parameter is neither f32 nor of the type of x, y or dy");
}

TEST(CudaModulated, TheFallbackSaysWhy) {
  const auto why = [](Pass pass, const auto& change) {
    Call call = modulated_call(pass, 8, 256, 1024, Dtype::kBF16, Dtype::kBF16, Dtype::kBF16);
    change(call);
    const Plan plan = make_plan(call, kH200.device);
    EXPECT_TRUE(plan.tile.multi_pass() && plan.modulated);
    return std::string(plan.runtime_dtype ? plan.runtime_dtype : "");
  };
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_EQ(why(pass, [](Call& c) { c.activation = EK_ACTIVATION_SILU; }),
              "an activation or casting order beside a scale or a shift");
    EXPECT_EQ(why(pass, [](Call& c) { c.x.data += 2; }),
              "rows are not aligned beside a scale or a shift");
    EXPECT_EQ(why(pass, [](Call& c) { c.compute = Dtype::kF64; }), "arithmetic is in f64");
  }
  EXPECT_EQ(why(Pass::kBackward, [](Call& c) { c.dsum = c.dy; }),
            "a gradient of the residual beside a scale or a shift");
}

// More blocks than a grid has go to the fallback, whose blocks take several chunks.
TEST(CudaModulated, AnyNumberOfSamplesFitsAGrid) {
  Call call = modulated_call(Pass::kBackward, int64_t{1} << 31, 1, 8, Dtype::kBF16, Dtype::kBF16,
                             Dtype::kBF16);
  const Plan plan = make_plan(call, kH200.device);
  EXPECT_TRUE(plan.tile.multi_pass());
  EXPECT_LE(plan.groups, kMostBlocks);
}

TEST(CudaModulated, AResidualIsAddedBefore) {
  Call call =
      modulated_call(Pass::kForward, 8, 256, 1024, Dtype::kBF16, Dtype::kBF16, Dtype::kBF16);
  call.weight = {nowhere(2), Dtype::kF32};
  call.residual = call.x;
  call.sum.dtype = Dtype::kBF16;
  const Plan plan = make_plan(call, kH200.device);
  EXPECT_STREQ(plan.added_first, "no kernel with a residual is compiled for this split");
  // The sum lies behind what the norm needs.
  EXPECT_GE(plan.sum_at, plan.biases_at + call.samples * call.width * 4);
  EXPECT_GE(plan.workspace, plan.sum_at + call.elements() * 2);
}

// Each kernel that is modulated, of each pair of dtypes, is run by a line of gpu_tiers.txt on an H200.
TEST(CudaModulated, EveryKernelIsTriedOnAGpu) {
  std::set<std::string> tried;
  for (const support::Case& c :
       support::read_cases(std::string(EVENKEEL_CASES_DIR) + "/gpu_tiers.txt")) {
    if (!modulates(c) || c.rows == 0 || c.residual.present || c.misalign != 0 ||
        c.inner_rows != 0 || c.activation != EK_ACTIVATION_NONE || c.casting != EK_CASTING_NONE ||
        quantizes(c))
      continue;
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      if (!(pass == Pass::kForward ? c.forward : c.backward)) continue;
      if (support::computes_in_f64(c, pass == Pass::kBackward)) continue;
      const auto other = static_cast<Dtype>(pass == Pass::kForward ? c.y.dtype : c.dy.dtype);
      Call call =
          modulated_call(pass, c.samples, c.rows / c.samples, c.cols, static_cast<Dtype>(c.x.dtype),
                         other, static_cast<Dtype>(c.scale.dtype));
      if (c.weight.present) call.weight = {nowhere(2), static_cast<Dtype>(c.weight.dtype)};
      const Plan plan = make_plan(call, kH200.device);
      if (!plan.runtime_dtype) tried.insert(kernel_name(pass, call.x.dtype, other, plan.policy));
    }
  }
  for (const auto& [x, other] : kPairs) {
    const auto x_size = static_cast<int>(size_of(x)), size = static_cast<int>(size_of(other));
    const auto expect = [&, x = x, o = other](Pass pass, const auto& table) {
      for (int i = 0; i < table.count; ++i) {
        const auto& policy = table.entries[i];
        if (!policy.modulated) continue;
        EXPECT_TRUE(tried.count(kernel_name(pass, x, o, i)))
            << kernel_name(pass, x, o, i) << ": scope " << static_cast<int>(policy.scope)
            << ", lanes " << policy.lanes << ", elements " << policy.elements;
      }
    };
    expect(Pass::kForward, forward_policies_of(x_size, size));
    expect(Pass::kBackward, backward_policies_of(x_size, size));
  }
}

}  // namespace
}  // namespace evenkeel::cuda
