// Group norm, backward.
//
// A slot's sums are those of dz * normalized and of dz: parts of dweight and dbias, which
// reduce_partials() (primitives/reduce_partials.cuh) adds up. Times the weight they are parts of the sums that dx needs.
#pragma once

#include "cuda/group/pipeline.cuh"

namespace evenkeel::cuda {

// Sums over some of a group's values.
template <typename C>
struct GradientSums {
  static constexpr int kValues = 2;
  C value[kValues] = {};

  template <typename AnyCrew, typename Each>
  __device__ GradientSums(const AnyCrew& crew, const Each& each) {
    each([&](C product, C plain) {
      value[0] += product;
      value[1] += plain;
    });
    crew.sum(value);
  }
  template <typename Body>
  __device__ void tell(const Body& body) const {
    body(value[0], value[1]);
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
  static constexpr int kChannels = Place::kChannels, kSums = kChannels;

  const GroupBackwardArguments& a;
  const Unit& unit;
  const Place& place;
  // mean; rstd, then the factor of x - mean in dx; weight, then what is added to dx; bias; and, after
  // sums, the factor of dz in dx.
  enum Number { kMean, kRstd, kWeight, kBias, kScale };
  static constexpr int kForSums = 4, kForOutputs = 4, kKeptParts = 2;
  static constexpr bool kSumsNeedNumbers = true, kDirect = false, kAsksFirst = !kLast;
  const Table<group_numbers(true), kChannels, C> table;
  Held<In, kVectors, kKeeps> held_x;
  std::conditional_t<kRereads, Reread<InDy>, Held<InDy, kVectors, kKeeps>> held_dy;

  __device__ GroupBackward(const GroupBackwardArguments& arguments, const Unit& own_unit,
                           const Place& own_place, char* kept, C* numbers)
      : a(arguments),
        unit(own_unit),
        place(own_place),
        table{numbers, Place::slots(a.shape)},
        held_x(a.shape, a.x, unit, place, kept),
        held_dy(a.shape, a.dy, unit, place, kept + a.shape.vectors * blockDim.x * 16) {}

  __device__ void load(int first, int last) {
    held_x.load(a.x, first, last);
    held_dy.load(a.dy, first, last);
  }

  using Numbers = LoadedScalar<X, C>;
  __device__ void ask(int number, int channel, Numbers& asked) const {
    if (number == kMean || number == kRstd) {
      const int64_t group = unit.group(a.shape) + a.shape.per_group.quotient(channel);
      asked.statistic(number == kMean ? a.mean : a.rstd, a.stats, group);
    } else if (number == kWeight || a.formula.silu) {
      asked.parameter(number == kWeight ? a.formula.weight : a.formula.bias,
                      unit.channel + channel);
    }
  }
  __device__ C answer(int number, const Numbers& asked) const {
    if (number == kBias) return a.formula.silu ? asked.parameter(a.formula.bias, C{0}) : C{0};
    return number == kWeight ? weight_of(a.formula, asked) : asked.statistic();
  }
  __device__ void begin_sums() {}

  // Calls body(x - mean, dz) for vectors. scale: weight * rstd.
  template <typename Body>
  __device__ void each(int first, int last, const C (&scale)[kChannels], const Body& body) {
    C mean[kChannels];
    table.get(kMean, place.slot, mean);
    const auto run = [&](const auto& activate) {
      held_x.template each<kLast>(
          first, last,
          [&](int v) {
            C x[W], dz[W];
            In::unpack(held_x.get(v), x);
            InDy::unpack(held_dy.get(v), dz);
#pragma unroll
            for (int k = 0; k < W; ++k) x[k] -= mean[k % kChannels];
            activate(x, dz);
            body(x, dz);
          },
          [&](int v) {
            held_x.refill(a.x, v);
            held_dy.refill(a.dy, v);
          });
    };
    // Two loops where the registers suffice.
    if (kLast && !a.formula.silu) return run([](const C(&)[W], C(&)[W]) {});
    C bias[kChannels];
    table.get(kBias, place.slot, bias);
    run([&](const C(&x)[W], C(&dz)[W]) {
      if (!kLast && !a.formula.silu) return;
#pragma unroll
      for (int k = 0; k < W; ++k) {
        dz[k] *= Silu::gradient(x[k] * scale[k % kChannels] + bias[k % kChannels]);
      }
    });
  }

  __device__ void sum(int first, int last, C (&sums)[2][kChannels]) {
    C scale[kChannels], rstd[kChannels];
    table.get(kRstd, place.slot, rstd);
    table.get(kWeight, place.slot, scale);
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
    table.get(kRstd, place.slot, rstd);
#pragma unroll
    for (int k = 0; k < kChannels; ++k) sums[0][k] += products[k] * rstd[k];
    held_x.discard_unpacked();
    held_dy.discard_unpacked();
  }

  template <typename Body>
  __device__ void tell(int slot, C, C product, C plain, const Body& body) const {
    const C weight = table.at(kWeight, slot);
    body(product * weight, plain * weight);
  }
  __device__ bool keeps_sums() const { return a.scratch.dweight_partials != nullptr; }
  __device__ void keep(int channel, int piece, C product, C plain) const {
    const int64_t at = (int64_t{unit.sample} * a.shape.pieces.value + piece) * a.shape.channels +
                       unit.channel + channel;
    reinterpret_cast<C*>(a.scratch.dweight_partials)[at] = product;
    reinterpret_cast<C*>(a.scratch.dbias_partials)[at] = plain;
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
    table.get(kRstd, place.slot, slope);
    table.get(kWeight, place.slot, shift);
    table.get(kScale, place.slot, scale);
    auto to = place.walk(a.shape, a.dx, unit);
    each(0, place.count, scale, [&](const C(&x)[W], const C(&dz)[W]) {
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

// kRereads: only x is kept.
template <typename X, typename D, typename C, int W, bool kLast, bool kKeeps, bool kRereads>
__global__ void __launch_bounds__(group_threads(kKeeps), group_blocks(true, kKeeps))
    group_backward(const __grid_constant__ GroupBackwardArguments a) {
  run_group<kKeeps, kLast, GroupBackward<X, D, C, W, kLast, kKeeps, kRereads>>(a);
}

}  // namespace evenkeel::cuda
