// How one call of a row norm is split: the numbers of a policy that were chosen, and those that are known
// at launch only.
//
// The split of a row decides the order of its sums, so it depends on the formula, dtypes, the row's length
// and how rows lie in memory, never on their number: a row gives the same bits in every batch. How many row
// groups a block has, how many rows a row group has, and how many blocks there are, may depend on anything.
#pragma once

#include <algorithm>

#include "cuda/row/policy.h"

namespace evenkeel::cuda {

struct Tile {
  Scope scope = Scope::kWarp;
  int threads_per_row = 32;  // in one block
  int elements = 0;  // that a thread holds; 0: multi-pass, the row is read anew in every pass
  int rows = 1;      // of a row group at once, with one vector of a thread each
  int cluster = 1;   // blocks of a row group
  int block_threads = 32;
  int stages = 0;  // rows in the ring of a row group
  Specialization specialization = Specialization::kNone;

  constexpr bool multi_pass() const { return elements == 0; }
  constexpr int row_groups() const { return block_threads / threads_per_row; }  // of a block
  // Columns that a row group can hold.
  constexpr int64_t capacity() const {
    return int64_t{threads_per_row} * elements * cluster / rows;
  }
  constexpr int block_rows() const { return row_groups() * rows; }
  bool operator==(const Tile&) const = default;
};

// Columns of a block's part of a row.
constexpr int64_t part_cols(int64_t cols, const Tile& tile) {
  return tile.cluster == 1 ? cols : round_up(ceil_div(cols, tile.cluster), 8);
}

// The multi-pass kernels: a block for each row, as far as a grid goes, with threads for eight elements
// each.
constexpr Tile multi_pass_tile(int64_t cols) {
  const auto threads =
      static_cast<int>(std::clamp<int64_t>(round_up(ceil_div(cols, 8), kWarp), kWarp, kMaxThreads));
  return {
      .scope = Scope::kBlock, .threads_per_row = threads, .elements = 0, .block_threads = threads};
}

// Of samples with sums of their own, so many rows are a chunk.
inline constexpr int64_t kSampleChunkRows = 256;

// Their backward pass finds dweight and dbias in a pass of its own over columns, in chunks of rows.
inline constexpr int kColumnThreads = 256;
inline constexpr int kMaxChunks = 128;
constexpr int64_t column_chunks(int64_t rows, int64_t cols, const DeviceProperties& device) {
  const int64_t blocks = ceil_div(cols, kColumnThreads);
  const int64_t wanted = ceil_div(int64_t{device.sms} * 8, blocks);
  return std::min<int64_t>({std::max<int64_t>(wanted, 1), kMaxChunks, ceil_div(rows, 16)});
}

}  // namespace evenkeel::cuda
