// Fills inputs (values.h). Every tensor has a stream of its own, so that the values of x do not
// depend on whether there is a bias; values are drawn in the order of the units and not of the
// addresses.
#include "support/values.h"

#include <cmath>
#include <limits>

#include "support/half.h"

namespace evenkeel::support {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// About a quarter of the subnormal range, so that squares and sums vary.
double subnormal(ek_dtype dtype, Random& random) {
  const double smallest_normal = std::ldexp(1.0, format_of(dtype).min_exponent);
  return 0.25 * random.normal() * smallest_normal;
}

double x_value(const Case& c, int64_t index, double unit_value, Random& random) {
  switch (c.values) {
    case Values::kMean1e4:
      return 1e4 + random.normal();
    case Values::kOutlierFirst:
      return index == 0 ? 1e4 : random.normal();
    case Values::kConstant:
      return 3 * unit_value;
    case Values::kZero:
      return 0;
    case Values::kDenormal:
      return subnormal(c.x.dtype, random);
    case Values::kHuge:
      return (c.x.dtype == EK_F16 ? 1e4 : 1e15) * random.normal();
    default:
      return 0.25 + random.normal();
  }
}

// Beside an x that is small or the same in all of a unit, so is the sum; otherwise spread 1.
double residual_value(const Case& c, double unit_value, Random& random) {
  switch (c.values) {
    case Values::kConstant:
      return unit_value;
    case Values::kZero:
      return 0;
    case Values::kDenormal:
      return subnormal(c.residual.dtype, random);
    default:
      return random.normal();
  }
}

// Calls value(unit, index) for every element, in order, and stores what it gives.
template <typename Value>
void fill(const Case& c, const TensorSpec& spec, Buffer& buffer, const Value& value) {
  const Placement placement(c, spec);
  const int64_t units = unit_count(c), size = unit_size(c);
  const auto bytes = static_cast<int64_t>(size_of(spec.dtype));
  const bool dense = placement.runs() == 1;
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t start = dense ? placement.offset(unit, 0) : 0;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = dense ? start + i : placement.element(unit, i);
      store(spec.dtype, buffer.data() + at * bytes, value(unit, i));
    }
  }
}

void fill(const VectorSpec& spec, Buffer& buffer, Random random, double center, double spread) {
  const size_t bytes = size_of(spec.dtype);
  for (size_t at = 0; at < buffer.size(); at += bytes) {
    store(spec.dtype, buffer.data() + at, center + spread * random.normal());
  }
}

void fill(const Case& c, const SampleSpec& spec, Buffer& buffer, Random random, double spread) {
  const size_t bytes = size_of(spec.dtype);
  const auto stride = static_cast<size_t>(spec.stride == 0 ? c.cols : spec.stride);
  for (size_t sample = 0; sample < static_cast<size_t>(c.samples); ++sample) {
    for (size_t i = 0; i < static_cast<size_t>(c.cols); ++i)
      store(spec.dtype, buffer.data() + (sample * stride + i) * bytes, spread * random.normal());
  }
}

}  // namespace

// The sum of x and residual in the sum's type: added in float64 where that is its type, otherwise in
// float32.
void fill_sum(const Case& c, Inputs& inputs) {
  const Placement x(c, c.x), residual(c, c.residual);
  const auto value = [&](const Placement& place, const TensorSpec& spec, const Buffer& buffer,
                         int64_t unit, int64_t index) {
    return load(spec.dtype, buffer.data() + static_cast<size_t>(place.element(unit, index)) *
                                                size_of(spec.dtype));
  };
  fill(c, normalized(c), inputs.sum, [&](int64_t unit, int64_t index) {
    const double sum = value(x, c.x, inputs.x, unit, index) +
                       value(residual, c.residual, inputs.residual, unit, index);
    return c.sum.dtype == EK_F64 ? sum : round_to(sum, format_of(EK_F32));
  });
}

void fill_inputs(const Case& c, Inputs& inputs) {
  const auto stream = [&](uint64_t index) { return Random(c.seed * 8 + index); };
  Random x = stream(0), dy = stream(1), choice = stream(4);
  const int64_t size = unit_size(c);
  double unit_value = 0;
  int64_t special = -1;
  const auto choose = [&](int64_t unit, int64_t index) {
    if (index != 0) return;
    unit_value = choice.normal();
    special = unit % 3 == 1 ? choice.below(size) : -1;
  };
  fill(c, c.x, inputs.x, [&](int64_t unit, int64_t index) {
    choose(unit, index);
    const double value = x_value(c, index, unit_value, x);
    if (index != special) return value;
    if (c.values == Values::kNan) return kNaN;
    if (c.values == Values::kInf) return unit_value < 0 ? -kInfinity : kInfinity;
    return value;
  });
  fill(c, c.dy, inputs.dy, [&](int64_t unit, int64_t index) {
    choose(unit, index);
    const double value = dy.normal();
    return c.values == Values::kNanDy && index == special ? kNaN : value;
  });
  if (c.residual.present) {
    Random residual = stream(5);
    fill(c, c.residual, inputs.residual, [&](int64_t unit, int64_t index) {
      choose(unit, index);
      return residual_value(c, unit_value, residual);
    });
    fill_sum(c, inputs);
  }
  if (c.dsum.present) {
    Random dsum = stream(6);
    fill(c, c.dsum, inputs.dsum, [&](int64_t, int64_t) { return dsum.normal(); });
  }
  const bool zero = c.values == Values::kZeroWeight;
  if (c.weight.present) {
    fill(c.weight, inputs.weight, stream(2), zero ? 0 : 1 - c.offset, zero ? 0 : 0.25);
  }
  if (c.bias.present) fill(c.bias, inputs.bias, stream(3), 0, zero ? 0 : 0.5);
  if (c.scale.present) fill(c, c.scale, inputs.scale, stream(7), 0.5);
  if (c.shift.present) fill(c, c.shift, inputs.shift, Random(c.seed * 8 + 1000003), 0.5);
}

}  // namespace evenkeel::support
