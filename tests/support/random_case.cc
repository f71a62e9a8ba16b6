// Draws random cases (random_case.h), so that what is drawn is always valid: parts that depend on
// each other are drawn together.
#include "support/random_case.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

namespace evenkeel::support {
namespace {

// Log-uniform in [1, limit], often at or next to a power of two.
int64_t random_size(Random& random, int64_t limit) {
  const int bits = static_cast<int>(std::log2(static_cast<double>(std::max<int64_t>(limit, 1))));
  const int64_t base = int64_t{1} << random.below(bits + 1);
  const int64_t size = random.chance(2) ? base + random.below(3) - 1 : base + random.below(base);
  return std::clamp<int64_t>(size, 1, std::max<int64_t>(limit, 1));
}

ek_dtype random_dtype(Random& random) {
  return random.chance(8)
             ? EK_F64
             : std::array{EK_F32, EK_F16, EK_BF16}[static_cast<size_t>(random.below(3))];
}

Values random_values(Random& random) {
  if (!random.chance(4)) return Values::kNormal;
  constexpr Values kAll[] = {Values::kMean1e4, Values::kOutlierFirst, Values::kConstant,
                             Values::kZero,    Values::kNan,          Values::kInf,
                             Values::kNanDy,   Values::kDenormal,     Values::kZeroWeight,
                             Values::kHuge};
  return kAll[random.below(static_cast<int64_t>(std::size(kAll)))];
}

// Either nested order of `outer` blocks of `inner` rows of `width` elements, with gaps.
void random_strides(Random& random, TensorSpec& spec, int64_t outer, int64_t inner, int64_t width) {
  if (random.chance(2)) return;
  const auto gap = [&] { return random.chance(2) ? 0 : random.below(9); };
  if (random.chance(3)) {
    spec.outer_stride = width + gap();
    spec.row_stride = outer * spec.outer_stride + gap();
  } else {
    spec.row_stride = width + gap();
    spec.outer_stride = random.chance(2) ? 0 : inner * spec.row_stride + gap();
  }
}

void random_parameters(Random& random, Case& c) {
  c.weight = {random_dtype(random), !random.chance(4)};
  c.bias = {random_dtype(random), !random.chance(c.op == EK_RMS_NORM ? 2 : 4)};
  if (c.weight.present && random.chance(4)) c.offset = random.chance(2) ? 1 : 0.5;
  if (c.op == EK_RMS_NORM && random.chance(2)) {
    c.casting = static_cast<ek_casting>(random.below(3));
  }
  if (random.chance(3)) c.activation = static_cast<ek_activation>(1 + random.below(4));
}

void random_outputs(Random& random, Case& c) {
  c.mean = c.op != EK_RMS_NORM && !random.chance(4);
  c.rstd = !random.chance(4);
  c.dweight = {random_dtype(random), !random.chance(4)};
  c.dbias = {random_dtype(random), !random.chance(4)};
  c.dx.present = (!c.dweight.present && !c.dbias.present) || !random.chance(5);
}

void random_quantization(Random& random, Case& c) {
  c.y.dtype = std::array{EK_F8_E4M3, EK_F8_E5M2, EK_I8}[static_cast<size_t>(random.below(3))];
  c.backward = false;
  c.y_scale = random.chance(2) ? YScale::kRows : YScale::kTensor;
  if (c.y_scale == YScale::kRows && random.chance(3)) c.amax_bound = random.chance(2) ? 2 : 1e-3;
}

// A residual, and what goes with it backward.
void random_residual(Random& random, Case& c, int64_t outer, int64_t inner, int64_t width) {
  const auto wide = [](const TensorSpec& spec) { return spec.present && spec.dtype == EK_F64; };
  const bool alike = random.chance(2);
  for (TensorSpec* spec : {&c.residual, &c.sum, &c.dsum, &c.dresidual}) {
    spec->dtype = alike ? c.x.dtype : random_dtype(random);
    random_strides(random, *spec, outer, inner, width);
  }
  c.residual.present = true;
  c.sum.present = !random.chance(4);
  c.dsum.present = !random.chance(4);
  c.dresidual.present = random.chance(2);
  // sum=none says nothing of its dtype and strides but what is the residual's.
  if (!c.sum.present) c.sum = {c.residual.dtype, false, 0, 0};
  if ((wide(c.x) || wide(c.residual)) && c.sum.dtype != EK_F64)
    c.residual.dtype = c.sum.dtype = EK_F64;
}

// A scale, a shift or both, for samples of any number of rows.
void random_modulation(Random& random, Case& c) {
  const auto draw = [&](bool present) {
    const int64_t stride = random.chance(2) ? 0 : c.cols + random.below(9);
    return SampleSpec{random_dtype(random), present, stride};
  };
  const bool both = random.chance(2), scale = random.chance(2);
  c.scale = draw(both || scale);
  c.shift = draw(both || !scale);
  c.dscale = draw(!random.chance(4));
  c.dshift = draw(!random.chance(4));
  c.samples = 1 + random.below(c.rows);
  while (c.rows % c.samples != 0) --c.samples;
}

}  // namespace

Case random_case(Random& random, int64_t max_elements) {
  Case c;
  c.op = static_cast<ek_op>(random.below(3));
  int64_t outer, inner, width;
  if (c.op == EK_GROUP_NORM) {
    c.layout = static_cast<ek_layout>(random.below(2));
    const int64_t per_group = random_size(random, 48);
    c.groups = random_size(random, std::min<int64_t>(40, max_elements / per_group));
    c.channels = per_group * c.groups;
    c.spatial = random_size(random, max_elements / c.channels);
    c.samples = random_size(random, std::min<int64_t>(9, max_elements / (c.channels * c.spatial)));
    outer = c.samples;
    inner = c.layout == EK_NHWC ? c.spatial : c.channels;
    width = c.layout == EK_NHWC ? c.channels : c.spatial;
  } else {
    c.cols = random_size(random, max_elements);
    inner = random_size(random, max_elements / c.cols);
    outer = random.chance(2) ? 1 : random_size(random, max_elements / c.cols / inner);
    c.rows = outer * inner;
    if (outer > 1 || random.chance(4)) c.inner_rows = inner;
    width = c.cols;
  }
  for (TensorSpec* spec : {&c.x, &c.y, &c.dy, &c.dx}) {
    spec->dtype = random_dtype(random);
    random_strides(random, *spec, outer, inner, width);
  }
  if (random.chance(3)) c.y.dtype = c.dy.dtype = c.dx.dtype = c.x.dtype;
  random_parameters(random, c);
  random_outputs(random, c);
  if (c.op != EK_GROUP_NORM && random.chance(3)) random_residual(random, c, outer, inner, width);
  if (c.op != EK_GROUP_NORM && random.chance(3)) random_modulation(random, c);
  if (c.residual.present && random.chance(6)) {
    c.in_place = random.chance(2) && c.sum.dtype == c.x.dtype ? InPlace::kSum : InPlace::kResidual;
    if (c.in_place == InPlace::kSum) {
      if (c.sum.present) c.sum = c.x;
      if (c.dsum.present)
        c.dx = c.dsum;
      else
        c.dsum = c.dx;
    } else {
      if (c.sum.present) c.residual = c.sum;
      if (c.dsum.present)
        c.dresidual = c.dsum;
      else
        c.dresidual.present = false;
    }
  } else if (random.chance(6)) {
    c.in_place = random.chance(2) ? InPlace::kDy : InPlace::kX;
    c.y = c.x;
    c.dx = c.in_place == InPlace::kDy ? c.dy : normalized(c);
  }
  if (random.chance(3)) c.misalign = random.below(64);
  c.values = random_values(random);
  if (c.op != EK_GROUP_NORM && c.in_place == InPlace::kNone && random.chance(5))
    random_quantization(random, c);
  constexpr double kEps[] = {1e-5, 1e-6, 1e-12, 1e-3, 1};
  // A variance that underflows or is zero needs an eps that does not.
  const bool ordinary = c.values == Values::kNormal;
  c.eps = ordinary ? kEps[random.below(5)] : 1e-5;
  if (ordinary && unit_size(c) > 8 && random.chance(6)) c.eps = 0;
  c.seed = 1 + static_cast<uint64_t>(random.below(1000000));
  return c;
}

}  // namespace evenkeel::support
