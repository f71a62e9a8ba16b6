// How a group norm is split between threads: plain constexpr functions, as in row/forward_tuning.h.
//
// A set is a sample's channels of one or several whole groups. Its pixels fall into slices, and a line is one
// channel's slice. A block works on a chunk of a set:
//
//   channels first (NCHW): some lines; `lanes` threads share a line.
//   channels last (NHWC): a slice of `tile` neighbouring channels, `rows` pixels at a time, of which
//                         other slices have the next ones; a thread has a vector of the channels.
//
// A set is resident if the shared memory of a cluster of blocks can hold it: then it is read once. Otherwise
// chunks are read twice, first for their sums and then, mostly out of L2, for the results.
//
// The split decides the order of sums, so nothing here depends on the number of samples but `lag`.
// Numbers were measured on an H200 (docs/performance.md).
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/group/policies.h"
#include "cuda/runtime/device_properties.h"

namespace evenkeel::cuda {

struct GroupProblem {
  int64_t channels, spatial, per_group;  // per_group: channels of a group
  bool channels_last;
  bool backward;
  bool aligned;
  int x_size;                                     // GroupPolicy's
  int size;                                       // of a number in arithmetic
  Activations activations = Activations::kCheap;  // GroupPolicy's
};

struct GroupTile {
  bool resident = false, reloads_dy = false, one_group = false;  // GroupPolicy's
  int vector = 1;
  int vectors = 0;  // of each tensor and thread, at most
  int threads = 0;
  int64_t span = 0;      // channels of a set
  int64_t slice = 0;     // pixels of a slice, at most
  int slices = 0;        // of a plane
  int chunks = 0;        // of a set; if it is resident, blocks of its cluster
  int tile = 0;          // channels last: channels of a chunk
  int rows = 0;          // channels last: pixels that a block reads at a time
  int partial_sums = 0;  // channels last: of a slot, one for each warp, or row where that is longer
  int lanes = 0;         // channels first: threads of a line

  bool operator==(const GroupTile&) const = default;
};

// The policy of a tile.
constexpr GroupPolicy group_policy_of(const GroupProblem& p, const GroupTile& t) {
  return {.x_size = p.x_size,
          .backward = p.backward,
          .channels_last = p.channels_last,
          .resident = t.resident,
          .vector = t.vector,
          .one_group = t.one_group,
          .reloads_dy = t.reloads_dy,
          .activations = p.x_size == 0 ? Activations::kAll : p.activations};
}

// What a block holds of its set: vectors of 16 bytes.
constexpr int64_t resident_bytes(const GroupProblem& p, const GroupTile& t) {
  return int64_t{16} * group_policy_of(p, t).resident_tensors() * t.vectors * t.threads;
}

// What blocks of a cluster send each other: an mbarrier, and parts of groups.
inline constexpr int kGroupBarrierBytes = 16;
constexpr int64_t group_exchange_bytes(const GroupProblem& p, const GroupTile& t) {
  if (!t.resident || t.chunks == 1) return 0;
  return kGroupBarrierBytes + round_up(int64_t{t.chunks} * ceil_div(t.span, p.per_group) *
                                           group_policy_of(p, t).part_values() * p.size,
                                       16);
}

// Shared memory: vectors, what is sent, the table of the chunk, and the sums of its slots.
constexpr int64_t group_shared(const GroupProblem& p, const GroupTile& t) {
  const int64_t slots = p.channels_last ? t.tile : t.threads / t.lanes;
  const int64_t sums = 2 * slots * (p.channels_last ? t.partial_sums : 1);
  return resident_bytes(p, t) + group_exchange_bytes(p, t) +
         p.size * (round_up(group_policy_of(p, t).numbers() * slots, 4) + sums);
}

constexpr int pow2_at_least(int64_t n, int most) {
  int result = 1;
  while (result < n && result < most) result *= 2;
  return result;
}

// Channels last: chunks of `tile` channels in sets of `span`, of at most `threads` threads that have `vectors`
// each; with more of them where sets would have more than `most` chunks.
constexpr bool split_rows(const GroupProblem& p, int64_t span, int64_t tile, int64_t threads,
                          int64_t vectors, int64_t most, GroupTile& t) {
  const int64_t columns = tile / t.vector, tiles = ceil_div(span, tile);
  const int64_t rows = std::min(threads / columns, p.spatial);
  if (rows == 0) return false;
  const int64_t all = ceil_div(p.spatial, rows);  // slices of one vector
  const int64_t slices = std::min(ceil_div(all, vectors), std::max<int64_t>(most / tiles, 1));
  t.vectors = static_cast<int>(ceil_div(all, slices));
  t.slices = static_cast<int>(slices);
  t.span = span;
  t.tile = static_cast<int>(tile);
  t.rows = static_cast<int>(rows);
  t.threads = static_cast<int>(round_up(rows * columns, kWarp));
  t.slice = rows * t.vectors;
  t.chunks = static_cast<int>(slices * tiles);
  t.partial_sums = columns <= kWarp ? t.threads / kWarp : t.rows;
  return true;
}

// Channels first: the same with blocks of whole lines.
constexpr bool split_lines(const GroupProblem& p, int64_t threads, int cluster, GroupTile& t) {
  t.span = p.per_group;
  const int64_t vectors = ceil_div(p.spatial, int64_t{t.vector});
  if (t.resident) {
    // Lines of a size that fills the threads of all blocks.
    const int64_t share = ceil_div(vectors * p.per_group, threads * cluster);
    t.lanes = pow2_at_least(ceil_div(vectors, share), kWarp);
    t.vectors = static_cast<int>(std::min(share, ceil_div(vectors, int64_t{t.lanes})));
  } else {
    t.lanes = pow2_at_least(ceil_div(vectors, int64_t{t.vectors}), kWarp);
  }
  t.slice = int64_t{t.lanes} * t.vectors * t.vector;
  t.slices = static_cast<int>(ceil_div(p.spatial, t.slice));
  const int64_t lines = t.span * t.slices;
  const int64_t in_block =
      t.resident ? ceil_div(lines, cluster) : std::min(lines, threads / t.lanes);
  if (in_block * t.lanes > kResidentBlock) return false;
  t.threads = static_cast<int>(round_up(in_block * t.lanes, kWarp));
  t.chunks = static_cast<int>(ceil_div(lines, t.threads / t.lanes));
  return true;
}

// Blocks that hold up to a half of the shared memory come in pairs, one of which loads while the other
// stores.
inline constexpr int kPairBlock = 256;  // the most threads
constexpr int64_t half_of(const DeviceProperties& device) { return device.shared_bytes / 2 - 1024; }

// Bytes of neighbouring channels that a chunk should have at least.
inline constexpr int64_t kTileBytes = 128;
inline constexpr int64_t kLeastTileBytes = 64;
inline constexpr int64_t kSectorBytes = 32;  // that are read from memory at least
// Vectors of a pixel in a chunk that is read twice, at most.
inline constexpr int64_t kColumns = 16;

// Channels last: the channels that resident chunks may have, in steps of `base`, which is whole groups of whole
// vectors.
struct GroupTileWidths {
  int64_t base, widest;
  bool even;  // there are chunks of equal size, and only these are taken

  constexpr GroupTileWidths(const GroupProblem& p, int vector)
      : base(std::lcm(int64_t{vector}, p.per_group)),
        widest(std::min(round_up(p.channels, base), base * ceil_div(kTileBytes, base * p.x_size))),
        even(false) {
    for (int64_t tile = widest; tile > 0 && !even; tile -= base)
      even = is_wide(p, tile) && p.channels % tile == 0;
  }
  static constexpr bool is_wide(const GroupProblem& p, int64_t tile) {
    return tile >= p.channels ||
           (tile * p.x_size >= kLeastTileBytes && tile * p.x_size % kSectorBytes == 0);
  }
  constexpr bool take(const GroupProblem& p, int64_t tile) const {
    return is_wide(p, tile) && (!even || p.channels % tile == 0);
  }
};

// The tile of aligned sets that clusters can hold; not resident: they cannot.
constexpr GroupTile resident_group_tile(const GroupProblem& p, const DeviceProperties& device) {
  const int vector = group_vector(p.channels_last, true, p.x_size);
  const GroupTileWidths widths(p, vector);
  // Pairs of blocks that hold all; then the smallest clusters; then chunks of equal size, and wide.
  constexpr struct {
    bool pairs, reloads_dy;
  } kWays[] = {{true, false}, {true, true}, {false, false}, {false, true}};
  for (const auto& way : kWays) {
    if (!p.backward && (way.reloads_dy || !way.pairs)) continue;  // to read x twice is faster
    const int64_t threads = way.pairs ? kPairBlock : kResidentBlock;
    for (int cluster = 1; cluster <= device.cluster_limit;
         cluster += p.channels_last && way.pairs ? 1 : cluster) {
      for (int64_t tile = widths.widest; tile > 0; tile -= widths.base) {
        if (p.channels_last && !widths.take(p, tile)) continue;
        GroupTile t{.resident = true,
                    .reloads_dy = way.reloads_dy,
                    .one_group = !p.backward && p.channels_last && p.per_group % vector == 0,
                    .vector = vector};
        if (!(p.channels_last ? split_rows(p, tile, tile, threads, 1, cluster, t)
                              : split_lines(p, threads, cluster, t)))
          continue;
        if (group_shared(p, t) <= (way.pairs ? half_of(device) : device.shared_bytes)) return t;
        if (!p.channels_last) break;
      }
    }
  }
  return {};
}

// The tile of sets that are read twice.
constexpr GroupTile two_pass_group_tile(const GroupProblem& p, const DeviceProperties& device) {
  GroupTile t{.vector = p.aligned ? group_vector(p.channels_last, false, p.x_size) : 1};
  const GroupPolicy policy = group_policy_of(p, t);
  const int64_t threads = kTwoPassBlock;
  if (!p.channels_last) {
    t.vectors = policy.vectors();
    split_lines(p, threads, 0, t);
    return t;
  }
  // Chunks of whole groups if they can be; all channels as one set otherwise. In either case a sample has no
  // more chunks than run at once.
  const int64_t most = int64_t{device.sms} * policy.resident_blocks();
  const int64_t widest = int64_t{kColumns} * t.vector;
  const int64_t base = std::lcm(int64_t{t.vector}, p.per_group);
  int64_t tile = std::min(widest / base * base, round_up(p.channels, base));
  while (tile > 0 && p.channels % tile != 0) tile -= base;
  if (tile * 2 >= std::min(widest, p.channels)) {
    split_rows(p, tile, tile, threads, policy.vectors(), most / (p.channels / tile), t);
  } else {
    split_rows(p, p.channels, std::min(widest, round_up(p.channels, int64_t{t.vector})), threads,
               policy.vectors(), most, t);
  }
  return t;
}

constexpr GroupTile group_tile(const GroupProblem& p, const DeviceProperties& device) {
  if (p.aligned) {
    if (const GroupTile tile = resident_group_tile(p, device); tile.resident) return tile;
  }
  return two_pass_group_tile(p, device);
}

// A tile, and the entry of a table that serves it.
struct GroupChoice {
  GroupProblem problem;  // fallback: not aligned
  GroupTile tile;
  int policy = -1;        // an index of the table; -1: it has none, not for single elements either
  bool fallback = false;  // no entry serves the tile that the problem should have
};

constexpr GroupChoice choose_group_tile(const GroupProblem& p, const DeviceProperties& device,
                                        const PolicyList<GroupPolicy>& table) {
  GroupChoice choice{.problem = p, .tile = group_tile(p, device)};
  choice.policy = table.find(group_policy_of(p, choice.tile));
  if (choice.policy >= 0) return choice;
  choice.fallback = true;
  choice.problem.aligned = false;
  choice.tile = group_tile(choice.problem, device);
  choice.policy = table.find(group_policy_of(choice.problem, choice.tile));
  return choice;
}

// Chunks that are read for their sums before the first one is read for the second time: those of whole sets,
// and enough to keep all SMs busy while the last sums of a set are reduced.
constexpr int64_t group_lag(int64_t sets, int64_t chunks, bool channels_last,
                            const DeviceProperties& device) {
  const int of_sm = channels_last ? 4 : 2;
  const int64_t wanted = (int64_t{device.sms} * of_sm + chunks / 2) / chunks;
  return std::min(std::max<int64_t>(wanted, 1), sets) * chunks;
}

}  // namespace evenkeel::cuda
