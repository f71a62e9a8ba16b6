// How a CUDA group norm is split (src/cuda/group/tuning.h): properties that every tile must have,
// on devices that need not be there. What kernels compute from a tile (src/cuda/group/chunk.h) is counted:
// every element is read by one thread, every line is one slot of its group, and no block waits for one that
// starts after it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/group/chunk.h"
#include "cuda/group/shape.h"
#include "cuda/group/tuning.h"
#include "cuda_devices.h"

namespace evenkeel::cuda {
namespace {

struct Choice {
  const NamedDevice& on;
  GroupProblem problem;
  GroupTile tile;
  int index;  // of the policy that serves the tile

  const GroupPolicy& policy() const { return group_policies_of(problem.x_size).entries[index]; }
  const DeviceProperties& device() const { return on.device; }
  int64_t groups() const { return problem.channels / problem.per_group; }
  int64_t columns() const { return tile.tile / tile.vector; }
  // Channels last: neighbouring chunks of a set.
  int64_t tiles() const { return ceil_div(tile.span, tile.tile); }
  // Lines, or channels, of a chunk.
  int64_t slots() const { return problem.channels_last ? tile.tile : tile.threads / tile.lanes; }
};

std::string describe(const Choice& c) {
  const GroupProblem& p = c.problem;
  const GroupTile& t = c.tile;
  std::ostringstream text;
  text << c.on.name << (p.backward ? " backward" : " forward")
       << (p.channels_last ? " channels last" : " channels first")
       << (p.aligned ? "" : ", not aligned") << ", elements of " << p.x_size << ", arithmetic of "
       << p.size << " bytes, " << c.groups() << " groups of " << p.per_group << ", spatial "
       << p.spatial << ": " << (t.resident ? "resident" : "read twice") << ", vector " << t.vector
       << ", vectors " << t.vectors << ", threads " << t.threads << ", span " << t.span
       << ", slice " << t.slice << ", slices " << t.slices << ", chunks " << t.chunks << ", tile "
       << t.tile << ", rows " << t.rows << ", partial_sums " << t.partial_sums << ", lanes "
       << t.lanes;
  return text.str();
}

// Bytes of an element (0: looked up at run time, which is never aligned) and of a number in arithmetic (plan.cc).
struct Sizes {
  int x, compute;
  bool aligned;
  Activations activations = Activations::kCheap;
};
constexpr Activations kAll = Activations::kAll;
constexpr Sizes kSizes[] = {{2, 4, true},        {4, 4, true},        {2, 4, false},
                            {4, 4, false},       {2, 4, true, kAll},  {4, 4, true, kAll},
                            {2, 4, false, kAll}, {4, 4, false, kAll}, {0, 4, false},
                            {0, 8, false, kAll}};

struct Sweep {
  std::vector<int64_t> per_group, groups, spatial;
};

// Calls body(choice) for the problems of a sweep, both layouts and passes, until one fails.
template <typename Body>
void for_choices(const NamedDevice& on, const Sweep& sweep, const Body& body) {
  for (const bool channels_last : {false, true}) {
    for (const bool backward : {false, true}) {
      for (const Sizes& sizes : kSizes) {
        for (const int64_t per_group : sweep.per_group) {
          for (const int64_t groups : sweep.groups) {
            for (const int64_t spatial : sweep.spatial) {
              const GroupProblem problem{.channels = groups * per_group,
                                         .spatial = spatial,
                                         .per_group = per_group,
                                         .channels_last = channels_last,
                                         .backward = backward,
                                         .aligned = sizes.aligned,
                                         .x_size = sizes.x,
                                         .size = sizes.compute,
                                         .activations = sizes.activations};
              const int64_t width = channels_last ? problem.channels : spatial;
              if (sizes.aligned && width % (16 / sizes.x) != 0) continue;
              const GroupChoice choice =
                  choose_group_tile(problem, on.device, group_policies_of(sizes.x));
              const Choice chosen{on, problem, choice.tile, choice.policy};
              ASSERT_FALSE(choice.fallback) << "no kernel has this tile: " << describe(chosen);
              body(chosen);
              if (testing::Test::HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

// --- Limits, of all kinds of problems

const Sweep& wide_sweep() {
  static const Sweep sweep = [] {
    Sweep result{{1,  2,  3,  4,   5,   7,   8,   10,  16,   31,   32,   33,
                  40, 64, 80, 100, 128, 129, 256, 320, 1000, 1024, 4096, 4099},
                 {1, 2, 3, 8, 32, 33},
                 {3, 5, 6, 7, 12, 49, 100, 196, 784, 1000, 3136, 12544, 50176, 1000000}};
    for (int64_t spatial = 1; spatial <= 1 << 22; spatial *= 2) {
      for (const int away : {-1, 0, 1, 8}) {
        if (spatial + away > 0) result.spatial.push_back(spatial + away);
      }
    }
    return result;
  }();
  return sweep;
}

// `flaw` says what is wrong with a choice; nullptr: nothing. One report for each device.
void expect_of_all_tiles(const char* (*flaw)(const Choice&)) {
  for (const NamedDevice& on : kDevices) {
    for_choices(on, wide_sweep(), [&](const Choice& c) {
      if (const char* what = flaw(c)) ADD_FAILURE() << what << ": " << describe(c);
    });
  }
}

TEST(CudaGroupTile, HasAKernelThatTakesIt) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    const GroupProblem& p = c.problem;
    const GroupTile& t = c.tile;
    const GroupPolicy& policy = c.policy();
    if (policy != group_policy_of(p, t)) return "the kernel has another split";
    if (p.aligned != (policy.vector > 1)) return "vectors and alignment differ";
    if (policy.resident && !p.aligned) return "single elements are resident";
    if (t.vectors < 1) return "threads without vectors";
    // They are in registers, channels last one set after another.
    if (!policy.resident && !policy.refills() && t.vectors != policy.vectors())
      return "the kernel has registers for fewer or more vectors";
    if (policy.one_group && p.per_group % policy.vector != 0)
      return "vectors lie in several groups";
    if (t.threads < kWarp || t.threads % kWarp != 0) return "threads are not whole warps";
    return t.threads > policy.block_threads() ? "more threads than the kernel is compiled for"
                                              : nullptr;
  });
}

// No entry of the table is there twice, and each is the one of some tile.
TEST(CudaGroupPolicies, AreDifferentAndInUse) {
  std::set<std::pair<int, int>> used;  // size of an element, index
  for_choices(kH200, wide_sweep(),
              [&](const Choice& c) { used.emplace(c.problem.x_size, c.index); });
  for (const int x_size : {0, 2, 4}) {
    const auto& table = group_policies_of(x_size);
    for (int i = 0; i < table.count; ++i) {
      EXPECT_EQ(table.entries[i].x_size, x_size);
      EXPECT_EQ(table.find(table.entries[i]), i) << x_size;
      EXPECT_TRUE(used.contains({x_size, i})) << "elements of " << x_size << ", policy " << i;
    }
  }
}

// A tile without an entry is not served by a neighbour: single elements take the problem, if the table has them.
TEST(CudaGroupPolicies, FallBackToSingleElements) {
  PolicyList<GroupPolicy> singles, none;
  for (const GroupPolicy& policy : group_policies_of(2)) {
    if (policy.vector == 1) singles.add(policy);
  }
  for_choices(kH200, {{8, 10}, {32}, {64, 4096, 1000000}}, [&](const Choice& c) {
    if (c.problem.x_size != 2) return;
    SCOPED_TRACE(describe(c));
    const GroupChoice choice = choose_group_tile(c.problem, kH200.device, singles);
    EXPECT_EQ(choice.fallback, c.problem.aligned);
    EXPECT_FALSE(choice.problem.aligned);
    ASSERT_GE(choice.policy, 0);
    EXPECT_EQ(singles.entries[choice.policy], group_policy_of(choice.problem, choice.tile));
    EXPECT_EQ(choice.tile, group_tile(choice.problem, kH200.device));
    const GroupChoice without = choose_group_tile(c.problem, kH200.device, none);
    EXPECT_TRUE(without.fallback);
    EXPECT_EQ(without.policy, -1);
  });
}

TEST(CudaGroupTile, HasAClusterThatRuns) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    constexpr int64_t kMostExpected = (1 << 20) - 1;  // bytes that a barrier can wait for
    if (c.tile.chunks < 1) return "sets without chunks";
    if (!c.tile.resident) return nullptr;
    if (c.tile.chunks > c.device().cluster_limit) return "a cluster that the device lacks";
    if (c.device().clusters_of(c.tile.chunks) < 1) return "a cluster that never runs";
    return group_exchange_bytes(c.problem, c.tile) > kMostExpected
               ? "more exchange than a barrier can count"
               : nullptr;
  });
}

// Channels last: threads whose first pixel this is, or a later one, have a vector less (GroupShape).
int64_t short_from(const Choice& c) {
  const GroupTile& t = c.tile;
  return c.problem.spatial - int64_t{t.vectors - 1} * t.rows * t.slices;
}

// Kernels have these numbers as int.
bool fits_int(int64_t number) { return number <= std::numeric_limits<int32_t>::max(); }

TEST(CudaGroupTile, CutsSetsIntoWholeGroupsSlicesAndLines) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    const GroupProblem& p = c.problem;
    const GroupTile& t = c.tile;
    if (t.span < 1 || t.span % p.per_group != 0) return "a set has a part of a group";
    if (!fits_int(t.slice)) return "a slice of too many pixels";
    if (t.slice * t.slices < p.spatial) return "pixels without a slice";
    if (p.channels_last) {
      if (int64_t{t.rows} * (t.slices - 1) >= p.spatial) return "a slice without pixels";
      if (short_from(c) < 1 || short_from(c) > int64_t{t.rows} * t.slices)
        return "vectors differ by more than one";
      if (t.tile < 1 || t.tile % t.vector != 0) return "a chunk has a part of a vector";
      if (t.rows < 1 || t.rows * c.columns() > t.threads) return "rows without threads";
      if (t.rows > p.spatial) return "rows without pixels";
      if (t.slice != int64_t{t.rows} * t.vectors) return "slices and rows differ";
      if (t.chunks != t.slices * c.tiles()) return "chunks and slices differ";
      const int64_t partial_sums = c.columns() <= kWarp ? t.threads / kWarp : t.rows;
      return t.partial_sums != partial_sums ? "a partial_sum is no warp and no row" : nullptr;
    }
    if (t.slice * (t.slices - 1) >= p.spatial) return "a slice without pixels";
    // Its slots are all the group's.
    if (t.span != p.per_group) return "a set of several groups, channels first";
    if (t.lanes > kWarp || !std::has_single_bit(static_cast<unsigned>(t.lanes)))
      return "a line of odd size";
    if (t.slice != int64_t{t.lanes} * t.vectors * t.vector) return "slices and lanes differ";
    if (!fits_int(t.chunks * c.slots())) return "too many lines";
    if (t.chunks * c.slots() < t.span * t.slices) return "lines without a chunk";
    return (t.chunks - 1) * c.slots() >= t.span * t.slices ? "a chunk without lines" : nullptr;
  });
}

// Bytes of shared memory that a block touches, counted without padding.
int64_t bytes_touched(const Choice& c) {
  const GroupProblem& p = c.problem;
  const GroupTile& t = c.tile;
  const int tensors = p.backward && !t.reloads_dy ? 2 : 1;
  const int64_t resident = t.resident ? int64_t{16} * tensors * t.vectors * t.threads : 0;
  const int64_t parts = t.resident && t.chunks > 1 ? t.chunks * (t.span / p.per_group) : 0;
  const int64_t barrier = parts > 0 ? 8 : 0;
  const int64_t slots = c.slots();
  const int64_t sums = p.channels_last ? 2 * slots * t.partial_sums : 2 * slots;
  return resident + barrier +
         p.size * (parts * c.policy().part_values() + slots * c.policy().numbers() + sums);
}

TEST(CudaGroupTile, FitsIntoSharedMemory) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    constexpr int64_t kOfBlock = 1024;  // what the driver takes of each
    const int64_t shared = group_shared(c.problem, c.tile);
    if (shared < bytes_touched(c)) return "less shared memory than is used";
    // The exchange and the table follow the vectors, and are read 16 bytes at a time.
    if (resident_bytes(c.problem, c.tile) % 16 != 0 ||
        group_exchange_bytes(c.problem, c.tile) % 16 != 0)
      return "a table that is not aligned";
    if (shared > c.device().shared_bytes) return "more shared memory than there is";
    return c.policy().resident_blocks() * (shared + kOfBlock) > c.device().shared_bytes + kOfBlock
               ? "fewer blocks on a SM than have registers"
               : nullptr;
  });
}

// The functions stay plain: a tile can be had at compile time.
constexpr GroupProblem kExample{.channels = 320,
                                .spatial = 4096,
                                .per_group = 10,
                                .channels_last = true,
                                .backward = false,
                                .aligned = true,
                                .x_size = 2,
                                .size = 4};
static_assert(group_tile(kExample, kH200.device).resident);

// --- Places, of problems that are small enough to count

// With little shared memory small sets take clusters of all sizes, and more than those hold. (The
// sums of channels last alone take more than the first of these has.)
constexpr DeviceProperties tiny_device(int shared_bytes) {
  return {.major = 9,
          .minor = 0,
          .sms = 4,
          .shared_bytes = shared_bytes,
          .cluster_limit = 16,
          .clusters = {4, 2, 1, 1, 1}};
}
constexpr NamedDevice kSmallDevices[] = {
    {"device with 20 KiB", tiny_device(20480)}, {"device with 40 KiB", tiny_device(40960)}, kH200};

const Sweep kSmallSweep{{1, 2, 3, 5, 8, 10, 32, 40, 129, 520},
                        {1, 3, 8},
                        {1, 2, 7, 8, 49, 64, 100, 256, 1000, 1023, 3136, 12544}};
constexpr int64_t kMostCounted = 50000;

template <int kSize, int kIndex>
constexpr GroupPolicy kEntry = group_policies_of(kSize).entries[kIndex];

// Calls body(Chunk) with a value of the type that the problem's kernel has: std::type_identity<Chunk<...>>.
template <int kSize, typename Body, int... kIndex>
void with_chunk_of(int index, const Body& body, std::integer_sequence<int, kIndex...>) {
  ((kIndex == index
        ? body(std::type_identity<
               Chunk<kEntry<kSize, kIndex>.channels_last, kEntry<kSize, kIndex>.vector>>())
        : void()),
   ...);
}
template <int kSize, typename Body>
void with_chunk_of(int index, const Body& body) {
  with_chunk_of<kSize>(index, body,
                       std::make_integer_sequence<int, group_policies_of(kSize).count>());
}
template <typename Body>
void with_chunk(const Choice& c, const Body& body) {
  switch (c.problem.x_size) {
    case 2:
      return with_chunk_of<2>(c.index, body);
    case 4:
      return with_chunk_of<4>(c.index, body);
    default:
      return with_chunk_of<0>(c.index, body);
  }
}

constexpr int kSamples = 2;

GroupShape shape_of(const Choice& c) {
  const int64_t sets = kSamples * ceil_div(c.problem.channels, c.tile.span);
  return group_shape(c.problem, c.tile, sets, sets * c.tile.chunks);
}

// Calls body(set) for the last sample's first set, and for its last one if that has fewer channels.
template <typename Body>
void for_sets(const Choice& c, const GroupShape& shape, const Body& body) {
  const int of_sample = shape.sets / kSamples, first = (kSamples - 1) * of_sample;
  body(GroupSet(shape, first));
  if (c.problem.channels % c.tile.span != 0) body(GroupSet(shape, shape.sets - 1));
}

// Calls body(choice) for problems that take all ways: both layouts, resident in clusters of all sizes
// or read twice.
template <typename Body>
void for_small_choices(const Body& body) {
  constexpr unsigned kReadTwice = 0;
  std::set<std::pair<bool, unsigned>> seen;
  for (const NamedDevice& on : kSmallDevices) {
    for_choices(on, kSmallSweep, [&](const Choice& c) {
      if (c.tile.span * c.problem.spatial > kMostCounted) return;
      const auto cluster = std::bit_ceil(static_cast<unsigned>(c.tile.chunks));
      seen.emplace(c.problem.channels_last, c.tile.resident ? cluster : kReadTwice);
      SCOPED_TRACE(describe(c));
      body(c);
    });
  }
  for (const bool channels_last : {false, true}) {
    for (const unsigned cluster : {kReadTwice, 1u, 2u, 4u, 8u, 16u}) {
      EXPECT_TRUE(seen.contains({channels_last, cluster}))
          << (channels_last ? "channels last: " : "channels first: ") << cluster;
    }
  }
}

// Of a set's elements, or lines, or chunks.
void expect_once(const std::vector<uint8_t>& counts) {
  EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](uint8_t count) { return count == 1; }));
}

TEST(CudaGroupSet, HasTheSamplesChannelsInOrder) {
  for_small_choices([](const Choice& c) {
    const GroupShape shape = shape_of(c);
    int64_t channels = 0;
    for (int index = 0; index < shape.sets; ++index) {
      const GroupSet set(shape, index);
      ASSERT_EQ(set.sample * c.problem.channels + set.channel, channels);
      ASSERT_EQ(set.group(shape), channels / c.problem.per_group);
      channels += set.channels;
    }
    ASSERT_EQ(channels, kSamples * c.problem.channels);
  });
}

// The addresses of all threads, in a dense tensor. A chunk that is read backwards has the same.
TEST(CudaGroupChunk, EveryElementIsReadOnce) {
  for_small_choices([](const Choice& c) {
    const GroupShape shape = shape_of(c);
    const GroupProblem& p = c.problem;
    DeviceTensor tensor{};
    tensor.row_stride = p.channels_last ? p.channels : p.spatial;
    tensor.outer_stride = p.channels * p.spatial;
    with_chunk(c, [&]<typename Position>(std::type_identity<Position>) {
      for_sets(c, shape, [&](const GroupSet& set) {
        for (const bool backwards : {false, true}) {
          std::vector<uint8_t> counts(static_cast<size_t>(set.channels * p.spatial));
          std::vector<int64_t> pixels(static_cast<size_t>(c.tile.slices));
          for (int chunk = 0; chunk < c.tile.chunks; ++chunk) {
            for (int thread = 0; thread < c.tile.threads; ++thread) {
              const Position at(shape, set, chunk, thread, c.tile.threads, backwards);
              ASSERT_LE(at.count, c.tile.vectors);
              const auto vectors = at.in(shape, tensor, set);
              for (int v = 0; v < at.count; ++v) {
                for (int element = 0; element < c.tile.vector; ++element) {
                  const int64_t index =
                      vectors.first + v * vectors.step + element - set.sample * tensor.outer_stride;
                  const int64_t row = index / tensor.row_stride, column = index % tensor.row_stride;
                  const int64_t channel = (p.channels_last ? column : row) - set.channel;
                  const int64_t pixel = p.channels_last ? row : column;
                  ASSERT_TRUE(channel >= 0 && channel < set.channels);
                  ASSERT_TRUE(pixel >= 0 && pixel < p.spatial);
                  ++counts[static_cast<size_t>(channel * p.spatial + pixel)];
                  ++pixels[static_cast<size_t>(at.slice)];
                }
              }
            }
          }
          expect_once(counts);
          for (int slice = 0; slice < c.tile.slices; ++slice)
            ASSERT_EQ(pixels[static_cast<size_t>(slice)],
                      int64_t{set.channels} * Position::pixels_of(shape, slice));
        }
      });
    });
  });
}

TEST(CudaGroupChunk, EveryLineIsOneSlotOfItsGroup) {
  for_small_choices([](const Choice& c) {
    const GroupShape shape = shape_of(c);
    const int threads = c.tile.threads;
    with_chunk(c, [&]<typename Position>(std::type_identity<Position>) {
      for_sets(c, shape, [&](const GroupSet& set) {
        const int slices = c.tile.slices;
        const auto per_group = static_cast<int>(c.problem.per_group);
        std::vector<uint8_t> counts(static_cast<size_t>(set.channels * slices));
        for (int chunk = 0; chunk < c.tile.chunks; ++chunk) {
          const Position at(shape, set, chunk, 0, threads, false);
          for (int group = 0; group < set.channels / per_group; ++group) {
            const auto slots = at.slots_of(shape, set, chunk, group, threads);
            ASSERT_LE(slots.last, Position::slots(shape, threads));
            for (int slot = slots.first; slot < slots.last; ++slot) {
              const auto line = at.line_of(shape, chunk, slot, threads);
              ASSERT_EQ(line.channel / per_group, group);
              ASSERT_LT(line.slice, slices);
              ++counts[static_cast<size_t>(line.channel * slices + line.slice)];
            }
          }
        }
        expect_once(counts);
      });
    });
  });
}

TEST(CudaGroupChunk, ThreadsAddToTheSlotsOfTheirChannels) {
  for_small_choices([](const Choice& c) {
    const GroupShape shape = shape_of(c);
    const GroupSet set(shape, 0);
    with_chunk(c, [&]<typename Position>(std::type_identity<Position>) {
      for (int chunk = 0; chunk < c.tile.chunks; ++chunk) {
        for (int thread = 0; thread < c.tile.threads; ++thread) {
          const Position at(shape, set, chunk, thread, c.tile.threads, false);
          if (at.count == 0) continue;
          const auto line = at.line_of(shape, chunk, at.slot, c.tile.threads);
          ASSERT_EQ(line.channel, at.channel);
          ASSERT_EQ(line.slice, at.slice);
        }
      }
    });
  });
}

// --- The order in which chunks are read twice

// Whoever reads a chunk for the second time waits for the sums of its whole set.
void expect_order(int64_t sets, int64_t chunks, int64_t lag, bool twice) {
  GroupShape shape{};
  shape.sets = static_cast<int>(sets);
  shape.chunks = Divisor(chunks);
  shape.lag = static_cast<int>(lag);
  std::vector<int64_t> sums(static_cast<size_t>(sets));
  std::vector<uint8_t> first(static_cast<size_t>(sets * chunks)), second(first.size());
  for (int block = 0; block < sets * chunks * (twice ? 2 : 1); ++block) {
    const WorkItem item(shape, block);
    ASSERT_TRUE(item.set >= 0 && item.set < sets && item.chunk >= 0 && item.chunk < chunks);
    int64_t& of_set = sums[static_cast<size_t>(item.set)];
    ++(item.second_pass ? second : first)[static_cast<size_t>(item.set * chunks + item.chunk)];
    if (!item.second_pass) ++of_set;
    ASSERT_TRUE(!item.second_pass || of_set == chunks)
        << "block " << block << " waits for later ones";
  }
  expect_once(first);
  if (twice) expect_once(second);
}

TEST(CudaGroupOrder, BlocksWaitForEarlierOnesOnly) {
  for (const NamedDevice& on : kDevices) {
    for (const int64_t sets : {1, 2, 3, 31, 256, 1000}) {
      for (const int64_t chunks : {1, 2, 3, 40, 527, 529, 2000}) {
        SCOPED_TRACE(testing::Message() << on.name << ": " << sets << " x " << chunks);
        for (const bool last : {false, true}) {
          const int64_t lag = group_lag(sets, chunks, last, on.device);
          ASSERT_EQ(lag % chunks, 0) << "a set is read second_pass before its sums are done";
          ASSERT_GE(lag, chunks);
          ASSERT_LE(lag, sets * chunks);
          if (sets * chunks <= 300000) expect_order(sets, chunks, lag, true);
        }
        if (sets * chunks > 300000) continue;
        expect_order(sets, chunks, sets * chunks, false);  // backward without dx
      }
    }
  }
}

// --- Division

void expect_division(uint32_t divisor, uint32_t n) {
  const Divisor by(divisor);
  ASSERT_EQ(by.quotient(n), n / divisor) << n << " / " << divisor;
}

TEST(CudaDivisor, DividesEveryNumberBelow2To31) {
  constexpr uint32_t kLimit = uint32_t{1} << 31;
  std::vector<uint32_t> numbers;
  for (uint32_t n = 1; n <= 1100; ++n) numbers.push_back(n);
  for (uint32_t n = 2048; n < kLimit && n > 0; n *= 2) {
    for (const uint32_t number : {n - 1, n, n + 1, n + n / 3, n + n / 2}) numbers.push_back(number);
  }
  numbers.push_back(kLimit - 1);
  for (const uint32_t divisor : numbers) {
    for (const uint32_t n : numbers) expect_division(divisor, n);
    expect_division(divisor, 0);
    // A quotient that is off by one shows beside multiples, the largest first.
    const uint32_t most = (kLimit - 1) / divisor;
    for (const uint32_t times : {most, most - most / 3, most / 2 + 1}) {
      for (const int away : {-1, 0, 1}) {
        const int64_t n = int64_t{times} * divisor + away;
        if (n >= 0 && n < kLimit) expect_division(divisor, static_cast<uint32_t>(n));
      }
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(CudaDivisor, IsOneUnlessTold) { EXPECT_EQ(Divisor().quotient(12345), 12345u); }

}  // namespace
}  // namespace evenkeel::cuda
