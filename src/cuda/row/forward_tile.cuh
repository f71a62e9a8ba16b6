// A thread's part of a row in a forward kernel: which columns it has, and their values.
//
// The values stay as they are stored, in registers or (clusters) in shared memory, and are unpacked and
// centered anew in every pass; short and unaligned rows are unpacked once (ForwardPolicy::unpacks_once).
//
// The parts of a kernel refer to its variables, as closures do, instead of owning them: so the compiler makes
// the same machine code of them as of one function.
#pragma once

#include "cuda/primitives/async_copy.cuh"
#include "cuda/primitives/element.cuh"
#include "cuda/primitives/row_group.cuh"
#include "cuda/row/policy.h"

namespace evenkeel::cuda {

// Where the thread's vectors are: columns first, first + step, ... of row `row`.
template <ForwardPolicy kPolicy>
struct ForwardPosition {
  static constexpr int W = kPolicy.vector();
  static constexpr bool kAligned = kPolicy.aligned, kFull = kPolicy.full();
  static constexpr bool kSpecialized = kPolicy.is_specialized();

  int part;         // the block's first column
  int end;          // behind its last one
  int own;          // the thread's first column in the part
  int first, step;  // in the row
  int64_t row;
  bool stores;

  // Whether vector v is in the row, and how many of its elements are.
  __device__ bool inside(int v) const { return kFull || first + v * step < end; }
  __device__ int valid(int v) const {
    return kAligned ? (inside(v) ? W : 0) : end - (first + v * step);
  }

  // The address of the thread's first vector in a tensor with elements of `size` bytes, and the distance from
  // there to vector v.
  __device__ char* address(const DeviceTensor& tensor, int64_t size) const {
    const int64_t offset = kSpecialized ? row * tensor.row_stride : tensor.offset(row);
    return tensor.data + (offset + first) * size;
  }
  __device__ auto distance(const DeviceTensor& tensor, int v, int size) const {
    constexpr int kApart = kPolicy.groups_per_warp();
    if constexpr (kPolicy.rows == 1)
      return v * step * size;
    else
      return v * (kApart * tensor.row_stride * size);
  }
};

// Rows of a row group take turns with those of the warp's other row groups. Lanes without a row do what those of
// the last row do, but store nothing.
template <ForwardPolicy kPolicy, typename Group>
__device__ inline ForwardPosition<kPolicy> find_position(const ForwardArguments& a,
                                                         const Group& group) {
  constexpr bool kCluster = kPolicy.scope == Scope::kCluster;
  constexpr int kRows = kPolicy.rows, kApart = kPolicy.groups_per_warp();
  using Own = Columns<kPolicy>;
  const int part = kCluster ? group.block() * a.part_cols : 0;
  auto end = static_cast<int>(a.cols);
  if constexpr (kCluster) end = min(end, part + a.part_cols);
  const int own = Own::first(group.thread()), first = part + own, step = Own::step(group.size());
  int64_t row = static_cast<int64_t>(group.cluster_index()) * (kPolicy.row_groups() * kRows) +
                group.index() + group.index() / kApart * (kApart * (kRows - 1));
  const bool stores = kCluster || kRows > 1 || row < a.rows;
  if constexpr (!kCluster && kRows == 1) row = min(row, a.rows - 1);
  return {part, end, own, first, step, row, stores};
}

template <typename X, ForwardPolicy kPolicy>
struct ForwardTile {
  static constexpr int W = kPolicy.vector(), kVectors = kPolicy.vectors(), kSize = sizeof(X);
  static constexpr bool kAligned = kPolicy.aligned, kInShared = kPolicy.resident_in_shared();
  static constexpr bool kOnce = kPolicy.unpacks_once();
  using In = Access<X, W, float>;
  using Fragment = SharedFragment<W * kSize>;
  using Raw = typename In::Raw[kInShared ? 1 : kVectors];
  using Unpacked = float[kOnce ? kVectors : 1][W];

  const ForwardPosition<kPolicy>& at;
  const Fragment& fragment;  // in shared memory
  Raw& raw;                  // in registers
  Unpacked& unpacked;

  // Subtracts the center from vector v. What is cut off stays 0: few threads have any of it, so the others
  // only test for it.
  __device__ void subtract(int v, float center, float (&x)[W]) const {
    constexpr bool kLater = kOnce && !kAligned;
#pragma unroll
    for (int k = 0; k < W; ++k) x[k] -= kLater || k < at.valid(v) ? center : 0;
    if (kLater && at.valid(v) < W) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = k < at.valid(v) ? x[k] : 0;
    }
  }
  // Vector v less the center; zeros beyond the end of the row.
  __device__ void values(int v, float center, float (&x)[W]) const {
    if constexpr (kOnce) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = unpacked[v][k];
    } else {
      if constexpr (kInShared) fragment.get(v, raw[0]);
      In::unpack(raw[kInShared ? 0 : v], x);
      subtract(v, center, x);
    }
  }
  // The sum over vectors of what sum_of_vector(values) gives.
  template <typename SumOfVector>
  __device__ float sum_over(float center, SumOfVector sum_of_vector) const {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[W];
      values(v, center, x);
      sum += sum_of_vector(x);
    }
    return sum;
  }
  __device__ void unpack() const {
    if constexpr (kOnce) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) In::unpack(raw[v], unpacked[v]);
    }
  }
};

}  // namespace evenkeel::cuda
