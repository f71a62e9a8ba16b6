// Which kernel a problem gets: plain constexpr functions of the row length, the element types and
// the chip, so that they can be tested without a GPU.
//
// A team of threads works on one row. How a row is split between them decides the order of its
// sums, so the split depends on the formula, types, the row's length and how rows lie in memory, never
// on their number: a row gives the same bits in every batch. How many teams share a block, how many
// rows a team has, and how many blocks there are, may depend on anything.
//
// Numbers were measured on an H200 (docs/performance.md).
#pragma once

#include <algorithm>
#include <cstdint>

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

// What a kernel may know: big tensors have one type, and all rows one stride; going forward, that the
// parameters have the same type.
enum class Usual {
  kNone,
  kRms,    // RMS norm without a bias (forward: with a weight)
  kLayer,  // layer norm (forward: with weight and bias)
};

struct Tile {
  Scope scope = Scope::kWarp;
  int team = 32;     // threads of a team in one block
  int elements = 0;  // that a thread holds; 0: the row is read anew in every pass
  int rows = 1;      // of a team at once, with one vector of a thread each
  int cluster = 1;   // blocks of a team
  int threads = 32;  // of a block
  int stages = 0;    // rows in the ring of a team
  Usual usual = Usual::kNone;

  constexpr bool streams() const { return elements == 0; }
  constexpr int teams() const { return threads / team; }  // in a block
  // Columns that a team can hold.
  constexpr int64_t capacity() const { return int64_t{team} * elements * cluster / rows; }
  constexpr int block_rows() const { return teams() * rows; }
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

// aligned: every row of every tensor begins at a multiple of 16 bytes and has a length to match.
// Threads have the same columns of a row that is not: it is moved in pieces of 16 bytes, too, and put
// together in shared memory. (Streamed rows are moved element by element then.)

// Persistent blocks with rings of rows (ring.cuh).
inline constexpr int kRingThreads = 512;  // of 128 registers: all that a multiprocessor has
inline constexpr int kMaxStages = 4;
inline constexpr int kMinStages = 2;  // one row at work, one on its way
// Copies into places that are not aligned so take up to a third longer (H200).
inline constexpr int kSlotAlignment = 128;

// Shared memory for what a team's warps exchange: places with three floats for each warp of a cluster
// (or two doubles for each warp of a block), and a barrier for each. They take turns. ahead: a sum
// begins before the one before it is finished.
inline constexpr int kBarrierBytes = 128;
inline constexpr int kMostPlaceBytes = 3 * 4 * kMaxCluster * (kRingThreads / kWarp);
constexpr int exchange_places(bool ahead) { return ahead ? 4 : 2; }
constexpr int reduce_bytes(bool ahead, int place = kMostPlaceBytes) {
  return static_cast<int>(round_up(kBarrierBytes + exchange_places(ahead) * place, kSlotAlignment));
}
// Forward places are no larger than needed: what is left of shared memory is the first cache's.
constexpr int forward_place(Scope scope, int team, int cluster) {
  return 3 * 4 * (scope == Scope::kCluster ? team * cluster : kRingThreads) / kWarp;
}

// Columns of a block's part of a row.
constexpr int64_t part_cols(int64_t cols, const Tile& tile) {
  return tile.cluster == 1 ? cols : round_up(ceil_div(cols, tile.cluster), 8);
}

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
// Lanes with a vector of 8 each: how RMS norm splits rows of that length, if it knows them.
inline constexpr int kForwardSpread = 16;
inline constexpr int kForwardBlockThreads = 512;
// Where a thread holds much: better than larger ones.
inline constexpr int kForwardSmallBlock = 256;

// Elements that a thread holds: 64 bytes, or 128 (long rows of a warp, of half types in a block, and of
// clusters, where they wait in shared memory).
constexpr int forward_elements(int x_size) { return 64 / x_size; }
constexpr int forward_most(int x_size) { return 128 / x_size; }

// Of a block with several teams.
constexpr int forward_warp_threads(int x_size, int elements) {
  const int bytes = x_size * elements;
  return bytes == 16 || bytes == 64 ? 64 : 128;
}

// Whether a row is copied into shared memory. There those of clusters stay; one that is not aligned goes
// on into registers.
constexpr bool forward_copies(Scope scope, bool aligned) {
  return scope == Scope::kCluster || !aligned;
}

// Larger blocks that hold 64 bytes a thread would be alone with another one. Rows of half types are held
// by smaller ones then; those of float32, which need fewer registers, by three.
inline constexpr int kForwardLargeBlock = 384;

// Whether a kernel that knows a usual problem also knows that rows fill their teams.
constexpr bool forward_full(Scope scope, int x_size, int elements, bool large, Usual usual) {
  if (scope == Scope::kWarp) return usual != Usual::kNone;
  return scope == Scope::kBlock &&
         (usual == Usual::kLayer || (usual == Usual::kRms && (large || x_size * elements < 64)));
}

// Whether all columns of a warp lie side by side. It gains 1 to 5 %, and loses 1 % where blocks of half
// types know that rows fill them.
constexpr bool forward_together(Scope scope, int x_size, bool full) {
  return scope != Scope::kBlock || x_size == 4 || !full;
}

// How many of a thread's vectors of the weight are asked for before sums are made: as many as there are
// registers for. There are none for a bias beside it.
constexpr int forward_early(Scope scope, int vectors, Usual usual) {
  if (usual != Usual::kRms) return 0;
  return scope == Scope::kCluster ? 2 : vectors;
}

// Threads that a multiprocessor shall hold at least, which says how many registers each has: 40 to 80.
constexpr int forward_threads(Scope scope, int team, int x_size, int elements, bool aligned,
                              bool large, Usual usual) {
  const int bytes = elements * x_size;
  if (!aligned) return 1024;
  if (usual != Usual::kNone && scope == Scope::kBlock && bytes < 64) return 1536;
  if (usual == Usual::kRms && scope == Scope::kBlock) return large ? 1152 : 1024;
  if (usual == Usual::kRms && scope == Scope::kWarp) return 1024;
  if (usual == Usual::kLayer && scope == Scope::kWarp)
    return bytes < 64 ? 1280 : team < kWarp ? 768 : 1024;
  if (usual == Usual::kLayer) return 1024;
  if (large) return 1536;
  if (scope == Scope::kCluster) return 1280;
  if (scope == Scope::kBlock) return elements == forward_elements(x_size) ? 1280 : 1024;
  return elements == 16 ? 1280 : 1024;
}

// Bytes of parameters that a thread of a cluster asks for at once: what registers are left.
inline constexpr int kForwardParameters = 64;

// Whether loads and stores say that x and y pass by once: it gains 4 to 7 % where a thread of a warp
// holds much, and loses up to 7 % elsewhere.
constexpr bool forward_hints(Scope scope, int x_size, int elements) {
  return scope == Scope::kWarp && x_size * elements >= 128;
}

// A block also brings rows into the second cache, for a later one: so many bytes further on (half as much
// and half more are as good). Where nearly all blocks run at once there is no later one.
inline constexpr int64_t kForwardAhead = int64_t{4} << 20;
constexpr int64_t forward_ahead(int64_t rows, int64_t cols, int x_size, const Tile& tile) {
  const int64_t row_bytes = cols * x_size;
  if (tile.streams() || forward_hints(tile.scope, x_size, tile.elements) ||
      rows * row_bytes < 4 * kForwardAhead)
    return 0;
  return std::max<int64_t>(kForwardAhead / row_bytes, 1);
}

// Shared memory: of a team's part of a row, and of a block.
constexpr int forward_slot(Scope scope, int team, int elements, int64_t part_cols, int x_size,
                           bool aligned) {
  if (!forward_copies(scope, aligned)) return 0;
  if (aligned) return team * elements * x_size;
  return static_cast<int>(ring_part(part_cols, x_size, aligned));
}
constexpr int64_t forward_shared(int64_t cols, int x_size, bool aligned, const Tile& tile) {
  if (tile.streams()) return 0;
  const int slot =
      forward_slot(tile.scope, tile.team, tile.elements, part_cols(cols, tile), x_size, aligned);
  const int sums = reduce_bytes(false, forward_place(tile.scope, tile.team, tile.cluster));
  return tile.teams() * int64_t{slot} + (tile.scope == Scope::kWarp ? 0 : sums);
}

constexpr Tile forward_tile(int64_t cols, int x_size, const Chip& chip) {
  const int few = forward_elements(x_size), most = forward_most(x_size);
  for (const ForwardShort& s : kForwardShort) {
    if (cols > s.team * s.elements || s.elements > most) continue;
    return {.scope = Scope::kWarp,
            .team = s.team,
            .elements = s.elements,
            .threads = forward_warp_threads(x_size, s.elements)};
  }
  struct Split {
    int elements, threads;          // the most of a block
    int smallest = 1, largest = 1;  // clusters
  };
  const bool half = x_size == 2;
  const Split splits[] = {{few, half ? kForwardLargeBlock : kForwardBlockThreads},
                          {most, half ? kForwardSmallBlock : 0},
                          {most, kForwardSmallBlock, 2, kMaxCluster},
                          {most, kForwardBlockThreads, 2, kMaxCluster}};
  for (const Split& split : splits) {
    const int largest = std::min(split.largest, chip.cluster_limit);
    for (int cluster = split.smallest; cluster <= largest; cluster *= 2) {
      const int64_t team = round_up(ceil_div(ceil_div(cols, split.elements), cluster), kWarp);
      if (team > split.threads) continue;
      return {.scope = cluster == 1 ? Scope::kBlock : Scope::kCluster,
              .team = static_cast<int>(team),
              .elements = split.elements,
              .cluster = cluster,
              .threads = static_cast<int>(team)};
    }
  }
  return streamed_tile(cols);
}

// The tile of a kernel that knows a usual problem, or the same if there is none.
constexpr Tile forward_usual(Tile tile, int64_t rows, int64_t cols, int x_size, Usual usual) {
  const bool rms = usual == Usual::kRms, half = x_size == 2;
  const int few = forward_elements(x_size);
  // Loads of a warp lie side by side if a thread has one vector of each row. Either all teams have
  // several rows, or all have one.
  if (rms && half && cols == kForwardSpread * 8) {
    tile = {.team = kForwardSpread,
            .elements = 8,
            .threads = forward_warp_threads(x_size, few),
            .usual = usual};
    if (rows % (tile.teams() * (few / 8)) == 0) tile.elements = few, tile.rows = few / 8;
    return tile;
  }
  // Blocks with more threads of fewer elements, instead of long rows of a warp, and, as RMS norm needs
  // fewer registers than layer norm, instead of its small blocks.
  const int most_threads = rms ? kForwardSmallBlock : kForwardSmallBlock / 2;
  if (usual != Usual::kNone && half && cols > kWarp * few && cols % (few / 2 * kWarp) == 0 &&
      cols / (few / 2) <= most_threads) {
    tile.scope = Scope::kBlock;
    tile.elements = few / 2;
    tile.team = tile.threads = static_cast<int>(cols / tile.elements);
  }
  const bool large = tile.team > kForwardSmallBlock;
  const bool full = forward_full(tile.scope, x_size, tile.elements, large, usual);
  if (tile.streams() || (full && tile.capacity() != cols)) return tile;
  const bool known = tile.scope == Scope::kCluster
                         ? rms && half
                         : tile.elements <= few && (!large || (rms && half));
  if (known) tile.usual = usual;
  return tile;
}

// Backward: the weight and the sums of dweight and dbias stay in registers beside the row.
inline constexpr int kBackwardTeams[] = {4, 8, 16, 32};
inline constexpr int kBackwardElements = 16;
inline constexpr int kBackwardMostElements = 32;  // of clusters: the weight is in shared memory
// Of a warp's lanes, if rows are known to have that length: no warp waits for another then.
inline constexpr int kBackwardWarpElements[] = {24, 32};
// The least lanes whose kernel gains if it knows a usual problem.
inline constexpr int kBackwardUsualTeam = 8;

constexpr bool backward_holds_weight(int elements, Scope scope) {
  return scope != Scope::kCluster || elements <= kBackwardElements;
}
// Threads of a block: with more sums each needs more registers.
constexpr int backward_threads(int elements, Scope scope) {
  return scope == Scope::kWarp && elements > kBackwardElements ? kRingThreads / 2 : kRingThreads;
}

// A cluster makes the sums of its next row before it asks for those of this one: they are on their
// way for a while. (Rings of longer rows have no slot for that.)
constexpr bool backward_ahead(Scope scope, int elements) {
  return scope == Scope::kCluster && elements <= kBackwardElements;
}

// Whether the blocks of a cluster add up their own sums before they send them: fewer messages, for a
// barrier.
constexpr bool backward_adds(int elements, int cluster) {
  return elements > kBackwardElements || cluster == kMaxCluster;
}

constexpr int64_t backward_shared(int64_t cols, int x_size, int dy_size, bool aligned,
                                  const Tile& tile) {
  const int64_t part = part_cols(cols, tile);
  const int64_t slot = ring_part(part, x_size, aligned) + ring_part(part, dy_size, aligned);
  // In the end the teams' sums of dweight and dbias lie in the rings' place.
  const int64_t held = int64_t{tile.team} * tile.elements * sizeof(float);
  const int64_t sums =
      tile.teams() == 1 ? 0 : 2 * (tile.threads / std::max(tile.team, kWarp)) * held;
  const int64_t weights = backward_holds_weight(tile.elements, tile.scope) ? 0 : held;
  return reduce_bytes(backward_ahead(tile.scope, tile.elements)) +
         std::max(tile.teams() * tile.stages * slot, sums) + weights;
}

// Gives a tile the most stages for which there is enough shared memory; false if there is not enough for
// any.
constexpr bool backward_fits(int64_t cols, int x_size, int dy_size, bool aligned, const Chip& chip,
                             Tile& tile) {
  for (tile.stages = kMaxStages; tile.stages >= kMinStages; --tile.stages) {
    if (backward_shared(cols, x_size, dy_size, aligned, tile) <= chip.shared_bytes) return true;
  }
  return false;
}

// How a row is split: by the least lanes of a warp that hold it, else by warps, else by the blocks
// of a cluster.
constexpr Tile backward_tile(int64_t cols, int x_size, int dy_size, bool aligned,
                             const Chip& chip) {
  const auto fits = [&](Tile& tile) {
    return backward_fits(cols, x_size, dy_size, aligned, chip, tile);
  };
  for (int team : kBackwardTeams) {
    if (cols > team * kBackwardElements) continue;
    for (int threads : {kRingThreads, kRingThreads / 2}) {
      Tile tile{
          .scope = Scope::kWarp, .team = team, .elements = kBackwardElements, .threads = threads};
      if (fits(tile)) return tile;
    }
  }
  const int64_t team = round_up(ceil_div(cols, kBackwardElements), kWarp);
  for (int64_t threads : {kRingThreads, kRingThreads / 2}) {
    if (team > threads) continue;
    Tile tile{.scope = Scope::kBlock,
              .team = static_cast<int>(team),
              .elements = kBackwardElements,
              .threads = static_cast<int>(threads / team * team)};
    if (fits(tile)) return tile;
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

// Whether kernels that know a usual problem know that rings have kMaxStages: those of float32 are shorter.
constexpr bool backward_knows_stages(int x_size) { return x_size == 2; }

// The tile of a kernel that knows a usual problem, or the same if there is none.
constexpr Tile backward_usual(Tile tile, int64_t cols, int x_size, const Chip& chip, Usual usual) {
  if (usual == Usual::kNone) return tile;
  const bool half = backward_knows_stages(x_size);
  for (int elements : kBackwardWarpElements) {
    if (cols != kWarp * elements) continue;
    Tile warp{.team = kWarp,
              .elements = elements,
              .threads = backward_threads(elements, Scope::kWarp),
              .usual = usual};
    if (backward_fits(cols, x_size, x_size, true, chip, warp) &&
        (!half || warp.stages == kMaxStages))
      return warp;
  }
  // A block with one team gains nothing: 5120 columns lost 5 %. Nor does float32.
  if (half && !tile.streams() && tile.scope != Scope::kCluster && tile.team >= kBackwardUsualTeam &&
      tile.teams() > 1 && tile.capacity() == cols && tile.stages == kMaxStages)
    tile.usual = usual;
  return tile;
}

// The kernel that adds up rows of partial sums.
inline constexpr int kFoldThreads = 512;
// Neighbouring columns of a block: more blocks for few of them, but no more threads for a column than
// there are rows.
constexpr int fold_lanes(int64_t cols, int64_t count) {
  int lanes = cols <= 1024 ? 16 : kWarp;
  while (lanes < 128 && kFoldThreads / lanes > count) lanes *= 2;
  return lanes;
}

// Streamed backward: dweight and dbias come from a pass of their own over columns, in chunks of
// rows.
inline constexpr int kColumnThreads = 256;
inline constexpr int kMaxChunks = 128;
constexpr int64_t column_chunks(int64_t rows, int64_t cols, const Chip& chip) {
  const int64_t blocks = ceil_div(cols, kColumnThreads);
  const int64_t wanted = ceil_div(int64_t{chip.multiprocessors} * 8, blocks);
  return std::min<int64_t>({std::max<int64_t>(wanted, 1), kMaxChunks, ceil_div(rows, 16)});
}

}  // namespace evenkeel::cuda
