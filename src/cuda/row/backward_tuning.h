// Which tile and policy a backward row norm gets (see forward_tuning.h).
#pragma once

#include "cuda/row/policies.h"
#include "cuda/row/tile.h"

namespace evenkeel::cuda {

// Whether the blocks of a cluster reduce their own sums before they send them: fewer messages, for a
// barrier.
constexpr bool backward_block_first(int elements, int cluster) {
  return elements > kBackwardElements || cluster == kMaxCluster;
}

// The policy of a tile.
constexpr BackwardPolicy backward_policy_of(const Tile& tile, int x_size, int dy_size, bool aligned,
                                            const EpilogueTerms& terms, bool residual = false,
                                            bool modulated = false) {
  const BackwardSplit split{
      tile.scope, tile.scope == Scope::kWarp ? tile.threads_per_row : kWarp, tile.elements,
      tile.scope == Scope::kCluster && backward_block_first(tile.elements, tile.cluster)};
  return backward_policy(split, x_size, dy_size, aligned, terms, tile.specialization, residual,
                         modulated);
}

// Persistent blocks of a sample with sums of its own: one for so many bytes of x at most, so that the blocks of many
// samples have something to do, and a few samples occupy a GPU. Other samples have no part in it.
inline constexpr int64_t kSampleBlockBytes = 128 << 10;
constexpr int64_t sample_blocks(int64_t rows, int64_t cols, int64_t x_size) {
  return std::max<int64_t>(1, rows * cols * x_size / kSampleBlockBytes);
}

// Dynamic shared memory of a block: the exchange, the rings, and the weights that registers do not hold. In
// the end the row groups' sums of dweight and dbias lie where the rings were.
constexpr int64_t backward_shared(int64_t cols, int x_size, int dy_size, bool aligned,
                                  const Tile& tile, bool residual = false) {
  const BackwardPolicy policy = backward_policy_of(tile, x_size, dy_size, aligned, kOffsetOnly);
  const int64_t part = part_cols(cols, tile);
  const int64_t slot = (residual ? 2 : 1) * slot_part_bytes(part, x_size, aligned) +
                       slot_part_bytes(part, dy_size, aligned);
  const int64_t floats = int64_t{tile.threads_per_row} * tile.elements * sizeof(float);
  const int64_t writers = tile.block_threads / std::max(tile.threads_per_row, kWarp);
  const int64_t sums = tile.row_groups() == 1 ? 0 : 2 * writers * floats;
  return exchange_bytes(policy.pipelined()) +
         std::max(tile.row_groups() * tile.stages * slot, sums) +
         (policy.weight_in_registers() ? 0 : floats);
}

// Gives a tile the most stages for which there is enough shared memory; false if there is not enough for
// any.
constexpr bool backward_fits(int64_t cols, int x_size, int dy_size, bool aligned,
                             const DeviceProperties& device, Tile& tile, bool residual) {
  for (tile.stages = kMaxStages; tile.stages >= kMinStages; --tile.stages) {
    if (backward_shared(cols, x_size, dy_size, aligned, tile, residual) <= device.shared_bytes)
      return true;
  }
  return false;
}

// How a row is split: by the least lanes of a warp that hold it, else by warps, else by the blocks of a
// cluster.
constexpr Tile backward_tile(int64_t cols, int x_size, int dy_size, bool aligned,
                             const DeviceProperties& device, bool residual = false) {
  const auto fits = [&](Tile& tile) {
    return backward_fits(cols, x_size, dy_size, aligned, device, tile, residual);
  };
  for (const BackwardSplit& s : kBackwardGeneral) {
    if (s.scope != Scope::kWarp || cols > s.lanes * s.elements) continue;
    for (int threads : {kRingThreads, kRingThreads / 2}) {
      Tile tile{.scope = Scope::kWarp,
                .threads_per_row = s.lanes,
                .elements = s.elements,
                .block_threads = threads};
      if (fits(tile)) return tile;
    }
  }
  const int64_t wanted = round_up(ceil_div(cols, kBackwardElements), kWarp);
  for (int64_t threads : {kRingThreads, kRingThreads / 2}) {
    if (wanted > threads) continue;
    Tile tile{.scope = Scope::kBlock,
              .threads_per_row = static_cast<int>(wanted),
              .elements = kBackwardElements,
              .block_threads = static_cast<int>(threads / wanted * wanted)};
    if (fits(tile)) return tile;
  }
  for (int elements : {kBackwardElements, kBackwardMostElements}) {
    for (int cluster = 2; cluster <= device.cluster_limit; cluster *= 2) {
      Tile tile{.scope = Scope::kCluster, .elements = elements, .cluster = cluster};
      const int64_t threads = round_up(ceil_div(part_cols(cols, tile), elements), kWarp);
      if (threads > kRingThreads) continue;
      tile.threads_per_row = tile.block_threads = static_cast<int>(threads);
      if (fits(tile)) return tile;
    }
  }
  return multi_pass_tile(cols);
}

// The tile of a specialized kernel, or the same if there is none for it.
constexpr Tile specialize_backward(const Tile& tile, int64_t cols, int x_size,
                                   const EpilogueTerms& terms, const DeviceProperties& device,
                                   Specialization specialization, bool residual = false) {
  if (specialization == Specialization::kNone) return tile;
  const auto has_kernel = [&](const BackwardPolicy& policy) {
    return backward_policies_of(x_size, x_size).find(policy) >= 0;
  };
  for (const BackwardSplit& s : kBackwardOneWarp) {
    if (cols != kWarp * s.elements) continue;
    Tile warp{.threads_per_row = kWarp, .elements = s.elements, .specialization = specialization};
    const BackwardPolicy policy = backward_policy_of(warp, x_size, x_size, true, terms, residual);
    warp.block_threads = policy.block_threads();
    if (has_kernel(policy) && backward_fits(cols, x_size, x_size, true, device, warp, residual) &&
        (!policy.knows_stages() || warp.stages == kMaxStages))
      return warp;
  }
  Tile special = tile;
  special.specialization = specialization;
  // A block with one row group gains nothing: 5120 columns lost 5 %.
  const bool fills = !tile.multi_pass() && tile.row_groups() > 1 && tile.capacity() == cols &&
                     tile.stages == kMaxStages;
  const BackwardPolicy policy = backward_policy_of(special, x_size, x_size, true, terms, residual);
  return fills && has_kernel(policy) ? special : tile;
}

}  // namespace evenkeel::cuda
