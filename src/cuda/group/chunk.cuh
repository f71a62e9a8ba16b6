// A thread's place in a chunk of a group norm (group/tuning.h says what that is), and what it holds of
// it: in registers, in shared memory, or not at all.
#pragma once

#include "cuda/primitives/element.cuh"
#include "cuda/primitives/async_copy.cuh"

namespace evenkeel::cuda {

// A unit's channels, and where they lie.
struct Unit {
  int index, sample, channel, channels;

  __device__ Unit(const GroupShape& s, int unit) : index(unit) {
    sample = s.spans.quotient(unit);
    channel = (unit - sample * static_cast<int>(s.spans.value)) * s.span;
    channels = min(s.span, s.channels - channel);
  }
  // The number of its first group among those of all samples.
  __device__ int64_t group(const GroupShape& s) const {
    return int64_t{sample} * s.groups + s.per_group.quotient(channel);
  }
};

// A thread's place in a chunk: vectors of W elements from a first one on, in even steps, or backwards
// from the last one. Its channels are W neighbouring ones (kLast), or one.
template <bool kLast, int W>
struct Chunk {
  static constexpr int kChannels = kLast ? W : 1;

  int piece;
  int channel;  // of the first vector, in the unit
  int pixel;    // of the first vector: in the plane (kLast), or in the piece
  int count;    // of vectors
  int slot;     // of the first channel
  bool backwards;

  __device__ Chunk(const GroupShape& s, const Unit& unit, int chunk, bool is_backwards)
      : backwards(is_backwards) {
    bool inside;
    const auto thread = static_cast<int>(threadIdx.x);
    if constexpr (kLast) {
      const int row = s.columns.quotient(thread);
      piece = s.tiles.quotient(chunk);
      const int tile = chunk - piece * static_cast<int>(s.tiles.value);
      slot = (thread - row * static_cast<int>(s.columns.value)) * W;
      channel = tile * s.tile + slot;
      inside = channel < unit.channels && row < s.rows;
      pixel = piece * s.rows + row;
      count = s.vectors - (pixel >= s.short_from);
    } else {
      slot = thread >> s.log_lanes;
      const int line = chunk * slots(s) + slot;
      channel = s.pieces.quotient(line);
      piece = line - channel * static_cast<int>(s.pieces.value);
      inside = channel < unit.channels;
      pixel = (thread - (slot << s.log_lanes)) * W;
      const int pixels = pixels_of(s, piece), step = W << s.log_lanes;
      count = pixels == s.piece ? s.vectors : max(0, (pixels - pixel + step - 1) / step);
    }
    if (!inside) count = 0;
  }

  static __device__ int slots(const GroupShape& s) {
    return kLast ? s.tile : static_cast<int>(blockDim.x) >> s.log_lanes;
  }
  static __device__ int pixels_of(const GroupShape& s, int piece) {
    if constexpr (kLast) return s.piece - min(max((piece + 1) * s.rows - s.short_from, 0), s.rows);
    return piece + 1 == static_cast<int>(s.pieces.value) ? s.last_piece : s.piece;
  }
  // What a slot stands for. There may be slots beyond the last channel.
  struct Line {
    int channel, piece;
  };
  __device__ Line line_of(const GroupShape& s, int chunk, int at) const {
    if constexpr (kLast) return {channel - slot + at, piece};
    const int line = chunk * slots(s) + at, found = s.pieces.quotient(line);
    return {found, line - found * static_cast<int>(s.pieces.value)};
  }
  // The slots of a group of the unit; none if last <= first.
  struct Slots {
    int first, last;
  };
  __device__ Slots slots_of(const GroupShape& s, const Unit& unit, int chunk, int group) const {
    const auto per_group = static_cast<int>(s.per_group.value);
    if constexpr (kLast) {
      const int tile = channel - slot, first = group * per_group - tile;
      return {max(first, 0), min(first + per_group, s.tile)};
    }
    const int lines = unit.channels * static_cast<int>(s.pieces.value);
    return {0, min(slots(s), lines - chunk * slots(s))};
  }

  // Where its vectors lie in a tensor: elements.
  struct Walk {
    int64_t first, step;
  };
  __device__ Walk walk(const GroupShape& s, const DeviceTensor& tensor, const Unit& unit) const {
    const int64_t at = unit.channel + channel, sample = unit.sample * tensor.outer_stride;
    const int64_t first =
        sample + (kLast ? pixel * tensor.row_stride + at
                        : at * tensor.row_stride + int64_t{piece} * s.piece + pixel);
    const int64_t step =
        kLast ? int64_t{s.pieces.value} * s.rows * tensor.row_stride : int64_t{W} << s.log_lanes;
    if (backwards) return {first + (count - 1) * step, -step};
    return {first, step};
  }
};

// A thread's vectors of a tensor: in its own part of the shared memory; or K at a time in registers.
template <typename Access, int K, bool kKeeps>
struct Held {
  using Raw = typename Access::Raw;
  Raw raw[kKeeps ? 1 : K];
  const uint4* kept;
  int64_t next, step;  // elements

  template <typename Place>
  __device__ Held(const GroupShape& s, const DeviceTensor& tensor, const Unit& unit,
                  const Place& place, char* shared) {
    const auto walk = place.walk(s, tensor, unit);
    next = walk.first;
    step = walk.step;
    kept = reinterpret_cast<const uint4*>(shared) + threadIdx.x;
  }
  // The vectors from `first` to `last`, in order; or (in registers) as many as there is room for.
  __device__ void load(const DeviceTensor& tensor, int first, int last) {
    if constexpr (kKeeps) {
      constexpr int64_t kSize = sizeof(Raw) / Access::kWidth;
      const char* from = tensor.data + (next + first * step) * kSize;
      uint32_t to = shared_address(kept + first * blockDim.x);
#pragma unroll 4
      for (int v = first; v < last; ++v, from += step * kSize, to += blockDim.x * 16)
        copy_async(to, from);
    } else {
#pragma unroll
      for (int v = 0; v < K; ++v, next += step) raw[v] = Access::load_if(v < last, tensor, next);
    }
  }
  __device__ Raw get(int v) const {
    if constexpr (kKeeps) {
      Raw result;
      *reinterpret_cast<uint4*>(&result) = kept[v * blockDim.x];
      return result;
    } else {
      return raw[v];
    }
  }
  // The next vector that is not in registers, in place of one that has been used.
  __device__ void refill(const DeviceTensor& tensor, int v) {
    raw[v] = Access::load(tensor, next);
    next += step;
  }
  // Between two uses.
  __device__ void discard_unpacked() {
    if constexpr (!kKeeps) Access::discard_unpacked(raw);
  }
  // Calls body(v) for the vectors from `first` to `last`, in order; in registers for all up to `last`,
  // and refill(v) where another one takes a place.
  template <bool kRefills, typename Body, typename Refill>
  static __device__ void each(int first, int last, const Body& body, const Refill& refill) {
    if constexpr (kKeeps) {
#pragma unroll 2
      for (int v = first; v < last; ++v) body(v);
    } else {
      for (int left = last; left > 0; left -= K) {
#pragma unroll
        for (int v = 0; v < K; ++v) {
          if (v >= left) break;
          body(v);
          if (kRefills && v + K < left) refill(v);
        }
        if (!kRefills) break;
      }
    }
  }
};

// The same for a tensor that is read again for every use.
template <typename Access>
struct Reread {
  const char* data;
  int64_t step;

  template <typename Place>
  __device__ Reread(const GroupShape& s, const DeviceTensor& tensor, const Unit& unit,
                    const Place& place, char*) {
    constexpr int64_t kSize = sizeof(typename Access::Raw) / Access::kWidth;
    const auto walk = place.walk(s, tensor, unit);
    data = tensor.data + walk.first * kSize;
    step = walk.step * kSize;
  }
  __device__ void load(const DeviceTensor&, int, int) {}
  __device__ typename Access::Raw get(int v) const { return Access::load(data + v * step); }
  __device__ void refill(const DeviceTensor&, int) {}
  __device__ void discard_unpacked() {}
};

}  // namespace evenkeel::cuda
