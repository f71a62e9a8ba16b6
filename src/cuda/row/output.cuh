// From a forward tile to y: a thread loads weight and bias of its vectors, evaluates the epilogue, converts and
// stores. Parameters come from L2, and a store keeps the compiler from loading those behind it earlier, so they
// are loaded in batches, or, RMS norm's weight, before the reduction.
#pragma once

#include <type_traits>

#include "cuda/primitives/parameters.cuh"
#include "cuda/row/epilogue.cuh"
#include "cuda/row/quantize.cuh"
#include "cuda/row/statistics.cuh"

namespace evenkeel::cuda {

// Weights that are loaded before the reduction: as many as there are registers for.
template <typename X, ForwardPolicy kPolicy>
struct EarlyWeights {
  static constexpr int kVectors = kPolicy.early_weights();
  using In = Access<X, kPolicy.vector(), float>;

  typename In::Raw raw[kVectors == 0 ? 1 : kVectors];

  __device__ void load(const Formula& formula, const ForwardPosition<kPolicy>& at) {
    constexpr int kSize = sizeof(X);
    const char* const weights = formula.weight.data + at.first * kSize;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      raw[v] = In::load_if(at.inside(v), weights + v * at.step * kSize);
  }
};

template <typename X, typename Y, ForwardPolicy kPolicy>
struct RowOutput {
  static constexpr int W = kPolicy.vector(), kVectors = kPolicy.vectors(), kRows = kPolicy.rows;
  static constexpr bool kAligned = kPolicy.aligned;
  const ForwardArguments& a;
  const Formula& formula;  // of the row
  const ForwardPosition<kPolicy>& at;
  const ForwardTile<X, kPolicy>& tile;
  const Moments<kPolicy>& moments;
  const EarlyWeights<X, kPolicy>& early;
  char* const to;     // of the thread's first vector
  const float shift;  // of a normalized value

  __device__ void store() const {
    each([&](int v, const float(&y)[W]) {
      constexpr bool kEvictFirst = kPolicy.evict_first() && kAligned;
      Access<Y, W, float>::template store<kEvictFirst>(to + at.distance(a.y, v, sizeof(Y)), y);
    });
  }

  // y is evaluated twice where the row's scale is to be found, by the same code, from the tile.
  template <typename Group>
  __device__ void quantize(Group& group) const {
    const Quantization& q = a.quantization;
    uint32_t most = 0;
    float inverse = 0;
#pragma unroll 1
    for (bool find = q.scale == nullptr;; find = false) {
      if (!find) inverse = inverse_scale<true>(q, most, at.row, at.first == 0 && at.stores);
      each([&](int v, const float(&y)[W]) {
        if (find) {
          most = largest_magnitude(most, y);
        } else {
          store_codes(a.y.dtype, to + at.distance(a.y, v, sizeof(Y)), inverse, y);
        }
      });
      if (!find) return;
      most = group.max(most);
    }
  }

 private:
  // Calls take(v, y) for the thread's vectors.
  //
  // Which parameters there are, and of which dtype, is found out before the loops. A weight that is known has no
  // offset, and beside it a bias that is not known is absent.
  template <typename Take>
  __device__ void each(const Take& take) const {
    constexpr bool kKnown = !kPolicy.terms.weight_offset;
    const DeviceVector &weight = formula.weight, &bias = formula.bias;
    const bool has_weight = weight.data != nullptr, has_bias = bias.data != nullptr;
    if constexpr (kPolicy.is_rms()) {
      each_of<X, kKnown, false>(has_weight, has_bias, take);
    } else if constexpr (kPolicy.is_layer()) {
      each_of<X, kKnown, kKnown>(has_weight, has_bias, take);
    } else {
      with_type_of<X, Y>(has_weight ? weight.dtype : bias.dtype, [&](auto type) {
        using T = decltype(type);
        if (kKnown && has_weight && has_bias) {
          each_of<T, kKnown, kKnown>(has_weight, has_bias, take);
        } else if (kKnown && has_weight) {
          each_of<T, kKnown, false>(has_weight, has_bias, take);
        } else {
          each_of<T, false, false>(has_weight, has_bias, take);
        }
      });
    }
  }

  template <typename T, bool kWeight, bool kBias, typename Take>
  __device__ void each_of(bool has_weight, bool has_bias, const Take& take) const {
    using Parameter = Access<T, W, float>;
    constexpr int kSize = sizeof(T);
    constexpr int kBatch =
        kPolicy.parameter_batch((kWeight && !kBias ? 1 : 2) * sizeof(typename Parameter::Raw));
    static_assert(kVectors % kBatch == 0);
    const char* const weights = formula.weight.data + at.first * kSize;
    const char* const biases = formula.bias.data + at.first * kSize;
    const auto load = [&](const char* vectors, int v) {
      const char* from = vectors + v * at.step * kSize;
      return kAligned ? Parameter::load(from) : Parameter::load_partial(from, at.valid(v));
    };
#pragma unroll
    for (int begin = 0; begin < kVectors; begin += kBatch) {
      if (!at.inside(begin) || !at.stores) continue;
      typename Parameter::Raw weight_raw[kBatch] = {}, bias_raw[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int v = begin + i;
        if ((i > 0 && !at.inside(v)) || take_early(v, weight_raw[i])) continue;
        if (kWeight || has_weight) weight_raw[i] = load(weights, v);
        if (kBias || (!kWeight && has_bias)) bias_raw[i] = load(biases, v);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i > 0 && !at.inside(begin + i)) continue;
        float weight[W], bias[W];
        Parameter::unpack(weight_raw[i], weight);
        Parameter::unpack(bias_raw[i], bias);
        if constexpr (!kWeight) {
          const float offset = has_weight ? formula.weight_offset.narrow : 1.0f;
#pragma unroll
          for (int k = 0; k < W; ++k) weight[k] += offset;
        }
        evaluate(begin + i, weight, bias, take);
      }
    }
  }

  // Whether the weight of vector v was loaded early.
  template <typename Raw>
  __device__ bool take_early(int v, Raw& weight) const {
    if constexpr (kPolicy.early_weights() > 0) {
      const int from = kRows == 1 ? v : 0;
      if (from < kPolicy.early_weights()) {
        weight = early.raw[from];
        return true;
      }
    }
    return false;
  }

  template <typename Take>
  __device__ void evaluate(int v, const float (&weight)[W], const float (&bias)[W],
                           const Take& take) const {
    float x[W], y[W];
    tile.values(v, moments.center, x);
    const float rstd = moments.rstd[kRows == 1 ? 0 : v];
    evaluate_epilogue<X, kPolicy.terms>(a, x, rstd, shift, weight, bias, y);
    take(v, y);
  }
};

}  // namespace evenkeel::cuda
