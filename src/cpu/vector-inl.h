// Memory to vectors and back: every element type is read into, and rounded from, vectors of the compute type.
//
// Dtypes appear here and nowhere else in the kernels. Typed<Stored> is a tensor whose type is known when compiling;
// Any<Compute> looks its type up at run time (one well-predicted branch a vector), so that all mixes of types need
// two instances rather than a hundred. Addresses need no alignment; a tail is read and written without touching the
// bytes behind it.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_VECTOR_INL_H_
#undef EVENKEEL_CPU_VECTOR_INL_H_
#else
#define EVENKEEL_CPU_VECTOR_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "cpu/stored.h"

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
  requires ComputesF32<D>
HWY_INLINE Vec<D> load_as(D d, const float* from) {
  return hn::LoadU(d, from);
}
template <class D>
  requires ComputesF64<D>
HWY_INLINE Vec<D> load_as(D d, const float* from) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), from));
}
template <class D>
  requires ComputesF64<D>
HWY_INLINE Vec<D> load_as(D d, const double* from) {
  return hn::LoadU(d, from);
}
template <class D>
  requires ComputesF32<D>
HWY_INLINE Vec<D> load_as(D d, const BF16* from) {
  const hn::Rebind<uint16_t, D> du16;
  const hn::Rebind<uint32_t, D> du32;
  const auto bits = hn::PromoteTo(du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}
template <class D>
  requires ComputesF32<D>
HWY_INLINE Vec<D> load_as(D d, const F16* from) {
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::PromoteTo(d, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(from)));
}
template <class D, class Half>
  requires ComputesF64<D>
HWY_INLINE Vec<D> load_as(D d, const Half* from) {
  return hn::PromoteTo(d, load_as(hn::Rebind<float, D>(), from));
}

// Rounds to the stored type; the result is a vector of as many (narrower) lanes.
template <class D>
  requires ComputesF32<D>
HWY_INLINE Vec<D> narrow(D, Vec<D> value, const float*) {
  return value;
}
template <class D>
  requires ComputesF64<D>
HWY_INLINE Vec<D> narrow(D, Vec<D> value, const double*) {
  return value;
}
template <class D>
  requires ComputesF64<D>
HWY_INLINE auto narrow(D, Vec<D> value, const float*) {
  return hn::DemoteTo(hn::Rebind<float, D>(), value);
}
template <class D>
  requires ComputesF32<D>
HWY_INLINE auto narrow(D, Vec<D> value, const BF16*) {
  const hn::Rebind<uint32_t, D> du32;
  const auto bits = hn::BitCast(du32, value);
  // To nearest even: add half a unit, and one less where the kept part is even. A NaN stays one: its top mantissa bit
  // is set, since the bits that made it a NaN may be among those cut off.
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du32, 0x7fff)));
  const auto quiet = hn::Or(bits, hn::Set(du32, 0x400000));
  const auto is_nan = hn::RebindMask(du32, hn::IsNaN(value));
  const auto kept = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
  const hn::Rebind<int32_t, D> di32;
  return hn::DemoteTo(hn::Rebind<uint16_t, D>(), hn::BitCast(di32, kept));
}
template <class D>
  requires ComputesF32<D>
HWY_INLINE auto narrow(D, Vec<D> value, const F16*) {
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::BitCast(hn::Rebind<uint16_t, D>(), hn::DemoteTo(df16, value));
}
template <class D, class Half>
  requires ComputesF64<D>
HWY_INLINE auto narrow(D, Vec<D> value, const Half* as) {
  const hn::Rebind<float, D> df32;
  return narrow(df32, hn::DemoteTo(df32, value), as);
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

// Fewer elements than a vector has. Lanes past `count` are read as zero.
template <class D, class Stored>
HWY_INLINE Vec<D> load_tail_as(D d, const Stored* from, size_t count) {
  HWY_ALIGN Stored buffer[hn::MaxLanes(d)] = {};
  std::memcpy(static_cast<void*>(buffer), static_cast<const void*>(from), count * sizeof(Stored));
  return load_as(d, buffer);
}

template <class D, class Stored>
HWY_INLINE void store_tail_as(D d, Vec<D> value, Stored* to, size_t count) {
  HWY_ALIGN Stored buffer[hn::MaxLanes(d)];
  store_as(d, value, buffer);
  std::memcpy(static_cast<void*>(to), static_cast<const void*>(buffer), count * sizeof(Stored));
}

// ---- tensors ----

template <class StoredType>
struct Typed {
  using Stored = StoredType;
  using Compute = typename Stored_<Stored>::Compute;

  Stored* data;

  Typed(void* at, Dtype) : data(static_cast<Stored*>(at)) {}
  Typed operator+(int64_t elements) const { return Typed(data + elements); }

  template <class D>
  HWY_INLINE Vec<D> load(D d, int64_t i) const {
    return load_as(d, data + i);
  }
  template <class D>
  HWY_INLINE Vec<D> load_tail(D d, int64_t i, size_t count) const {
    return load_tail_as(d, data + i, count);
  }
  template <class D>
  HWY_INLINE void store(D d, Vec<D> value, int64_t i) const {
    store_as(d, value, data + i);
  }
  template <class D>
  HWY_INLINE void stream(D d, Vec<D> value, int64_t i) const {
    stream_as(d, value, data + i);
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
  Any operator+(int64_t elements) const { return Any(data + elements * size_of(dtype), dtype); }

  // Calls visit with a typed pointer to element i. f64 storage always comes with f64 arithmetic.
  template <class Visit>
  HWY_INLINE auto with(int64_t i, Visit visit) const {
    switch (dtype) {
      case Dtype::kF16: return visit(reinterpret_cast<F16*>(data) + i);
      case Dtype::kBF16: return visit(reinterpret_cast<BF16*>(data) + i);
      case Dtype::kF64:
        if constexpr (sizeof(Compute) == 8) return visit(reinterpret_cast<double*>(data) + i);
        break;
      case Dtype::kF32: break;
    }
    return visit(reinterpret_cast<float*>(data) + i);
  }

  template <class D>
  HWY_INLINE Vec<D> load(D d, int64_t i) const {
    return with(i, [&](auto* at) HWY_ATTR { return load_as(d, at); });
  }
  template <class D>
  HWY_INLINE Vec<D> load_tail(D d, int64_t i, size_t count) const {
    return with(i, [&](auto* at) HWY_ATTR { return load_tail_as(d, at, count); });
  }
  template <class D>
  HWY_INLINE void store(D d, Vec<D> value, int64_t i) const {
    with(i, [&](auto* at) HWY_ATTR { store_as(d, value, at); });
  }
  template <class D>
  HWY_INLINE void stream(D d, Vec<D> value, int64_t i) const {
    with(i, [&](auto* at) HWY_ATTR { stream_as(d, value, at); });
  }
  template <class D>
  HWY_INLINE void store_tail(D d, Vec<D> value, int64_t i, size_t count) const {
    with(i, [&](auto* at) HWY_ATTR { store_tail_as(d, value, at, count); });
  }
};

// ---- full vectors and tails under one name, so that a kernel's loop body is written once ----

struct Full {
  template <class D, class Source>
  HWY_INLINE Vec<D> load(D d, const Source& from, int64_t i) const {
    return from.load(d, i);
  }
  template <class D, class Target>
  HWY_INLINE void store(D d, Vec<D> value, const Target& to, int64_t i) const {
    to.store(d, value, i);
  }
  template <class D>
  HWY_INLINE Vec<D> zero_outside(D, Vec<D> value) const {
    return value;
  }
};

struct Streamed : Full {
  template <class D, class Target>
  HWY_INLINE void store(D d, Vec<D> value, const Target& to, int64_t i) const {
    to.stream(d, value, i);
  }
};

struct Tail {
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

// Calls body(i, access) for every vector of n elements.
template <class Access = Full, class D, class Body>
HWY_INLINE void for_each_vector(D d, int64_t n, Body body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, Access());
  if (i < n) body(i, Tail{static_cast<size_t>(n - i)});
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
HWY_INLINE double sum_of_lanes(D d, Vec<D> value) {
  return static_cast<double>(hn::GetLane(hn::SumOfLanes(d, value)));
}

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
