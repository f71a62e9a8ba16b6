// A call's operands as kernels get them.
#pragma once

#include "core/call.h"
#include "cuda/arguments.h"
#include "cuda/plan.h"

namespace evenkeel::cuda {

// Whether all runs of the tensor have one stride.
inline bool is_even(const Call& call, const Tensor& tensor) {
  return !tensor || call.outer == 1 || tensor.outer_stride == call.inner * tensor.row_stride;
}

inline DeviceTensor device_tensor(const Call& call, const Tensor& tensor) {
  const int64_t inner = is_even(call, tensor) ? 0 : call.inner;
  const int64_t last =
      (call.outer - 1) * tensor.outer_stride + (call.inner - 1) * tensor.row_stride;
  return {tensor.data,
          tensor ? tensor.at(last + call.width) : nullptr,
          tensor.row_stride,
          tensor.outer_stride,
          inner,
          tensor.dtype};
}

// A call whose y is to be quantized, with y in float32 there.
inline Call norm_in_f32(const Call& call, char* y) {
  Call norm = call;
  norm.y = {y, Dtype::kF32, call.width, call.inner * call.width};
  norm.y_scale = nullptr;
  norm.y_row_scale = nullptr;
  return norm;
}

// The norm of a call's sum, as if it had been added before. sum: where it is, if the call does not store it.
inline Call norm_of_sum(const Call& call, char* sum) {
  Call norm = call;
  norm.x = call.sum ? call.sum : Tensor{sum, call.sum.dtype, call.width, call.inner * call.width};
  norm.residual = norm.sum = Tensor{};
  return norm;
}

// The norm of the samples of a call with a scale or a shift: its weight and bias are those of the first one, and those of
// the others lie behind, at these distances in elements.
struct NormOfSamples {
  Call norm;
  int64_t weight_stride = 0, bias_stride = 0;
};

// Whether scale and shift can be read as weight and bias: none of them is to be combined with the call's own.
inline bool has_sample_parameters(const Call& call) {
  return !(call.scale && (call.weight || call.bias)) && !(call.shift && call.bias);
}

inline NormOfSamples norm_of_samples(const Call& call) {
  NormOfSamples samples{call};
  if (call.scale) {
    samples.norm.weight = {call.scale.data, call.scale.dtype};
    samples.norm.weight_offset = 1;
    samples.weight_stride = call.scale.row_stride;
  }
  if (call.shift) {
    samples.norm.bias = {call.shift.data, call.shift.dtype};
    samples.bias_stride = call.shift.row_stride;
  }
  return samples;
}

// Whether rows meet a bias: backward only before an activation.
inline bool reads_bias(const Call& call) {
  return call.pass == Pass::kForward || call.activation != EK_ACTIVATION_NONE;
}

// The same where they were made, dense and in the arithmetic's type. biases: nullptr where no bias is read.
inline NormOfSamples norm_of_samples(const Call& call, char* weights, char* biases) {
  NormOfSamples samples{call, call.width, call.width};
  samples.norm.weight = {weights, call.compute};
  samples.norm.bias = {biases, call.compute};
  samples.norm.weight_offset = 0;
  return samples;
}

// Where dx goes. Kernels that are compiled for dtypes store `first` in x's, and `second` in dy's.
struct DxOutputs {
  Tensor first, second;
};

inline DxOutputs dx_outputs(const Call& call) {
  const Tensor &dx = call.dx, &dresidual = call.dresidual;
  const Dtype x = call.x.dtype, dy = call.dy.dtype;
  if (!dresidual) return {dx, {}};
  if (!dx)
    return dresidual.dtype != x && dresidual.dtype == dy ? DxOutputs{{}, dresidual}
                                                         : DxOutputs{dresidual, {}};
  return dx.dtype == dy && dresidual.dtype == x ? DxOutputs{dresidual, dx}
                                                : DxOutputs{dx, dresidual};
}

// count: values that share a mean and rstd.
inline Formula formula_of(const Call& call, int64_t count) {
  return {.weight = {call.weight.data, call.weight.dtype},
          .bias = {call.bias.data, call.bias.dtype},
          .eps = call.eps,
          .weight_offset = call.weight_offset,
          .inv_n = 1 / static_cast<double>(count),
          .centers = call.centers(),
          .activation = static_cast<uint8_t>(call.activation),
          .rounds = call.casting == EK_CASTING_LLAMA};
}

inline char* aligned_workspace(const Call& call) {
  return call.workspace + -reinterpret_cast<uintptr_t>(call.workspace) % kWorkspaceAlignment;
}

}  // namespace evenkeel::cuda
