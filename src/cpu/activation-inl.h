// The activations: for each the value and dy times the slope, of one vector.
//
// Spans take NoActivation, whose loops have no activation in their code, Silu, or for all others
// OtherActivation, which looks up at run time which one it is: the branch costs an instruction or two of a
// vector's 25 to 100, and the constants of all of them do not stay in registers, which would
// be a sixth of SiLU's instructions.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_ACTIVATION_INL_H_
#undef EVENKEEL_CPU_ACTIVATION_INL_H_
#else
#define EVENKEEL_CPU_ACTIVATION_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <type_traits>

#include "core/gelu.h"
#include "cpu/vector-inl.h"
#include "evenkeel/evenkeel.h"

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

// 1 / (1 + exp(-z)), by way of exp(-|z|), which cannot overflow.
template <class D>
HWY_INLINE Vec<D> sigmoid(D d, Vec<D> z) {
  const auto one = hn::Set(d, 1);
  const auto decay = hn::Exp(d, hn::Neg(hn::Abs(z)));
  const auto numerator = hn::IfThenElse(hn::Lt(z, hn::Zero(d)), decay, one);
  return hn::Div(numerator, hn::Add(one, decay));
}

// The slope of z * sigmoid(t), where `steep` is z times the slope of t. With sigmoid(-t) as it is computed: `steep` would
// multiply what 1 - sigmoid(t) rounds.
template <class D>
HWY_INLINE Vec<D> sigmoid_slope(D d, Vec<D> t, Vec<D> steep) {
  const auto one = hn::Set(d, 1), decay = hn::Exp(d, hn::Neg(hn::Abs(t)));
  const auto near = hn::Div(one, hn::Add(one, decay)), far = hn::Mul(decay, near);
  const auto below = hn::Lt(t, hn::Zero(d));
  const auto s = hn::IfThenElse(below, far, near), rest = hn::IfThenElse(below, near, far);
  return hn::Mul(s, hn::MulAdd(steep, rest, one));
}

// |z|, but no more than `end`; NaN stays.
template <class D>
HWY_INLINE Vec<D> magnitude_up_to(D d, Vec<D> z, int end) {
  const auto most = hn::Set(d, static_cast<hn::TFromD<D>>(end)), magnitude = hn::Abs(z);
  return hn::IfThenElse(hn::Gt(magnitude, most), most, magnitude);
}

struct Silu {
  template <class D>
  static HWY_INLINE Vec<D> value(D d, Vec<D> z) {
    return hn::Mul(z, sigmoid(d, z));
  }
  template <class D>
  static HWY_INLINE Vec<D> gradient(D d, Vec<D> z, Vec<D> dy) {
    return hn::Mul(dy, sigmoid_slope(d, z, z));
  }
};

// Selects, as torch's does: a NaN stays, and an infinite dy does not become one.
struct Relu {
  template <class D>
  static HWY_INLINE Vec<D> value(D d, Vec<D> z) {
    return gradient(d, z, z);
  }
  template <class D>
  static HWY_INLINE Vec<D> gradient(D d, Vec<D> z, Vec<D> dy) {
    return hn::IfThenZeroElse(hn::Le(z, hn::Zero(d)), dy);
  }
};

struct Gelu {
  template <class D>
  static HWY_INLINE Vec<D> value(D d, Vec<D> z) {
    return hn::Mul(z, Normal<D>(d, z).cdf);
  }
  template <class D>
  static HWY_INLINE Vec<D> gradient(D d, Vec<D> z, Vec<D> dy) {
    const Normal<D> normal(d, z);
    return hn::Mul(dy, hn::MulAdd(normal.cut_off, normal.density, normal.cdf));
  }

 private:
  // Of z, or of where it is cut off: the density is 0 there.
  template <class D>
  struct Normal {
    Vec<D> cut_off, cdf, density;

    HWY_INLINE Normal(D d, Vec<D> z) {
      using T = hn::TFromD<D>;
      const auto a = magnitude_up_to(d, z, kNormalEnd), half = hn::Set(d, static_cast<T>(0.5));
      // The square's rounding would be that of a large exponent; without FMA the rest is 0.
      const auto square = hn::Mul(a, a), rest = hn::MulSub(a, a, square);
      const auto power = hn::Exp(d, hn::Neg(hn::Mul(half, square)));
      const auto decay = hn::NegMulAdd(power, hn::Mul(half, rest), power);
      const auto ratio =
          hn::Div(polynomial(d, a, NormalTail<T>::kP), polynomial(d, a, NormalTail<T>::kQ));
      const auto tail = hn::Mul(decay, ratio);
      cdf = hn::IfThenElse(hn::Lt(z, hn::Zero(d)), tail, hn::Sub(hn::Set(d, 1), tail));
      density = hn::Mul(decay, hn::Set(d, static_cast<T>(kInverseRootOf2Pi)));
      cut_off = hn::CopySign(a, z);
    }
  };

  template <class D, size_t kTerms>
  static HWY_INLINE Vec<D> polynomial(D d, Vec<D> a, const hn::TFromD<D> (&coefficients)[kTerms]) {
    auto sum = hn::Set(d, coefficients[kTerms - 1]);
    for (size_t i = kTerms - 1; i-- > 0;) sum = hn::MulAdd(sum, a, hn::Set(d, coefficients[i]));
    return sum;
  }
};

struct GeluTanh {
  template <class D>
  static HWY_INLINE Vec<D> value(D d, Vec<D> z) {
    return hn::Mul(z, sigmoid(d, hn::Mul(z, slope(d, z, kGeluTanh3))));
  }
  template <class D>
  static HWY_INLINE Vec<D> gradient(D d, Vec<D> z, Vec<D> dy) {
    const auto cut_off = hn::CopySign(magnitude_up_to(d, z, kGeluTanhEnd), z);
    const auto t = hn::Mul(cut_off, slope(d, cut_off, kGeluTanh3));
    const auto steep = hn::Mul(cut_off, slope(d, cut_off, 3 * kGeluTanh3));
    return hn::Mul(dy, sigmoid_slope(d, t, steep));
  }

 private:
  template <class D>
  static HWY_INLINE Vec<D> slope(D d, Vec<D> z, double cubic) {
    using T = hn::TFromD<D>;
    return hn::MulAdd(hn::Mul(z, z), hn::Set(d, static_cast<T>(cubic)),
                      hn::Set(d, static_cast<T>(kGeluTanh1)));
  }
};

struct NoActivation {
  template <class D>
  HWY_INLINE Vec<D> value(D, Vec<D> z) const {
    return z;
  }
};

struct OtherActivation {
  ek_activation which;

  template <class D>
  HWY_INLINE Vec<D> value(D d, Vec<D> z) const {
    return chosen([&](auto act) EK_LAMBDA { return act.value(d, z); });
  }
  template <class D>
  HWY_INLINE Vec<D> gradient(D d, Vec<D> z, Vec<D> dy) const {
    return chosen([&](auto act) EK_LAMBDA { return act.gradient(d, z, dy); });
  }

 private:
  template <class Body>
  HWY_INLINE auto chosen(const Body& body) const {
    if (which == EK_ACTIVATION_RELU) return body(Relu());
    return which == EK_ACTIVATION_GELU ? body(Gelu()) : body(GeluTanh());
  }
};

// run(activation) of one that there is.
template <class Run>
HWY_INLINE void with_activation(ek_activation which, const Run& run) {
  which == EK_ACTIVATION_SILU ? run(Silu()) : run(OtherActivation{which});
}

template <class Act>
inline constexpr bool kActivates = !std::is_same_v<Act, NoActivation>;

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
