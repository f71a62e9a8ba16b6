// How a row norm with a residual will run on a GPU (src/cuda/plan.h): forward with the split of the sum's norm, so
// that bits are equal; backward with room for dsum. On chips that need not be there.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "cuda/operands.h"
#include "cuda/plan.h"
#include "cuda_devices.h"
#include "cuda_kinds.h"
#include "support/cases.h"

namespace evenkeel::cuda {
namespace {

constexpr int64_t kRows = 1000;

// x and y are of `branch`, residual and sum of `stream`.
Call residual_call(int64_t cols, Dtype branch, Dtype stream) {
  Call call = make_call(Pass::kForward, kRows, cols, branch, branch);
  call.residual = {nowhere(10), stream, cols, kRows * cols};
  call.sum = {nowhere(11), stream, cols, kRows * cols};
  return call;
}

// dy and dx are of `branch`; x, dsum and dresidual of `stream`.
Call gradient_call(int64_t cols, Dtype branch, Dtype stream) {
  Call call = make_call(Pass::kBackward, kRows, cols, stream, branch);
  call.dx.dtype = branch;
  call.dsum = {nowhere(10), stream, cols, kRows * cols};
  call.dresidual = {nowhere(11), stream, cols, kRows * cols};
  return call;
}

constexpr int64_t kLengths[] = {8,    64,   100,  128,  512,   768,   1000,  1024,
                                3001, 4096, 5120, 8192, 12288, 16384, 65536, 262144};
constexpr Dtype kPairs[][2] = {{Dtype::kBF16, Dtype::kBF16},
                               {Dtype::kF16, Dtype::kF16},
                               {Dtype::kF32, Dtype::kF32},
                               {Dtype::kBF16, Dtype::kF32},
                               {Dtype::kF16, Dtype::kF32}};

template <typename Body>
void for_calls(const Body& body) {
  for (const NamedDevice& on : kDevices) {
    for (const auto& [branch, stream] : kPairs) {
      for (const int64_t cols : kLengths) {
        for (const ek_op op : {EK_LAYER_NORM, EK_RMS_NORM}) {
          for (const bool same : {false, true}) {  // parameters have x's dtype
            SCOPED_TRACE(std::string(on.name) + " " + name_of(branch) + " into " + name_of(stream) +
                         ", cols " + std::to_string(cols));
            const auto change = [&, b = branch](Call& call) {
              call.op = op;
              if (op == EK_RMS_NORM) call.bias = {}, call.dbias = {}, call.mean = nullptr;
              if (same) call.weight.dtype = call.bias.dtype = b;
            };
            body(on.device, branch, stream, cols, change);
            if (testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CudaResidual, IsAddedInTheKernelThatNormalizesTheSum) {
  int64_t joined = 0;
  for_calls([&](const DeviceProperties& device, Dtype branch, Dtype stream, int64_t cols,
                const auto& change) {
    Call call = residual_call(cols, branch, stream);
    change(call);
    const Plan plan = make_plan(call, device);
    const Call norm = norm_of_sum(call, nullptr);
    const Plan alone = make_plan(norm, device);
    EXPECT_TRUE(plan.tile == alone.tile);
    EXPECT_EQ(plan.groups, alone.groups);
    EXPECT_EQ(plan.aligned, alone.aligned);
    EXPECT_EQ(plan.residual, plan.added_first == nullptr);
    EXPECT_EQ(plan.workspace, 0);
    EXPECT_LE(plan.shared, device.shared_bytes);
    EXPECT_EQ(plan.residual, !alone.tile.multi_pass());  // every row that its norm holds
    if (!plan.residual) return;
    ++joined;
    const auto x_size = static_cast<int>(size_of(stream)),
               y_size = static_cast<int>(size_of(branch));
    ForwardPolicy own = forward_policies_of(x_size, y_size).entries[plan.policy];
    EXPECT_TRUE(own.residual);
    own.residual = false;
    EXPECT_TRUE(own == forward_policies_of(x_size, y_size).entries[alone.policy]);
  });
  EXPECT_GT(joined, 500);
}

TEST(CudaResidual, IsAddedBeforeWhereNoKernelTakesIt) {
  const auto why = [](const auto& change) {
    Call call = residual_call(4096, Dtype::kBF16, Dtype::kBF16);
    change(call);
    const Plan plan = make_plan(call, kH200.device);
    EXPECT_FALSE(plan.residual);
    return std::string(plan.added_first ? plan.added_first : "");
  };
  EXPECT_EQ(why([](Call& c) { c.residual.dtype = Dtype::kF32; }),
            "residual and sum have different types");
  EXPECT_EQ(why([](Call& c) { c.x.dtype = Dtype::kF32; }), "x and y have different types");
  EXPECT_EQ(why([](Call& c) { c.x.data += 2; }), "rows of x or residual are not aligned");
  EXPECT_EQ(why([](Call& c) { c.residual.row_stride = 4097; }),
            "rows of x or residual are not aligned");
  EXPECT_EQ(why([](Call& c) { c.y.data += 2, c.x.data += 1; }), "an address cuts elements apart");
  EXPECT_EQ(why([](Call& c) { c.compute = Dtype::kF64; }), "rows are read again in every pass");
  const auto several_strides = [](Call& c) {
    c.weight.dtype = c.bias.dtype = Dtype::kBF16;
    c.inner = 10, c.outer = kRows / 10;
    for (Tensor* tensor : {&c.x, &c.y, &c.residual, &c.sum}) tensor->outer_stride = 10 * 4096;
    c.x.outer_stride = 11 * 4096;
  };
  EXPECT_EQ(why(several_strides), "rows of x or residual have several strides");
}

TEST(CudaResidual, KeepsASumThatIsNotWantedInTheWorkspaceOnlyIfItMust) {
  Call call = residual_call(4096, Dtype::kBF16, Dtype::kBF16);
  call.sum.data = nullptr;
  EXPECT_TRUE(make_plan(call, kH200.device).residual);
  EXPECT_EQ(make_plan(call, kH200.device).workspace, 0);
  call.x.data += 2;
  EXPECT_GE(make_plan(call, kH200.device).workspace, kRows * 4096 * 2);
}

TEST(CudaResidual, PrefetchesBothSummandsOrNone) {
  Call call = residual_call(4096, Dtype::kBF16, Dtype::kF32);
  call.inner = 1 << 14;
  EXPECT_GT(make_plan(call, kH200.device).prefetch_rows, 0);
  call.outer = 2, call.inner = 1 << 13;
  for (Tensor* tensor : {&call.x, &call.y, &call.residual, &call.sum})
    tensor->outer_stride = call.inner * 4096;
  call.residual.outer_stride += 4096;
  const Plan plan = make_plan(call, kH200.device);
  EXPECT_TRUE(plan.residual);
  EXPECT_EQ(plan.prefetch_rows, 0);
}

TEST(CudaResidual, BackwardHasRoomForDsum) {
  int64_t resident = 0;
  for_calls([&](const DeviceProperties& device, Dtype branch, Dtype stream, int64_t cols,
                const auto& change) {
    Call call = gradient_call(cols, branch, stream);
    change(call);
    const Plan plan = make_plan(call, device);
    EXPECT_TRUE(plan.residual);
    EXPECT_EQ(plan.runtime_dtype == nullptr, !plan.tile.multi_pass()) << plan.runtime_dtype;
    if (plan.runtime_dtype) return;
    ++resident;
    const auto x_size = static_cast<int>(size_of(stream)),
               dy_size = static_cast<int>(size_of(branch));
    const BackwardPolicy& policy = backward_policies_of(x_size, dy_size).entries[plan.policy];
    EXPECT_TRUE(policy.residual);
    EXPECT_LE(plan.shared, device.shared_bytes);
    const int64_t part = part_cols(cols, plan.tile);
    EXPECT_GE(plan.shared,
              plan.tile.row_groups() * plan.tile.stages * part * (2 * x_size + dy_size));
    EXPECT_TRUE(!policy.knows_stages() || plan.tile.stages == kMaxStages);
  });
  EXPECT_GT(resident, 500);
}

// Kernels store dx in x's dtype, and once more in dy's; which of them is the residual's does not matter.
TEST(CudaResidual, BackwardStoresDxWhereItsTypeIs) {
  const auto outputs = [](Dtype dx, Dtype dresidual, Dtype dy) {
    Call call = gradient_call(64, dy, Dtype::kF32);
    call.dx.dtype = dx, call.dresidual.dtype = dresidual;
    return call;
  };
  Call call = outputs(Dtype::kBF16, Dtype::kF32, Dtype::kBF16);
  EXPECT_EQ(dx_outputs(call).first.data, call.dresidual.data);
  EXPECT_EQ(dx_outputs(call).second.data, call.dx.data);
  call = outputs(Dtype::kF32, Dtype::kBF16, Dtype::kBF16);
  EXPECT_EQ(dx_outputs(call).first.data, call.dx.data);
  EXPECT_EQ(dx_outputs(call).second.data, call.dresidual.data);
  call.dx.data = nullptr;
  EXPECT_EQ(dx_outputs(call).first.data, nullptr);
  EXPECT_EQ(dx_outputs(call).second.data, call.dresidual.data);
  call.dresidual.dtype = Dtype::kF32;
  EXPECT_EQ(dx_outputs(call).first.data, call.dresidual.data);
  call = outputs(Dtype::kF16, Dtype::kF32, Dtype::kBF16);
  EXPECT_STREQ(make_plan(call, kH200.device).runtime_dtype, "dx has another type than x");
  call = outputs(Dtype::kF32, Dtype::kF16, Dtype::kBF16);
  EXPECT_STREQ(make_plan(call, kH200.device).runtime_dtype,
               "dx is stored in a type that is not x's or dy's");
  call = outputs(Dtype::kBF16, Dtype::kF32, Dtype::kBF16);
  call.dsum.dtype = Dtype::kBF16;
  EXPECT_STREQ(make_plan(call, kH200.device).runtime_dtype, "dsum has another type than x");
}

// One store, no dsum: the kernel without a residual, whichever of the two outputs is asked for.
TEST(CudaResidual, BackwardWithoutDsumIsThePlainOne) {
  Call call = gradient_call(4096, Dtype::kBF16, Dtype::kBF16);
  call.dsum = {}, call.dresidual = {};
  const Plan plain = make_plan(call, kH200.device);
  EXPECT_FALSE(plain.residual);
  std::swap(call.dx, call.dresidual);
  EXPECT_FALSE(make_plan(call, kH200.device).residual);
  EXPECT_EQ(make_plan(call, kH200.device).policy, plain.policy);
}

Tensor tensor_of(const support::Case& c, const support::TensorSpec& spec, int index) {
  if (!spec.present) return {nullptr, static_cast<Dtype>(spec.dtype)};
  const int64_t inner = c.inner_rows ? c.inner_rows : c.rows;
  const int64_t row = spec.row_stride ? spec.row_stride : c.cols;
  return {nowhere(index) + c.misalign, static_cast<Dtype>(spec.dtype), row,
          spec.outer_stride ? spec.outer_stride : inner * row};
}

Call call_of(const support::Case& c, Pass pass) {
  Call call = make_call(pass, c.rows, c.cols, static_cast<Dtype>(c.x.dtype), Dtype::kF32);
  call.op = c.op;
  call.activation = c.activation;
  call.casting = c.casting;
  call.weight_offset = c.offset;
  call.inner = c.inner_rows ? c.inner_rows : c.rows;
  call.outer = c.rows / call.inner;
  const auto vector = [&](const support::VectorSpec& spec, int index) {
    return Vector{spec.present ? nowhere(index) + c.misalign : nullptr,
                  static_cast<Dtype>(spec.dtype)};
  };
  call.weight = vector(c.weight, 2), call.bias = vector(c.bias, 3);
  if (c.op == EK_RMS_NORM) call.mean = nullptr;
  if (pass == Pass::kForward) {
    call.x = tensor_of(c, c.x, 1), call.y = tensor_of(c, c.y, 6);
    call.residual = tensor_of(c, c.residual, 10), call.sum = tensor_of(c, c.sum, 11);
  } else {
    call.x = tensor_of(c, normalized(c), 1), call.dy = tensor_of(c, c.dy, 6);
    call.dx = tensor_of(c, c.dx, 7), call.dsum = tensor_of(c, c.dsum, 10);
    call.dresidual = tensor_of(c, c.dresidual, 11);
    call.dweight = vector(c.dweight, 8), call.dbias = vector(c.dbias, 9);
  }
  if (support::computes_in_f64(c, pass == Pass::kBackward)) call.compute = Dtype::kF64;
  return call;
}

// Each kernel with a residual, of each pair of dtypes, is run by a line of gpu_tiers.txt on an H200.
TEST(CudaResidual, EveryKernelIsTriedOnAGpu) {
  std::set<std::string> tried;
  for (const support::Case& c :
       support::read_cases(std::string(EVENKEEL_CASES_DIR) + "/gpu_tiers.txt")) {
    if (c.op == EK_GROUP_NORM || modulates(c)) continue;
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      if (!(pass == Pass::kForward ? c.forward : c.backward)) continue;
      const Call call = call_of(c, pass);
      const Plan plan = make_plan(call, kH200.device);
      if (plan.residual && !plan.runtime_dtype) {
        const Dtype other = pass == Pass::kForward ? call.y.dtype : call.dy.dtype;
        tried.insert(kernel_name(pass, call.normalized(), other, plan.policy));
      }
    }
  }
  for (const auto& [branch, stream] : kPairs) {
    const auto x_size = static_cast<int>(size_of(stream)), size = static_cast<int>(size_of(branch));
    const auto expect = [&, b = branch, s = stream](Pass pass, const auto& table) {
      for (int i = 0; i < table.count; ++i) {
        const auto& policy = table.entries[i];
        if (!policy.residual) continue;
        EXPECT_TRUE(tried.count(kernel_name(pass, s, b, i)))
            << kernel_name(pass, s, b, i) << ": scope " << static_cast<int>(policy.scope)
            << ", lanes " << policy.lanes << ", elements " << policy.elements << ", aligned "
            << policy.aligned << ", activation " << policy.terms.activation << ", specialization "
            << static_cast<int>(policy.specialization);
      }
    };
    expect(Pass::kForward, forward_policies_of(x_size, size));
    expect(Pass::kBackward, backward_policies_of(x_size, size));
  }
}

}  // namespace
}  // namespace evenkeel::cuda
