// Which kernel a problem gets: plain constexpr functions of the row length, the element types and
// the chip, so that they can be tested without a GPU.
//
// A team of threads works on one row. How a row is split between them decides the order of its
// sums, so the split depends on the row's length and type only, never on the number of rows: a row
// gives the same bits in every batch. How many teams share a block, and how many blocks there are,
// may depend on anything.
//
// Numbers were measured on an H200 (docs/performance.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace evenkeel::cuda {

// What a team is made of.
enum class Scope {
  kWarp,     // some or all lanes of a warp: sums by shuffles
  kBlock,    // warps of a block: sums through shared memory
  kCluster,  // blocks of a cluster: sums through distributed shared memory
};

struct Chip {
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;   // that a block may have
  int cluster_limit = 1;  // the largest cluster that can be launched
  int clusters[5] =
      {};  // of 1, 2, 4, 8, 16 blocks that run at once with one block a multiprocessor

  constexpr bool has_clusters() const { return cluster_limit > 1; }
  constexpr int clusters_of(int size) const {
    int log = 0;
    while (1 << log < size) ++log;
    return clusters[log];
  }
};

struct Tile {
  Scope scope = Scope::kWarp;
  int team = 32;     // threads of a team in one block
  int elements = 0;  // of a row that a thread holds; 0: the row is read anew in every pass
  int cluster = 1;   // blocks of a team
  int threads = 32;  // of a block
  int stages = 0;    // rows in the ring of a team

  constexpr bool streams() const { return elements == 0; }
  constexpr int teams() const { return threads / team; }  // in a block
  // Columns that a team can hold.
  constexpr int64_t capacity() const { return int64_t{team} * elements * cluster; }
  bool operator==(const Tile&) const = default;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline constexpr int kWarp = 32;
inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxCluster = 16;

inline constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;  // of a grid

// Rows that are read anew in every pass: a block for each, as far as a grid goes, with threads for
// eight elements each.
constexpr Tile streamed_tile(int64_t cols) {
  const auto team =
      static_cast<int>(std::clamp<int64_t>(round_up(ceil_div(cols, 8), kWarp), kWarp, kMaxThreads));
  return {.scope = Scope::kBlock, .team = team, .elements = 0, .threads = team};
}

// aligned: every row of every tensor begins at a multiple of 16 bytes and has a length to match, so
// that loads and stores are of 16 bytes; otherwise they are of one element.

// Persistent blocks with rings of rows (ring.cuh).
inline constexpr int kRingThreads = 512;  // of 128 registers: all that a multiprocessor has
inline constexpr int kMaxStages = 4;
inline constexpr int kMinStages = 2;  // one row at work, one on its way
// Shared memory for what a team's warps exchange: places with three floats for each warp of a cluster
// (or two doubles for each warp of a block), and a barrier for each. They take turns.
inline constexpr int kBarrierBytes = 128;
inline constexpr int kPlaceBytes = 3 * 4 * kMaxCluster * (kRingThreads / kWarp);
constexpr int exchange_places(Scope scope) { return scope == Scope::kCluster ? 4 : 2; }
constexpr int reduce_bytes(Scope scope) {
  return kBarrierBytes + exchange_places(scope) * kPlaceBytes;
}

// Columns of a block's part of a row.
constexpr int64_t part_cols(int64_t cols, const Tile& tile) {
  return tile.cluster == 1 ? cols : round_up(ceil_div(cols, tile.cluster), 8);
}

// Copies into places that are not aligned so take up to a third longer (H200).
inline constexpr int kSlotAlignment = 128;

// Bytes of a part of a row in the ring. What does not begin at a multiple of 16 keeps its place
// within 16 bytes.
constexpr int64_t ring_part(int64_t cols, int size, bool aligned) {
  return round_up(cols * size + (aligned ? 0 : 15), kSlotAlignment);
}

// Forward: a block for each row, or for several rows of a warp or less.
struct ForwardShort {
  int team, elements;
};
inline constexpr ForwardShort kForwardShort[] = {{4, 16},  {4, 32},  {8, 32},
                                                 {16, 32}, {32, 32}, {32, 64}};
inline constexpr ForwardShort kForwardShortSingle[] = {{4, 16}, {8, 16}, {16, 16}, {32, 16}};
constexpr std::span<const ForwardShort> forward_short(bool aligned) {
  if (aligned) return kForwardShort;
  return kForwardShortSingle;
}
inline constexpr int kForwardWarpThreads = 128;
inline constexpr int kForwardBlockThreads = 512;

// The most elements that a thread holds: 64 bytes, or 128 where a warp or a cluster has to hold a
// long row.
constexpr int forward_elements(Scope scope, int x_size, bool aligned) {
  if (!aligned) return 16;
  return (scope == Scope::kBlock ? 64 : 128) / x_size;
}

// Threads that a multiprocessor shall hold at least, which says how many registers each has: 48 for
// rows of a block, else 56 or 64.
constexpr int forward_threads(Scope scope, int elements) {
  if (scope == Scope::kBlock) return 1280;
  return scope == Scope::kWarp && elements == 16 ? 1152 : 1024;
}

// Whether loads and stores say that x and y pass by once: it gains up to 12 % where a thread holds
// much, and loses up to 7 % elsewhere.
constexpr bool forward_hints(int x_size, int elements) { return x_size * elements >= 128; }

constexpr Tile forward_tile(int64_t cols, int x_size, bool aligned, const Chip& chip) {
  for (const ForwardShort& s : forward_short(aligned)) {
    if (cols > s.team * s.elements || s.elements > forward_elements(Scope::kWarp, x_size, aligned))
      continue;
    return {.scope = Scope::kWarp,
            .team = s.team,
            .elements = s.elements,
            .threads = kForwardWarpThreads};
  }
  for (int cluster = 1; cluster <= chip.cluster_limit; cluster *= 2) {
    const Scope scope = cluster == 1 ? Scope::kBlock : Scope::kCluster;
    const int elements = forward_elements(scope, x_size, aligned);
    const int64_t threads = ceil_div(ceil_div(cols, elements), cluster);
    const auto team = static_cast<int>(round_up(threads, kWarp));
    if (team > kForwardBlockThreads) continue;
    return {
        .scope = scope, .team = team, .elements = elements, .cluster = cluster, .threads = team};
  }
  return streamed_tile(cols);
}

// Backward: the weight and the sums of dweight and dbias stay in registers beside the row.
inline constexpr int kBackwardTeams[] = {4, 8, 16, 32};
inline constexpr int kBackwardElements = 16;
inline constexpr int kBackwardFewElements = 8;    // of rows that are not aligned: a register each
inline constexpr int kBackwardMostElements = 32;  // the weight is in shared memory

constexpr int64_t backward_shared(int64_t cols, int x_size, int dy_size, bool aligned,
                                  const Tile& tile) {
  const int64_t part = part_cols(cols, tile);
  const int64_t slot = ring_part(part, x_size, aligned) + ring_part(part, dy_size, aligned);
  // In the end the sums of dweight and dbias, 8 bytes a column and team, lie in the rings' place.
  static_assert(kMinStages * 2 * 2 >= 2 * sizeof(float));
  const int64_t weights =
      tile.elements > kBackwardElements ? tile.capacity() / tile.cluster * sizeof(float) : 0;
  return reduce_bytes(tile.scope) + tile.teams() * tile.stages * slot + weights;
}

// How a row is split: by the least lanes of a warp that hold it, else by warps, else by the blocks
// of a cluster; always with the most stages for which there is enough shared memory.
constexpr Tile backward_tile(int64_t cols, int x_size, int dy_size, bool aligned,
                             const Chip& chip) {
  const auto fits = [&](Tile& tile) {
    for (tile.stages = kMaxStages; tile.stages >= kMinStages; --tile.stages) {
      if (backward_shared(cols, x_size, dy_size, aligned, tile) <= chip.shared_bytes) return true;
    }
    return false;
  };
  for (int team : kBackwardTeams) {
    if (cols > team * kBackwardElements) continue;
    for (int threads : {kRingThreads, kRingThreads / 2}) {
      Tile tile{
          .scope = Scope::kWarp, .team = team, .elements = kBackwardElements, .threads = threads};
      if (fits(tile)) return tile;
    }
  }
  for (int elements : {kBackwardFewElements, kBackwardElements}) {
    if (aligned && elements == kBackwardFewElements) continue;
    const int64_t team = round_up(ceil_div(cols, elements), kWarp);
    for (int64_t threads : {kRingThreads, kRingThreads / 2}) {
      if (team > threads) continue;
      Tile tile{.scope = Scope::kBlock,
                .team = static_cast<int>(team),
                .elements = elements,
                .threads = static_cast<int>(threads / team * team)};
      if (fits(tile)) return tile;
    }
  }
  for (int elements : {kBackwardElements, kBackwardMostElements}) {
    for (int cluster = 2; cluster <= chip.cluster_limit; cluster *= 2) {
      Tile tile{.scope = Scope::kCluster, .elements = elements, .cluster = cluster};
      const int64_t share = round_up(ceil_div(part_cols(cols, tile), elements), kWarp);
      if (share > kRingThreads) continue;
      tile.team = tile.threads = static_cast<int>(share);
      if (fits(tile)) return tile;
    }
  }
  return streamed_tile(cols);
}

// Streamed backward: dweight and dbias come from a pass of their own over columns, in chunks of
// rows.
inline constexpr int kColumnThreads = 256;
inline constexpr int kFoldThreads = 512;  // of the kernel that adds up the partial sums
inline constexpr int kMaxChunks = 128;
constexpr int64_t column_chunks(int64_t rows, int64_t cols, const Chip& chip) {
  const int64_t blocks = ceil_div(cols, kColumnThreads);
  const int64_t wanted = ceil_div(int64_t{chip.multiprocessors} * 8, blocks);
  return std::min<int64_t>({std::max<int64_t>(wanted, 1), kMaxChunks, ceil_div(rows, 16)});
}

}  // namespace evenkeel::cuda
