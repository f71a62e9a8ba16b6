// Which part of a group norm a block and its threads work on, as tuning.h splits it: sets of groups, chunks,
// slots. Plain arithmetic for host and device, so that tests count what kernels read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/arguments.h"

namespace evenkeel::cuda {

#if !defined(__CUDACC__)
using std::max;
using std::min;
#endif

// A set of groups: its channels, and where they lie.
struct GroupSet {
  int index, sample, channel, channels;

  EVENKEEL_DEVICE GroupSet(const GroupShape& s, int set) : index(set) {
    sample = s.spans.quotient(set);
    channel = (set - sample * static_cast<int>(s.spans.value)) * s.span;
    channels = min(s.span, s.channels - channel);
  }
  // The number of its first group among those of all samples.
  EVENKEEL_DEVICE int64_t group(const GroupShape& s) const {
    return int64_t{sample} * s.groups + s.per_group.quotient(channel);
  }
};

// A thread's vectors of W elements in a chunk: from a first one on, in even steps, or backwards from the last
// one. Its channels are W neighbouring ones (kChannelsLast), or one.
template <bool kChannelsLast, int W>
struct Chunk {
  static constexpr int kChannels = kChannelsLast ? W : 1;

  int slice;
  int channel;  // of the first vector, in the set
  int pixel;    // of the first vector: in the plane (kChannelsLast), or in the slice
  int count;    // of vectors
  int slot;     // of the first channel
  bool backwards;

  // thread, threads: of the block.
  EVENKEEL_DEVICE Chunk(const GroupShape& s, const GroupSet& set, int chunk, int thread,
                        int threads, bool is_backwards)
      : backwards(is_backwards) {
    bool inside;
    if constexpr (kChannelsLast) {
      const int row = s.columns.quotient(thread);
      slice = s.tiles.quotient(chunk);
      const int tile = chunk - slice * static_cast<int>(s.tiles.value);
      slot = (thread - row * static_cast<int>(s.columns.value)) * W;
      channel = tile * s.tile + slot;
      inside = channel < set.channels && row < s.rows;
      pixel = slice * s.rows + row;
      count = s.vectors - (pixel >= s.short_from);
    } else {
      slot = thread >> s.log_lanes;
      const int line = chunk * slots(s, threads) + slot;
      channel = s.slices.quotient(line);
      slice = line - channel * static_cast<int>(s.slices.value);
      inside = channel < set.channels;
      pixel = (thread - (slot << s.log_lanes)) * W;
      const int pixels = pixels_of(s, slice), step = W << s.log_lanes;
      count = pixels == s.slice ? s.vectors : max(0, (pixels - pixel + step - 1) / step);
    }
    if (!inside) count = 0;
  }

  static EVENKEEL_DEVICE int slots(const GroupShape& s, int threads) {
    return kChannelsLast ? s.tile : threads >> s.log_lanes;
  }
  static EVENKEEL_DEVICE int pixels_of(const GroupShape& s, int slice) {
    if constexpr (kChannelsLast)
      return s.slice - min(max((slice + 1) * s.rows - s.short_from, 0), s.rows);
    return slice + 1 == static_cast<int>(s.slices.value) ? s.last_slice : s.slice;
  }
  // What a slot stands for. There may be slots beyond the last channel.
  struct Line {
    int channel, slice;
  };
  EVENKEEL_DEVICE Line line_of(const GroupShape& s, int chunk, int at, int threads) const {
    if constexpr (kChannelsLast) return {channel - slot + at, slice};
    const int line = chunk * slots(s, threads) + at, found = s.slices.quotient(line);
    return {found, line - found * static_cast<int>(s.slices.value)};
  }
  // The slots of a group of the set; none if last <= first.
  struct Slots {
    int first, last;
  };
  EVENKEEL_DEVICE Slots slots_of(const GroupShape& s, const GroupSet& set, int chunk, int group,
                                 int threads) const {
    const auto per_group = static_cast<int>(s.per_group.value);
    if constexpr (kChannelsLast) {
      const int tile = channel - slot, first = group * per_group - tile;
      return {max(first, 0), min(first + per_group, s.tile)};
    }
    const int lines = set.channels * static_cast<int>(s.slices.value);
    return {0, min(slots(s, threads), lines - chunk * slots(s, threads))};
  }

  // Where its vectors lie in a tensor, in elements.
  struct Strided {
    int64_t first, step;
  };
  EVENKEEL_DEVICE Strided in(const GroupShape& s, const DeviceTensor& tensor,
                             const GroupSet& set) const {
    const int64_t at = set.channel + channel, sample = set.sample * tensor.outer_stride;
    const int64_t first =
        sample + (kChannelsLast ? pixel * tensor.row_stride + at
                                : at * tensor.row_stride + int64_t{slice} * s.slice + pixel);
    const int64_t step = kChannelsLast ? int64_t{s.slices.value} * s.rows * tensor.row_stride
                                       : int64_t{W} << s.log_lanes;
    if (backwards) return {first + (count - 1) * step, -step};
    return {first, step};
  }
};

// What a block does with sets that are read twice: chunks in order, first for their sums; each is read for
// the second time `lag` chunks later. Blocks start in order, too, so that a block only waits for blocks that
// have started before it.
struct WorkItem {
  int set, chunk;
  bool second_pass;

  EVENKEEL_DEVICE WorkItem(const GroupShape& s, int block) {
    const int turn = block - s.lag;
    const int all = s.sets * static_cast<int>(s.chunks.value), alternating = 2 * (all - s.lag);
    second_pass = turn >= alternating || (turn >= 0 && turn % 2 == 0);
    const int index = turn < 0              ? block
                      : turn >= alternating ? block - all
                      : second_pass         ? turn / 2
                                            : s.lag + turn / 2;
    set = s.chunks.quotient(index);
    chunk = index - set * static_cast<int>(s.chunks.value);
    if (second_pass) chunk = static_cast<int>(s.chunks.value) - 1 - chunk;
  }
};

}  // namespace evenkeel::cuda
