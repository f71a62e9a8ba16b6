// With a residual y, sum and statistics are bit for bit those of an addition and a norm one after the
// other (where there is no NaN, whose bits are anybody's); a second dx is the first; and what goes wrong
// with a residual is named.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "broken_call.h"
#include "support/half.h"

namespace evenkeel::support {
namespace {

const char kResidualCases[] = R"(
layer_norm rows=9 cols=1,7,64,129,1000,4097 x=f32,f16,bf16 residual=f32,f16,bf16 sum=f32,f16,bf16 y=f32,f64,f16,bf16
rms_norm rows=9 cols=1,7,64,129,1000,4097 x=f32,f16,bf16 residual=f32,f16,bf16 sum=f32,f16,bf16 y=f32,bf16 casting=none,llama
layer_norm rows=9 cols=7,129 x=f32,f64,f16,bf16 residual=f32,f64,f16,bf16 sum=f64 y=f32,f64,f16,bf16
rms_norm rows=9 cols=7,1000 x=f32,bf16 residual=f32,bf16 sum=f32,bf16 activation=silu offset=1 weight=bf16
layer_norm rows=3 cols=40001 x=f32,bf16 residual=f32,bf16 y=bf16
layer_norm rows=33009 cols=64 x=f32,bf16 residual=f32,bf16
rms_norm rows=3000 cols=128 x=bf16 residual=f32,bf16 dsum=f32 dresidual=f32 in_place=residual
rms_norm rows=3000 cols=128 x=bf16 residual=bf16 dsum=bf16 in_place=sum
layer_norm rows=12 cols=65 inner_rows=4 x=bf16 residual=f32,bf16 residual_row_stride=70 x_row_stride=260 x_outer_stride=65 sum_row_stride=80
layer_norm rows=12 cols=65,1000 x=bf16 residual=f32,bf16 misalign=2,6
layer_norm rows=10 cols=65,5000 x=f32,bf16 residual=f32,bf16 values=mean1e4,inf,huge,denormal
)";

// The case without a residual, whose x is the sum.
std::unique_ptr<Problem> norm_of_sum(const Problem& fused) {
  Case c = fused.spec();
  c.x = normalized(c);
  c.residual = c.sum = c.dsum = c.dresidual = kAbsent;
  c.in_place = InPlace::kNone;
  auto problem = std::make_unique<Problem>(c);
  auto& inputs = const_cast<Inputs&>(*problem->inputs());
  inputs.x.copy_from(fused.inputs()->sum);
  inputs.dy.copy_from(fused.inputs()->dy);
  inputs.weight.copy_from(fused.inputs()->weight);
  inputs.bias.copy_from(fused.inputs()->bias);
  return problem;
}

bool same_units(const Problem& a, Tensor of_a, const Problem& b, Tensor of_b) {
  for (int64_t unit = 0; unit < unit_count(a.spec()); ++unit) {
    if (a.bytes(of_a, unit) != b.bytes(of_b, unit)) return false;
  }
  return true;
}

class Residual : public testing::TestWithParam<Runner> {};

TEST_P(Residual, IsAnAdditionAndANorm) {
  for (const Case& c : parse_cases(kResidualCases, "residual")) {
    SCOPED_TRACE(to_string(c));
    Problem fused(c);
    const auto norm = norm_of_sum(fused);
    ASSERT_EQ(fused.forward(GetParam()), "");
    ASSERT_EQ(norm->forward(GetParam()), "");
    EXPECT_TRUE(same_units(fused, Tensor::kY, *norm, Tensor::kY));
    EXPECT_TRUE(same_units(fused, Tensor::kSum, *norm, Tensor::kX));
    EXPECT_TRUE(fused.buffer(Vector::kMean) == norm->buffer(Vector::kMean));
    EXPECT_TRUE(fused.buffer(Vector::kRstd) == norm->buffer(Vector::kRstd));
  }
}

TEST_P(Residual, DoesNotNeedTheSumToBeStored) {
  for (const char* line : {"layer_norm rows=9 cols=1000 x=bf16 residual=bf16",
                           "rms_norm rows=9 cols=20001 x=f32 residual=f32",
                           "rms_norm rows=5 cols=77 x=bf16 residual=f32 y=bf16"}) {
    Case c = parse_case(line);
    Problem stored(c);
    c.sum.present = false;
    Problem fused(c, stored.inputs());
    ASSERT_EQ(stored.forward(GetParam()), "");
    ASSERT_EQ(fused.forward(GetParam()), "");
    EXPECT_TRUE(fused.buffer(Tensor::kY) == stored.buffer(Tensor::kY)) << line;
    EXPECT_TRUE(fused.buffer(Vector::kRstd) == stored.buffer(Vector::kRstd)) << line;
  }
}

TEST_P(Residual, SecondDxIsTheFirst) {
  for (const Case& c : parse_cases(R"(
layer_norm rows=70 cols=7,64,1000 x=f32,bf16 dresidual=f32,bf16 dsum=none
rms_norm rows=70 cols=7,64,20001 x=f32,bf16 dx=f32,bf16 dresidual=f32,bf16 dsum=f32
)",
                                   "second")) {
    SCOPED_TRACE(to_string(c));
    Problem both(c);
    ASSERT_EQ(both.save_statistics(GetParam()), "");
    ASSERT_EQ(both.backward(GetParam()), "");
    Case alone = c;
    alone.dresidual.present = false;
    Problem first(alone, both.inputs());
    first.take_statistics(both);
    ASSERT_EQ(first.backward(GetParam()), "");
    EXPECT_TRUE(both.buffer(Tensor::kDx) == first.buffer(Tensor::kDx));
    EXPECT_TRUE(both.buffer(Vector::kDweight) == first.buffer(Vector::kDweight));
    const bool alike = c.dx.dtype == c.dresidual.dtype;
    EXPECT_TRUE(!alike || both.buffer(Tensor::kDresidual) == both.buffer(Tensor::kDx));
  }
}

// Whether there is a second dx or a dsum does not move another bit.
TEST_P(Residual, DsumLeavesParameterGradientsAlone) {
  for (const char* line :
       {"layer_norm rows=70 cols=1000 x=bf16 residual=f32 dsum=f32 dresidual=f32",
        "rms_norm rows=70 cols=129 x=bf16 residual=bf16 dsum=bf16"}) {
    Problem with(parse_case(line));
    const auto norm = norm_of_sum(with);
    ASSERT_EQ(with.save_statistics(GetParam()), "");
    norm->take_statistics(with);
    ASSERT_EQ(with.backward(GetParam()), "");
    ASSERT_EQ(norm->backward(GetParam()), "");
    EXPECT_TRUE(with.buffer(Vector::kDweight) == norm->buffer(Vector::kDweight)) << line;
    EXPECT_TRUE(with.buffer(Vector::kDbias) == norm->buffer(Vector::kDbias)) << line;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Residual, testing::Values(kCpu, Runner{"cpu", 3}, kReference),
                         [](const auto& runner) {
                           return std::string(runner.param.backend) +
                                  std::to_string(runner.param.threads);
                         });

constexpr char kWithResidual[] = "layer_norm rows=3 cols=8 residual=f32 dsum=f32 dresidual=f32";

TEST(Errors, OfAResidual) {
  const Broken<ek_forward_args> forward[] = {
      {"residual of group norm",
       kGroups,
       [](Forward& c) { c.args.residual = c.args.x; },
       {"residual", "group norm takes none", "NULL"}},
      {"sum alone",
       kRows,
       [](Forward& c) { c.args.sum = c.args.x; },
       {"sum", "without a residual", "NULL"}},
      {"residual dtype",
       kWithResidual,
       [](Forward& c) { c.args.residual.dtype = 9; },
       {"residual.dtype", "9", "EK_BF16"}},
      {"sum dtype",
       kWithResidual,
       [](Forward& c) { c.args.sum.dtype = -1; },
       {"sum.dtype", "-1", "EK_BF16"}},
      {"residual of f64",
       kWithResidual,
       [](Forward& c) { c.args.residual.dtype = EK_F64; },
       {"sum.dtype is 0", "EK_F64", "residual.dtype is"}},
      {"x of f64",
       "layer_norm rows=3 cols=8 x=f64 residual=f64 y=f64",
       [](Forward& c) { c.args.residual.dtype = c.args.sum.dtype = EK_F32; },
       {"sum.dtype is 0", "EK_F64", "x.dtype is"}},
      {"residual reserved",
       kWithResidual,
       [](Forward& c) { c.args.residual.reserved = 5; },
       {"residual.reserved", "5", "0"}},
      {"residual stride",
       kWithResidual,
       [](Forward& c) { c.args.residual.row_stride = 3; },
       {"residual.row_stride", "3", "overlap"}},
      {"sum stride",
       kWithResidual,
       [](Forward& c) { c.args.sum.row_stride = 3; },
       {"sum.row_stride", "3", "overlap"}},
      {"sum shifted from residual",
       kWithResidual,
       [](Forward& c) { c.args.sum.data = static_cast<char*>(c.args.residual.data) + 4; },
       {"sum", "residual", "overlap", "exactly"}},
      {"sum is residual with another type",
       kWithResidual,
       [](Forward& c) {
         c.args.sum.data = c.args.residual.data;
         c.args.sum.dtype = EK_F16;
       },
       {"sum", "residual", "overlap"}},
      {"y is sum",
       kWithResidual,
       [](Forward& c) { c.args.y.data = c.args.sum.data; },
       {"y", "sum", "overlap"}},
      {"y is residual",
       kWithResidual,
       [](Forward& c) { c.args.y.data = c.args.residual.data; },
       {"y", "residual", "overlap", "apart"}},
      {"sum on the weight",
       kWithResidual,
       [](Forward& c) { c.args.sum.data = c.args.weight.data; },
       {"sum", "weight", "overlap"}},
  };
  for (const auto& broken : forward) check(broken, false);
  const Broken<ek_backward_args> backward[] = {
      {"dsum of group norm",
       kGroups,
       [](Backward& c) { c.args.dsum = c.args.dy; },
       {"dsum", "group norm takes none", "NULL"}},
      {"dresidual of group norm",
       kGroups,
       [](Backward& c) { c.args.dresidual = c.args.dx; },
       {"dresidual", "group norm takes none", "NULL"}},
      {"dsum dtype",
       kWithResidual,
       [](Backward& c) { c.args.dsum.dtype = 4; },
       {"dsum.dtype", "4", "EK_BF16"}},
      {"dresidual dtype",
       kWithResidual,
       [](Backward& c) { c.args.dresidual.dtype = 4; },
       {"dresidual.dtype", "4", "EK_BF16"}},
      {"dsum stride",
       kWithResidual,
       [](Backward& c) { c.args.dsum.row_stride = 1; },
       {"dsum.row_stride", "1", "overlap"}},
      {"dx is dresidual",
       kWithResidual,
       [](Backward& c) { c.args.dx.data = c.args.dresidual.data; },
       {"dx", "dresidual", "overlap"}},
      {"dx shifted from dsum",
       kWithResidual,
       [](Backward& c) { c.args.dx.data = static_cast<char*>(c.args.dsum.data) + 4; },
       {"dx", "dsum", "overlap", "exactly"}},
      {"dweight on dsum",
       kWithResidual,
       [](Backward& c) { c.args.dweight.data = c.args.dsum.data; },
       {"dweight", "dsum", "overlap"}},
      {"workspace is dresidual",
       kWithResidual,
       [](Backward& c) { c.execution.workspace = c.args.dresidual.data; },
       {"execution.workspace", "dresidual", "overlap"},
       EK_INVALID_ARGUMENT,
       true},
  };
  for (const auto& broken : backward) check(broken, true);
}

}  // namespace
}  // namespace evenkeel::support
