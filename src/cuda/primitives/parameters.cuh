// Weight, bias and statistics on their way into registers. Their dtype is looked up once for many
// elements; where a latency is to be hidden, a load is issued early and its value taken later.
#pragma once

#include <type_traits>

#include "cuda/primitives/functors.cuh"
#include "cuda/primitives/ptx.cuh"

namespace evenkeel::cuda {

// Calls body with a value of the type, which is not float64: kernels that are compiled for the dtypes of
// big tensors look those of parameters up.
template <typename Body>
__device__ inline void with_type(Dtype dtype, const Body& body) {
  if (dtype == Dtype::kF32) return body(float{});
  if (dtype == Dtype::kF16) return body(__half{});
  body(__nv_bfloat16{});
}
// The same where it is float32, X or Y, at most one of which is a half type.
template <typename X, typename Y, typename Body>
__device__ inline void with_type_of(Dtype dtype, const Body& body) {
  using Half = std::conditional_t<sizeof(X) == 2, X, Y>;
  if (sizeof(Half) == 2 && dtype != Dtype::kF32) return body(Half{});
  body(float{});
}

// Parameters in a kernel whose x has type X.
template <typename X, int W, typename C>
__device__ inline void parameters_at(const DeviceVector& vector, int64_t column, C absent,
                                     C (&out)[W]) {
  const auto read = [&](auto type) {
    using A = Access<decltype(type), W, C>;
    A::unpack(A::load(vector, column), out);
  };
  if (vector.data == nullptr) {
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] = absent;
  } else if constexpr (std::is_same_v<X, RuntimeDtype>) {
    read(RuntimeDtype{});
  } else {
    with_type(vector.dtype, read);
  }
}

// The formula with the weight and bias of a sample.
__device__ inline Formula formula_of_sample(const Formula& formula, const Samples& samples,
                                            int64_t sample) {
  Formula own = formula;
  if (own.weight.data != nullptr) own.weight.data += sample * samples.weight_bytes;
  if (own.bias.data != nullptr) own.bias.data += sample * samples.bias_bytes;
  return own;
}
// The formula of a row: that of its sample if kModulated, otherwise a reference to the one of all rows.
template <bool kModulated, typename Arguments>
__device__ inline decltype(auto) formula_of(const Arguments& a, int64_t row) {
  if constexpr (kModulated) {
    return formula_of_sample(a.formula, a.samples, row / a.samples.rows);
  } else {
    return (a.formula);
  }
}

// One block prefetches weight and bias into L2, before its kernel has to wait for the one before it.
__device__ inline void prefetch_parameters(const Formula& formula, int64_t cols) {
  if (blockIdx.x != 0) return;
  for (const DeviceVector& vector : {formula.weight, formula.bias}) {
    if (vector.data == nullptr) continue;
    constexpr int kLine = 128;
    const int64_t bytes = cols * (vector.dtype == Dtype::kF32 ? 4 : 2);
    for (int64_t at = threadIdx.x * kLine; at < bytes; at += blockDim.x * kLine)
      ptx::prefetch_line(vector.data + at);
  }
}

// Weights with their offset, or ones.
template <typename X, int W, typename C>
__device__ inline void weights_at(const Formula& formula, int64_t column, C (&out)[W]) {
  parameters_at<X>(formula.weight, column, C{1}, out);
  if (formula.weight.data != nullptr) add_weight_offset(formula, out);
}

// Parameters from column `part` + `column` on, none beyond `part` + `cols`. An aligned vector ends there, at
// the latest; the others may be cut off.
template <typename A, bool kAligned>
__device__ inline typename A::Raw load_vector(const DeviceVector& vector, int64_t part, int column,
                                              int cols) {
  if constexpr (kAligned) return A::load(vector, part + min(column, cols - A::kWidth));
  return A::load_partial(vector, part + min(column, cols), cols - column);
}

// A thread's weights: vectors of W columns from `part` + `first` on, `step` apart, none beyond `part` +
// `cols`, of dtype X, Y or float32. issue() loads all of them; get() waits for them.
template <typename X, typename Y, bool kAligned, int kVectors, int W>
class WeightLoad {
 public:
  __device__ void issue(const Formula& formula, int64_t part, int first, int step, int cols) {
    if (formula.weight.data == nullptr) return;
    with_type_of<X, Y>(formula.weight.dtype, [&](auto type) {
      using A = Access<decltype(type), W, float>;
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        raw<A>(v) = load_vector<A, kAligned>(formula.weight, part, first + v * step, cols);
    });
  }
  __device__ void get(const Formula& formula, float (&weight)[kVectors][W]) {
    if (formula.weight.data == nullptr) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int k = 0; k < W; ++k) weight[v][k] = 1;
      }
      return;
    }
    with_type_of<X, Y>(formula.weight.dtype, [&](auto type) {
      using A = Access<decltype(type), W, float>;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        A::unpack(raw<A>(v), weight[v]);
        add_weight_offset(formula, weight[v]);
      }
    });
  }

 private:
  template <typename A>
  __device__ typename A::Raw& raw(int v) {
    static_assert(sizeof(typename A::Raw) <= sizeof words_[0]);
    return reinterpret_cast<typename A::Raw&>(words_[v]);
  }
  struct alignas(16) Words {
    uint32_t word[W];
  };
  Words words_[kVectors];
};

// One parameter or statistic: a function with an index issues the load, the one without waits for the
// value. In a kernel whose x has type X.
template <typename X, typename C>
class LoadedScalar {
 public:
  __device__ void parameter(const DeviceVector& vector, int64_t column) {
    if (vector.data == nullptr) return;
    if (vector.dtype == Dtype::kF32) {
      bits_ = reinterpret_cast<const uint32_t*>(vector.data)[column];
    } else {
      bits_ = reinterpret_cast<const uint16_t*>(vector.data)[column];
    }
  }
  __device__ C parameter(const DeviceVector& vector, C absent) const {
    if (vector.data == nullptr) return absent;
    if (vector.dtype == Dtype::kF32) return __uint_as_float(bits_);
    if (vector.dtype == Dtype::kBF16) return __uint_as_float(bits_ << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits_)));
  }
  __device__ void statistic(const char* from, Dtype, int64_t at) {
    bits_ = reinterpret_cast<const uint32_t*>(from)[at];
  }
  __device__ C statistic() const { return __uint_as_float(bits_); }

 private:
  uint32_t bits_ = 0;
};

template <typename C>
class LoadedScalar<RuntimeDtype, C> {
 public:
  __device__ void parameter(const DeviceVector& vector, int64_t column) {
    if (vector.data != nullptr) value_ = load_runtime<C>(vector.data, vector.dtype, column);
  }
  __device__ C parameter(const DeviceVector& vector, C absent) const {
    return vector.data != nullptr ? value_ : absent;
  }
  __device__ void statistic(const char* from, Dtype stats, int64_t at) {
    value_ = load_runtime<C>(from, stats, at);
  }
  __device__ C statistic() const { return value_; }

 private:
  C value_ = 0;
};

// A weight with its offset, or one.
template <typename X, typename C>
__device__ inline C weight_of(const Formula& formula, const LoadedScalar<X, C>& loaded) {
  C weight[1] = {loaded.parameter(formula.weight, C{1})};
  if (formula.weight.data != nullptr) add_weight_offset(formula, weight);
  return weight[0];
}

}  // namespace evenkeel::cuda
