// The last step of an epilogue whose y has 8 bits (core/quantize.h): the scale of a row, and codes in memory.
#pragma once

#include "core/quantize.h"
#include "cuda/primitives/element.cuh"

namespace evenkeel::cuda {

// The bits of the largest absolute value of `most` and a vector.
template <int W>
__device__ inline uint32_t largest_magnitude(uint32_t most, const float (&values)[W]) {
#pragma unroll
  for (int k = 0; k < W; ++k) {
    const uint32_t magnitude = __float_as_uint(values[k]) & kFloatMagnitude;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// What y is multiplied by, from the largest magnitude of the row if its scale is to be found. first: the thread that
// stores it. kAligned: scales lie at multiples of their size.
template <bool kAligned>
__device__ inline float inverse_scale(const Quantization& q, uint32_t most, int64_t row,
                                      bool first) {
  if (q.scale != nullptr) {
    if constexpr (kAligned) return 1 / *q.scale;
    return 1 / load_runtime<float>(reinterpret_cast<const char*>(q.scale), Dtype::kF32, 0);
  }
  const float scale = row_scale_of(most, q.amax_bound, q.largest);
  if (first) {
    if constexpr (kAligned) {
      q.row_scale[row] = scale;
    } else {
      store_runtime(reinterpret_cast<char*>(q.row_scale), Dtype::kF32, row, scale);
    }
  }
  return 1 / scale;
}

template <typename Format, int W>
__device__ inline void store_codes_as(char* at, const float (&scaled)[W]) {
  if constexpr (W == 1) {
    *at = static_cast<char>(Format::encode(scaled[0]));
  } else {
    static_assert(W == 8);
    uint32_t words[2] = {};
#pragma unroll
    for (int k = 0; k < W; ++k)
      words[k / 4] |= static_cast<uint32_t>(Format::encode(scaled[k])) << (k % 4 * 8);
    *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
  }
}

// The codes of a vector; they lie at a multiple of its size.
template <int W>
__device__ inline void store_codes(Dtype dtype, char* at, float inverse, const float (&y)[W]) {
  float scaled[W];
#pragma unroll
  for (int k = 0; k < W; ++k) scaled[k] = y[k] * inverse;
  if (dtype == Dtype::kF8E4M3) return store_codes_as<E4M3>(at, scaled);
  if (dtype == Dtype::kF8E5M2) return store_codes_as<E5M2>(at, scaled);
  store_codes_as<Int8>(at, scaled);
}

}  // namespace evenkeel::cuda
