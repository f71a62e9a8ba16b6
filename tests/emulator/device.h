// CUDA's variables and functions for kernels that a C++ compiler makes host code of: included before everything else.
#ifndef EVENKEEL_TESTS_EMULATOR_DEVICE_H_
#define EVENKEEL_TESTS_EMULATOR_DEVICE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "grid.h"

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#undef __noinline__
#define __global__
#define __device__
#define __shared__ static  // of kernels without clusters, whose blocks run one after the other
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __noinline__ __attribute__((noinline))
#define __CUDA_ARCH__ 900

#define threadIdx (evenkeel::emulator::current->thread)
#define blockIdx (evenkeel::emulator::current->block)
#define blockDim (evenkeel::emulator::current->block_size)
#define gridDim (evenkeel::emulator::current->grid_size)

inline unsigned __clusterRelativeBlockRank() {
  return static_cast<unsigned>(evenkeel::emulator::current->rank);
}
inline unsigned __clusterSizeInBlocks() {
  return static_cast<unsigned>(evenkeel::emulator::current->cluster_size);
}
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// --- Threads of a warp and of a block

template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  const int lane = evenkeel::emulator::current->lane;
  return evenkeel::emulator::exchange(value, [&](auto of) { return of(lane ^ distance); });
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int distance, int width = 32) {
  const int lane = evenkeel::emulator::current->lane;
  const bool inside = lane % width + distance < width;
  return evenkeel::emulator::exchange(value,
                                      [&](auto of) { return of(inside ? lane + distance : lane); });
}
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  const int lane = evenkeel::emulator::current->lane;
  return evenkeel::emulator::exchange(
      value, [&](auto of) { return of(lane / width * width + from % width); });
}
inline int __reduce_add_sync(unsigned, int value) {
  return evenkeel::emulator::exchange(value, [](auto of) {
    int sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += of(lane);
    return sum;
  });
}
inline bool __any_sync(unsigned mask, bool value) {
  return __reduce_add_sync(mask, int{value}) != 0;
}
inline void __syncwarp() {
  evenkeel::emulator::Warp& warp = *evenkeel::emulator::current->warp;
  evenkeel::emulator::wait(warp.barrier, warp.threads);
}
inline void __syncthreads() {
  evenkeel::emulator::Block& block = *evenkeel::emulator::current->own;
  evenkeel::emulator::wait(block.barrier, block.threads);
}
inline bool __syncthreads_or(bool value) {
  evenkeel::emulator::Block& block = *evenkeel::emulator::current->own;
  __syncthreads();
  block.any = false;
  __syncthreads();
  block.any = block.any || value;
  __syncthreads();
  return block.any;
}

// --- Memory

template <typename T>
T __ldcs(const T* at) {
  return *at;
}
template <typename T>
void __stcs(T* at, const T& value) {
  *at = value;
}
inline void __threadfence() {}
inline void __nanosleep(unsigned) { evenkeel::emulator::yield(); }
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at += value;
  return before;
}
inline unsigned atomicExch(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = value;
  return before;
}
inline size_t __cvta_generic_to_shared(const void* at) { return reinterpret_cast<uintptr_t>(at); }

// --- Numbers

using std::isfinite;
using std::max;
using std::min;
inline int64_t min(int64_t a, int b) { return std::min<int64_t>(a, b); }
inline int64_t min(int a, int64_t b) { return std::min<int64_t>(a, b); }
inline unsigned min(unsigned a, int b) { return std::min(a, static_cast<unsigned>(b)); }

template <typename To, typename From>
To evenkeel_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(static_cast<void*>(&bits), &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t value) { return evenkeel_bits<float>(value); }
inline uint32_t __float_as_uint(float value) { return evenkeel_bits<uint32_t>(value); }
#define __ushort_as_half(value) evenkeel_bits<__half>(static_cast<uint16_t>(value))

inline float __frcp_rn(float value) { return 1 / value; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float value) { return std::exp(value); }
inline float rsqrtf(float value) { return static_cast<float>(1 / std::sqrt(double{value})); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}

#endif  // EVENKEEL_TESTS_EMULATOR_DEVICE_H_
