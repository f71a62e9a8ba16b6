// The functions of single values that all kernels share, rows and groups, forward and backward: each term
// of the epilogue has its value and, for the backward pass, its gradient here and nowhere else.
//
//   z = casting(normalized) * (weight + offset) + bias,   y = activation(z)
#pragma once

#include <iterator>

#include "core/gelu.h"
#include "cuda/primitives/activations.h"
#include "cuda/primitives/element.cuh"

namespace evenkeel::cuda {

// One Newton step from the approximation; there is none from 0, infinity or NaN.
__device__ inline float reciprocal_root(float value) {
  const float root = rsqrtf(value);
  const float better = root + 0.5f * root * (1.0f - value * root * root);
  return isfinite(better) ? better : root;
}
__device__ inline double reciprocal_root(double value) { return 1 / sqrt(value); }

__device__ inline float exponential(float z) { return __expf(z); }
__device__ inline double exponential(double z) { return exp(z); }

// The division gives 0 for z below -87, where the result would be subnormal.
__device__ inline float sigmoid(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }
__device__ inline double sigmoid(double z) { return 1 / (1 + exp(-z)); }

// |z|, but no more than `end`; NaN stays.
template <typename C>
__device__ inline C magnitude_up_to(C z, C end) {
  const C magnitude = z < 0 ? -z : z;
  return magnitude > end ? end : magnitude;
}

template <const auto& kCoefficients, int kFirst = 0>
__device__ inline float polynomial(float a) {
  constexpr float first = kCoefficients[kFirst];
  if constexpr (kFirst + 1 == std::size(kCoefficients)) {
    return first;
  } else {
    return polynomial<kCoefficients, kFirst + 1>(a) * a + first;
  }
}

// Of the normal distribution at z, or where z is cut off: the density is 0 there.
template <typename C>
struct Normal {
  C cut_off, cdf, density;

  __device__ explicit Normal(C z) {
    const C a = magnitude_up_to(z, C{kNormalEnd});
    C tail;
    tail_and_density(a, tail, density);
    cdf = z < 0 ? tail : 1 - tail;
    cut_off = z < 0 ? -a : a;
  }

 private:
  static __device__ void tail_and_density(float a, float& tail, float& density) {
    using Tail = NormalTail<float>;
    const float decay = exponential(-0.5f * a * a);
    tail = decay * __fdividef(polynomial<Tail::kP>(a), polynomial<Tail::kQ>(a));
    density = decay * static_cast<float>(kInverseRootOf2Pi);
  }
  static __device__ void tail_and_density(double a, double& tail, double& density) {
    tail = 0.5 * erfc(a * kRootOfHalf);
    density = exponential(-0.5 * a * a) * kInverseRootOf2Pi;
  }
};

// The activations: value, and dy times the slope.

struct Silu {
  template <typename C>
  static __device__ C value(C z) {
    return z * sigmoid(z);
  }
  template <typename C>
  static __device__ C gradient(C z, C dy) {
    const C s = sigmoid(z);
    return dy * (s * (1 + z * (1 - s)));
  }
};

// Selects, as torch's does: a NaN stays, and an infinite dy does not become one.
struct Relu {
  template <typename C>
  static __device__ C value(C z) {
    return z <= 0 ? 0 : z;
  }
  template <typename C>
  static __device__ C gradient(C z, C dy) {
    return z <= 0 ? 0 : dy;
  }
};

struct Gelu {
  template <typename C>
  static __device__ C value(C z) {
    return z * Normal<C>(z).cdf;
  }
  template <typename C>
  static __device__ C gradient(C z, C dy) {
    const Normal<C> normal(z);
    return dy * (normal.cdf + normal.cut_off * normal.density);
  }
};

struct GeluTanh {
  template <typename C>
  static __device__ C value(C z) {
    return z * sigmoid(z * slope(z, C(kGeluTanh3)));
  }
  template <typename C>
  static __device__ C gradient(C z, C dy) {
    const C a = magnitude_up_to(z, C{kGeluTanhEnd}), cut_off = z < 0 ? -a : a;
    const C t = cut_off * slope(cut_off, C(kGeluTanh3));
    const C steep = cut_off * slope(cut_off, C(3 * kGeluTanh3));
    // Both sigmoid(t) and sigmoid(-t): `steep` would multiply what 1 - sigmoid(t) rounds.
    const C decay = exponential(t < 0 ? t : -t), near = sigmoid(t < 0 ? -t : t);
    const C far = decay * near, s = t < 0 ? far : near, rest = t < 0 ? near : far;
    return dy * (s * (1 + steep * rest));
  }

 private:
  template <typename C>
  static __device__ C slope(C z, C cubic) {
    return C(kGeluTanh1) + cubic * (z * z);
  }
};

// Calls body(activation) with one of these, or not at all. All threads have the same one: choose it around
// the values of a vector, so that they share the branch.
template <Activations kActivations = Activations::kAll, typename Body>
__device__ inline void with_activation(const Formula& formula, const Body& body) {
  if constexpr (kActivations == Activations::kCheap) {
    if (formula.activation != EK_ACTIVATION_NONE) body(Silu());
    return;
  }
  switch (formula.activation) {
    case EK_ACTIVATION_NONE:
      return;
    case EK_ACTIVATION_SILU:
      return body(Silu());
    case EK_ACTIVATION_RELU:
      return body(Relu());
    case EK_ACTIVATION_GELU:
      return body(Gelu());
    case EK_ACTIVATION_GELU_TANH:
      return body(GeluTanh());
  }
}

// Rounds the normalized value to x's dtype before it meets the weight. Its gradient passes through.
template <typename X>
struct RoundToX {
  template <int W, typename C>
  static __device__ void value(const DeviceTensor& x, const C (&normalized)[W], C (&out)[W]) {
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] = Access<X, W, C>::round(normalized[k], x);
  }
};

// The gradient of the offset weight is the weight's.
template <int W, typename C>
__device__ inline void add_weight_offset(const Formula& formula, C (&weight)[W]) {
  const C offset = formula.weight_offset;
  if (offset == 0) return;
#pragma unroll
  for (int k = 0; k < W; ++k) weight[k] += offset;
}

}  // namespace evenkeel::cuda
