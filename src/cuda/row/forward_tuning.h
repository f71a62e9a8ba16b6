// Which tile and policy a forward row norm gets: constexpr functions of the row length, the element sizes
// and the device, so that they can be tested without a GPU. Numbers were measured on an H200
// (docs/performance.md).
#pragma once

#include "cuda/row/policies.h"
#include "cuda/row/tile.h"

namespace evenkeel::cuda {

// The most threads of a block where a thread holds much: better than larger blocks.
inline constexpr int kForwardSmallBlock = 256;
// Larger blocks that hold 64 bytes a thread would share an SM with one other only. Rows of half types go to
// smaller blocks then; those of float32, which need fewer registers, to three blocks (wide_block).
inline constexpr int kForwardLargeBlock = 384;

// The policy of a tile.
constexpr ForwardPolicy forward_policy_of(const Tile& tile, int x_size, int y_size, bool aligned,
                                          const EpilogueTerms& terms, bool residual = false,
                                          bool modulated = false) {
  const bool general = tile.specialization == Specialization::kNone;
  const bool wide = general ? x_size == 4 && aligned && tile.threads_per_row > kForwardLargeBlock
                            : tile.threads_per_row > kForwardSmallBlock;
  const ForwardSplit split{tile.scope, tile.scope == Scope::kWarp ? tile.threads_per_row : kWarp,
                           tile.elements, tile.rows,
                           wide && tile.scope == Scope::kBlock && !tile.multi_pass()};
  return forward_policy(split, x_size, y_size, aligned, terms, tile.specialization, residual,
                        modulated);
}

// A block also prefetches rows into L2, for a later one: so many bytes further on (half as much and half
// more are as good). Where nearly all blocks run at once there is no later one.
inline constexpr int64_t kForwardPrefetchBytes = int64_t{4} << 20;
// In rows; 0: none.
constexpr int64_t forward_prefetch_rows(int64_t rows, int64_t cols, int x_size, const Tile& tile) {
  const int64_t row_bytes = cols * x_size;
  if (tile.multi_pass() || forward_policy_of(tile, x_size, x_size, true, kNoTerms).evict_first() ||
      rows * row_bytes < 4 * kForwardPrefetchBytes)
    return 0;
  return std::max<int64_t>(kForwardPrefetchBytes / row_bytes, 1);
}

// Dynamic shared memory of a block.
constexpr int64_t forward_shared(int64_t cols, int x_size, bool aligned, const Tile& tile,
                                 bool residual = false) {
  if (tile.multi_pass()) return 0;
  const int slot = forward_slot_bytes(tile.scope, tile.threads_per_row, tile.elements,
                                      part_cols(cols, tile), x_size, aligned, residual);
  const int exchange = exchange_bytes(
      false, forward_exchange_slot_bytes(tile.scope, tile.threads_per_row, tile.cluster));
  return tile.row_groups() * int64_t{slot} + (tile.scope == Scope::kWarp ? 0 : exchange);
}

// How a row is split: by the least lanes of a warp that hold it, else by warps, else by the blocks of a
// cluster.
constexpr Tile forward_tile(int64_t cols, int x_size, const DeviceProperties& device) {
  const auto in_warp = [&](const auto& splits) -> Tile {
    for (const ForwardSplit& s : splits) {
      if (s.scope != Scope::kWarp || cols > s.lanes * s.elements) continue;
      return {.scope = Scope::kWarp,
              .threads_per_row = s.lanes,
              .elements = s.elements,
              .block_threads = forward_warp_threads(x_size, s.elements)};
    }
    return {};
  };
  const bool half = x_size == 2;
  if (const Tile tile = half ? in_warp(kForwardHalf) : in_warp(kForwardFloat); !tile.multi_pass())
    return tile;
  struct Attempt {
    int elements, threads;          // the most of a block
    int smallest = 1, largest = 1;  // clusters
  };
  const int few = forward_elements(x_size), most = forward_most_elements(x_size);
  const Attempt attempts[] = {{few, half ? kForwardLargeBlock : kForwardBlockThreads},
                              {most, half ? kForwardSmallBlock : 0},
                              {most, kForwardSmallBlock, 2, kMaxCluster},
                              {most, kForwardBlockThreads, 2, kMaxCluster}};
  for (const Attempt& attempt : attempts) {
    const int largest = std::min(attempt.largest, device.cluster_limit);
    for (int cluster = attempt.smallest; cluster <= largest; cluster *= 2) {
      const int64_t threads = round_up(ceil_div(ceil_div(cols, attempt.elements), cluster), kWarp);
      if (threads > attempt.threads) continue;
      return {.scope = cluster == 1 ? Scope::kBlock : Scope::kCluster,
              .threads_per_row = static_cast<int>(threads),
              .elements = attempt.elements,
              .cluster = cluster,
              .block_threads = static_cast<int>(threads)};
    }
  }
  return multi_pass_tile(cols);
}

// The tile of a specialized kernel, or the same if there is none for it.
constexpr Tile specialize_forward(const Tile& tile, int64_t rows, int64_t cols, int x_size,
                                  const EpilogueTerms& terms, Specialization specialization) {
  if (specialization == Specialization::kNone || tile.multi_pass()) return tile;
  const bool rms = specialization == Specialization::kRms, half = x_size == 2;
  const int few = forward_elements(x_size);
  const int most_threads = rms ? kForwardSmallBlock : kForwardSmallBlock / 2;
  Tile special = tile;
  if (rms && half && cols == kForwardShortRms) {
    special = {.threads_per_row = kForwardShortRms / 8,
               .elements = 8,
               .block_threads = forward_warp_threads(x_size, few)};
    // Either all row groups have several rows, or all have one.
    if (rows % (special.row_groups() * (few / 8)) == 0)
      special.elements = few, special.rows = few / 8;
  } else if (half && cols > kWarp * few && cols % (few / 2 * kWarp) == 0 &&
             cols / (few / 2) <= most_threads) {
    // Blocks with more threads of fewer elements, instead of long rows of a warp, and, as RMS norm needs
    // fewer registers than layer norm, instead of its small blocks.
    special.scope = Scope::kBlock;
    special.elements = few / 2;
    special.threads_per_row = special.block_threads = static_cast<int>(cols / special.elements);
  }
  special.specialization = specialization;
  const ForwardPolicy policy = forward_policy_of(special, x_size, x_size, true, terms);
  if (policy.full() && special.capacity() != cols) return tile;
  return forward_policies_of(x_size, x_size).find(policy) < 0 ? tile : special;
}

}  // namespace evenkeel::cuda
