// Rows in memory: where the part of a row begins that a block works on, how a persistent block moves from
// row to row, and how unaligned rows pass through shared memory.
#pragma once

#include <cstdint>

#include "cuda/primitives/async_copy.cuh"
#include "cuda/primitives/element.cuh"

namespace evenkeel::cuda {

// The part of a tensor's row that a block works on, moving from row to row. It takes no division: the
// distance to the row group's next row is the same every time, but for a correction where the next one
// lies in another run of rows (RowIterator).
template <typename T>
struct Cursor {
  char* at;

  // The first row, whose number is `row`, from column `column` on.
  __device__ Cursor(const DeviceTensor& tensor, int64_t row, int64_t column)
      : at(tensor.data + (tensor.offset(row) + column) * static_cast<int64_t>(sizeof(T))) {}

  __device__ void move(const RowStep& step, bool wraps) {
    at += step.bytes;
    if (wraps) at += step.wrap_bytes;
  }
  // Of the row's first byte within 16 bytes.
  __device__ int offset16() const { return static_cast<int>(reinterpret_cast<uintptr_t>(at) % 16); }
};

// Counts rows of a run, to know when the next row lies in another one.
struct RowIterator {
  int64_t inside;  // the row's index in its run

  __device__ bool move(const RowStride& stride) {
    if (stride.inner == 0) return false;
    inside += stride.step_inside;
    const bool wraps = inside >= stride.inner;
    if (wraps) inside -= stride.inner;
    return wraps;
  }
};

// Which rows and columns a row group works on in a grid of persistent blocks: row, row + stride.step, ... Of samples
// with sums of their own (kSamples), each has as many blocks, one sample's behind the other's.
template <int kGroupsOfWarp, bool kSamples = false>
struct RowPartition {
  int block;   // or cluster
  int groups;  // row groups of a block
  int64_t row;
  int steps;           // rows of this row group
  int warp_steps;      // the most of the warp's row groups
  int block_steps;     // the most of the block's row groups
  int64_t part;        // the block's first column
  int cols;            // and how many it has
  int64_t before = 0;  // rows of other samples

  template <typename Group>
  __device__ RowPartition(const Group& group, const RowStride& stride, int64_t rows,
                          const Samples& samples, int64_t all_cols, int part_cols)
      : block(static_cast<int>(blockIdx.x) / group.cluster()),
        groups(static_cast<int>(blockDim.x) / group.size()),
        part(static_cast<int64_t>(group.block()) * part_cols),
        cols(static_cast<int>(min(static_cast<int64_t>(part_cols), all_cols - part))) {
    // Neighbouring rows in a warp; otherwise one row for each block, then the second row groups.
    int64_t blocks = gridDim.x / group.cluster(), own_block = block;
    if constexpr (kSamples) {
      blocks = samples.blocks;
      own_block = block % blocks;
      before = block / blocks * samples.rows;
      rows = before + samples.rows;
    }
    row = before + (kGroupsOfWarp > 1 ? own_block * groups + group.index()
                                      : group.index() * blocks + own_block);
    const auto steps_from = [&](int64_t first) {
      return first < rows ? static_cast<int>((rows - first + stride.step - 1) / stride.step) : 0;
    };
    steps = steps_from(row);
    warp_steps = kGroupsOfWarp > 1 ? steps_from(row - group.index() % kGroupsOfWarp) : steps;
    block_steps = steps_from(before + own_block);
  }
};

// The elements of 16 bytes that are not before `begin` nor behind `end`, one by one.
template <typename T>
__device__ inline void copy_elements(char* to, const char* from, int at, int begin, int end) {
  for (int i = max(at, begin); i < min(at + 16, end); i += sizeof(T))
    *reinterpret_cast<T*>(to + i) = *reinterpret_cast<const T*>(from + i);
}

// Copies `cols` elements of an unaligned row into shared memory. The row keeps its offset within 16 bytes,
// and is copied with what lies around it in these; only before the first and after the last row of a tensor
// there may be nothing to read.
template <typename T>
__device__ inline void copy_row(const Cursor<T>& row, const DeviceTensor& tensor, int cols,
                                char* to, int thread, int threads) {
  const int offset = row.offset16();
  const int bytes = offset + cols * static_cast<int>(sizeof(T));
  const char* from = row.at - offset;
  const int begin = from < tensor.data ? 16 : 0;
  const auto end = static_cast<int>(min(tensor.end - from, int64_t{bytes} + 16));
  for (int at = thread * 16; at < bytes; at += threads * 16) {
    if (at >= begin && at + 16 <= end) {
      copy_async(shared_address(to + at), from + at);
    } else {
      copy_elements<T>(to, from, at, offset, bytes);
    }
  }
}

// The other way: from shared memory, where the row is aligned.
template <typename T>
__device__ inline void write_row(const Cursor<T>& row, int cols, const char* from, int thread,
                                 int threads) {
  using Vector = Access<T, 16 / static_cast<int>(sizeof(T)), float>;
  const int bytes = cols * static_cast<int>(sizeof(T));
  for (int at = thread * 16 - row.offset16(); at < bytes; at += threads * 16) {
    if (at >= 0 && at + 16 <= bytes) {
      *reinterpret_cast<typename Vector::Raw*>(row.at + at) =
          Vector::load_unaligned_shared(from + at);
    } else {
      copy_elements<T>(row.at, from, at, 0, bytes);
    }
  }
}

// The same with a conversion from S.
template <typename S, typename T>
__device__ inline void write_converted_row(const Cursor<T>& row, int cols, const char* from,
                                           int thread, int threads) {
  constexpr int kSize = sizeof(T), W = 16 / kSize;
  const S* const values = reinterpret_cast<const S*>(from);
  for (int at = thread * W - row.offset16() / kSize; at < cols; at += threads * W) {
    float vector[W];
#pragma unroll
    for (int k = 0; k < W; ++k) vector[k] = to_float(values[min(max(at + k, 0), cols - 1)]);
    if (at >= 0 && at + W <= cols) {
      Access<T, W, float>::store(row.at + at * kSize, vector);
    } else {
#pragma unroll
      for (int k = 0; k < W; ++k) {
        if (at + k >= 0 && at + k < cols) convert(vector[k], reinterpret_cast<T*>(row.at)[at + k]);
      }
    }
  }
}

}  // namespace evenkeel::cuda
