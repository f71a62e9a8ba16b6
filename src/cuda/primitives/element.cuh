// Elements in memory and in registers: the only file of the kernels that knows dtypes.
//
// Access<T, W, C> moves W neighbouring elements of type T between a tensor and registers, as they
// are stored (Raw) or in the compute type C. W elements are a multiple of 16 bytes, or one element.
// Vectors lie at multiples of 16 bytes, but for the functions that say otherwise.
// Access<RuntimeDtype, 1, C> looks the dtype up at run time and accepts every address: for rare mixes of
// dtypes, float64, and addresses that are no multiple of the element's size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/arguments.h"

namespace evenkeel::cuda {

struct RuntimeDtype {};

// y's type where it is quantized: which one of 8 bits it is, is looked up at run time (row/quantize.cuh).
struct EightBits {
  uint8_t code;
};

// Not inlined: there are many callers, and none of them is fast anyway.
template <typename C>
__device__ __noinline__ C load_runtime(const char* data, Dtype dtype, int64_t index) {
  const auto read = [&](auto value) {
    const char* at = data + index * static_cast<int64_t>(sizeof value);
    if (reinterpret_cast<uintptr_t>(at) % sizeof value == 0)
      return *reinterpret_cast<const decltype(value)*>(at);
    for (int i = 0; i < static_cast<int>(sizeof value); ++i)
      reinterpret_cast<char*>(&value)[i] = at[i];
    return value;
  };
  switch (dtype) {
    case Dtype::kF64:
      return static_cast<C>(read(double{}));
    case Dtype::kF32:
      return static_cast<C>(read(float{}));
    case Dtype::kF16:
      return static_cast<C>(__half2float(read(__half{})));
    default:
      break;
  }
  return static_cast<C>(__bfloat162float(read(__nv_bfloat16{})));
}

__device__ inline void convert(float value, float& to) { to = value; }
__device__ inline void convert(double value, float& to) { to = static_cast<float>(value); }
__device__ inline void convert(double value, double& to) { to = value; }
__device__ inline void convert(float value, __half& to) { to = __float2half_rn(value); }
__device__ inline void convert(double value, __half& to) { to = __double2half(value); }
__device__ inline void convert(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }
__device__ inline void convert(double value, __nv_bfloat16& to) { to = __double2bfloat16(value); }

template <typename C>
__device__ __noinline__ void store_runtime(char* data, Dtype dtype, int64_t index, C value) {
  const auto write = [&](auto stored) {
    convert(value, stored);
    char* at = data + index * static_cast<int64_t>(sizeof stored);
    if (reinterpret_cast<uintptr_t>(at) % sizeof stored == 0) {
      *reinterpret_cast<decltype(stored)*>(at) = stored;
      return;
    }
    for (int i = 0; i < static_cast<int>(sizeof stored); ++i)
      at[i] = reinterpret_cast<const char*>(&stored)[i];
  };
  switch (dtype) {
    case Dtype::kF64:
      return write(double{});
    case Dtype::kF32:
      return write(float{});
    case Dtype::kF16:
      return write(__half{});
    default:
      return write(__nv_bfloat16{});
  }
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// 16 of the 32 bytes of two words, from byte `offset` on, a multiple of 2.
__device__ inline uint4 extract(const uint4& low, const uint4& high, int offset) {
  uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = offset & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = offset & 4 ? w[i + 1] : w[i];
  const auto rest = [&](int i) { return __funnelshift_r(w[i], w[i + 1], offset % 4 * 8); };
  return make_uint4(rest(0), rest(1), rest(2), rest(3));
}

template <typename T, int W, typename C>
struct Access {
  static constexpr int kWidth = W;
  // 16 bytes at a time; 8 where parameters of a half type go with float32.
  static constexpr int kBytes = W * static_cast<int>(sizeof(T));
  using Word = std::conditional_t<kBytes % 16 == 0, uint4, uint2>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  static_assert(W == 1 || kBytes % sizeof(Word) == 0);

  struct alignas(W == 1 ? sizeof(T) : sizeof(Word)) Raw {
    T at[W];
  };

  static __device__ Raw load(const DeviceTensor& tensor, int64_t index) {
    return load(tensor.data + index * static_cast<int64_t>(sizeof(T)));
  }
  static __device__ Raw load(const char* at) {
    Raw raw;
    if constexpr (W == 1) {
      raw.at[0] = *reinterpret_cast<const T*>(at);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        reinterpret_cast<Word*>(&raw)[i] = reinterpret_cast<const Word*>(at)[i];
    }
    return raw;
  }
  static __device__ Raw load(const DeviceVector& vector, int64_t index) {
    return load(vector.data + index * static_cast<int64_t>(sizeof(T)));
  }
  // The first `count` elements one by one, and zeros.
  static __device__ Raw load_elements(const char* at, int count) {
    Raw raw{};
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if (k < count) raw.at[k] = reinterpret_cast<const T*>(at)[k];
    }
    return raw;
  }
  // The first `count` elements from any multiple of an element's size, as one vector if that is possible.
  static __device__ Raw load_partial(const char* at, int count) {
    const bool aligned = reinterpret_cast<uintptr_t>(at) % sizeof(Word) == 0;
    return count >= W && aligned ? load(at) : load_elements(at, count);
  }
  static __device__ Raw load_partial(const DeviceVector& vector, int64_t index, int count) {
    return load_partial(vector.data + index * static_cast<int64_t>(sizeof(T)), count);
  }
  // The same from shared memory, for up to 16 bytes that rarely are aligned. May read all of the words of
  // 16 bytes that they are a part of.
  static __device__ Raw load_unaligned_shared(const char* at, int count = W) {
    static_assert(kBytes <= 16);
    if (count < W) return load_elements(at, count);
    const int offset = static_cast<int>(__cvta_generic_to_shared(at)) % 16;
    const uint4* word = reinterpret_cast<const uint4*>(at - offset);
    const bool two = kBytes == 16 || offset + kBytes > 16;
    const uint4 bytes = offset == 0 ? word[0] : extract(word[0], word[two ? 1 : 0], offset);
    return reinterpret_cast<const Raw&>(bytes);
  }
  static __device__ Raw load_if(bool valid, const DeviceTensor& tensor, int64_t index) {
    return load_if(valid, tensor.data + index * static_cast<int64_t>(sizeof(T)));
  }
  static __device__ void unpack(const Raw& raw, C (&out)[W]) {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && W > 1) {
      // The upper half of a float: one instruction each.
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        const uint32_t pair = reinterpret_cast<const uint32_t*>(&raw)[i];
        out[2 * i] = __uint_as_float(pair << 16);
        out[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
      }
    } else {
#pragma unroll
      for (int k = 0; k < W; ++k) out[k] = to_float(raw.at[k]);
    }
  }
  // A compiler barrier: what was unpacked before is unpacked again after it, instead of being held in
  // registers meanwhile.
  template <int K>
  static __device__ void discard_unpacked(Raw (&raw)[K]) {
    if constexpr (W > 1 && sizeof(T) < sizeof(C)) {
#pragma unroll
      for (Raw& r : raw) {
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) asm("" : "+r"(reinterpret_cast<uint32_t*>(&r)[i]));
      }
    }
  }
  // Zeros unless `valid`. kEvictFirst: from global memory that is read once, so that caches keep what is
  // read again.
  template <bool kEvictFirst = false>
  static __device__ Raw load_if(bool valid, const char* at) {
    Raw raw{};
    if constexpr (W == 1) {
      if (valid) raw = load(at);
    } else if (valid) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const Word* word = reinterpret_cast<const Word*>(at) + i;
        reinterpret_cast<Word*>(&raw)[i] = kEvictFirst ? __ldcs(word) : *word;
      }
    }
    return raw;
  }
  static __device__ void store(const DeviceTensor& tensor, int64_t index, const C (&values)[W]) {
    store(tensor.data + index * static_cast<int64_t>(sizeof(T)), values);
  }
  // kEvictFirst: to global memory that is not read again soon. (It keeps the compiler from moving the
  // stores, for which a kernel that is short of registers has no room.)
  template <bool kEvictFirst = false>
  static __device__ void store(char* at, const C (&values)[W]) {
    Raw raw;
#pragma unroll
    for (int k = 0; k < W; ++k) convert(values[k], raw.at[k]);
    if constexpr (W == 1) {
      *reinterpret_cast<T*>(at) = raw.at[0];
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const Word word = reinterpret_cast<const Word*>(&raw)[i];
        Word* const to = reinterpret_cast<Word*>(at) + i;
        if constexpr (kEvictFirst) {
          __stcs(to, word);
        } else {
          *to = word;
        }
      }
    }
  }
  static __device__ Raw pack(const C (&values)[W]) {
    Raw raw;
#pragma unroll
    for (int k = 0; k < W; ++k) convert(values[k], raw.at[k]);
    return raw;
  }
  template <bool kEvictFirst = false>
  static __device__ void store_raw(char* at, const Raw& raw) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const Word word = reinterpret_cast<const Word*>(&raw)[i];
      Word* const to = reinterpret_cast<Word*>(at) + i;
      if constexpr (kEvictFirst) {
        __stcs(to, word);
      } else {
        *to = word;
      }
    }
  }
  // The first `count` elements one by one.
  static __device__ void store_elements(char* at, const C (&values)[W], int count) {
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if (k < count) convert(values[k], reinterpret_cast<T*>(at)[k]);
    }
  }
  // The value after a conversion to this type and back.
  static __device__ C round(C value, const DeviceTensor&) {
    T stored;
    convert(value, stored);
    return to_float(stored);
  }
};

template <typename C>
struct Access<RuntimeDtype, 1, C> {
  static constexpr int kWidth = 1;
  using Raw = C;

  static __device__ Raw load(const DeviceTensor& tensor, int64_t index) {
    return load_runtime<C>(tensor.data, tensor.dtype, index);
  }
  static __device__ Raw load(const DeviceVector& vector, int64_t index) {
    return load_runtime<C>(vector.data, vector.dtype, index);
  }
  static __device__ Raw load_if(bool valid, const DeviceTensor& tensor, int64_t index) {
    return valid ? load(tensor, index) : Raw{};
  }
  static __device__ void unpack(Raw raw, C (&out)[1]) { out[0] = raw; }
  template <int K>
  static __device__ void discard_unpacked(Raw (&)[K]) {}
  static __device__ void store(const DeviceTensor& tensor, int64_t index, const C (&values)[1]) {
    store_runtime(tensor.data, tensor.dtype, index, values[0]);
  }
  static __device__ C round(C value, const DeviceTensor& tensor) {
    char stored[8];
    store_runtime(stored, tensor.dtype, 0, value);
    return load_runtime<C>(stored, tensor.dtype, 0);
  }
};

}  // namespace evenkeel::cuda
