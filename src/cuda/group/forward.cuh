// Group norm, forward.
//
// Values are taken relative to a center near them, one for each slot, so that sums of the first and second
// power are exact enough; parts of groups are merged by Chan's formula.
#pragma once

#include "cuda/group/pipeline.cuh"
#include "cuda/group/policies.h"

namespace evenkeel::cuda {

// Of some of a group's values: their number, their mean, what its rounding took from it, and the
// squares of the distances from it.
template <typename C>
struct alignas(16) Moments {
  static constexpr int kValues = 4;
  C value[kValues];

  // For each(body), which calls body(number of values, a center near them, the sums of distances from it and
  // of their squares) for those that a lane has.
  template <typename SubWarp, typename Each>
  __device__ Moments(const SubWarp& sub_warp, const Each& each) {
    C sums[2] = {};
    each([&](C count, C center, C rest, C) {
      sums[0] += count;
      sums[1] += count * center + rest;
    });
    sub_warp.sum(sums);
    const C n = sums[0], share = ratio(1, n > 0 ? n : 1), mean = sums[1] * share;
    C rests[2] = {};
    each([&](C count, C center, C rest, C squares) {
      const C distance = center - mean;
      rests[0] += rest + count * distance;
      rests[1] += squares + distance * (2 * rest + count * distance);
    });
    sub_warp.sum(rests);
    const C rest = rests[0] * share;
    value[0] = n;
    value[1] = mean + rest;
    value[2] = rest - (value[1] - mean);
    value[3] = rests[1] - rests[0] * rest;
  }
  template <typename Body>
  __device__ void contribute(const Body& body) const {
    const C rest = value[0] * value[2];
    body(value[0], value[1], rest, value[3] + rest * value[2]);
  }
};

// A center near some values: their mean without the least and the greatest, because one outlier would move it
// far away.
template <typename C>
struct CenterEstimate {
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

template <typename X, typename C, GroupPolicy kOwnPolicy>
struct GroupForward {
  static constexpr GroupPolicy kPolicy = kOwnPolicy;
  static constexpr int W = kPolicy.vector, kChannels = kPolicy.channels(), kSums = kPolicy.sums();
  static constexpr bool kChannelsLast = kPolicy.channels_last, kOneGroup = kPolicy.one_group;
  using Compute = C;
  using Part = Moments<C>;
  using Position = Chunk<kChannelsLast, W>;
  using In = Access<X, W, C>;

  const GroupForwardArguments& a;
  const GroupSet& set;
  const Position& position;
  // weight, then weight * rstd; bias; the slot's center, then its group's mean. (Where threads complete their own
  // channels, centers, then results of groups; the others stay as they are.)
  enum Number { kWeight, kBias, kMean };
  const Table<kPolicy, C> table;
  ThreadVectors<In, kPolicy> x_vectors;
  C center[kSums];

  __device__ GroupForward(const GroupForwardArguments& arguments, const GroupSet& own_set,
                          const Position& own_position, char* resident, C* numbers)
      : a(arguments),
        set(own_set),
        position(own_position),
        table{numbers, Position::slots(a.shape, blockDim.x)},
        x_vectors(a.shape, a.x, set, position, resident) {}

  __device__ void load(int first, int last) { x_vectors.load(a.x, first, last); }

  // Channels last, the values for the center are loaded on their own while the chunk is in flight.
  using One = Access<X, 1, C>;
  static constexpr int kPixels = 8;
  struct Loads {
    LoadedScalar<X, C> loaded;
    typename One::Raw pixel[kChannelsLast ? kPixels : 1];
  };
  __device__ void issue(int number, int channel, Loads& numbers) const {
    if (number != kMean)
      return numbers.loaded.parameter(number == kWeight ? a.formula.weight : a.formula.bias,
                                      set.channel + channel);
    if constexpr (kChannelsLast) {
      if (kOneGroup) channel -= channel % W;
      const int64_t first = set.sample * a.x.outer_stride + set.channel + channel;
      const GroupShape& s = a.shape;
      const int64_t step = s.rows >= kPixels ? 1 : int64_t{s.rows} * s.slices.value;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const int64_t pixel = position.slice * s.rows + i * step;
        const int64_t at = pixel < s.spatial ? pixel : position.slice * s.rows;
        numbers.pixel[i] = One::load(a.x, first + (kOneGroup ? i % W : 0) + at * a.x.row_stride);
      }
    }
  }
  __device__ C value(int number, const Loads& numbers) const {
    if (number == kBias) return numbers.loaded.parameter(a.formula.bias, C{0});
    if (number == kWeight) return weight_of(a.formula, numbers.loaded);
    CenterEstimate<C> estimate;
    if constexpr (kChannelsLast) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        C x[1];
        One::unpack(numbers.pixel[i], x);
        estimate.add(x[0]);
      }
    }
    return estimate.center();
  }
  // Calls body(x) for vectors.
  template <typename Body>
  __device__ void each(int first, int last, const Body& body) {
    x_vectors.each(
        first, last,
        [&](int v) {
          C x[W];
          In::unpack(x_vectors.get(v), x);
          body(x);
        },
        [&](int v) { x_vectors.refill(a.x, v); });
  }

  __device__ void begin_sums() {
    if constexpr (kOneGroup) {
      center[0] = table.at(kMean, position.slot);
    } else if constexpr (kChannelsLast) {
      table.get(kMean, position.slot, center);
    } else {
      // Values of the line's first thread.
      constexpr int kFew = W < 8 ? 8 / W : 1;
      const int few = min(kFew, position.count);
      CenterEstimate<C> estimate;
      each(0, few, [&](const C(&x)[W]) {
#pragma unroll
        for (int k = 0; k < W; ++k) estimate.add(x[k]);
      });
      center[0] = __shfl_sync(0xffffffff, estimate.center(), 0, 1 << a.shape.log_lanes);
      if (position.pixel == 0) table.at(kMean, position.slot) = center[0];
    }
  }
  __device__ void sum(int first, int last, C (&sums)[2][kSums]) {
    // Several accumulators, so that additions do not wait for each other.
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
    x_vectors.discard_unpacked();
  }

  template <typename Body>
  __device__ void contribute(int slot, C count, C rest, C squares, const Body& body) const {
    body(count, table.at(kMean, slot), rest, squares);
  }
  __device__ bool wants_partials() const { return false; }
  __device__ void store_partials(int, int, C, C) const {}

  __device__ void finish(const Part& part, C (&results)[kGroupResults]) const {
    const C variance = part.value[3] * static_cast<C>(a.formula.inv_n);
    results[0] = part.value[1];
    results[1] = part.value[2];
    results[2] = reciprocal_root((variance < 0 ? 0 : variance) + static_cast<C>(a.formula.eps));
  }
  __device__ void publish(int group, const C (&results)[kGroupResults]) const {
    const int64_t at = set.group(a.shape) + group;
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

  __device__ void store_results(int first, const C (&results)[kGroupResults]) const {
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
    if constexpr (!kPolicy.completes_in_threads()) table.get(kMean, position.slot, mean);
    table.get(kWeight, position.slot, scale);
    table.get(kBias, position.slot, shift);
    if constexpr (kPolicy.completes_in_threads()) {
      const auto& per_group = a.shape.per_group;
      const int in_group = position.channel -
                           per_group.quotient(position.channel) * static_cast<int>(per_group.value);
      C results[kGroupResults];
#pragma unroll
      for (int i = 0; i < kGroupResults; ++i)
        results[i] = table.at(kMean, position.slot - in_group + i);
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        mean[k] = results[0];
        scale[k] *= results[2];
        shift[k] -= results[1] * scale[k];
      }
    }
    auto to = position.in(a.shape, a.y, set);
    const auto store = [&](const auto& activate) {
      each(0, position.count, [&](const C(&x)[W]) {
        C y[W];
#pragma unroll
        for (int k = 0; k < W; ++k)
          y[k] =
              activate((x[k] - mean[k % kChannels]) * scale[k % kChannels] + shift[k % kChannels]);
        In::store(a.y, to.first, y);
        to.first += to.step;
      });
    };
    // A loop for each of them.
    if (a.formula.activation == EK_ACTIVATION_NONE) return store([](C z) { return z; });
    with_activation<kPolicy.activations>(
        a.formula, [&](auto activation) { store([&](C z) { return activation.value(z); }); });
  }
};

template <typename X, typename C, int kIndex>
__global__ void __launch_bounds__(kGroupPolicy<X, kIndex>.block_threads(),
                                  kGroupPolicy<X, kIndex>.resident_blocks())
    group_forward(const __grid_constant__ GroupForwardArguments a) {
  run_group<GroupForward<X, C, kGroupPolicy<X, kIndex>>>(a);
}

}  // namespace evenkeel::cuda
