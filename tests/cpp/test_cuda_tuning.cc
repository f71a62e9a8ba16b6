// Which tile a row gets (src/cuda/row/tuning.h): properties that every tile must have, on devices that need
// not be there. A kernel trusts its tile, so a wrong one would read beyond shared memory, leave
// columns out or hang in a barrier.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <set>
#include <vector>

#include "cuda/primitives/reduce_partials.h"
#include "cuda_devices.h"
#include "cuda_kinds.h"

namespace evenkeel::cuda {
namespace {

// Every length of rows that are short, and then some around powers of two and between them.
const std::vector<int64_t>& all_lengths() {
  static const std::vector<int64_t> lengths = [] {
    constexpr int64_t kDense = 20000, kLongest = int64_t{1} << 24;
    std::vector<int64_t> result;
    for (int64_t cols = 1; cols <= kDense; ++cols) result.push_back(cols);
    const auto add_around = [&](int64_t cols) {
      for (const int away : {-8, -1, 0, 1, 8}) result.push_back(cols + away);
    };
    for (int64_t cols = 2 * kDense; cols < kLongest; cols += cols / 64) add_around(cols / 8 * 8);
    for (int64_t cols = 1 << 15; cols <= kLongest; cols *= 2) add_around(cols);
    return result;
  }();
  return lengths;
}

// `flaw` says what is wrong with a choice; nullptr: nothing. One report for each device and kind.
void expect_of_all_tiles(const char* (*flaw)(const Choice&)) {
  for (const NamedDevice& on : kDevices) {
    for (const Kind& kind : all_kinds()) {
      const Offer offer = offer_of(kind);
      for (const int64_t cols : all_lengths()) {
        if (cols % kind.vector() != 0) continue;
        const Choice choice{on, kind, offer, cols, tile_of(kind, cols, on.device)};
        if (const char* what = flaw(choice)) {
          ADD_FAILURE() << what << ": " << describe(choice);
          break;
        }
      }
    }
  }
}

TEST(CudaTile, HoldsEveryColumn) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    const Tile& tile = c.tile;
    if (tile.multi_pass()) return nullptr;
    if (tile.elements % c.kind.vector() != 0) return "a thread holds a piece of a vector";
    const int64_t share = part_cols(c.cols, tile);
    if (share > int64_t{tile.threads_per_row} * tile.elements) return "the threads hold too little";
    if (share * tile.cluster < c.cols) return "the blocks hold too little";
    if (share % c.kind.vector() != 0) return "a block's share cuts a vector apart";
    return share * (tile.cluster - 1) >= c.cols ? "the last block has no columns" : nullptr;
  });
}

const char* flaw_of_warp(const Choice& c) {
  if (c.tile.cluster != 1) return "a cluster whose sums stay in a warp";
  if (c.tile.block_threads > warp_threads(c.kind, c.tile.elements))
    return "more threads than the kernel is compiled for";
  for (const Tile& offered : c.offer.warps) {
    if (offered.threads_per_row == c.tile.threads_per_row && offered.elements == c.tile.elements)
      return nullptr;
  }
  return "no kernel has such a row group";
}

const char* flaw_of_block(const Choice& c) {
  constexpr int kNamedBarriers = 15;  // of 16; the first one is __syncthreads()
  if (c.tile.cluster != 1) return "a cluster whose sums stay in a block";
  if (c.tile.threads_per_row % kWarp != 0) return "a warp that waits in two barriers";
  if (c.tile.elements != c.offer.elements && c.tile.elements != c.offer.other_elements)
    return "no kernel holds so many elements";
  if (c.tile.block_threads > c.offer.block_threads)
    return "more threads than the kernel is compiled for";
  return c.tile.row_groups() > kNamedBarriers ? "more row groups than barriers" : nullptr;
}

const char* flaw_of_cluster(const Choice& c) {
  const int cluster = c.tile.cluster;
  if (cluster < 2 || cluster > kMaxCluster || !std::has_single_bit(static_cast<unsigned>(cluster)))
    return "a cluster of odd size";
  if (cluster > c.device().cluster_limit) return "a cluster that the device lacks";
  if (c.device().clusters_of(cluster) < 1) return "a cluster that never runs";
  if (c.tile.threads_per_row % kWarp != 0 || c.tile.row_groups() != 1)
    return "a cluster with many row groups in a block";
  if (c.tile.elements != c.offer.elements && c.tile.elements != c.offer.most_elements)
    return "no kernel holds so many elements";
  return c.tile.block_threads > c.offer.block_threads
             ? "more threads than the kernel is compiled for"
             : nullptr;
}

const char* flaw_of_multi_pass(const Choice& c) {
  if (c.tile.scope != Scope::kBlock || c.tile.cluster != 1)
    return "a multi-pass row of many blocks";
  return c.tile.row_groups() != 1 || c.tile.block_threads > kMaxThreads
             ? "threads of a multi-pass row"
             : nullptr;
}

TEST(CudaTile, HasAShapeThatKernelsTake) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    const Tile& tile = c.tile;
    const auto threads = static_cast<unsigned>(tile.threads_per_row);
    if (threads % kWarp != 0 && (threads > kWarp || !std::has_single_bit(threads)))
      return "a row group of odd size";
    if (tile.block_threads < 1 || tile.block_threads % kWarp != 0)
      return "threads are not whole warps";
    if (tile.block_threads % tile.threads_per_row != 0) return "threads are not whole row groups";
    // Backward sums are pairs; forward a warp has a mean, squares and a count; multi-pass rows may
    // have pairs of doubles.
    const auto of_warp =
        static_cast<int>(tile.multi_pass() ? 2 * sizeof(double) : 3 * sizeof(float));
    const bool tight = c.kind.pass == Pass::kForward && !tile.multi_pass();
    if (tile.block_threads / kWarp * tile.cluster * of_warp >
        (tight ? forward_exchange_slot_bytes(tile.scope, tile.threads_per_row, tile.cluster)
               : kMostExchangeSlotBytes))
      return "no room for the exchange";
    if (tile.multi_pass()) return flaw_of_multi_pass(c);
    if (c.kind.pass == Pass::kForward) {
      if (tile.stages != 0) return "a forward kernel has no ring";
      // Its row groups within a warp know their number at compile time, the larger ones are alone.
      if (tile.block_threads !=
          (tile.scope == Scope::kWarp ? warp_threads(c.kind, tile.elements) : tile.threads_per_row))
        return "a forward kernel finds its rows elsewhere";
    } else if (tile.stages < kMinStages || tile.stages > kMaxStages) {
      return "a ring of too few or too many rows";
    }
    switch (tile.scope) {
      case Scope::kWarp:
        return flaw_of_warp(c);
      case Scope::kBlock:
        return flaw_of_block(c);
      case Scope::kCluster:
        return flaw_of_cluster(c);
    }
    return "a scope without a name";
  });
}

static_assert(exchange_bytes(false) % kSlotAlignment == 0 &&
                  exchange_bytes(true) % kSlotAlignment == 0 &&
                  exchange_bytes(false, 1) % kSlotAlignment == 0,
              "the first slot comes after the sums");

// Blocks that add up their own sums first: two sums of every block of the cluster, and of every warp.
static_assert((kMaxCluster + kRingThreads / kWarp) * 2 * int{sizeof(float)} <=
              kMostExchangeSlotBytes);
// Threads with many elements have no other kernel.
static_assert(backward_block_first(kBackwardMostElements, 2) &&
              backward_block_first(kBackwardMostElements, 8));
static_assert(backward_block_first(kBackwardElements, 16) &&
              !backward_block_first(kBackwardElements, 8));

TEST(CudaTile, FitsIntoSharedMemoryWithAsManyRowsAsPossible) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    if (c.tile.multi_pass()) return nullptr;
    const int64_t shared = shared_of(c.kind, c.cols, c.tile);
    if (shared > c.device().shared_bytes) return "more shared memory than there is";
    if (shared < bytes_touched(c)) return "less shared memory than is used";
    // Kernels that ask for no more have 48 KB.
    if (c.kind.pass == Pass::kForward && c.tile.scope != Scope::kCluster && shared > 48 << 10)
      return "more shared memory than a kernel has that does not ask for it";
    if (c.kind.pass == Pass::kForward || c.tile.stages == kMaxStages) return nullptr;
    Tile longer = c.tile;
    ++longer.stages;
    return shared_of(c.kind, c.cols, longer) <= c.device().shared_bytes ? "room for another row"
                                                                        : nullptr;
  });
}

// Whether rings of the least length fit into shared memory.
bool could_fit(const Choice& c, Tile tile) {
  tile.stages = kMinStages;
  return shared_of(c.kind, c.cols, tile) <= c.device().shared_bytes;
}

// Whether a cluster of this size (1: a block) could hold the row if it held one only.
bool could_hold(const Choice& c, int cluster, int elements, int threads) {
  const Tile tile{.scope = cluster == 1 ? Scope::kBlock : Scope::kCluster,
                  .threads_per_row = threads,
                  .elements = elements,
                  .cluster = cluster,
                  .block_threads = threads};
  return part_cols(c.cols, tile) <= int64_t{threads} * elements && could_fit(c, tile);
}

bool some_cluster_could_hold(const Choice& c, int elements) {
  for (int cluster = 2; cluster <= c.device().cluster_limit; cluster *= 2) {
    if (could_hold(c, cluster, elements, c.offer.block_threads)) return true;
  }
  return false;
}

TEST(CudaTile, IsTheSmallestThatHoldsTheRow) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    const Tile& tile = c.tile;
    const Offer& offer = c.offer;
    if (tile.multi_pass()) {
      return could_hold(c, 1, offer.elements, offer.block_threads) ||
                     some_cluster_could_hold(c, offer.elements) ||
                     some_cluster_could_hold(c, offer.most_elements)
                 ? "the row need not be read in several passes"
                 : nullptr;
    }
    bool crowded =
        false;  // a smaller row group would do, but even half a block has too many of them
    for (Tile smaller : offer.warps) {
      if (smaller.capacity() >= tile.capacity() || smaller.capacity() < c.cols) continue;
      smaller.block_threads = warp_threads(c.kind, smaller.elements) / 2;
      if (could_fit(c, smaller)) return "a smaller part of a warp would do";
      crowded = true;
    }
    if (tile.scope != Scope::kWarp &&
        part_cols(c.cols, tile) <= int64_t{tile.threads_per_row - kWarp} * tile.elements)
      return "a warp less would do";
    if (tile.scope == Scope::kCluster) {
      if (could_hold(c, 1, offer.elements, offer.block_threads)) return "a block would do";
      if (c.kind.pass == Pass::kBackward && tile.elements > offer.elements &&
          some_cluster_could_hold(c, offer.elements))
        return "fewer elements would do";
      // Going forward, smaller blocks are better.
      const bool small =
          c.kind.pass == Pass::kForward && tile.threads_per_row <= kForwardSmallBlock;
      if (tile.cluster > 2 && could_hold(c, tile.cluster / 2, tile.elements,
                                         small ? kForwardSmallBlock : offer.block_threads))
        return "half the cluster would do";
    }
    const bool smallest = crowded || tile.capacity() == offer.warps.front().capacity();
    return !smallest && tile.capacity() >= 2 * c.cols ? "half of the tile or more is empty"
                                                      : nullptr;
  });
}

// Persistent blocks are alone on a SM, so small ones would leave it idle.
TEST(CudaTile, BackwardBlocksAreAtLeastHalfFull) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    if (c.kind.pass == Pass::kForward || c.tile.multi_pass() || c.tile.cluster > 1) return nullptr;
    return c.tile.block_threads + c.tile.threads_per_row <= kRingThreads / 2
               ? "room for another row group"
               : nullptr;
  });
}

// The longest rows of half types that a large cluster holds in both passes.
TEST(CudaTile, NoLongHalfRowIsMultiPassOnAnH200) {
  constexpr int64_t kLongest = 262144;
  for (const Kind& kind : all_kinds()) {
    if (!kind.aligned || kind.x_size() != 2 || kind.other_size() != 2) continue;
    const Offer offer = offer_of(kind);
    for (int64_t cols = kind.vector(); cols <= kLongest; cols += kind.vector()) {
      const Choice choice{kH200, kind, offer, cols, tile_of(kind, cols, kH200.device)};
      ASSERT_FALSE(choice.tile.multi_pass()) << describe(choice);
    }
  }
}

// --- The kernel that adds up partial sums

TEST(CudaReducePartials, HasThreadsForAllRowsAndColumns) {
  for (const int64_t cols : {1, 15, 1024, 1025, 1 << 24}) {
    for (int64_t count = 1; count <= 2000; ++count) {
      const int lanes = reduce_lanes(cols, count);
      EXPECT_EQ(kReduceThreads % lanes, 0);
      EXPECT_EQ(kReduceThreads % std::max(lanes, kWarp), 0);
      EXPECT_TRUE(kReduceThreads / lanes <= count || lanes == 128) << lanes;
    }
  }
}

// The functions stay plain: a tile can be had at compile time.
static_assert(forward_tile(4096, 2, kH200.device).capacity() >= 4096);
static_assert(backward_tile(4096, 2, 2, true, kH200.device).capacity() >= 4096);

// --- What row groups exchange (RowGroup of primitives/row_group.cuh)

// Who sends for the n-th time writes into a slot that others read when they receive: in any order of events,
// have all received what was there? ahead: how often a member sends before it first receives.
bool has_enough_slots(int slots, int ahead) {
  constexpr int kTurns = 10;
  struct Member {
    int sent = 0, received = 0;
    auto operator<=>(const Member&) const = default;
  };
  using State = std::array<Member, 3>;
  std::set<State> seen{State{}};
  std::vector<State> open{State{}};
  while (!open.empty()) {
    const State state = open.back();
    open.pop_back();
    const auto all = [&](auto condition) {
      return std::all_of(state.begin(), state.end(), condition);
    };
    for (size_t i = 0; i < state.size(); ++i) {
      State next = state;
      Member& member = next[i];
      if (member.sent < kTurns && member.sent - member.received < ahead) {
        if (!all([&](const Member& m) { return m.received > member.sent - slots; })) return false;
        ++member.sent;
      } else if (member.received < member.sent &&
                 all([&](const Member& m) { return m.sent > member.received; })) {
        ++member.received;
      } else {
        continue;
      }
      if (seen.insert(next).second) open.push_back(next);
    }
  }
  return true;
}

TEST(CudaExchange, NobodyWritesWhatIsStillToBeRead) {
  EXPECT_TRUE(has_enough_slots(exchange_slots(false), 1));
  EXPECT_TRUE(has_enough_slots(exchange_slots(true), 2));
  EXPECT_FALSE(has_enough_slots(exchange_slots(false) - 1, 1));
  EXPECT_FALSE(has_enough_slots(exchange_slots(true) - 1, 2));
}

}  // namespace
}  // namespace evenkeel::cuda
