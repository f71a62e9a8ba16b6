// Group norm, forward.
//
// Values are taken relative to a center near them, one for each slot, so that sums of the first and
// second power are enough; parts of groups are merged by means.
#pragma once

#include "cuda/group/pipeline.cuh"

namespace evenkeel::cuda {

// Of some of a group's values: their number, their mean, what its rounding took from it, and the
// squares of the distances from it.
template <typename C>
struct alignas(16) Moments {
  static constexpr int kValues = 4;
  C value[kValues];

  // For each(body), which calls body(number of values, a center near them, the sums of distances from
  // it and of their squares) for those that a lane knows.
  template <typename AnyCrew, typename Each>
  __device__ Moments(const AnyCrew& crew, const Each& each) {
    C sums[2] = {};
    each([&](C count, C center, C rest, C) {
      sums[0] += count;
      sums[1] += count * center + rest;
    });
    crew.sum(sums);
    const C n = sums[0], share = ratio(1, n > 0 ? n : 1), mean = sums[1] * share;
    C rests[2] = {};
    each([&](C count, C center, C rest, C squares) {
      const C distance = center - mean;
      rests[0] += rest + count * distance;
      rests[1] += squares + distance * (2 * rest + count * distance);
    });
    crew.sum(rests);
    const C rest = rests[0] * share;
    value[0] = n;
    value[1] = mean + rest;
    value[2] = rest - (value[1] - mean);
    value[3] = rests[1] - rests[0] * rest;
  }
  template <typename Body>
  __device__ void tell(const Body& body) const {
    const C rest = value[0] * value[2];
    body(value[0], value[1], rest, value[3] + rest * value[2]);
  }
};

// Some values, and a center near them: their mean without the least and the greatest, because one that
// lies far out would take the center with it.
template <typename C>
struct Sample {
  C sum = 0, least = 0, most = 0;
  int count = 0;

  __device__ void add(C x) {
    least = count == 0 ? x : min(least, x);
    most = count == 0 ? x : max(most, x);
    sum += x;
    ++count;
  }
  __device__ C center() const {
    if (count < 3) return ratio(sum, static_cast<C>(max(count, 1)));
    return ratio(sum - least - most, static_cast<C>(count - 2));
  }
};

// kWhole: a thread's channels are all of one group.
template <typename X, typename Y, typename C, int W, bool kLast, bool kKeeps, bool kWhole>
struct GroupForward {
  static constexpr int kVectors = group_vectors(false, W, sizeof(X));
  using Compute = C;
  using Part = Moments<C>;
  using Place = Chunk<kLast, W>;
  using In = Access<X, W, C>;
  static constexpr int kChannels = Place::kChannels, kSums = kWhole ? 1 : kChannels;

  const GroupForwardArguments& a;
  const Unit& unit;
  const Place& place;
  // weight, then weight * rstd; bias; the slot's center, then its group's mean. (Or, kDirect, centers,
  // then results of groups; the others stay as they are.)
  enum Number { kWeight, kBias, kMean };
  static constexpr int kForSums = kLast ? 3 : 2, kForOutputs = 2, kKeptParts = 3;
  static constexpr bool kSumsNeedNumbers = kLast, kAsksFirst = false;
  const Table<group_numbers(false), kChannels, C> table;
  Held<In, kVectors, kKeeps> held;
  C center[kSums];

  __device__ GroupForward(const GroupForwardArguments& arguments, const Unit& own_unit,
                          const Place& own_place, char* kept, C* numbers)
      : a(arguments),
        unit(own_unit),
        place(own_place),
        table{numbers, Place::slots(a.shape)},
        held(a.shape, a.x, unit, place, kept) {}

  __device__ void load(int first, int last) { held.load(a.x, first, last); }

  // Channels last, the values of samples are read on their own while the chunk is on its way.
  using One = Access<X, 1, C>;
  static constexpr int kPixels = 8;
  struct Numbers {
    LoadedScalar<X, C> asked;
    typename One::Raw pixel[kLast ? kPixels : 1];
  };
  __device__ void ask(int number, int channel, Numbers& numbers) const {
    if (number != kMean)
      return numbers.asked.parameter(number == kWeight ? a.formula.weight : a.formula.bias,
                                     unit.channel + channel);
    if constexpr (kLast) {
      if (kWhole) channel -= channel % W;
      const int64_t first = unit.sample * a.x.outer_stride + unit.channel + channel;
      const GroupShape& s = a.shape;
      const int64_t step = s.rows >= kPixels ? 1 : int64_t{s.rows} * s.pieces.value;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const int64_t pixel = place.piece * s.rows + i * step;
        const int64_t at = pixel < s.spatial ? pixel : place.piece * s.rows;
        numbers.pixel[i] = One::load(a.x, first + (kWhole ? i % W : 0) + at * a.x.row_stride);
      }
    }
  }
  __device__ C answer(int number, const Numbers& numbers) const {
    if (number == kBias) return numbers.asked.parameter(a.formula.bias, C{0});
    if (number == kWeight) return weight_of(a.formula, numbers.asked);
    Sample<C> sample;
    if constexpr (kLast) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        C x[1];
        One::unpack(numbers.pixel[i], x);
        sample.add(x[0]);
      }
    }
    return sample.center();
  }
  // Calls body(x) for vectors.
  template <typename Body>
  __device__ void each(int first, int last, const Body& body) {
    held.template each<kLast>(
        first, last,
        [&](int v) {
          C x[W];
          In::unpack(held.get(v), x);
          body(x);
        },
        [&](int v) { held.refill(a.x, v); });
  }

  __device__ void begin_sums() {
    if constexpr (kWhole) {
      center[0] = table.at(kMean, place.slot);
    } else if constexpr (kLast) {
      table.get(kMean, place.slot, center);
    } else {
      // Values of the line's first thread.
      constexpr int kFew = W < 8 ? 8 / W : 1;
      const int few = min(kFew, place.count);
      Sample<C> sample;
      each(0, few, [&](const C(&x)[W]) {
#pragma unroll
        for (int k = 0; k < W; ++k) sample.add(x[k]);
      });
      center[0] = __shfl_sync(0xffffffff, sample.center(), 0, 1 << a.shape.log_lanes);
      if (place.pixel == 0) table.at(kMean, place.slot) = center[0];
    }
  }
  __device__ void sum(int first, int last, C (&sums)[2][kSums]) {
    // Sums, so that additions need not wait for each other.
    constexpr int kAtOnce = kSums == 1 && W > 1 ? 2 : kSums;
    C rest[kAtOnce] = {}, squares[kAtOnce] = {};
    each(first, last, [&](const C(&x)[W]) {
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const C distance = x[k] - center[k % kSums];
        rest[k % kAtOnce] += distance;
        squares[k % kAtOnce] += distance * distance;
      }
    });
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      sums[0][k % kSums] += rest[k];
      sums[1][k % kSums] += squares[k];
    }
    held.discard_unpacked();
  }

  template <typename Body>
  __device__ void tell(int slot, C count, C rest, C squares, const Body& body) const {
    body(count, table.at(kMean, slot), rest, squares);
  }
  __device__ bool keeps_sums() const { return false; }
  __device__ void keep(int, int, C, C) const {}

  __device__ void finish(const Part& part, C (&results)[kGroupResults]) const {
    const C variance = part.value[3] * static_cast<C>(a.formula.inv_n);
    results[0] = part.value[1];
    results[1] = part.value[2];
    results[2] = reciprocal_root((variance < 0 ? 0 : variance) + static_cast<C>(a.formula.eps));
  }
  __device__ void publish(int group, const C (&results)[kGroupResults]) const {
    const int64_t at = unit.group(a.shape) + group;
    const auto store = [&](char* to, C value) {
      if (to == nullptr) return;
      if constexpr (std::is_same_v<X, RuntimeDtype>) {
        store_runtime(to, a.stats, at, value);
      } else {
        reinterpret_cast<float*>(to)[at] = value;
      }
    };
    store(a.mean, results[0]);
    store(a.rstd, results[2]);
  }

  static constexpr bool kDirect = kWhole;
  __device__ void leave(int first, const C (&results)[kGroupResults]) const {
#pragma unroll
    for (int i = 0; i < kGroupResults; ++i) table.at(kMean, first + i) = results[i];
  }
  __device__ void complete(int slot, const C* results) const {
    const C scale = table.at(kWeight, slot) * results[2];
    table.at(kMean, slot) = results[0];
    table.at(kWeight, slot) = scale;
    table.at(kBias, slot) -= results[1] * scale;
  }

  __device__ void apply() {
    C mean[kChannels], scale[kChannels], shift[kChannels];
    if constexpr (!kDirect) table.get(kMean, place.slot, mean);
    table.get(kWeight, place.slot, scale);
    table.get(kBias, place.slot, shift);
    if constexpr (kDirect) {
      const auto& per_group = a.shape.per_group;
      const int in_group =
          place.channel - per_group.quotient(place.channel) * static_cast<int>(per_group.value);
      C results[kGroupResults];
#pragma unroll
      for (int i = 0; i < kGroupResults; ++i)
        results[i] = table.at(kMean, place.slot - in_group + i);
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        mean[k] = results[0];
        scale[k] *= results[2];
        shift[k] -= results[1] * scale[k];
      }
    }
    auto to = place.walk(a.shape, a.y, unit);
    const auto store = [&](const auto& activate) {
      each(0, place.count, [&](const C(&x)[W]) {
        C y[W];
#pragma unroll
        for (int k = 0; k < W; ++k)
          y[k] =
              activate((x[k] - mean[k % kChannels]) * scale[k % kChannels] + shift[k % kChannels]);
        Access<Y, W, C>::store(a.y, to.first, y);
        to.first += to.step;
      });
    };
    if (a.formula.silu) {
      store([](C z) { return Silu::value(z); });
    } else {
      store([](C z) { return z; });
    }
  }
};

template <typename X, typename Y, typename C, int W, bool kLast, bool kKeeps, bool kWhole>
__global__ void __launch_bounds__(group_threads(kKeeps), group_blocks(false, kKeeps))
    group_forward(const __grid_constant__ GroupForwardArguments a) {
  run_group<kKeeps, kLast, GroupForward<X, Y, C, W, kLast, kKeeps, kWhole>>(a);
}

}  // namespace evenkeel::cuda
