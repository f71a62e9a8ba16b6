// Memory to vectors and back: every element type is read into, and rounded from, vectors of the
// compute type.
//
// Dtypes appear here and nowhere else in the kernels. Typed<Stored> is a tensor whose type is known
// when compiling; Any<Compute> looks its type up at run time (one well-predicted branch a vector),
// so that all mixes of types need two instances rather than a hundred. Addresses need no alignment;
// a tail is read and written without touching the bytes behind it.
//
// bf16 is taken apart into its even and its odd elements: a shift and a mask instead of shuffles,
// and the same backwards. Arrays that go with such a tensor (weights, column sums) lie in that
// order, too: "lane order". For all other types lane order is memory order.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_VECTOR_INL_H_
#undef EVENKEEL_CPU_VECTOR_INL_H_
#else
#define EVENKEEL_CPU_VECTOR_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "cpu/moments.h"
#include "cpu/stored.h"

// For lambdas in kernels: compiled for the instruction set at hand, and inlined, however long.
#undef EK_LAMBDA
#define EK_LAMBDA HWY_ATTR __attribute__((always_inline))

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class D>
using Vec = hn::Vec<D>;

template <class D>
concept ComputesF32 = sizeof(hn::TFromD<D>) == 4;
template <class D>
concept ComputesF64 = sizeof(hn::TFromD<D>) == 8;

// ---- one vector of each stored type ----

template <class D>
requires ComputesF32<D> HWY_INLINE Vec<D> load_as(D d, const float* from) {
  return hn::LoadU(d, from);
}
template <class D>
requires ComputesF64<D> HWY_INLINE Vec<D> load_as(D d, const float* from) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), from));
}
template <class D>
requires ComputesF64<D> HWY_INLINE Vec<D> load_as(D d, const double* from) {
  return hn::LoadU(d, from);
}
template <class D>
requires ComputesF32<D> HWY_INLINE Vec<D> load_as(D d, const BF16* from) {
  const hn::Rebind<uint16_t, D> du16;
  const hn::Rebind<uint32_t, D> du32;
  const auto bits = hn::PromoteTo(du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}
template <class D>
requires ComputesF32<D> HWY_INLINE Vec<D> load_as(D d, const F16* from) {
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2
  // Without an instruction for it, Highway makes a number of Inf and NaN.
  const hn::Rebind<uint32_t, D> du32;
  const auto code = hn::PromoteTo(
      du32, hn::LoadU(hn::Rebind<uint16_t, D>(), reinterpret_cast<const uint16_t*>(from)));
  const auto shifted = hn::ShiftLeft<13>(hn::And(code, hn::Set(du32, 0x7fff)));
  const auto sign = hn::ShiftLeft<16>(hn::And(code, hn::Set(du32, 0x8000)));
  const auto rebias = hn::Set(du32, 112u << 23);
  const auto normal = hn::Add(shifted, rebias);
  const auto special = hn::Add(normal, rebias);
  const auto smallest = hn::Set(du32, 113u << 23);
  const auto denormal = hn::BitCast(
      du32, hn::Sub(hn::BitCast(d, hn::Add(shifted, smallest)), hn::BitCast(d, smallest)));
  const auto number = hn::IfThenElse(hn::Lt(shifted, hn::Set(du32, 1u << 23)), denormal, normal);
  const auto value = hn::IfThenElse(hn::Gt(shifted, hn::Set(du32, 0x0f7fffff)), special, number);
  return hn::BitCast(d, hn::Or(value, sign));
#else
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::PromoteTo(d, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(from)));
#endif
}
template <class D, class Half>
requires ComputesF64<D> HWY_INLINE Vec<D> load_as(D d, const Half* from) {
  return hn::PromoteTo(d, load_as(hn::Rebind<float, D>(), from));
}

// Rounds to the stored type; the result is a vector of as many (narrower) lanes.
template <class D>
requires ComputesF32<D> HWY_INLINE Vec<D> narrow(D, Vec<D> value, const float*) { return value; }
template <class D>
requires ComputesF64<D> HWY_INLINE Vec<D> narrow(D, Vec<D> value, const double*) { return value; }
template <class D>
requires ComputesF64<D> HWY_INLINE auto narrow(D, Vec<D> value, const float*) {
  return hn::DemoteTo(hn::Rebind<float, D>(), value);
}
template <class D>
requires ComputesF32<D> HWY_INLINE auto narrow(D, Vec<D> value, const BF16*) {
  const hn::Rebind<uint32_t, D> du32;
  const auto bits = hn::BitCast(du32, value);
  // To nearest even: add half a unit, and one less where the kept part is even. A NaN stays one:
  // its top mantissa bit is set, since the bits that made it a NaN may be among those cut off.
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du32, 0x7fff)));
  const auto quiet = hn::Or(bits, hn::Set(du32, 0x400000));
  const auto is_nan = hn::RebindMask(du32, hn::IsNaN(value));
  const auto kept = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
  const hn::Rebind<int32_t, D> di32;
  return hn::DemoteTo(hn::Rebind<uint16_t, D>(), hn::BitCast(di32, kept));
}
template <class D>
requires ComputesF32<D> HWY_INLINE auto narrow(D d, Vec<D> value, const F16*) {
  const hn::Rebind<uint16_t, D> du16;
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2
  // Without an instruction for it, Highway cuts off instead of rounding.
  const hn::Rebind<uint32_t, D> du32;
  const hn::Rebind<int32_t, D> di32;
  const auto bits = hn::BitCast(du32, value);
  const auto magnitude = hn::And(bits, hn::Set(du32, 0x7fffffff));
  const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du32, 1));
  const auto normal =
      hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, hn::Set(du32, (112u << 23) - 0xfff)), odd));
  // One half has the step of f16's denormals, so adding it rounds to them.
  const auto half = hn::Set(d, 0.5f);
  const auto denormal =
      hn::Sub(hn::BitCast(du32, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du32, half));
  const auto number =
      hn::IfThenElse(hn::Lt(magnitude, hn::Set(du32, 0x38800000)), denormal, normal);
  const auto too_large = hn::Gt(magnitude, hn::Set(du32, 0x477fffff));
  const auto is_nan = hn::RebindMask(du32, hn::IsNaN(value));
  const auto special = hn::IfThenElse(is_nan, hn::Set(du32, 0x7e00), hn::Set(du32, 0x7c00));
  const auto code = hn::Or(sign, hn::IfThenElse(too_large, special, number));
  return hn::DemoteTo(du16, hn::BitCast(di32, code));
#else
  (void)d;
  return hn::BitCast(du16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), value));
#endif
}
template <class D, class Half>
requires ComputesF64<D> HWY_INLINE auto narrow(D, Vec<D> value, const Half* as) {
  // By way of f32, but rounded once: what f32 has no room for is kept as one bit that is set if any
  // of it was.
  const hn::Rebind<float, D> df32;
  const hn::Rebind<uint64_t, D> du64;
  const auto bits = hn::BitCast(du64, value);
  const auto cut = hn::Set(du64, 0x1fffffff);
  const auto sticky =
      hn::IfThenElseZero(hn::Ne(hn::And(bits, cut), hn::Zero(du64)), hn::Set(du64, 0x20000000));
  const auto kept = hn::BitCast(D(), hn::Or(hn::AndNot(cut, bits), sticky));
  return narrow(df32, hn::DemoteTo(df32, kept), as);
}

// The lanes that memory holds: the halves are moved as plain 16-bit integers.
template <class Stored>
struct Lanes {
  using Type = Stored;
};
template <>
struct Lanes<F16> {
  using Type = uint16_t;
};
template <>
struct Lanes<BF16> {
  using Type = uint16_t;
};

template <class D, class Stored>
HWY_INLINE void store_as(D d, Vec<D> value, Stored* to) {
  using Lane = typename Lanes<Stored>::Type;
  hn::StoreU(narrow(d, value, to), hn::Rebind<Lane, D>(), reinterpret_cast<Lane*>(to));
}

// Past the caches. `to` must be aligned to the vector.
template <class D, class Stored>
HWY_INLINE void stream_as(D d, Vec<D> value, Stored* to) {
  using Lane = typename Lanes<Stored>::Type;
  hn::Stream(narrow(d, value, to), hn::Rebind<Lane, D>(), reinterpret_cast<Lane*>(to));
}

// Fewer elements than a vector has. Lanes past `count` are read as zero. (The minimum is there for
// the compiler, which cannot see that a tail is short.)
template <class D, class Stored>
HWY_INLINE Vec<D> load_tail_as(D d, const Stored* from, size_t count) {
  HWY_ALIGN Stored buffer[hn::MaxLanes(d)] = {};
  std::memcpy(static_cast<void*>(buffer), static_cast<const void*>(from),
              std::min(count * sizeof(Stored), sizeof buffer));
  return load_as(d, buffer);
}

template <class D, class Stored>
HWY_INLINE void store_tail_as(D d, Vec<D> value, Stored* to, size_t count) {
  HWY_ALIGN Stored buffer[hn::MaxLanes(d)];
  store_as(d, value, buffer);
  std::memcpy(static_cast<void*>(to), static_cast<const void*>(buffer),
              std::min(count * sizeof(Stored), sizeof buffer));
}

// ---- tensors ----

template <class StoredType>
struct Typed {
  using Stored = StoredType;
  using Compute = typename Stored_<Stored>::Compute;

  Stored* data;

  Typed(void* at, Dtype) : data(static_cast<Stored*>(at)) {}
  Typed operator+(int64_t elements) const { return Typed(data + elements); }
  static constexpr int64_t element() { return sizeof(Stored); }

  template <class D>
  HWY_INLINE Vec<D> load(D d, int64_t i) const {
    return load_as(d, data + i);
  }
  template <class D>
  HWY_INLINE Vec<D> load_tail(D d, int64_t i, size_t count) const {
    return load_tail_as(d, data + i, count);
  }
  template <bool kStream, class D>
  HWY_INLINE void store(D d, Vec<D> value, int64_t i) const {
    kStream ? stream_as(d, value, data + i) : store_as(d, value, data + i);
  }
  template <class D>
  HWY_INLINE void store_tail(D d, Vec<D> value, int64_t i, size_t count) const {
    store_tail_as(d, value, data + i, count);
  }

 private:
  explicit Typed(Stored* at) : data(at) {}
};

template <class ComputeType>
struct Any {
  using Compute = ComputeType;

  char* data;
  Dtype dtype;

  Any(void* at, Dtype type) : data(static_cast<char*>(at)), dtype(type) {}
  Any operator+(int64_t elements) const { return Any(data + elements * element(), dtype); }
  int64_t element() const { return size_of(dtype); }

  // Calls visit with a typed pointer to element i. f64 storage always comes with f64 arithmetic.
  template <class Visit>
  HWY_INLINE auto with(int64_t i, Visit visit) const {
    switch (dtype) {
      case Dtype::kF16:
        return visit(reinterpret_cast<F16*>(data) + i);
      case Dtype::kBF16:
        return visit(reinterpret_cast<BF16*>(data) + i);
      case Dtype::kF64:
        if constexpr (sizeof(Compute) == 8) return visit(reinterpret_cast<double*>(data) + i);
        break;
      default:  // what has 8 bits is no operand
        break;
    }
    return visit(reinterpret_cast<float*>(data) + i);
  }

  template <class D>
  HWY_INLINE Vec<D> load(D d, int64_t i) const {
    return with(i, [&](auto* at) EK_LAMBDA { return load_as(d, at); });
  }
  // Tails are not inlined: they have code for every type, and little time is spent in them.
  template <class D>
  HWY_NOINLINE Vec<D> load_tail(D d, int64_t i, size_t count) const {
    return with(i, [&](auto* at) EK_LAMBDA { return load_tail_as(d, at, count); });
  }
  template <bool kStream, class D>
  HWY_INLINE void store(D d, Vec<D> value, int64_t i) const {
    with(i,
         [&](auto* at) EK_LAMBDA { kStream ? stream_as(d, value, at) : store_as(d, value, at); });
  }
  template <class D>
  HWY_NOINLINE void store_tail(D d, Vec<D> value, int64_t i, size_t count) const {
    with(i, [&](auto* at) EK_LAMBDA { store_tail_as(d, value, at, count); });
  }
};

// Prefetches n elements, to be read or written soon.
template <bool kToWrite = false, class In>
HWY_INLINE void fetch(In from, int64_t n) {
  const auto* const data = reinterpret_cast<const char*>(from.data);
  const int64_t bytes = n * from.element();
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, kToWrite);
}

// An operand that is the same for every element.
template <class D>
struct Splat {
  Vec<D> value;

  Splat(D d, double scalar) : value(hn::Set(d, static_cast<hn::TFromD<D>>(scalar))) {}
  HWY_INLINE Vec<D> load(D, int64_t) const { return value; }
  HWY_INLINE Vec<D> load_tail(D, int64_t, size_t) const { return value; }
};

template <class D>
struct TwoSums {
  Vec<D> first, second;
};

// ---- from vectors to their sums ----

// The sums over the lanes of up to kBatch vectors. A vector's way to its sum is long, but many can
// go it together, a pair of vectors becoming one at every step. The order of a sum's additions does
// not depend on the other vectors, nor on their number.
template <class D>
class LaneSums {
 public:
  HWY_INLINE void put(D d, int64_t i, Vec<D> value) { hn::Store(value, d, vectors_ + i * kLanes); }

  // Of the first `count` vectors.
  HWY_INLINE void add_up(D d, int64_t count) {
    for (int64_t first = 0; first < count; first += kLanes)
      hn::Store(tree<kLanes>(d, first, count), d, sums_ + first);
  }

  // Adds these sums to those in `totals`, or begins with them.
  HWY_INLINE void add_to(D d, int64_t count, bool begin, double* totals) {
    add_up(d, count);
    if (begin) std::fill_n(totals, count, 0);
    for (int64_t i = 0; i < count; ++i) totals[i] += (*this)[i];
  }

  HWY_INLINE double operator[](int64_t i) const { return static_cast<double>(sums_[i]); }

 private:
  using Lane = hn::TFromD<D>;
  static constexpr int64_t kLanes = hn::MaxLanes(D());
  static constexpr int64_t kSlots = kBatch > kLanes ? kBatch : kLanes;

  // Sums of kWidth vectors from `first` on; each fills kLanes / kWidth lanes.
  template <int64_t kWidth>
  HWY_INLINE Vec<D> tree(D d, int64_t first, [[maybe_unused]] int64_t count) const {
#if HWY_TARGET != HWY_SCALAR
    if constexpr (kWidth > 1) {
      const auto low = tree<kWidth / 2>(d, first, count);
      const auto high =
          first + kWidth / 2 < count ? tree<kWidth / 2>(d, first + kWidth / 2, count) : hn::Zero(d);
      return hn::Add(hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low));
    }
#endif
    return hn::Load(d, vectors_ + first * kLanes);
  }

  HWY_ALIGN Lane vectors_[kSlots * kLanes];
  HWY_ALIGN Lane sums_[kSlots];
};

// ---- bf16 in two parts ----

template <class In>
inline constexpr bool kInParts = false;
#if HWY_TARGET != HWY_SCALAR  // a vector of one element cannot be taken apart
template <>
inline constexpr bool kInParts<Typed<BF16>> = true;
#endif

// 2 * Lanes(d) elements as 16-bit integers.
template <class D>
using Words = hn::Repartition<uint16_t, D>;

// The even (0) or odd (1) ones of a vector of bf16.
template <int kPart, class D>
HWY_INLINE Vec<D> part_of(D d, Vec<Words<D>> words) {
  const hn::Repartition<uint32_t, D> du32;
  const auto pairs = hn::BitCast(du32, words);
  return hn::BitCast(
      d, kPart == 0 ? hn::ShiftLeft<16>(pairs) : hn::And(pairs, hn::Set(du32, 0xffff0000u)));
}

// Rounds to nearest even and puts the parts together again. The upper and the lower halves of all
// values are brought together first; then the lower halves decide, all at once, whether the upper
// ones go up by one.
template <class D>
HWY_INLINE Vec<Words<D>> join_parts(D, Vec<D> even, Vec<D> odd) {
  const Words<D> du16;
  const hn::Repartition<uint32_t, D> du32;
  const auto high = hn::Set(du32, 0xffff0000u);
  const auto e = hn::BitCast(du32, even), o = hn::BitCast(du32, odd);
  const auto upper = hn::BitCast(du16, hn::OrAnd(hn::ShiftRight<16>(e), o, high));
  const auto lower = hn::BitCast(du16, hn::IfVecThenElse(high, hn::ShiftLeft<16>(o), e));
  // lower + 0x7fff + (upper & 1) carries out of 16 bits; the average keeps the 17th bit and drops
  // the lowest.
  const auto addend = hn::OrAnd(hn::Set(du16, 0x7ffe), upper, hn::Set(du16, 1));
  const auto carry = hn::ShiftRight<15>(hn::AverageRound(lower, addend));
  // Only a NaN with all bits set could be carried over into another number.
  const auto magnitude = hn::Set(du16, 0x7fff);
  const auto all_set = hn::Eq(hn::And(upper, magnitude), magnitude);
  return hn::IfThenElse(all_set, upper, hn::Add(upper, carry));
}

// ---- full vectors and tails, parts and wholes under one name, so that a kernel's loop body is written once ----

struct Whole {
  template <class D, class Source>
  HWY_INLINE Vec<D> load(D d, const Source& from, int64_t i) const {
    return from.load(d, i);
  }
  template <class D, class Target>
  HWY_INLINE void store(D d, Vec<D> value, const Target& to, int64_t i) const {
    to.template store<false>(d, value, i);
  }
  template <class D>
  HWY_INLINE Vec<D> zero_outside(D, Vec<D> value) const {
    return value;
  }
};

struct WholeTail {
  size_t count;

  template <class D, class Source>
  HWY_INLINE Vec<D> load(D d, const Source& from, int64_t i) const {
    return from.load_tail(d, i, count);
  }
  template <class D, class Target>
  HWY_INLINE void store(D d, Vec<D> value, const Target& to, int64_t i) const {
    to.store_tail(d, value, i, count);
  }
  template <class D>
  HWY_INLINE Vec<D> zero_outside(D d, Vec<D> value) const {
    return hn::IfThenElseZero(hn::FirstN(d, count), value);
  }
};

// Arrays in lane order are padded, so that even a tail's parts are whole vectors there.
template <int kPart>
struct Part {
  template <class D>
  HWY_INLINE Vec<D> load(D d, const Typed<BF16>& from, int64_t i) const {
    return part_of<kPart>(d,
                          hn::LoadU(Words<D>(), reinterpret_cast<const uint16_t*>(from.data + i)));
  }
  template <class D, class Source>
  HWY_INLINE Vec<D> load(D d, const Source& from, int64_t i) const {
    return from.load(d, i + kPart * static_cast<int64_t>(hn::Lanes(d)));
  }
  template <class D, class Target>
  HWY_INLINE void store(D d, Vec<D> value, const Target& to, int64_t i) const {
    to.template store<false>(d, value, i + kPart * static_cast<int64_t>(hn::Lanes(d)));
  }
  template <class D>
  HWY_INLINE Vec<D> zero_outside(D, Vec<D> value) const {
    return value;
  }
};

template <int kPart>
struct PartTail : Part<kPart> {
  size_t count;

  explicit PartTail(size_t elements) : count(elements) {}

  using Part<kPart>::load;
  template <class D>
  HWY_INLINE Vec<D> load(D d, const Typed<BF16>& from, int64_t i) const {
    HWY_ALIGN uint16_t buffer[2 * hn::MaxLanes(d)] = {};
    std::memcpy(buffer, static_cast<const void*>(from.data + i),
                std::min(count * sizeof(uint16_t), sizeof buffer));
    return part_of<kPart>(d, hn::Load(Words<D>(), buffer));
  }
  template <class D>
  HWY_INLINE Vec<D> zero_outside(D d, Vec<D> value) const {
    return hn::IfThenElseZero(hn::FirstN(d, (count + 1 - kPart) / 2), value);
  }
};

// Calls body(i, access) for every vector of n elements of In.
template <class In, class D, class Body>
HWY_INLINE void for_each_vector(D d, int64_t n, Body body) {
  constexpr int kVectors = kInParts<In> ? 2 : 1;
  const auto step = kVectors * static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    if constexpr (kInParts<In>) {
      body(i, Part<0>());
      body(i, Part<1>());
    } else {
      body(i, Whole());
    }
  }
  if (i >= n) return;
  const auto count = static_cast<size_t>(n - i);
  if constexpr (kInParts<In>) {
    body(i, PartTail<0>(count));
    body(i, PartTail<1>(count));
  } else {
    body(i, WholeTail{count});
  }
}

// Two sums over n elements, each in four accumulators: add(i, access, first, second) adds the
// vector at i to them.
template <class In, class D, class Add>
HWY_INLINE TwoSums<D> two_sums(D d, int64_t n, Add add) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto f0 = hn::Zero(d), f1 = f0, f2 = f0, f3 = f0, s0 = f0, s1 = f0, s2 = f0, s3 = f0;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    if constexpr (kInParts<In>) {
      add(i, Part<0>(), f0, s0);
      add(i, Part<1>(), f1, s1);
      add(i + 2 * lanes, Part<0>(), f2, s2);
      add(i + 2 * lanes, Part<1>(), f3, s3);
    } else {
      add(i, Whole(), f0, s0);
      add(i + lanes, Whole(), f1, s1);
      add(i + 2 * lanes, Whole(), f2, s2);
      add(i + 3 * lanes, Whole(), f3, s3);
    }
  }
  for_each_vector<In>(d, n - i,
                      [&](int64_t j, auto access) EK_LAMBDA { add(i + j, access, f0, s0); });
  return {hn::Add(hn::Add(f0, f1), hn::Add(f2, f3)), hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))};
}

// Stores body(i, access) for every vector of n elements.
template <bool kStream, class In, class D, class Body>
HWY_INLINE void for_each_result(D d, In to, int64_t n, Body body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  if constexpr (kInParts<In>) {
    const Words<D> du16;
    auto* words = reinterpret_cast<uint16_t*>(to.data);
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const auto joined = join_parts(d, body(i, Part<0>()), body(i, Part<1>()));
      if constexpr (kStream) {
        hn::Stream(joined, du16, words + i);
      } else {
        hn::StoreU(joined, du16, words + i);
      }
    }
    if (i >= n) return;
    const auto count = static_cast<size_t>(n - i);
    HWY_ALIGN uint16_t buffer[2 * hn::MaxLanes(d)];
    hn::Store(join_parts(d, body(i, PartTail<0>(count)), body(i, PartTail<1>(count))), du16,
              buffer);
    std::memcpy(static_cast<void*>(words + i), buffer,
                std::min(count * sizeof(uint16_t), sizeof buffer));
  } else {
    for (; i + lanes <= n; i += lanes) to.template store<kStream>(d, body(i, Whole()), i);
    if (i >= n) return;
    const WholeTail tail{static_cast<size_t>(n - i)};
    tail.store(d, body(i, tail), to, i);
  }
}

// An array of the compute type, in the lane order of In, as the target of results.
template <class In>
struct LaneOrder {
  Typed<typename In::Compute> array;
};

template <bool, class In, class D, class Body>
HWY_INLINE void for_each_result(D d, LaneOrder<In> to, int64_t n, Body body) {
  for_each_vector<In>(d, n, [&](int64_t i, auto access) EK_LAMBDA {
    access.store(d, body(i, access), to.array, i);
  });
}

// Copies bytes past the caches. `to` and `bytes` must be multiples of the vector.
inline void stream_copy(const char* from, char* to, int64_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  const auto* source = reinterpret_cast<const uint8_t*>(from);
  auto* target = reinterpret_cast<uint8_t*>(to);
  for (int64_t i = 0; i < bytes; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::Stream(hn::LoadU(d, source + i), d, target + i);
}

// Arrays from memory order to lane order and back, in place. They are padded to whole steps.
#if HWY_TARGET != HWY_SCALAR
template <class In, class T>
void to_lane_order(T* array, int64_t n) {
  if constexpr (kInParts<In>) {
    const hn::ScalableTag<T> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (int64_t i = 0; i < n; i += 2 * lanes) {
      const auto first = hn::LoadU(d, array + i), second = hn::LoadU(d, array + i + lanes);
      hn::StoreU(hn::ConcatEven(d, second, first), d, array + i);
      hn::StoreU(hn::ConcatOdd(d, second, first), d, array + i + lanes);
    }
  }
}

template <class In, class T>
void to_memory_order(T* array, int64_t n) {
  if constexpr (kInParts<In>) {
    const hn::ScalableTag<T> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (int64_t i = 0; i < n; i += 2 * lanes) {
      const auto even = hn::LoadU(d, array + i), odd = hn::LoadU(d, array + i + lanes);
      hn::StoreInterleaved2(even, odd, d, array + i);
    }
  }
}
#else
template <class In, class T>
void to_lane_order(T*, int64_t) {}
template <class In, class T>
void to_memory_order(T*, int64_t) {}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
