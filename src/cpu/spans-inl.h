// The kernels proper: what happens to one contiguous span of elements. A norm is "reduce, then
// map":
//
//   forward    moments  ->  normalize
//   backward   reduce_rows / reduce_plane  ->  input_gradient
//
// With a residual, add comes before the moments, and add_to and put_gradient after input_gradient.
//
// Operands that are scalars for one shape and arrays for another (statistics, weights) are template
// parameters with a load(): Splat or Typed. So row norms, NCHW planes and NHWC pixels share each
// kernel. Every sum is formed in an order that depends on the span's length alone.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_SPANS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_SPANS_INL_H_
#undef EVENKEEL_CPU_SPANS_INL_H_
#else
#define EVENKEEL_CPU_SPANS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>

#include "cpu/activation-inl.h"
#include "cpu/moments.h"
#include "cpu/plan.h"
#include "cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

// ---- casting order ----

// Rounds to the type of what is normalized between the normalization and the weight, or not at all. Whether it does
// is looked up at run time where that hardly counts (with an activation), which saves half of the
// instances.
struct NoCast {
  template <class D>
  HWY_INLINE Vec<D> operator()(D, Vec<D> value) const {
    return value;
  }
};

struct CastTo {
  Dtype dtype;
  bool on;

  template <class D>
  HWY_INLINE Vec<D> operator()(D d, Vec<D> value) const {
    if (!on) return value;
    HWY_ALIGN double buffer[hn::MaxLanes(d)];
    const Any<hn::TFromD<D>> rounded(buffer, dtype);
    rounded.template store<false>(d, value, 0);
    return rounded.load(d, 0);
  }
};

// ---- forward ----

// sum = x + residual, rounded to the type of the sum.
template <class In>
HWY_INLINE void add(In x, In residual, In sum, int64_t n) {
  const hn::ScalableTag<typename In::Compute> d;
  for_each_result<false>(d, sum, n, [&](int64_t i, auto access) EK_LAMBDA {
    return hn::Add(access.load(d, x, i), access.load(d, residual, i));
  });
}

// How many elements are added up in vectors before the sums are carried on in double. Errors of
// many lanes average out, those of a few do not.
template <class D>
HWY_INLINE int64_t block_length(D d) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  return (lanes < 8 ? 64 : 1024) * lanes;
}

// Sums of (x - shift) and (x - shift)^2 over a block; without a center, only those of x^2.
template <bool kCenter, class In>
HWY_INLINE auto block_sums(In x, int64_t n, typename In::Compute shift_value) {
  const hn::ScalableTag<typename In::Compute> d;
  const auto shift = hn::Set(d, shift_value);
  return two_sums<In>(d, n, [&](int64_t i, auto access, auto& s, auto& q) EK_LAMBDA {
    auto v = access.load(d, x, i);
    if constexpr (kCenter) {
      v = access.zero_outside(d, hn::Sub(v, shift));
      s = hn::Add(s, v);
    }
    q = hn::MulAdd(v, v, q);
  });
}

// For a guess at the mean that is good enough to shift by: the sum of four vectors spread over the
// span. Returns the sum's lanes.
template <class In>
HWY_INLINE auto sample(In x, int64_t n) {
  const hn::ScalableTag<typename In::Compute> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  if (n < lanes) return x.load_tail(d, 0, static_cast<size_t>(n));
  const int64_t last = n - lanes;
  return hn::Add(hn::Add(x.load(d, 0), x.load(d, last)),
                 hn::Add(x.load(d, last / 3), x.load(d, last / 3 * 2)));
}

// Where the vectors' arithmetic over- or underflows, or the row holds an Inf or NaN: element by
// element in double.
template <class In>
HWY_NOINLINE Sums wide_sums(In x, int64_t n, double shift) {
  const hn::ScalableTag<typename In::Compute> d;
  HWY_ALIGN typename In::Compute buffer[hn::MaxLanes(d)];
  Sums total{0, 0};
  for_each_vector<Typed<typename In::Compute>>(d, n, [&](int64_t i, auto access) EK_LAMBDA {
    hn::Store(access.load(d, x, i), d, buffer);
    const int64_t count = std::min<int64_t>(n - i, static_cast<int64_t>(hn::Lanes(d)));
    for (int64_t k = 0; k < count; ++k) {
      const double v = static_cast<double>(buffer[k]) - shift;
      total.sum += v;
      total.squares += v * v;
    }
  });
  return total;
}

// Sums over a slice of each of `count` spans.
template <bool kCenter, class SpanAt, class Compute>
HWY_INLINE void sums(const SpanAt& span_at, int64_t count, int64_t n, const Compute* shift,
                     SumsBatch& result) {
  const hn::ScalableTag<Compute> d;
  const int64_t block = block_length(d);
  LaneSums<decltype(d)> first, second;
  if (!kCenter || count < kBatch) result = {};  // what is not summed is nought
  for (int64_t start = 0; start < n; start += block) {
    for (int64_t i = 0; i < count; ++i) {
      const auto found =
          block_sums<kCenter>(span_at(i) + start, std::min(block, n - start), shift[i]);
      if constexpr (kCenter) first.put(d, i, found.first);
      second.put(d, i, found.second);
    }
    if constexpr (kCenter) first.add_to(d, count, start == 0, result.sum);
    second.add_to(d, count, start == 0, result.squares);
  }
}

// The second look at a slice whose sums are not to be trusted: shifted by the mean that the first
// one found, and element by element in double where the vectors' arithmetic over- or underflows.
template <class In>
HWY_NOINLINE Moments careful_moments(In x, int64_t n, double floor, double mean) {
  using Compute = typename In::Compute;
  const auto shift = static_cast<Compute>(mean);
  SumsBatch batch;
  sums<true>([&](int64_t) EK_LAMBDA { return x; }, 1, n, &shift, batch);
  const Sums found = batch[0];
  if (in_safe_range<Compute>(found.squares, floor))
    return from_sums(found, n, static_cast<double>(shift));
  const double exact = wide_sums(x, n, 0).sum / static_cast<double>(n);
  return from_sums(wide_sums(x, n, exact), n, exact);
}

// from_sums() of a whole batch; false if any of the sums is not to be trusted.
template <class Compute>
HWY_INLINE bool from_sums_batch(const SumsBatch& found, int64_t n, const double* shift,
                                double floor, MomentsBatch& result) {
  const hn::ScalableTag<double> d;
  const auto count = hn::Set(d, static_cast<double>(n)), share = hn::Div(hn::Set(d, 1), count);
  auto good = hn::Eq(count, count);
  for (int64_t i = 0; i < kBatch; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto s = hn::LoadU(d, found.sum + i), q = hn::LoadU(d, found.squares + i);
    const auto off = hn::Mul(s, share);
    const auto deviations = hn::NegMulAdd(off, s, q);
    const auto zero = hn::Zero(d);
    hn::StoreU(hn::Add(hn::LoadU(d, shift + i), off), d, result.mean + i);
    hn::StoreU(hn::IfThenElse(hn::Lt(deviations, zero), zero, deviations), d,
               result.deviations + i);
    const auto largest = hn::Set(d, safe_squares<Compute>().first);
    const auto least = hn::Set(d, safe_squares<Compute>().second - floor);
    good = hn::And(good, hn::And(hn::Le(q, largest), hn::Ge(q, least)));
    good = hn::And(good, hn::Le(hn::Mul(s, s), hn::Mul(hn::Mul(hn::Set(d, 0.5), q), count)));
  }
  return hn::AllTrue(d, good);
}

// Mean and sum of squared deviations of a slice, at most kSlice elements, of each of `count` spans,
// at most kBatch: one pass of shifted sums where the shift is close to the mean.
template <bool kCenter, class SpanAt>
HWY_INLINE void slice_moments(const SpanAt& span_at, int64_t count, int64_t n, double eps,
                              MomentsBatch& result) {
  using Compute = typename decltype(span_at(0))::Compute;
  const hn::ScalableTag<Compute> d;
  Compute shift[kBatch] = {};
  if constexpr (kCenter) {
    LaneSums<decltype(d)> samples;
    for (int64_t i = 0; i < count; ++i) samples.put(d, i, sample(span_at(i), n));
    samples.add_up(d, count);
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    const double share = 1 / static_cast<double>(n < lanes ? n : 4 * lanes);
    for (int64_t i = 0; i < count; ++i) shift[i] = static_cast<Compute>(samples[i] * share);
  }
  SumsBatch found;
  sums<kCenter>(span_at, count, n, shift, found);
  double from[kBatch];
  std::copy_n(shift, kBatch, from);
  const double floor = eps * static_cast<double>(n);
  result.count = static_cast<double>(n);
  if (HWY_LIKELY(from_sums_batch<Compute>(found, n, from, floor, result))) return;
  for (int64_t i = 0; i < count; ++i) {
    const bool safe = in_safe_range<Compute>(found.squares[i], floor);
    if constexpr (kCenter) {
      if (!safe || !shift_was_good(found[i], n))
        result.set(i, careful_moments(span_at(i), n, floor, result.mean[i]));
    } else if (!safe) {
      result.deviations[i] = wide_sums(span_at(i), n, 0).squares;
    }
  }
}

// The same over whole spans.
template <bool kCenter, class SpanAt>
HWY_INLINE void moments(const SpanAt& span_at, int64_t count, int64_t n, double eps,
                        MomentsBatch& result) {
  slice_moments<kCenter>(span_at, count, std::min(n, kSlice), eps, result);
  for (int64_t start = kSlice; start < n; start += kSlice) {
    MomentsBatch part;
    slice_moments<kCenter>([&](int64_t i) EK_LAMBDA { return span_at(i) + start; }, count,
                           std::min(n - start, kSlice), eps, part);
    // The last one sets the count for all.
    const MomentsBatch before = result;
    for (int64_t i = 0; i < count; ++i) result.set(i, merge(before[i], part[i]));
  }
}

// y = act(cast((x - shift) * scale + offset) * weight + bias); without a center, shift, offset and
// bias are nought.
template <bool kStream, bool kCenter, class In, class Stat, class Weight, class Cast, class Act>
HWY_INLINE void normalize(In x, In y, int64_t n, Stat shift, Stat scale, Stat offset, Weight weight,
                          Weight bias, Cast cast, Act act) {
  const hn::ScalableTag<typename In::Compute> d;
  for_each_result<kStream>(d, y, n, [&](int64_t i, auto access) EK_LAMBDA {
    const auto value = access.load(d, x, i), by = access.load(d, scale, i);
    const auto w = access.load(d, weight, i);
    if constexpr (kCenter) {
      const auto centered = hn::Sub(value, access.load(d, shift, i));
      const auto normalized = cast(d, hn::MulAdd(centered, by, access.load(d, offset, i)));
      return act.value(d, hn::MulAdd(normalized, w, access.load(d, bias, i)));
    } else {
      return act.value(d, hn::Mul(cast(d, hn::Mul(value, by)), w));
    }
  });
}

// The same where weight and bias are already part of scale and offset.
template <bool kStream, class In, class Stat, class Act>
HWY_INLINE void scale_and_shift(In x, In y, int64_t n, Stat shift, Stat scale, Stat offset,
                                Act act) {
  const hn::ScalableTag<typename In::Compute> d;
  for_each_result<kStream>(d, y, n, [&](int64_t i, auto access) EK_LAMBDA {
    const auto centered = hn::Sub(access.load(d, x, i), access.load(d, shift, i));
    const auto z = hn::MulAdd(centered, access.load(d, scale, i), access.load(d, offset, i));
    return act.value(d, z);
  });
}

// Sums of (x - shift) and (x - shift)^2 for each position, over `count` spans that lie `stride`
// apart.
template <class In>
void column_sums(In x, int64_t stride, int64_t count, int64_t n, Typed<typename In::Compute> shift,
                 Typed<typename In::Compute> sum, Typed<typename In::Compute> squares) {
  const hn::ScalableTag<typename In::Compute> d;
  // The next four spans are fetched from the first to the last element, piece by piece: what the
  // processor fetches by itself for four places at once comes too late. A piece is a whole number of
  // vectors.
  constexpr int64_t kPiece = 64;
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) {
    for (int64_t start = 0; start < n; start += kPiece) {
      const In x0 = x + (row * stride + start), x1 = x0 + stride, x2 = x1 + stride,
               x3 = x2 + stride;
      fetch(x + ((row + 4) * stride + 4 * start), 4 * kPiece);
      const Typed<typename In::Compute> at = shift + start, s = sum + start, q = squares + start;
      for_each_vector<In>(d, std::min(kPiece, n - start), [&](int64_t i, auto access) EK_LAMBDA {
        const auto by = access.load(d, at, i);
        const auto shifted = [&](const In& from) EK_LAMBDA {
          return access.zero_outside(d, hn::Sub(access.load(d, from, i), by));
        };
        const auto v0 = shifted(x0), v1 = shifted(x1), v2 = shifted(x2), v3 = shifted(x3);
        const auto added = hn::Add(hn::Add(v0, v1), hn::Add(v2, v3));
        const auto squared =
            hn::Add(hn::MulAdd(v0, v0, hn::Mul(v1, v1)), hn::MulAdd(v2, v2, hn::Mul(v3, v3)));
        access.store(d, hn::Add(access.load(d, s, i), added), s, i);
        access.store(d, hn::Add(access.load(d, q, i), squared), q, i);
      });
    }
  }
  for (; row < count; ++row) {
    const In x0 = x + row * stride;
    for_each_vector<In>(d, n, [&](int64_t i, auto access) EK_LAMBDA {
      const auto v =
          access.zero_outside(d, hn::Sub(access.load(d, x0, i), access.load(d, shift, i)));
      access.store(d, hn::Add(access.load(d, sum, i), v), sum, i);
      access.store(d, hn::MulAdd(v, v, access.load(d, squares, i)), squares, i);
    });
  }
}

// ---- backward ----

// dz, the gradient before the activation.
template <class D, class Cast, class Act>
HWY_INLINE Vec<D> activation_gradient(D d, Vec<D> dy, Vec<D> normalized, Vec<D> weight, Vec<D> bias,
                                      Cast cast, Act act) {
  if constexpr (kActivates<Act>)
    return act.gradient(d, hn::MulAdd(cast(d, normalized), weight, bias), dy);
  return dy;
}

// One row of x and dy with its statistics.
template <class In, class Stat>
struct GradientRow {
  In x;
  In dy;
  Stat mean;
  Stat rstd;
};

// Two rows at once, which halves the traffic of the parameter sums:
//   dweight += dz * normalized, dbias += dz for each position; returns sum(dz * weight) and sum(dz * weight * normalized)
// for each row. Without a center the mean and the first sum are nought.
template <bool kDweight, bool kDbias, bool kRowSums, bool kCenter, class In, class Stat,
          class Weight, class Cast, class Act>
HWY_INLINE void reduce_rows(const GradientRow<In, Stat> (&rows)[2], int64_t n, Weight weight,
                            Weight bias, Typed<typename In::Compute> dweight,
                            Typed<typename In::Compute> dbias, Cast cast, Act act,
                            TwoSums<hn::ScalableTag<typename In::Compute>> (&result)[2]) {
  const hn::ScalableTag<typename In::Compute> d;
  auto sum0 = hn::Zero(d), sum1 = sum0, product0 = sum0, product1 = sum0;
  for_each_vector<In>(d, n, [&](int64_t i, auto access) EK_LAMBDA {
    const auto w = access.load(d, weight, i);
    const auto b = kActivates<Act> ? access.load(d, bias, i) : hn::Zero(d);
    const auto row = [&](const GradientRow<In, Stat>& r, auto& sum, auto& product,
                         auto& dz) EK_LAMBDA {
      auto centered = access.load(d, r.x, i);
      if constexpr (kCenter) centered = hn::Sub(centered, access.load(d, r.mean, i));
      const auto normalized = access.zero_outside(d, hn::Mul(centered, access.load(d, r.rstd, i)));
      dz = access.zero_outside(
          d, activation_gradient(d, access.load(d, r.dy, i), normalized, w, b, cast, act));
      if constexpr (kRowSums) {
        const auto g = hn::Mul(dz, w);
        if constexpr (kCenter) sum = hn::Add(sum, g);
        product = hn::MulAdd(g, normalized, product);
      }
      return cast(d, normalized);
    };
    auto dz0 = hn::Zero(d), dz1 = dz0;
    const auto normalized0 = row(rows[0], sum0, product0, dz0);
    const auto normalized1 = row(rows[1], sum1, product1, dz1);
    if constexpr (kDweight) {
      const auto first = hn::MulAdd(dz0, normalized0, access.load(d, dweight, i));
      access.store(d, hn::MulAdd(dz1, normalized1, first), dweight, i);
    }
    if constexpr (kDbias) {
      access.store(d, hn::Add(access.load(d, dbias, i), hn::Add(dz0, dz1)), dbias, i);
    }
  });
  if constexpr (kRowSums) {
    result[0] = {sum0, product0};
    result[1] = {sum1, product1};
  }
}

// Returns sum(dz) and sum(dz * normalized) over a block with one weight.
template <class In, class Act>
HWY_INLINE auto reduce_plane(In x, In dy, int64_t n, double mean_value, double rstd_value,
                             double weight_value, double bias_value, Act act) {
  const hn::ScalableTag<typename In::Compute> d;
  using Scalar = Splat<decltype(d)>;
  const Scalar mean(d, mean_value), rstd(d, rstd_value), weight(d, weight_value),
      bias(d, bias_value);
  const auto add = [&](int64_t i, auto access, auto& s, auto& p) EK_LAMBDA {
    const auto normalized =
        access.zero_outside(d, hn::Mul(hn::Sub(access.load(d, x, i), mean.value), rstd.value));
    const auto dz = activation_gradient(d, access.load(d, dy, i), normalized, weight.value,
                                        bias.value, NoCast(), act);
    s = hn::Add(s, access.zero_outside(d, dz));
    p = hn::MulAdd(dz, normalized, p);
  };
  return two_sums<In>(d, n, add);
}

// What is added to a gradient: nothing,
struct Nothing {
  template <class D, class Access>
  HWY_INLINE Vec<D> operator()(D, Vec<D> gradient, int64_t, Access) const {
    return gradient;
  }
};
// or another one.
template <class In>
struct Another {
  In from;

  template <class D, class Access>
  HWY_INLINE Vec<D> operator()(D d, Vec<D> gradient, int64_t i, Access access) const {
    return hn::Add(gradient, access.load(d, from, i));
  }
};

// dx = rstd * dz * weight - gradient_share - normalized * product_share, where the shares are rstd
// times the means of dz * weight and of dz * weight * normalized. Without a center the mean and
// gradient_share are nought.
template <bool kStream, bool kCenter, class In, class Out, class Stat, class Weight, class Cast,
          class Act, class More = Nothing>
HWY_INLINE void input_gradient(In x, In dy, Out dx, int64_t n, Stat mean, Stat rstd,
                               Stat gradient_share, Stat product_share, Weight weight, Weight bias,
                               Cast cast, Act act, More more = {}) {
  const hn::ScalableTag<typename In::Compute> d;
  for_each_result<kStream>(d, dx, n, [&](int64_t i, auto access) EK_LAMBDA {
    const auto r = access.load(d, rstd, i);
    const auto w = access.load(d, weight, i);
    const auto b = kActivates<Act> ? access.load(d, bias, i) : hn::Zero(d);
    auto centered = access.load(d, x, i);
    if constexpr (kCenter) centered = hn::Sub(centered, access.load(d, mean, i));
    const auto normalized = hn::Mul(centered, r);
    const auto dz = activation_gradient(d, access.load(d, dy, i), normalized, w, b, cast, act);
    const auto g = hn::Mul(dz, w);
    const auto own = kCenter ? hn::MulSub(g, r, access.load(d, gradient_share, i)) : hn::Mul(g, r);
    return more(d, hn::NegMulAdd(normalized, access.load(d, product_share, i), own), i, access);
  });
}

// gradient += from. The array lies in the lane order of In.
template <class In>
HWY_INLINE void add_to(Typed<typename In::Compute> gradient, In from, int64_t n) {
  const hn::ScalableTag<typename In::Compute> d;
  for_each_vector<In>(d, n, [&](int64_t i, auto access) EK_LAMBDA {
    const auto total = hn::Add(access.load(d, gradient, i), access.load(d, from, i));
    access.store(d, total, gradient, i);
  });
}

// dx = gradient, rounded.
template <bool kStream, class In>
HWY_INLINE void put_gradient(Typed<typename In::Compute> gradient, In dx, int64_t n) {
  const hn::ScalableTag<typename In::Compute> d;
  for_each_result<kStream>(
      d, dx, n, [&](int64_t i, auto access) EK_LAMBDA { return access.load(d, gradient, i); });
}

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
