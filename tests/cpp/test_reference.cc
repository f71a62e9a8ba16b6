// The reference backend, which everything else is measured against, held against something
// independent of it: the formulas of the header written out in long double over plain indices, and,
// for gradients, finite differences of the forward pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "support/half.h"
#include "support/problem.h"

namespace evenkeel::support {
namespace {

using Real = long double;

const char* const kLines[] = {
    "layer_norm rows=3 cols=7 x=f64",
    "layer_norm rows=4 cols=5 x=f64 inner_rows=2 x_row_stride=6 x_outer_stride=17 y_row_stride=9",
    "layer_norm rows=3 cols=7 x=f64 weight=none bias=none eps=0.1",
    "layer_norm rows=2 cols=9 x=f64 activation=silu offset=1",
    "rms_norm rows=3 cols=7 x=f64",
    "rms_norm rows=3 cols=7 x=f64 weight=none bias=f64 activation=silu",
    "rms_norm rows=3 cols=7 x=f64 offset=1 weight=bf16",
    "group_norm samples=2 channels=6 spatial=4 groups=3 x=f64",
    "group_norm samples=2 channels=6 spatial=4 groups=3 x=f64 layout=nhwc",
    "group_norm samples=2 channels=6 spatial=3 groups=2 x=f64 layout=nhwc x_row_stride=8 "
    "dx_row_stride=7",
    "group_norm samples=2 channels=6 spatial=3 groups=2 x=f64 x_row_stride=5 x_outer_stride=31",
    "group_norm samples=1 channels=4 spatial=5 groups=1 x=f64 activation=silu bias=none",
    "group_norm samples=1 channels=4 spatial=5 groups=4 x=f64 layout=nhwc activation=silu",
    "layer_norm rows=3 cols=7 x=f64 activation=relu",
    "layer_norm rows=3 cols=7 x=f64 activation=gelu offset=1",
    "layer_norm rows=3 cols=7 x=f64 activation=gelu_tanh offset=1",
};

// Reads a big tensor by the header's address formula: element (a, b, e), where a is the block or
// sample, b the row, channel or pixel inside it and e the innermost index.
Real at(const Case& c, const TensorSpec& spec, const Buffer& buffer, int64_t a, int64_t b,
        int64_t e) {
  const bool group = c.op == EK_GROUP_NORM;
  const int64_t width = !group ? c.cols : c.layout == EK_NCHW ? c.spatial : c.channels;
  const int64_t inner = !group                ? (c.inner_rows ? c.inner_rows : c.rows)
                        : c.layout == EK_NCHW ? c.channels
                                              : c.spatial;
  const int64_t row_stride = spec.row_stride ? spec.row_stride : width;
  const int64_t outer_stride = spec.outer_stride ? spec.outer_stride : inner * row_stride;
  const int64_t offset = a * outer_stride + b * row_stride + e;
  return load(spec.dtype, buffer.data() + static_cast<size_t>(offset) * size_of(spec.dtype));
}

// The same for unit and element, the element in (channel, pixel) order.
Real at(const Case& c, const TensorSpec& spec, const Buffer& buffer, int64_t unit, int64_t i) {
  if (c.op != EK_GROUP_NORM) {
    const int64_t inner = c.inner_rows ? c.inner_rows : c.rows;
    return at(c, spec, buffer, unit / inner, unit % inner, i);
  }
  const int64_t channel = unit % c.groups * (c.channels / c.groups) + i / c.spatial;
  const int64_t sample = unit / c.groups, pixel = i % c.spatial;
  return c.layout == EK_NCHW ? at(c, spec, buffer, sample, channel, pixel)
                             : at(c, spec, buffer, sample, pixel, channel);
}

Real parameter(const Case& c, const VectorSpec& spec, const Buffer& buffer, int64_t unit,
               int64_t i) {
  const int64_t index =
      c.op == EK_GROUP_NORM ? unit % c.groups * (c.channels / c.groups) + i / c.spatial : i;
  return load(spec.dtype, buffer.data() + static_cast<size_t>(index) * size_of(spec.dtype));
}

Real activated(ek_activation activation, Real z) {
  const Real root = std::sqrt(2 / std::numbers::pi_v<Real>);
  switch (activation) {
    case EK_ACTIVATION_SILU:
      return z / (1 + std::exp(-z));
    case EK_ACTIVATION_RELU:
      return std::max(z, Real{0});
    case EK_ACTIVATION_GELU:
      return z / 2 * (1 + std::erf(z / std::numbers::sqrt2_v<Real>));
    case EK_ACTIVATION_GELU_TANH:
      return z / 2 * (1 + std::tanh(root * (z + Real{0.044715L} * z * z * z)));
    default:
      return z;
  }
}

struct Written {
  Real mean = 0, rstd = 0;
  std::vector<Real> y;
};

Written written_out(const Case& c, const Inputs& inputs, int64_t unit) {
  const int64_t size = unit_size(c);
  Written result;
  Real square = 0;
  if (c.op != EK_RMS_NORM) {
    for (int64_t i = 0; i < size; ++i) result.mean += at(c, c.x, inputs.x, unit, i) / size;
  }
  for (int64_t i = 0; i < size; ++i) {
    const Real centered = at(c, c.x, inputs.x, unit, i) - result.mean;
    square += centered * centered / size;
  }
  result.rstd = 1 / std::sqrt(square + static_cast<Real>(c.eps));
  for (int64_t i = 0; i < size; ++i) {
    Real y = (at(c, c.x, inputs.x, unit, i) - result.mean) * result.rstd;
    if (c.casting == EK_CASTING_LLAMA) y = round_to(static_cast<double>(y), format_of(c.x.dtype));
    if (c.weight.present) {
      y *= static_cast<Real>(c.offset) + parameter(c, c.weight, inputs.weight, unit, i);
    }
    if (c.bias.present) y += parameter(c, c.bias, inputs.bias, unit, i);
    if (c.activation != EK_ACTIVATION_NONE) y = activated(c.activation, y);
    result.y.push_back(y);
  }
  return result;
}

TEST(Reference, ForwardIsTheWrittenOutFormula) {
  for (const char* line : kLines) {
    const Case c = parse_case(line);
    Problem problem(c);
    ASSERT_EQ(problem.forward(kReference), "") << line;
    for (int64_t unit = 0; unit < unit_count(c); ++unit) {
      const Written expected = written_out(c, *problem.inputs(), unit);
      const auto u = static_cast<size_t>(unit);
      if (c.mean) {
        EXPECT_NEAR(problem.read(Vector::kMean)[u], static_cast<double>(expected.mean), 1e-14);
      }
      EXPECT_NEAR(problem.read(Vector::kRstd)[u], static_cast<double>(expected.rstd), 1e-13);
      for (int64_t i = 0; i < unit_size(c); ++i) {
        EXPECT_NEAR(static_cast<double>(at(c, c.y, problem.buffer(Tensor::kY), unit, i)),
                    static_cast<double>(expected.y[static_cast<size_t>(i)]), 1e-13)
            << line << ", unit " << unit << ", element " << i;
      }
    }
  }
}

// The casting order is visible: bf16 values that are rounded before the weight is applied.
TEST(Reference, LlamaRoundsBeforeTheWeight) {
  const Case c = parse_case("rms_norm rows=2 cols=50 x=bf16 y=f64 casting=llama");
  const Case plain = parse_case("rms_norm rows=2 cols=50 x=bf16 y=f64 casting=gemma");
  Problem problem(c), other(plain);
  ASSERT_EQ(problem.forward(kReference), "");
  ASSERT_EQ(other.forward(kReference), "");
  EXPECT_FALSE(problem.buffer(Tensor::kY) == other.buffer(Tensor::kY));
  for (int64_t unit = 0; unit < 2; ++unit) {
    const Written expected = written_out(c, *problem.inputs(), unit);
    for (int64_t i = 0; i < unit_size(c); ++i) {
      EXPECT_NEAR(static_cast<double>(at(c, c.y, problem.buffer(Tensor::kY), unit, i)),
                  static_cast<double>(expected.y[static_cast<size_t>(i)]), 1e-13);
    }
  }
}

// The sum over dy * y, whose gradient the backward pass returns, from the written out formula.
Real loss(const Case& c, const Inputs& inputs) {
  Real sum = 0;
  for (int64_t unit = 0; unit < unit_count(c); ++unit) {
    const Written result = written_out(c, inputs, unit);
    for (int64_t i = 0; i < unit_size(c); ++i) {
      sum += at(c, c.dy, inputs.dy, unit, i) * result.y[static_cast<size_t>(i)];
    }
  }
  return sum;
}

TEST(Reference, GradientsAreFiniteDifferences) {
  for (const char* line : kLines) {
    Case c = parse_case(line);
    if (c.weight.present) c.weight.dtype = c.dweight.dtype = EK_F64;
    if (c.bias.present) c.bias.dtype = c.dbias.dtype = EK_F64;
    Problem problem(c);
    ASSERT_EQ(problem.save_statistics(kReference), "") << line;
    ASSERT_EQ(problem.backward(kReference), "") << line;
    // The inputs are shared but not written by any call, so the test may move them a little.
    auto& inputs = const_cast<Inputs&>(*problem.inputs());
    const auto slope = [&](unsigned char* address) {
      constexpr double kStep = 1e-5;
      const double center = load(EK_F64, address);
      Real difference = 0;
      for (const double sign : {1.0, -1.0}) {
        store(EK_F64, address, center + sign * kStep);
        difference += sign * loss(c, inputs) / (2 * kStep);
      }
      store(EK_F64, address, center);
      return static_cast<double>(difference);
    };
    const Placement x(c, c.x), dx(c, c.dx);
    for (int64_t unit = 0; unit < unit_count(c); ++unit) {
      std::vector<double> gradients;
      problem.read(Tensor::kDx, unit, gradients);
      for (int64_t i = 0; i < unit_size(c); ++i) {
        EXPECT_NEAR(gradients[static_cast<size_t>(i)],
                    slope(inputs.x.data() + x.element(unit, i) * 8), 1e-7)
            << line << ", dx of unit " << unit << ", element " << i;
      }
    }
    const auto check = [&](const char* name, Vector vector, Buffer& input) {
      const std::vector<double> gradients = problem.read(vector);
      for (size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_NEAR(gradients[i], slope(input.data() + i * 8), 1e-7)
            << line << ", " << name << " " << i;
      }
    };
    if (c.weight.present) check("dweight", Vector::kDweight, inputs.weight);
    if (c.bias.present) check("dbias", Vector::kDbias, inputs.bias);
  }
}

}  // namespace
}  // namespace evenkeel::support
