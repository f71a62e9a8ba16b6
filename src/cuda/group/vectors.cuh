// What a thread holds of a chunk: vectors that are resident in shared memory, in registers, or loaded again.
#pragma once

#include "cuda/group/chunk.h"
#include "cuda/group/policy.h"
#include "cuda/primitives/async_copy.cuh"
#include "cuda/primitives/element.cuh"

namespace evenkeel::cuda {

// A thread's vectors of a tensor: resident in shared memory, where each thread has its own words; or some at a
// time in registers.
template <typename Access, GroupPolicy kPolicy>
struct ThreadVectors {
  static constexpr int K = kPolicy.vectors();
  static constexpr bool kResident = kPolicy.resident, kRefills = kPolicy.refills();
  using Raw = typename Access::Raw;
  Raw raw[kResident ? 1 : K];
  const uint4* resident;
  int64_t next, step;  // elements

  template <typename Position>
  __device__ ThreadVectors(const GroupShape& s, const DeviceTensor& tensor, const GroupSet& set,
                           const Position& position, char* shared) {
    const auto vectors = position.in(s, tensor, set);
    next = vectors.first;
    step = vectors.step;
    resident = reinterpret_cast<const uint4*>(shared) + threadIdx.x;
  }
  // Loads the vectors from `first` to `last`; in registers, as many as there is room for.
  __device__ void load(const DeviceTensor& tensor, int first, int last) {
    if constexpr (kResident) {
      constexpr int64_t kSize = sizeof(Raw) / Access::kWidth;
      const char* from = tensor.data + (next + first * step) * kSize;
      uint32_t to = shared_address(resident + first * blockDim.x);
#pragma unroll 4
      for (int v = first; v < last; ++v, from += step * kSize, to += blockDim.x * 16)
        copy_async(to, from);
    } else {
#pragma unroll
      for (int v = 0; v < K; ++v, next += step) raw[v] = Access::load_if(v < last, tensor, next);
    }
  }
  __device__ Raw get(int v) const {
    if constexpr (kResident) {
      Raw result;
      *reinterpret_cast<uint4*>(&result) = resident[v * blockDim.x];
      return result;
    } else {
      return raw[v];
    }
  }
  // Loads the next vector into the registers of one that has been used.
  __device__ void refill(const DeviceTensor& tensor, int v) {
    raw[v] = Access::load(tensor, next);
    next += step;
  }
  // Between two uses.
  __device__ void discard_unpacked() {
    if constexpr (!kResident) Access::discard_unpacked(raw);
  }
  // Calls body(v) for the vectors from `first` to `last`, in order; in registers for all up to `last`, and
  // refill(v) where another one follows in the same registers.
  template <typename Body, typename Refill>
  static __device__ void each(int first, int last, const Body& body, const Refill& refill) {
    if constexpr (kResident) {
#pragma unroll 2
      for (int v = first; v < last; ++v) body(v);
    } else {
      for (int left = last; left > 0; left -= K) {
#pragma unroll
        for (int v = 0; v < K; ++v) {
          if (v >= left) break;
          body(v);
          if (kRefills && v + K < left) refill(v);
        }
        if (!kRefills) break;
      }
    }
  }
};

// The same for a tensor that is loaded again for every use.
template <typename Access>
struct ReloadedVectors {
  const char* data;
  int64_t step;

  template <typename Position>
  __device__ ReloadedVectors(const GroupShape& s, const DeviceTensor& tensor, const GroupSet& set,
                             const Position& position, char*) {
    constexpr int64_t kSize = sizeof(typename Access::Raw) / Access::kWidth;
    const auto vectors = position.in(s, tensor, set);
    data = tensor.data + vectors.first * kSize;
    step = vectors.step * kSize;
  }
  __device__ void load(const DeviceTensor&, int, int) {}
  __device__ typename Access::Raw get(int v) const { return Access::load(data + v * step); }
  __device__ void refill(const DeviceTensor&, int) {}
  __device__ void discard_unpacked() {}
};

}  // namespace evenkeel::cuda
