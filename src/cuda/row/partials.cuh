// Row sums and column sums of the backward pass, and the way of the latter out: from the threads of a persistent
// block to one row of partials, which reduce_partials() (primitives/reduce_partials.cuh) finishes.
#pragma once

#include "cuda/arguments.h"
#include "cuda/primitives/async_copy.cuh"
#include "cuda/primitives/row_group.cuh"
#include "cuda/row/policy.h"

namespace evenkeel::cuda {

// Adds the gradient of one vector to the sums of its row, and to those of its columns.
template <BackwardPolicy kPolicy>
struct GradientAccumulator {
  static constexpr int W = kPolicy.vector(), kElements = kPolicy.elements, kSums = kPolicy.sums();
  static constexpr bool kMayCenter = !kPolicy.is_rms();

  float (&sums)[kSums];
  float (&dweight)[kElements];
  float (&dbias)[kElements];

  template <typename Element>
  __device__ void operator()(const Element& e, int v) const {
    float gradient[2] = {}, product[2] = {};
#pragma unroll
    for (int k = 0; k < W; ++k) {
      product[k % 2] += e.g[k] * e.normalized[k];
      dweight[v * W + k] += e.dz[k] * e.scaled[k];
      if constexpr (kMayCenter) {
        gradient[k % 2] += e.g[k];
        dbias[v * W + k] += e.dz[k];
      }
    }
    sums[0] += product[0] + product[1];
    if constexpr (kMayCenter) sums[1] += gradient[0] + gradient[1];
  }
};

// A block's sums of dweight and dbias, as one row of partials. Each row group (of a warp, the first) puts its
// sums into shared memory, as they lie in its threads, and all threads of the block add them up. `memory`:
// the rings, whose rows have been read.
template <auto kPolicy, int kElements, typename Group, typename Partition>
__device__ inline void write_partials(const BackwardArguments& a, const Group& group,
                                      const Partition& partition, char* memory,
                                      float (&dweight)[kElements], float (&dbias)[kElements]) {
  if (a.dweight_partials == nullptr && a.dbias_partials == nullptr) return;
  using Own = Columns<kPolicy>;
  constexpr int W = kPolicy.vector(), kFloats = 4, kWords = kElements / kFloats;
  constexpr int kGroupsOfWarp = kPolicy.groups_per_warp();
  constexpr bool kAligned = kPolicy.aligned;
  const auto word_of = [](const float(&sums)[kElements], int p) {
    const float* s = sums + p * kFloats;
    return make_float4(s[0], s[1], s[2], s[3]);
  };
  // Word p of a thread.
  const auto write = [&](const float4& word, char* partials, int thread, int p) {
    const int e = p * kFloats,
              column = Own::first(thread) + e / W * Own::step(group.size()) + e % W;
    if (column >= partition.cols) return;
    float* const to =
        reinterpret_cast<float*>(partials) + partition.block * a.cols + partition.part + column;
    if constexpr (kAligned) {
      *reinterpret_cast<float4*>(to) = word;
    } else {
      const float values[] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int k = 0; k < kFloats; ++k) {
        if (column + k < partition.cols) to[k] = values[k];
      }
    }
  };
  const int writers = partition.groups / kGroupsOfWarp;
  if (writers == 1 && kGroupsOfWarp == 1) {
    const auto write_all = [&](const float(&sums)[kElements], char* partials) {
      if (partials == nullptr) return;
#pragma unroll
      for (int p = 0; p < kWords; ++p) write(word_of(sums, p), partials, group.thread(), p);
    };
    write_all(dweight, a.dweight_partials);
    write_all(dbias, a.dbias_partials);
    return;
  }
  const int words = group.size() * kWords;
  auto* const sums_of_groups = reinterpret_cast<float4*>(memory);
  const auto collect = [&](float(&sums)[kElements], const char* partials, float4* to) {
    if (partials == nullptr) return;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
#pragma unroll
      for (int distance = kWarp / kGroupsOfWarp; distance < kWarp; distance *= 2)
        sums[e] += __shfl_xor_sync(0xffffffff, sums[e], distance);
    }
    if (group.index() % kGroupsOfWarp != 0) return;
    to += group.index() / kGroupsOfWarp * words + group.thread();
#pragma unroll
    for (int p = 0; p < kWords; ++p) to[p * group.size()] = word_of(sums, p);
  };
  wait_for_copies(0);
  __syncthreads();
  collect(dweight, a.dweight_partials, sums_of_groups);
  collect(dbias, a.dbias_partials, sums_of_groups + writers * words);
  __syncthreads();
  for (int at = threadIdx.x; at < 2 * words; at += blockDim.x) {
    const bool second = at >= words;
    char* const partials = second ? a.dbias_partials : a.dweight_partials;
    if (partials == nullptr) continue;
    const int own = second ? at - words : at;
    const float4* from = sums_of_groups + (second ? writers * words : 0) + own;
    float4 sum = from[0];
#pragma unroll 4
    for (int w = 1; w < writers; ++w) {
      const float4 more = from[w * words];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    write(sum, partials, own % group.size(), own / group.size());
  }
}

}  // namespace evenkeel::cuda
