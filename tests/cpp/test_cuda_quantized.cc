// How a row norm whose y has 8 bits will run on a GPU (src/cuda/plan.h): with the split of the norm whose y is float32,
// so that it is quantized from the same bits, in that kernel or behind it. On chips that need not be there.
#include <gtest/gtest.h>

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

constexpr int64_t kRows = 1000;

Call quantized_call(int64_t cols, Dtype x, bool residual = false) {
  Call call = make_call(Pass::kForward, kRows, cols, x, Dtype::kF8E4M3);
  call.y_row_scale = reinterpret_cast<float*>(nowhere(12));
  if (residual) {
    call.residual = {nowhere(10), x, cols, kRows * cols};
    call.sum = {nowhere(11), x, cols, kRows * cols};
  }
  return call;
}

TEST(CudaQuantized, HasTheSplitOfAFloat32Y) {
  int64_t joined = 0;
  for (const NamedDevice& on : kDevices) {
    for (const Dtype x : {Dtype::kBF16, Dtype::kF16, Dtype::kF32}) {
      for (const int64_t cols : {8, 64, 100, 512, 1000, 3001, 4096, 8192, 16384, 65536, 262144}) {
        for (const bool residual : {false, true}) {
          SCOPED_TRACE(std::string(on.name) + " " + name_of(x) + ", cols " + std::to_string(cols));
          const Call call = quantized_call(cols, x, residual);
          const Call norm = norm_in_f32(call, nullptr);
          const Plan plan = make_plan(call, on.device);
          const Plan alone = make_plan(residual ? norm_of_sum(norm, nullptr) : norm, on.device);
          EXPECT_TRUE(plan.tile == alone.tile);
          EXPECT_EQ(plan.aligned, alone.aligned);
          EXPECT_EQ(plan.quantizes, plan.quantized_last == nullptr);
          const bool held = x != Dtype::kF32 && cols % 8 == 0 && !alone.tile.multi_pass();
          EXPECT_EQ(plan.quantizes, held) << (plan.quantized_last ? plan.quantized_last : "");
          EXPECT_EQ(plan.workspace == 0, held);
          EXPECT_LE(plan.shared, on.device.shared_bytes);
          if (!held) {
            EXPECT_GE(plan.workspace, plan.y_at + kRows * cols * 4);
            continue;
          }
          ++joined;
          const ForwardPolicy& own = forward_policies_of(2, 1).entries[plan.policy];
          EXPECT_TRUE(own.quantizes());
          EXPECT_EQ(own.residual, residual);
          EXPECT_EQ(own.elements, plan.tile.elements);
        }
      }
    }
  }
  EXPECT_GT(joined, 80);
}

TEST(CudaQuantized, SaysWhyItIsQuantizedLast) {
  const auto why = [](const auto& change, Dtype x = Dtype::kBF16) {
    Call call = quantized_call(4096, x, true);
    change(call);
    const Plan plan = make_plan(call, kH200.device);
    EXPECT_FALSE(plan.quantizes);
    return std::string(plan.quantized_last ? plan.quantized_last : "");
  };
  EXPECT_EQ(why([](Call&) {}, Dtype::kF32), "no kernel for x of f32 quantizes");
  EXPECT_EQ(why([](Call& c) { c.y.data += 4; }), "rows of y are not aligned");
  EXPECT_EQ(why([](Call& c) { c.y.row_stride = 4097; }), "rows of y are not aligned");
  EXPECT_EQ(why([](Call& c) { c.x.data += 2; }), "rows of x or residual are not aligned");
  EXPECT_EQ(why([](Call& c) { c.residual.row_stride = 4097; }),
            "rows of x or residual are not aligned");
  EXPECT_EQ(why([](Call& c) { c.residual.dtype = Dtype::kF32; }),
            "x, residual and sum have different types");
  EXPECT_EQ(why([](Call& c) { c.activation = EK_ACTIVATION_SILU; }),
            "rows are read again in every pass");
  EXPECT_EQ(why([](Call& c) {
              c.y_row_scale = reinterpret_cast<float*>(reinterpret_cast<char*>(c.y_row_scale) + 1);
            }),
            "an address cuts elements apart");
}

// Each kernel that quantizes is run by a line of gpu_tiers.txt on an H200.
TEST(CudaQuantized, EveryKernelIsTriedOnAGpu) {
  std::set<std::string> tried;
  for (const support::Case& c :
       support::read_cases(std::string(EVENKEEL_CASES_DIR) + "/gpu_tiers.txt")) {
    if (!support::quantizes(c) || c.misalign != 0 || c.x.row_stride != 0) continue;
    Call call = quantized_call(c.cols, static_cast<Dtype>(c.x.dtype), c.residual.present);
    call.op = c.op;
    call.activation = c.activation;
    call.casting = c.casting;
    call.residual.dtype = static_cast<Dtype>(c.residual.dtype);
    call.sum.dtype = static_cast<Dtype>(c.sum.dtype);
    if (c.x.dtype == EK_F64) call.compute = Dtype::kF64;
    const Plan plan = make_plan(call, kH200.device);
    if (plan.quantizes)
      tried.insert(std::string(name_of(call.x.dtype)) + " " + std::to_string(plan.policy));
  }
  for (const char* x : {"f16", "bf16"}) {
    for (int i = 0; i < forward_policies_of(2, 1).count; ++i)
      EXPECT_TRUE(tried.count(std::string(x) + " " + std::to_string(i))) << x << " " << i;
  }
}

}  // namespace
}  // namespace evenkeel::cuda
