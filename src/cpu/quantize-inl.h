// Quantization of a piece of y, float32 in scratch, to 8 bits: core/quantize.h lane by lane.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_QUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_QUANTIZE_INL_H_
#undef EVENKEEL_CPU_QUANTIZE_INL_H_
#else
#define EVENKEEL_CPU_QUANTIZE_INL_H_
#endif

#include "core/quantize.h"
#include "cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

// The codes as integers, of values that are scaled.
template <class D, int kMantissa, bool kHasInfinity>
HWY_INLINE auto codes_of(D d, Vec<D> value, Float8<kMantissa, kHasInfinity> /*format*/) {
  using Format = Float8<kMantissa, kHasInfinity>;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, value), infinity = hn::Set(du, kFloatInfinity);
  const auto exact = hn::And(bits, hn::Set(du, kFloatMagnitude));
  // Integers have the order of the numbers; what is not finite is put in its place at the end.
  const auto largest = hn::Set(du, std::bit_cast<uint32_t>(Format::kLargest));
  const auto magnitude = hn::Min(exact, largest);
  const auto odd = hn::And(hn::ShiftRight<Format::kCut>(magnitude), hn::Set(du, 1));
  const auto half = hn::Set(du, (1u << (Format::kCut - 1)) - 1 - Format::kRebias);
  const auto normal = hn::ShiftRight<Format::kCut>(hn::Add(magnitude, hn::Add(half, odd)));
  const auto rounds = hn::Set(d, Format::kRoundsSubnormal);
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), rounds)), hn::BitCast(du, rounds));
  const auto finite =
      hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, Format::kLeastNormal)), subnormal, normal);
  const auto number =
      hn::IfThenElse(hn::Eq(exact, infinity), hn::Set(du, Format::kInfinity), finite);
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(du, 0x80));
  const auto nan =
      kHasInfinity ? hn::Gt(exact, infinity) : hn::Gt(exact, hn::Set(du, kFloatInfinity - 1));
  return hn::IfThenElse(nan, hn::Set(du, Format::kNan), hn::Or(sign, number));
}

template <class D>
HWY_INLINE auto codes_of(D d, Vec<D> value, Int8 /*format*/) {
  const hn::RebindToUnsigned<D> du;
  const auto within = hn::Max(hn::Min(value, hn::Set(d, Int8::kLargest)), hn::Set(d, Int8::kLeast));
  const auto rounds = hn::Set(d, Int8::kRounds);
  const auto code = hn::Sub(hn::BitCast(du, hn::Add(within, rounds)), hn::BitCast(du, rounds));
  const auto number = hn::RebindMask(du, hn::Eq(value, value));
  return hn::IfThenElseZero(number, hn::And(code, hn::Set(du, 0xff)));
}

// Where codes go, as the target of results.
template <class Format>
struct Codes {
  uint8_t* data;

  template <bool kStream, class D>
  HWY_INLINE void store(D d, Vec<D> value, int64_t i) const {
    hn::StoreU(bytes(d, value), hn::Rebind<uint8_t, D>(), data + i);
  }
  template <class D>
  HWY_INLINE void store_tail(D d, Vec<D> value, int64_t i, size_t count) const {
    HWY_ALIGN uint8_t buffer[hn::MaxLanes(d)];
    hn::StoreU(bytes(d, value), hn::Rebind<uint8_t, D>(), buffer);
    std::memcpy(data + i, buffer, std::min(count, sizeof buffer));
  }

 private:
  template <class D>
  static HWY_INLINE auto bytes(D d, Vec<D> value) {
    const auto codes = codes_of(d, value, Format());
    return hn::DemoteTo(hn::Rebind<uint8_t, D>(), hn::BitCast(hn::RebindToSigned<D>(), codes));
  }
};

// The bits of the largest absolute value.
inline HWY_NOINLINE uint32_t amax_bits_of(Typed<float> y, int64_t n) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const auto magnitude = hn::Set(du, kFloatMagnitude);
  auto most = hn::Zero(du);
  for_each_vector<Typed<float>>(d, n, [&](int64_t i, auto access) EK_LAMBDA {
    most = hn::Max(most, hn::And(hn::BitCast(du, access.load(d, y, i)), magnitude));
  });
  HWY_ALIGN uint32_t lanes[hn::MaxLanes(d)];
  hn::Store(most, du, lanes);
  return *std::max_element(lanes, lanes + hn::Lanes(d));
}

template <class Format>
HWY_NOINLINE void quantize_as(Typed<float> y, float scale, Codes<Format> codes, int64_t n) {
  const hn::ScalableTag<float> d;
  const auto inverse = hn::Set(d, 1 / scale);
  for_each_vector<Typed<float>>(d, n, [&](int64_t i, auto access) EK_LAMBDA {
    access.store(d, hn::Mul(access.load(d, y, i), inverse), codes, i);
  });
}

inline void quantize(Typed<float> y, float scale, Dtype dtype, char* to, int64_t n) {
  with_eight_bits(dtype, [&](auto format) {
    quantize_as(y, scale, Codes<decltype(format)>{reinterpret_cast<uint8_t*>(to)}, n);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
