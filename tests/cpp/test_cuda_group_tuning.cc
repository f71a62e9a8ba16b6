// How a CUDA group norm is split (src/cuda/group/tuning.h): properties that every tile must have,
// on devices that need not be there. What kernels work out of a tile is worked out here once more (as
// in group.cuh) and counted: every element has one place, every line one slot of its group, and no
// block waits for one that starts after it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/group/tuning.h"
#include "cuda_devices.h"

namespace evenkeel::cuda {
namespace {

struct Choice {
  const NamedDevice& on;
  GroupProblem problem;
  GroupTile tile;

  const DeviceProperties& device() const { return on.device; }
  int64_t groups() const { return problem.channels / problem.per_group; }
  int64_t columns() const { return tile.tile / tile.vector; }
  // Channels last: chunks of a unit, side by side.
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
       << p.spatial << ": " << (t.keeps ? "kept" : "read twice") << ", vector " << t.vector
       << ", vectors " << t.vectors << ", threads " << t.threads << ", span " << t.span
       << ", piece " << t.piece << ", pieces " << t.pieces << ", chunks " << t.chunks << ", tile "
       << t.tile << ", rows " << t.rows << ", bundles " << t.bundles << ", lanes " << t.lanes;
  return text.str();
}

// Bytes of an element and of a number in arithmetic. f64 is never aligned (plan.cc).
struct Sizes {
  int x, compute;
  bool aligned;
};
constexpr Sizes kSizes[] = {{2, 4, true},  {4, 4, true},  {2, 4, false},
                            {4, 4, false}, {2, 8, false}, {8, 8, false}};

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
                                         .size = sizes.compute};
              const int64_t width = channels_last ? problem.channels : spatial;
              if (sizes.aligned && width % (16 / sizes.x) != 0) continue;
              body(Choice{on, problem, group_tile(problem, on.device)});
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

TEST(CudaGroupTile, HasAKernel) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    const GroupProblem& p = c.problem;
    const GroupTile& t = c.tile;
    const int vector = p.aligned ? group_vector(p.channels_last, t.keeps, p.x_size) : 1;
    if (t.vector != vector) return "no kernel has such vectors";
    if (t.keeps && !p.aligned) return "single elements are kept";
    if (t.vectors < 1) return "threads without vectors";
    // They are in registers, channels last one set after another.
    if (!t.keeps && !p.channels_last && t.vectors != group_vectors(p.backward, t.vector, p.x_size))
      return "no kernel has so many vectors";
    if (t.whole && !(p.channels_last && t.keeps && p.per_group % t.vector == 0))
      return "no kernel takes vectors of one group";
    if (t.threads < kWarp || t.threads % kWarp != 0) return "threads are not whole warps";
    return t.threads > group_threads(t.keeps) ? "more threads than the kernel is compiled for"
                                              : nullptr;
  });
}

TEST(CudaGroupTile, HasAClusterThatRuns) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    constexpr int64_t kMostExpected = (1 << 20) - 1;  // bytes that a barrier can wait for
    if (c.tile.chunks < 1) return "units without chunks";
    if (!c.tile.keeps) return nullptr;
    if (c.tile.chunks > c.device().cluster_limit) return "a cluster that the device lacks";
    if (c.device().clusters_of(c.tile.chunks) < 1) return "a cluster that never runs";
    return mail_bytes(c.problem, c.tile) > kMostExpected ? "more mail than a barrier can count"
                                                         : nullptr;
  });
}

// Channels last: threads whose first pixel this is, or a later one, have a vector less (GroupShape).
int64_t short_from(const Choice& c) {
  const GroupTile& t = c.tile;
  return c.problem.spatial - int64_t{t.vectors - 1} * t.rows * t.pieces;
}

// Kernels have these numbers as int.
bool fits_int(int64_t number) { return number <= std::numeric_limits<int32_t>::max(); }

TEST(CudaGroupTile, CutsUnitsIntoWholeGroupsPiecesAndLines) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    const GroupProblem& p = c.problem;
    const GroupTile& t = c.tile;
    if (t.span < 1 || t.span % p.per_group != 0) return "a unit has a part of a group";
    if (!fits_int(t.piece)) return "a piece of too many pixels";
    if (t.piece * t.pieces < p.spatial) return "pixels without a piece";
    if (p.channels_last) {
      if (int64_t{t.rows} * (t.pieces - 1) >= p.spatial) return "a piece without pixels";
      if (short_from(c) < 1 || short_from(c) > int64_t{t.rows} * t.pieces)
        return "vectors differ by more than one";
      if (t.tile < 1 || t.tile % t.vector != 0) return "a chunk has a part of a vector";
      if (t.rows < 1 || t.rows * c.columns() > t.threads) return "rows without threads";
      if (t.rows > p.spatial) return "rows without pixels";
      if (t.piece != int64_t{t.rows} * t.vectors) return "pieces and rows differ";
      if (t.chunks != t.pieces * c.tiles()) return "chunks and pieces differ";
      const int64_t bundles = c.columns() <= kWarp ? t.threads / kWarp : t.rows;
      return t.bundles != bundles ? "a bundle is no warp and no row" : nullptr;
    }
    if (t.piece * (t.pieces - 1) >= p.spatial) return "a piece without pixels";
    // Its slots are all the group's.
    if (t.span != p.per_group) return "a unit of several groups, channels first";
    if (t.lanes > kWarp || !std::has_single_bit(static_cast<unsigned>(t.lanes)))
      return "a line of odd size";
    if (t.piece != int64_t{t.lanes} * t.vectors * t.vector) return "pieces and lanes differ";
    if (!fits_int(t.chunks * c.slots())) return "too many lines";
    if (t.chunks * c.slots() < t.span * t.pieces) return "lines without a chunk";
    return (t.chunks - 1) * c.slots() >= t.span * t.pieces ? "a chunk without lines" : nullptr;
  });
}

// Bytes of shared memory that a block touches, counted without padding.
int64_t bytes_touched(const Choice& c) {
  const GroupProblem& p = c.problem;
  const GroupTile& t = c.tile;
  const int tensors = p.backward && !t.rereads ? 2 : 1;
  const int64_t kept = t.keeps ? int64_t{16} * tensors * t.vectors * t.threads : 0;
  const int64_t parts = t.keeps && t.chunks > 1 ? t.chunks * (t.span / p.per_group) : 0;
  const int64_t barrier = parts > 0 ? 8 : 0;
  const int64_t slots = c.slots();
  const int64_t sums = p.channels_last ? 2 * slots * t.bundles : 2 * slots;
  return kept + barrier +
         p.size * (parts * part_values(p.backward) + slots * group_numbers(p.backward) + sums);
}

TEST(CudaGroupTile, FitsIntoSharedMemory) {
  expect_of_all_tiles([](const Choice& c) -> const char* {
    constexpr int64_t kOfBlock = 1024;  // what the driver takes of each
    const int64_t shared = group_shared(c.problem, c.tile);
    if (shared < bytes_touched(c)) return "less shared memory than is used";
    // The mail and the table come next to what is kept, and are read 16 bytes at a time.
    if (kept_bytes(c.problem, c.tile) % 16 != 0 || mail_bytes(c.problem, c.tile) % 16 != 0)
      return "a table that is not aligned";
    if (shared > c.device().shared_bytes) return "more shared memory than there is";
    return group_blocks(c.problem.backward, c.tile.keeps) * (shared + kOfBlock) >
                   c.device().shared_bytes + kOfBlock
               ? "fewer blocks on a SM than have registers"
               : nullptr;
  });
}

// The functions stay plain: a tile can be had at compile time.
constexpr GroupProblem kPlain{.channels = 320,
                              .spatial = 4096,
                              .per_group = 10,
                              .channels_last = true,
                              .backward = false,
                              .aligned = true,
                              .x_size = 2,
                              .size = 4};
static_assert(group_tile(kPlain, kH200.device).keeps);

// --- Places, of problems that are small enough to count

// With little shared memory small units take clusters of all sizes, and more than those hold. (The
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

// A thread's place in a chunk (Chunk of group_chunk.cuh).
struct Place {
  int64_t channel, piece, pixel, step, count, slot;  // pixel: in the plane
};

int64_t pixels_of(const Choice& c, int64_t piece) {
  const GroupTile& t = c.tile;
  if (!c.problem.channels_last) return std::min(t.piece, c.problem.spatial - piece * t.piece);
  return t.piece - std::clamp<int64_t>((piece + 1) * t.rows - short_from(c), 0, t.rows);
}

Place place_of(const Choice& c, int64_t channels, int64_t chunk, int64_t thread) {
  const GroupTile& t = c.tile;
  Place place{};
  bool inside;
  if (c.problem.channels_last) {
    const int64_t row = thread / c.columns();
    place.piece = chunk / c.tiles();
    place.slot = thread % c.columns() * t.vector;
    place.channel = chunk % c.tiles() * t.tile + place.slot;
    place.pixel = place.piece * t.rows + row;
    place.step = int64_t{t.rows} * t.pieces;
    place.count = t.vectors - (place.pixel >= short_from(c) ? 1 : 0);
    inside = place.channel < channels && row < t.rows;
  } else {
    place.slot = thread / t.lanes;
    const int64_t line = chunk * c.slots() + place.slot;
    place.channel = line / t.pieces;
    place.piece = line % t.pieces;
    place.pixel = thread % t.lanes * t.vector;
    place.step = int64_t{t.vector} * t.lanes;
    const int64_t pixels = pixels_of(c, place.piece), first = place.pixel;
    place.pixel += place.piece * t.piece;
    place.count =
        pixels == t.piece ? t.vectors : std::max<int64_t>(0, ceil_div(pixels - first, place.step));
    inside = place.channel < channels;
  }
  if (!inside) place.count = 0;
  return place;
}

// What a slot stands for.
struct Line {
  int64_t channel, piece;
};

Line line_of(const Choice& c, int64_t chunk, int64_t slot) {
  if (c.problem.channels_last) return {chunk % c.tiles() * c.tile.tile + slot, chunk / c.tiles()};
  const int64_t line = chunk * c.slots() + slot;
  return {line / c.tile.pieces, line % c.tile.pieces};
}

struct Slots {
  int64_t first, last;
};

Slots slots_of(const Choice& c, int64_t channels, int64_t chunk, int64_t group) {
  if (c.problem.channels_last) {
    const int64_t first = group * c.problem.per_group - chunk % c.tiles() * c.tile.tile;
    return {std::max<int64_t>(first, 0),
            std::min<int64_t>(first + c.problem.per_group, c.tile.tile)};
  }
  return {0, std::min(c.slots(), channels * c.tile.pieces - chunk * c.slots())};
}

// Calls body(channels) for a sample's first unit, and for its last one if that has fewer.
template <typename Body>
void for_units(const Choice& c, const Body& body) {
  const int64_t channels = c.problem.channels, rest = channels % c.tile.span;
  if (channels >= c.tile.span) body(c.tile.span);
  if (rest > 0) body(rest);
}

// Calls body(choice) for problems that take all ways: both layouts, kept by clusters of all sizes
// or read twice.
template <typename Body>
void for_small_choices(const Body& body) {
  constexpr unsigned kReadTwice = 0;
  std::set<std::pair<bool, unsigned>> seen;
  for (const NamedDevice& on : kSmallDevices) {
    for_choices(on, kSmallSweep, [&](const Choice& c) {
      if (c.tile.span * c.problem.spatial > kMostCounted) return;
      const auto cluster = std::bit_ceil(static_cast<unsigned>(c.tile.chunks));
      seen.emplace(c.problem.channels_last, c.tile.keeps ? cluster : kReadTwice);
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

// Of a unit's elements, or lines, or chunks.
void expect_once(const std::vector<uint8_t>& counts) {
  EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](uint8_t count) { return count == 1; }));
}

TEST(CudaGroupPlaces, EveryElementHasOne) {
  for_small_choices([](const Choice& c) {
    for_units(c, [&](int64_t channels) {
      const GroupTile& t = c.tile;
      const int64_t spatial = c.problem.spatial;
      std::vector<uint8_t> counts(static_cast<size_t>(channels * spatial));
      std::vector<int64_t> pixels(static_cast<size_t>(t.pieces));
      for (int64_t chunk = 0; chunk < t.chunks; ++chunk) {
        for (int64_t thread = 0; thread < t.threads; ++thread) {
          const Place place = place_of(c, channels, chunk, thread);
          ASSERT_LE(place.count, t.vectors);
          for (int64_t v = 0; v < place.count; ++v) {
            for (int64_t k = 0; k < t.vector; ++k) {
              const int64_t channel = place.channel + (c.problem.channels_last ? k : 0);
              const int64_t pixel =
                  place.pixel + v * place.step + (c.problem.channels_last ? 0 : k);
              ASSERT_LT(channel, channels);
              ASSERT_LT(pixel, spatial);
              ++counts[static_cast<size_t>(channel * spatial + pixel)];
              ++pixels[static_cast<size_t>(place.piece)];
            }
          }
        }
      }
      expect_once(counts);
      for (int64_t piece = 0; piece < t.pieces; ++piece)
        ASSERT_EQ(pixels[static_cast<size_t>(piece)], channels * pixels_of(c, piece));
    });
  });
}

TEST(CudaGroupPlaces, EveryLineIsOneSlotOfItsGroup) {
  for_small_choices([](const Choice& c) {
    for_units(c, [&](int64_t channels) {
      const int64_t pieces = c.tile.pieces, groups = channels / c.problem.per_group;
      std::vector<uint8_t> counts(static_cast<size_t>(channels * pieces));
      for (int64_t chunk = 0; chunk < c.tile.chunks; ++chunk) {
        for (int64_t group = 0; group < groups; ++group) {
          const Slots slots = slots_of(c, channels, chunk, group);
          ASSERT_LE(slots.last, c.slots());
          for (int64_t slot = slots.first; slot < slots.last; ++slot) {
            const Line line = line_of(c, chunk, slot);
            ASSERT_EQ(line.channel / c.problem.per_group, group);
            ASSERT_LT(line.piece, pieces);
            ++counts[static_cast<size_t>(line.channel * pieces + line.piece)];
          }
        }
      }
      expect_once(counts);
    });
  });
}

TEST(CudaGroupPlaces, ThreadsAddToTheSlotsOfTheirChannels) {
  for_small_choices([](const Choice& c) {
    for (int64_t chunk = 0; chunk < c.tile.chunks; ++chunk) {
      for (int64_t thread = 0; thread < c.tile.threads; ++thread) {
        const Place place = place_of(c, c.tile.span, chunk, thread);
        if (place.count == 0) continue;
        const Line line = line_of(c, chunk, place.slot);
        ASSERT_EQ(line.channel, place.channel);
        ASSERT_EQ(line.piece, place.piece);
      }
    }
  });
}

// --- The order in which chunks are read twice

// What a block does (Item of group.cuh).
struct Item {
  int64_t unit, chunk;
  bool again;
};

Item item_of(int64_t units, int64_t chunks, int64_t lag, int64_t block) {
  const int64_t all = units * chunks, turn = block - lag, alternating = 2 * (all - lag);
  const bool again = turn >= alternating || (turn >= 0 && turn % 2 == 0);
  const int64_t index = turn < 0              ? block
                        : turn >= alternating ? block - all
                        : again               ? turn / 2
                                              : lag + turn / 2;
  const int64_t chunk = index % chunks;
  return {index / chunks, again ? chunks - 1 - chunk : chunk, again};
}

// Whoever reads a chunk again waits for the sums of its whole unit.
void expect_order(int64_t units, int64_t chunks, int64_t lag, bool again) {
  std::vector<int64_t> sums(static_cast<size_t>(units));
  std::vector<uint8_t> first(static_cast<size_t>(units * chunks)), second(first.size());
  for (int64_t block = 0; block < units * chunks * (again ? 2 : 1); ++block) {
    const Item item = item_of(units, chunks, lag, block);
    ASSERT_TRUE(item.unit >= 0 && item.unit < units && item.chunk >= 0 && item.chunk < chunks);
    int64_t& of_unit = sums[static_cast<size_t>(item.unit)];
    ++(item.again ? second : first)[static_cast<size_t>(item.unit * chunks + item.chunk)];
    if (!item.again) ++of_unit;
    ASSERT_TRUE(!item.again || of_unit == chunks) << "block " << block << " waits for later ones";
  }
  expect_once(first);
  if (again) expect_once(second);
}

TEST(CudaGroupOrder, BlocksWaitForEarlierOnesOnly) {
  for (const NamedDevice& on : kDevices) {
    for (const int64_t units : {1, 2, 3, 31, 256, 1000}) {
      for (const int64_t chunks : {1, 2, 3, 40, 527, 529, 2000}) {
        SCOPED_TRACE(testing::Message() << on.name << ": " << units << " x " << chunks);
        for (const bool last : {false, true}) {
          const int64_t lag = group_lag(units, chunks, last, on.device);
          ASSERT_EQ(lag % chunks, 0) << "a unit is read again before its sums are done";
          ASSERT_GE(lag, chunks);
          ASSERT_LE(lag, units * chunks);
          if (units * chunks <= 300000) expect_order(units, chunks, lag, true);
        }
        if (units * chunks > 300000) continue;
        expect_order(units, chunks, units * chunks, false);  // backward without dx
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
