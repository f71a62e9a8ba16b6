// Group norm, backward.
//
// A slot's sums are those of dz * normalized and of dz: parts of dweight and dbias, which
// fold_partials() (fold.cuh) adds up. Times the weight they are parts of the sums that dx needs.
#pragma once

#include "cuda/group.cuh"

namespace evenkeel::cuda {

// Sums over some of a group's values.
template <typename C>
struct GradientSums {
  static constexpr int kValues = 2;
  C value[kValues] = {};

  GradientSums() = default;
  template <typename Pass, typename Each>
  __device__ GradientSums(const Pass& pass, int lanes, const Each& each) {
    each([&](int slot, C, C product, C plain) {
      const C weight = pass.table.at(4, slot);
      value[0] += product * weight;
      value[1] += plain * weight;
    });
    value[0] = sum_over(lanes, value[0]);
    value[1] = sum_over(lanes, value[1]);
  }
  __device__ void merge(const GradientSums& other) {
    value[0] += other.value[0];
    value[1] += other.value[1];
  }
};

template <typename X, typename D, typename C, int W, bool kLast, bool kKeeps, bool kRereads>
struct GroupBackward {
  static constexpr int kVectors = group_vectors(true, W, sizeof(X));
  using Compute = C;
  using Part = GradientSums<C>;
  using Place = Chunk<kLast, W>;
  using In = Access<X, W, C>;
  using InDy = Access<D, W, C>;
  static constexpr int kChannels = Place::kChannels;

  const GroupBackwardArguments& a;
  // mean; rstd, then the factor of x - mean in dx; weight * rstd; bias; weight, then what is added to
  // dx.
  Table<group_numbers(true), kChannels, C> table;
  Held<In, kVectors, kKeeps> held_x;
  std::conditional_t<kRereads, Reread<InDy>, Held<InDy, kVectors, kKeeps>> held_dy;

  __device__ void load(const Unit& unit, const Place& place, char* kept) {
    held_x.load(a.shape, a.x, unit, place, kept);
    held_dy.load(a.shape, a.dy, unit, place, kept + a.shape.vectors * blockDim.x * 16);
  }

  template <typename Each>
  __device__ void prepare(const Unit& unit, const Place&, const Each& each) {
    each([&](int slot, int channel) {
      C weight[1], bias[1];
      const int64_t group = unit.group(a.shape) + a.shape.per_group.quotient(channel);
      const C mean = statistic<X, C>(a.mean, a.stats, group);
      const C rstd = statistic<X, C>(a.rstd, a.stats, group);
      weights_at<X>(a.formula, unit.channel + channel, weight);
      parameters_at<X>(a.formula.bias, unit.channel + channel, C{0}, bias);
      table.at(0, slot) = mean;
      table.at(1, slot) = rstd;
      table.at(2, slot) = weight[0] * rstd;
      table.at(3, slot) = bias[0];
      table.at(4, slot) = weight[0];
    });
    __syncthreads();
  }

  // Calls body(v, x - mean, dz, weight * rstd).
  template <typename Body>
  __device__ void each(const Place& place, const Body& body) const {
    C mean[kChannels], scale[kChannels];
    table.get(0, place.slot, mean);
    table.get(2, place.slot, scale);
    held_x.each(place.count, [&](int v) {
      C x[W], dz[W];
      In::unpack(held_x.get(v), x);
      InDy::unpack(held_dy.get(v), dz);
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] -= mean[k % kChannels];
      if (a.formula.silu) {
        C bias[kChannels];
        table.get(3, place.slot, bias);
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const C z = x[k] * scale[k % kChannels] + bias[k % kChannels], s = sigmoid(z);
          dz[k] *= s * (1 + z * (1 - s));
        }
      }
      body(v, x, dz, scale);
    });
  }

  __device__ void sum(const Place& place, C (&sums)[2][kChannels]) {
    each(place, [&](int, const C(&x)[W], const C(&dz)[W], const C(&)[kChannels]) {
#pragma unroll
      for (int k = 0; k < W; ++k) {
        sums[0][k % kChannels] += dz[k] * x[k];
        sums[1][k % kChannels] += dz[k];
      }
    });
    C rstd[kChannels];
    table.get(1, place.slot, rstd);
#pragma unroll
    for (int k = 0; k < kChannels; ++k) sums[0][k] *= rstd[k];
    held_x.forget();
    held_dy.forget();
  }

  __device__ bool keeps_sums() const { return a.scratch.dweight_partials != nullptr; }
  __device__ void keep(const Unit& unit, int channel, int piece, C product, C plain) const {
    const int64_t at = (int64_t{unit.sample} * a.shape.pieces.value + piece) * a.shape.channels +
                       unit.channel + channel;
    reinterpret_cast<C*>(a.scratch.dweight_partials)[at] = product;
    reinterpret_cast<C*>(a.scratch.dbias_partials)[at] = plain;
  }

  __device__ void finish(const Unit&, int, const Part& sums, C (&results)[kGroupResults],
                         bool) const {
    results[0] = sums.value[0] * static_cast<C>(a.formula.share);
    results[1] = sums.value[1] * static_cast<C>(a.formula.share);
    results[2] = 0;
  }

  __device__ void complete(int slot, const C* results) const {
    const C rstd = table.at(1, slot);
    table.at(1, slot) = -results[0] * rstd * rstd;
    table.at(4, slot) = -results[1] * rstd;
  }

  __device__ void apply(const Unit& unit, const Place& place) const {
    if (a.dx.data == nullptr) return;
    C slope[kChannels], shift[kChannels];
    table.get(1, place.slot, slope);
    table.get(4, place.slot, shift);
    const int64_t first = place.offset(a.shape, a.dx, unit), step = Place::step(a.shape, a.dx);
    each(place, [&](int v, const C(&x)[W], const C(&dz)[W], const C(&scale)[kChannels]) {
      C dx[W];
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const int c = k % kChannels;
        dx[k] = dz[k] * scale[c] + (x[k] * slope[c] + shift[c]);
      }
      In::store(a.dx, first + v * step, dx);
    });
  }
};

// kRereads: only x is kept.
template <typename X, typename D, typename C, int W, bool kLast, bool kKeeps, bool kRereads>
__global__ void __launch_bounds__(group_threads(kKeeps), group_blocks(true, kKeeps))
    group_backward(const __grid_constant__ GroupBackwardArguments a) {
  GroupBackward<X, D, C, W, kLast, kKeeps, kRereads> pass{a};
  run_group<kKeeps, kLast>(pass, a.shape, a.scratch);
}

}  // namespace evenkeel::cuda
