// Group norm, forward.
//
// Values are taken relative to a center near them, one for each slot, so that sums of the first and
// second power are enough; parts of groups are merged by means.
#pragma once

#include "cuda/group.cuh"

namespace evenkeel::cuda {

// Of some of a group's values: their number, their mean, what its rounding took from it, and the
// squares of the distances from it.
template <typename C>
struct alignas(16) Moments {
  static constexpr int kValues = 4;
  C value[kValues] = {};

  Moments() = default;
  template <typename Pass, typename Each>
  __device__ Moments(const Pass& pass, int lanes, const Each& each) {
    C n = 0, sum = 0;
    each([&](int slot, C count, C rest, C) {
      n += count;
      sum += count * pass.table.at(0, slot) + rest;
    });
    n = sum_over(lanes, n);
    const C mean = ratio(sum_over(lanes, sum), n > 0 ? n : 1);
    C rests = 0, squares = 0;
    each([&](int slot, C count, C rest, C square) {
      const C distance = pass.table.at(0, slot) - mean;
      rests += rest + count * distance;
      squares += square + distance * (2 * rest + count * distance);
    });
    rests = sum_over(lanes, rests);
    value[0] = n;
    value[1] = mean;
    value[3] = sum_over(lanes, squares);
    const C rest = ratio(rests, n > 0 ? n : 1);
    value[3] -= rests * rest;
    move(rest);
  }

  __device__ void merge(const Moments& other) {
    const C n = value[0], m = other.value[0];
    if (m == 0) return;
    if (n == 0) {
      *this = other;
      return;
    }
    const C share = ratio(m, n + m);
    const C distance = (other.value[1] - value[1]) + (other.value[2] - value[2]);
    move(value[2] + distance * share);
    value[3] += other.value[3] + distance * distance * (n * share);
    value[0] = n + m;
  }

 private:
  __device__ void move(C distance) {
    const C mean = value[1] + distance;
    value[2] = distance - (mean - value[1]);
    value[1] = mean;
  }
};

template <typename X, typename Y, typename C, int W, bool kLast, bool kKeeps>
struct GroupForward {
  static constexpr int kVectors = group_vectors(false, W, sizeof(X));
  using Compute = C;
  using Part = Moments<C>;
  using Place = Chunk<kLast, W>;
  using In = Access<X, W, C>;
  static constexpr int kChannels = Place::kChannels;

  const GroupForwardArguments& a;
  // The slot's center, then its group's mean; weight, then weight * rstd; bias.
  Table<group_numbers(false), kChannels, C> table;
  Held<In, kVectors, kKeeps> held;

  __device__ void load(const Unit& unit, const Place& place, char* kept) {
    held.load(a.shape, a.x, unit, place, kept);
  }

  // Centers of channels are means of some pixels: one alone would be a bad center if it lies far out.
  // While a kept chunk is on its way they are read on their own.
  template <typename Each>
  __device__ void prepare(const Unit& unit, const Place& place, const Each& each) {
    each([&](int slot, int channel) {
      C weight[1], bias[1];
      weights_at<X>(a.formula, unit.channel + channel, weight);
      parameters_at<X>(a.formula.bias, unit.channel + channel, C{0}, bias);
      table.at(1, slot) = weight[0];
      table.at(2, slot) = bias[0];
      if constexpr (kLast && kKeeps) {
        constexpr int kPixels = 8;
        using One = Access<X, 1, C>;
        const int64_t first = unit.sample * a.x.outer_stride + unit.channel + channel;
        const int64_t begin = int64_t{place.piece} * a.shape.piece;
        const int last = Place::pixels_of(a.shape, place.piece) - 1;
        typename One::Raw pixel[kPixels];
#pragma unroll
        for (int i = 0; i < kPixels; ++i)
          pixel[i] = One::load(a.x, first + (begin + min(i, last)) * a.x.row_stride);
        C sum = 0;
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          C x[1];
          One::unpack(pixel[i], x);
          sum += x[0];
        }
        table.at(0, slot) = sum * (C{1} / kPixels);
      }
    });
    if constexpr (kLast && !kKeeps) {
      if (place.pixel == 0) {
        C center[W] = {};
        held.each(place.count, [&](int v) {
          C x[W];
          In::unpack(held.get(v), x);
#pragma unroll
          for (int k = 0; k < W; ++k) center[k] += x[k];
        });
        const C share = ratio(1, static_cast<C>(max(place.count, 1)));
#pragma unroll
        for (int k = 0; k < W; ++k) table.at(0, place.slot + k) = center[k] * share;
        held.forget();
      }
    }
    if constexpr (kLast) __syncthreads();
  }

  __device__ void sum(const Place& place, C (&sums)[2][kChannels]) {
    C center[kChannels];
    if constexpr (kLast) {
      table.get(0, place.slot, center);
    } else {
      // The mean of some values of the line's first thread.
      constexpr int kFew = W < 8 ? 8 / W : 1;
      const int few = min(kFew, place.count);
      C sum = 0;
      held.each(few, [&](int v) {
        C x[W];
        In::unpack(held.get(v), x);
#pragma unroll
        for (int k = 0; k < W; ++k) sum += x[k];
      });
      sum = ratio(sum, static_cast<C>(max(1, few) * W));
      center[0] = __shfl_sync(0xffffffff, sum, 0, 1 << a.shape.log_lanes);
      if (place.pixel == 0) table.at(0, place.slot) = center[0];
    }
    constexpr int kAtOnce = kLast ? 1 : 2;  // sums, so that additions need not wait for each other
    C rest[kChannels * kAtOnce] = {}, squares[kChannels * kAtOnce] = {};
    held.each(place.count, [&](int v) {
      C x[W];
      In::unpack(held.get(v), x);
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const C distance = x[k] - center[k % kChannels];
        rest[k % (kChannels * kAtOnce)] += distance;
        squares[k % (kChannels * kAtOnce)] += distance * distance;
      }
    });
#pragma unroll
    for (int k = 0; k < kChannels * kAtOnce; ++k) {
      sums[0][k % kChannels] += rest[k];
      sums[1][k % kChannels] += squares[k];
    }
    held.forget();
  }

  __device__ bool keeps_sums() const { return false; }
  __device__ void keep(const Unit&, int, int, C, C) const {}

  __device__ void finish(const Unit& unit, int group, const Part& part, C (&results)[kGroupResults],
                         bool writes) const {
    const C variance = part.value[3] * static_cast<C>(a.formula.share);
    results[0] = part.value[1];
    results[1] = part.value[2];
    results[2] = reciprocal_root((variance < 0 ? 0 : variance) + static_cast<C>(a.formula.eps));
    if (!writes) return;
    const int64_t at = unit.group(a.shape) + group;
    const auto store = [&](char* to, C value) {
      if (to == nullptr) return;
      if constexpr (std::is_same_v<X, Any>) {
        store_any(to, a.stats, at, value);
      } else {
        reinterpret_cast<float*>(to)[at] = value;
      }
    };
    store(a.mean, results[0]);
    store(a.rstd, results[2]);
  }

  __device__ void complete(int slot, const C* results) const {
    const C scale = table.at(1, slot) * results[2];
    table.at(0, slot) = results[0];
    table.at(1, slot) = scale;
    table.at(2, slot) -= results[1] * scale;
  }

  __device__ void apply(const Unit& unit, const Place& place) const {
    C mean[kChannels], scale[kChannels], shift[kChannels];
    table.get(0, place.slot, mean);
    table.get(1, place.slot, scale);
    table.get(2, place.slot, shift);
    const int64_t first = place.offset(a.shape, a.y, unit), step = Place::step(a.shape, a.y);
    held.each(place.count, [&](int v) {
      C x[W];
      In::unpack(held.get(v), x);
#pragma unroll
      for (int k = 0; k < W; ++k)
        x[k] = (x[k] - mean[k % kChannels]) * scale[k % kChannels] + shift[k % kChannels];
      if (a.formula.silu) {
#pragma unroll
        for (int k = 0; k < W; ++k) x[k] *= sigmoid(x[k]);
      }
      Access<Y, W, C>::store(a.y, first + v * step, x);
    });
  }
};

template <typename X, typename Y, typename C, int W, bool kLast, bool kKeeps>
__global__ void __launch_bounds__(group_threads(kKeeps), group_blocks(false, kKeeps))
    group_forward(const __grid_constant__ GroupForwardArguments a) {
  GroupForward<X, Y, C, W, kLast, kKeeps> pass{a};
  run_group<kKeeps, kLast>(pass, a.shape, a.scratch);
}

}  // namespace evenkeel::cuda
