// Group norm, backward.
//
// A slot's sums are those of dz * normalized and of dz: partials of dweight and dbias, which reduce_partials()
// (primitives/reduce_partials.cuh) sums. Times the weight they are parts of the sums that dx needs.
#pragma once

#include "cuda/group/pipeline.cuh"
#include "cuda/group/policies.h"

namespace evenkeel::cuda {

// Sums over some of a group's values.
template <typename C>
struct GradientSums {
  static constexpr int kValues = 2;
  C value[kValues] = {};

  template <typename SubWarp, typename Each>
  __device__ GradientSums(const SubWarp& sub_warp, const Each& each) {
    each([&](C product, C gradient) {
      value[0] += product;
      value[1] += gradient;
    });
    sub_warp.sum(value);
  }
  template <typename Body>
  __device__ void contribute(const Body& body) const {
    body(value[0], value[1]);
  }
};

template <typename X, typename C, GroupPolicy kOwnPolicy>
struct GroupBackward {
  static constexpr GroupPolicy kPolicy = kOwnPolicy;
  static constexpr int W = kPolicy.vector, kChannels = kPolicy.channels();
  static constexpr bool kChannelsLast = kPolicy.channels_last;
  using Compute = C;
  using Part = GradientSums<C>;
  using Position = Chunk<kChannelsLast, W>;
  using In = Access<X, W, C>;

  const GroupBackwardArguments& a;
  const GroupSet& set;
  const Position& position;
  // mean; rstd, then the factor of x - mean in dx; weight, then what is added to dx; bias; and, after
  // sums, the factor of dz in dx.
  enum Number { kMean, kRstd, kWeight, kBias, kScale };
  const Table<kPolicy, C> table;
  ThreadVectors<In, kPolicy> x_vectors;
  std::conditional_t<kPolicy.reloads_dy, ReloadedVectors<In>, ThreadVectors<In, kPolicy>>
      dy_vectors;

  __device__ GroupBackward(const GroupBackwardArguments& arguments, const GroupSet& own_set,
                           const Position& own_position, char* resident, C* numbers)
      : a(arguments),
        set(own_set),
        position(own_position),
        table{numbers, Position::slots(a.shape, blockDim.x)},
        x_vectors(a.shape, a.x, set, position, resident),
        dy_vectors(a.shape, a.dy, set, position, resident + a.shape.vectors * blockDim.x * 16) {}

  __device__ void load(int first, int last) {
    x_vectors.load(a.x, first, last);
    dy_vectors.load(a.dy, first, last);
  }

  __device__ bool activates() const { return a.formula.activation != EK_ACTIVATION_NONE; }

  using Loads = LoadedScalar<X, C>;
  __device__ void issue(int number, int channel, Loads& loaded) const {
    if (number == kMean || number == kRstd) {
      const int64_t group = set.group(a.shape) + a.shape.per_group.quotient(channel);
      loaded.statistic(number == kMean ? a.mean : a.rstd, a.stats, group);
    } else if (number == kWeight || activates()) {
      loaded.parameter(number == kWeight ? a.formula.weight : a.formula.bias,
                       set.channel + channel);
    }
  }
  __device__ C value(int number, const Loads& loaded) const {
    if (number == kBias) return activates() ? loaded.parameter(a.formula.bias, C{0}) : C{0};
    return number == kWeight ? weight_of(a.formula, loaded) : loaded.statistic();
  }
  __device__ void begin_sums() {}

  // Calls body(x - mean, dz) for vectors. scale: weight * rstd.
  template <typename Body>
  __device__ void each(int first, int last, const C (&scale)[kChannels], const Body& body) {
    C mean[kChannels];
    table.get(kMean, position.slot, mean);
    const auto run = [&](const auto& activate) {
      x_vectors.each(
          first, last,
          [&](int v) {
            C x[W], dz[W];
            In::unpack(x_vectors.get(v), x);
            In::unpack(dy_vectors.get(v), dz);
#pragma unroll
            for (int k = 0; k < W; ++k) x[k] -= mean[k % kChannels];
            activate(x, dz);
            body(x, dz);
          },
          [&](int v) {
            x_vectors.refill(a.x, v);
            dy_vectors.refill(a.dy, v);
          });
    };
    // Two loops where the registers suffice.
    if (kChannelsLast && !activates()) return run([](const C(&)[W], C(&)[W]) {});
    C bias[kChannels];
    table.get(kBias, position.slot, bias);
    run([&](const C(&x)[W], C(&dz)[W]) {
      with_activation<kPolicy.activations>(a.formula, [&](auto activation) {
#pragma unroll
        for (int k = 0; k < W; ++k)
          dz[k] = activation.gradient(x[k] * scale[k % kChannels] + bias[k % kChannels], dz[k]);
      });
    });
  }

  __device__ void sum(int first, int last, C (&sums)[2][kChannels]) {
    C scale[kChannels], rstd[kChannels];
    table.get(kRstd, position.slot, rstd);
    table.get(kWeight, position.slot, scale);
#pragma unroll
    for (int k = 0; k < kChannels; ++k) scale[k] *= rstd[k];
    C products[kChannels] = {};
    each(first, last, scale, [&](const C(&x)[W], const C(&dz)[W]) {
#pragma unroll
      for (int k = 0; k < W; ++k) {
        products[k % kChannels] += dz[k] * x[k];
        sums[1][k % kChannels] += dz[k];
      }
    });
    table.get(kRstd, position.slot, rstd);
#pragma unroll
    for (int k = 0; k < kChannels; ++k) sums[0][k] += products[k] * rstd[k];
    x_vectors.discard_unpacked();
    dy_vectors.discard_unpacked();
  }

  template <typename Body>
  __device__ void contribute(int slot, C, C product, C gradient, const Body& body) const {
    const C weight = table.at(kWeight, slot);
    body(product * weight, gradient * weight);
  }
  __device__ bool wants_partials() const { return a.scratch.dweight_partials != nullptr; }
  __device__ void store_partials(int channel, int slice, C product, C gradient) const {
    const int64_t at = (int64_t{set.sample} * a.shape.slices.value + slice) * a.shape.channels +
                       set.channel + channel;
    reinterpret_cast<C*>(a.scratch.dweight_partials)[at] = product;
    reinterpret_cast<C*>(a.scratch.dbias_partials)[at] = gradient;
  }

  __device__ void finish(const Part& sums, C (&results)[kGroupResults]) const {
    results[0] = sums.value[0] * static_cast<C>(a.formula.inv_n);
    results[1] = sums.value[1] * static_cast<C>(a.formula.inv_n);
    results[2] = 0;
  }
  __device__ void publish(int, const C (&)[kGroupResults]) const {}

  __device__ void complete(int slot, const C* results) const {
    const C rstd = table.at(kRstd, slot);
    table.at(kRstd, slot) = -results[0] * rstd * rstd;
    table.at(kScale, slot) = table.at(kWeight, slot) * rstd;
    table.at(kWeight, slot) = -results[1] * rstd;
  }

  __device__ void apply() {
    if (a.dx.data == nullptr) return;
    C slope[kChannels], shift[kChannels], scale[kChannels];
    table.get(kRstd, position.slot, slope);
    table.get(kWeight, position.slot, shift);
    table.get(kScale, position.slot, scale);
    auto to = position.in(a.shape, a.dx, set);
    each(0, position.count, scale, [&](const C(&x)[W], const C(&dz)[W]) {
      C dx[W];
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const int c = k % kChannels;
        dx[k] = dz[k] * scale[c] + (x[k] * slope[c] + shift[c]);
      }
      In::store(a.dx, to.first, dx);
      to.first += to.step;
    });
  }
};

template <typename X, typename C, int kIndex>
__global__ void __launch_bounds__(kGroupPolicy<X, kIndex>.block_threads(),
                                  kGroupPolicy<X, kIndex>.resident_blocks())
    group_backward(const __grid_constant__ GroupBackwardArguments a) {
  run_group<GroupBackward<X, C, kGroupPolicy<X, kIndex>>>(a);
}

}  // namespace evenkeel::cuda
