// The same bits from any number of threads, any order of tasks and any run; and a row's bits from
// any batch it is in.
//
// A row (for group norm: a sample) is taken out of a problem and computed alone, and at other
// places of other problems, with other strides and alignments: y, mean, rstd and dx must not change
// by a bit.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "parallels.h"
#include "support/half.h"
#include "support/problem.h"
#include "support/values.h"

namespace evenkeel::support {
namespace {

const char kThreadCases[] = R"(
layer_norm rows=37 cols=1024 x=f32
layer_norm rows=37 cols=1000 x=bf16 weight=bf16 bias=bf16 activation=silu
layer_norm rows=4099 cols=33 x=f32
layer_norm rows=20011 cols=8 x=bf16
layer_norm rows=1031 cols=768 x=f16
layer_norm rows=3 cols=100000 x=f32
layer_norm rows=2 cols=100003 x=f64
layer_norm rows=1 cols=300001 x=bf16
rms_norm rows=700 cols=129 x=f32
rms_norm rows=2 cols=300001 x=bf16
rms_norm rows=513 cols=256 x=bf16 casting=llama
layer_norm rows=600 cols=65 x=f32 dx=none
layer_norm rows=37 cols=1000 x=bf16 residual=f32 dsum=f32 dresidual=f32
rms_norm rows=700 cols=129 x=bf16 residual=bf16 dsum=bf16
rms_norm rows=2 cols=300001 x=bf16 residual=bf16 dsum=bf16 in_place=sum
layer_norm rows=60 cols=650 x=f32 in_place=dy
layer_norm rows=4000 cols=33 samples=5 x=f32 scale=f32 shift=f32
rms_norm rows=700 cols=129 samples=350 x=bf16 scale=bf16 shift=bf16
layer_norm rows=3 cols=100003 samples=3 x=bf16 scale=f32 shift=f32 residual=f32
group_norm samples=2 channels=320 spatial=100 groups=32 x=f32 layout=nchw,nhwc
group_norm samples=1 channels=4 spatial=100003 groups=1 x=f32 layout=nchw,nhwc
group_norm samples=1 channels=40 spatial=10007 groups=2 x=bf16 layout=nchw,nhwc activation=silu
group_norm samples=70 channels=6 spatial=49 groups=3 x=f32 layout=nchw,nhwc
)";

// All outputs of forward and backward, run after run, as one string of bytes each.
std::vector<std::string> run_all(const Case& c, const Runner& runner) {
  Problem problem(c);
  EXPECT_EQ(problem.forward(runner), "") << to_string(c);
  EXPECT_EQ(problem.save_statistics(runner), "") << to_string(c);
  EXPECT_EQ(problem.backward(runner), "") << to_string(c);
  std::vector<std::string> outputs;
  const auto keep = [&](const Buffer& buffer) {
    outputs.emplace_back(reinterpret_cast<const char*>(buffer.data()), buffer.size());
  };
  for (Tensor tensor : {Tensor::kY, Tensor::kSum, Tensor::kDx, Tensor::kDresidual})
    keep(problem.buffer(tensor));
  for (Vector vector : {Vector::kMean, Vector::kRstd, Vector::kDweight, Vector::kDbias,
                        Vector::kDscale, Vector::kDshift}) {
    keep(problem.buffer(vector));
  }
  return outputs;
}

class Threads : public testing::TestWithParam<Case> {};

TEST_P(Threads, DoNotChangeABit) {
  const Case& c = GetParam();
  const std::vector<std::string> expected = run_all(c, kCpu);
  for (const int threads : {1, 2, 3, 7}) {
    EXPECT_TRUE(run_all(c, {"cpu", threads, nullptr}) == expected)
        << threads << " threads of the pool";
  }
  for (const int threads : {1, 3, 7}) {
    const ek_parallel in_order = make_parallel(threads, run_in_order);
    const ek_parallel reversed = make_parallel(threads, run_reversed);
    const ek_parallel concurrent = make_parallel(threads, run_on_threads);
    EXPECT_TRUE(run_all(c, {"cpu", 0, &in_order}) == expected) << threads << " threads, in order";
    EXPECT_TRUE(run_all(c, {"cpu", 0, &reversed}) == expected) << threads << " threads, reversed";
    EXPECT_TRUE(run_all(c, {"cpu", 0, &concurrent}) == expected)
        << threads << " threads, concurrent";
  }
}

INSTANTIATE_TEST_SUITE_P(Determinism, Threads,
                         testing::ValuesIn(parse_cases(kThreadCases, "kThreadCases")));

// --- A row on its own
// -----------------------------------------------------------------------------

// A row, or a sample: what the caller can hand over in any batch.
int64_t units_per_item(const Case& c) { return c.op == EK_GROUP_NORM ? c.groups : 1; }

Case with_items(Case c, int64_t items) {
  (c.op == EK_GROUP_NORM ? c.samples : c.rows) = items;
  return c;
}

// A problem of the case `to`, whose item `position` is item `source` of `from`; the rest is its
// own.
std::unique_ptr<Problem> transplant(const Problem& from, int64_t source, const Case& to,
                                    int64_t position) {
  auto problem = std::make_unique<Problem>(to);
  auto& inputs = const_cast<Inputs&>(*problem->inputs());
  const auto copy = [&](const TensorSpec& to_spec, Buffer& to_buffer, const TensorSpec& from_spec,
                        const Buffer& from_buffer) {
    const Placement to_place(to, to_spec), from_place(from.spec(), from_spec);
    const size_t bytes = size_of(to_spec.dtype);
    const int64_t units = units_per_item(to);
    for (int64_t unit = 0; unit < units; ++unit) {
      for (int64_t i = 0; i < unit_size(to); ++i) {
        const auto target = static_cast<size_t>(to_place.element(position * units + unit, i));
        const auto origin = static_cast<size_t>(from_place.element(source * units + unit, i));
        std::memcpy(to_buffer.data() + target * bytes, from_buffer.data() + origin * bytes, bytes);
      }
    }
  };
  copy(to.x, inputs.x, from.spec().x, from.inputs()->x);
  copy(to.dy, inputs.dy, from.spec().dy, from.inputs()->dy);
  if (to.residual.present) {
    copy(to.residual, inputs.residual, from.spec().residual, from.inputs()->residual);
    fill_sum(to, inputs);
  }
  if (to.dsum.present) copy(to.dsum, inputs.dsum, from.spec().dsum, from.inputs()->dsum);
  inputs.weight.copy_from(from.inputs()->weight);
  inputs.bias.copy_from(from.inputs()->bias);
  return problem;
}

// The bytes of everything that belongs to one item.
std::string item_bytes(const Problem& problem, int64_t item) {
  const Case& c = problem.spec();
  const int64_t units = units_per_item(c);
  std::string all;
  for (int64_t unit = item * units; unit < (item + 1) * units; ++unit) {
    for (Tensor tensor : {Tensor::kY, Tensor::kSum, Tensor::kDx, Tensor::kDresidual}) {
      if (!problem.buffer(tensor)) continue;
      const std::vector<unsigned char> bytes = problem.bytes(tensor, unit);
      all.append(bytes.begin(), bytes.end());
    }
    for (Vector vector : {Vector::kMean, Vector::kRstd}) {
      const Buffer& buffer = problem.buffer(vector);
      if (!buffer) continue;
      const size_t size = size_of(problem.dtype(vector));
      all.append(reinterpret_cast<const char*>(buffer.data()) + static_cast<size_t>(unit) * size,
                 size);
    }
  }
  return all;
}

void run(Problem& problem, int threads) {
  const Runner runner{"cpu", threads, nullptr};
  ASSERT_EQ(problem.forward(runner), "");
  ASSERT_EQ(problem.save_statistics(runner), "");
  ASSERT_EQ(problem.backward(runner), "");
}

const char kRowCases[] = R"(
layer_norm rows=37 cols=1 x=f32
layer_norm rows=37 cols=7 x=f32
layer_norm rows=37 cols=64 x=bf16
layer_norm rows=37 cols=64 x=bf16 residual=bf16 dsum=bf16
layer_norm rows=37 cols=1023 x=bf16 residual=f32 dsum=f32 dresidual=f32
rms_norm rows=3 cols=100000 x=bf16 residual=bf16 sum=none dsum=bf16
layer_norm rows=37 cols=64 x=f32
layer_norm rows=37 cols=129 x=f16 y=f32 activation=silu
layer_norm rows=37 cols=1023 x=f32 weight=none
layer_norm rows=37 cols=4097 x=bf16
layer_norm rows=37 cols=1000 x=f64
layer_norm rows=37 cols=300 x=f32 values=outlier_first
layer_norm rows=5 cols=20001 x=f32
layer_norm rows=3 cols=100000 x=f32
layer_norm rows=3 cols=100000 x=bf16
rms_norm rows=37 cols=65 x=f32
rms_norm rows=37 cols=768 x=bf16 casting=llama
rms_norm rows=3 cols=100000 x=f32
group_norm samples=7 channels=6 spatial=49 groups=2 x=f32 layout=nchw,nhwc
group_norm samples=7 channels=40 spatial=33 groups=4 x=bf16 layout=nchw,nhwc
group_norm samples=3 channels=32 spatial=1023 groups=32 x=f32 layout=nchw,nhwc
group_norm samples=3 channels=4 spatial=50021 groups=1 x=f32 layout=nchw,nhwc
)";

class Row : public testing::TestWithParam<Case> {};

TEST_P(Row, DoesNotDependOnItsBatch) {
  const Case& c = GetParam();
  const int64_t items = c.op == EK_GROUP_NORM ? c.samples : c.rows;
  Problem whole(c);
  run(whole, 1);
  for (const int64_t item : {int64_t{0}, int64_t{1}, items / 2, items - 1}) {
    const std::string expected = item_bytes(whole, item);
    struct Place {
      int64_t items, position;
      int threads;
    };
    const Place places[] = {{1, 0, 1}, {2, 1, 2}, {items + 27, items + 3, 3}};
    for (const auto& [count, position, threads] : places) {
      Case other = with_items(c, count);
      other.seed = 77;
      // Another alignment and another distance to the next row, too.
      other.misalign = position * 2;
      if (position > 0 && c.op != EK_GROUP_NORM) other.x.row_stride = c.cols + 3;
      const auto problem = transplant(whole, item, other, position);
      run(*problem, threads);
      EXPECT_TRUE(item_bytes(*problem, position) == expected)
          << "item " << item << " at " << position << " of " << count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Determinism, Row, testing::ValuesIn(parse_cases(kRowCases, "kRowCases")));

}  // namespace

// What a failing test prints of its parameter.
void PrintTo(const Case& c, std::ostream* out) { *out << to_string(c); }

}  // namespace evenkeel::support
