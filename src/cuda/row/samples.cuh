// What a scale and a shift of each sample need beside the kernels of rows: before them weight and bias of each sample,
// where nobody has these in memory; after them the gradients of each sample.
//
// For the rows of a sample a modulated norm is one with the weight (1 + scale) * weight and the bias (1 + scale) * bias +
// shift. So with A, the sum of dz * normalized, and B, the sum of dz, over its rows: dshift = B, dscale = weight * A +
// bias * B, and its shares of dweight and dbias are (1 + scale) * A and (1 + scale) * B.
#pragma once

#include "cuda/primitives/cluster.cuh"
#include "cuda/primitives/element.cuh"
#include "cuda/row/tile.h"

namespace evenkeel::cuda {

template <typename C>
__device__ inline C value_at(const DeviceVector& vector, int64_t column, C absent) {
  return vector.data == nullptr ? absent : load_runtime<C>(vector.data, vector.dtype, column);
}

template <typename C>
__device__ inline C factor_at(const DeviceSamples& scale, int64_t sample, int64_t column) {
  if (scale.data == nullptr) return 1;
  return 1 + load_runtime<C>(scale.data, scale.dtype, sample * scale.stride + column);
}

template <typename C>
__device__ inline void store_at(const DeviceSamples& to, int64_t sample, int64_t column, C value) {
  if (to.data != nullptr) store_runtime(to.data, to.dtype, sample * to.stride + column, value);
}

// Calls body(sample, column) for a thread's column, and the samples of its block.
template <typename Body>
__device__ inline void each_sample(int64_t samples, int64_t cols, const Body& body) {
  wait_for_previous_kernel();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x;
  if (column >= cols) return;
  for (int64_t sample = blockIdx.y; sample < samples; sample += gridDim.y) body(sample, column);
}

template <typename C>
__global__ void __launch_bounds__(kColumnThreads)
    sample_parameters(const __grid_constant__ SampleParametersArguments a) {
  each_sample(a.samples, a.cols, [&](int64_t sample, int64_t column) {
    const C factor = factor_at<C>(a.scale, sample, column);
    C weight = value_at(a.weight, column, C{1});
    if (a.weight.data != nullptr) weight += static_cast<C>(a.weight_offset);
    const int64_t at = sample * a.cols + column;
    reinterpret_cast<C*>(a.weights)[at] = weight * factor;
    if (a.biases == nullptr) return;
    C bias = value_at(a.bias, column, C{0}) * factor;
    if (a.shift.data != nullptr)
      bias += load_runtime<C>(a.shift.data, a.shift.dtype, sample * a.shift.stride + column);
    reinterpret_cast<C*>(a.biases)[at] = bias;
  });
}

// Partials are added up in the order of the sample's blocks.
template <typename C>
__global__ void __launch_bounds__(kColumnThreads)
    reduce_samples(const __grid_constant__ ReduceSamplesArguments a) {
  each_sample(a.samples, a.cols, [&](int64_t sample, int64_t column) {
    const auto sum = [&](const char* partials) {
      C total = 0;
      if (partials == nullptr) return total;
      const C* from = reinterpret_cast<const C*>(partials) + sample * a.count * a.cols + column;
#pragma unroll 4
      for (int64_t i = 0; i < a.count; ++i) total += from[i * a.cols];
      return total;
    };
    const C product = sum(a.products), gradient = sum(a.gradients);
    C weight = value_at(a.weight, column, C{1});
    if (a.weight.data != nullptr) weight += static_cast<C>(a.weight_offset);
    C dscale = product * weight;
    if (a.bias.data != nullptr) dscale += gradient * value_at(a.bias, column, C{0});
    store_at(a.dscale, sample, column, dscale);
    store_at(a.dshift, sample, column, gradient);
    const C factor = factor_at<C>(a.scale, sample, column);
    const int64_t at = sample * a.cols + column;
    if (a.dweight_shares != nullptr) reinterpret_cast<C*>(a.dweight_shares)[at] = product * factor;
    if (a.dbias_shares != nullptr) reinterpret_cast<C*>(a.dbias_shares)[at] = gradient * factor;
  });
}

}  // namespace evenkeel::cuda
