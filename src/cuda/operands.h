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

// count: values that share a mean and rstd.
inline Formula formula_of(const Call& call, int64_t count) {
  return {.weight = {call.weight.data, call.weight.dtype},
          .bias = {call.bias.data, call.bias.dtype},
          .eps = call.eps,
          .weight_offset = call.weight_offset,
          .inv_n = 1 / static_cast<double>(count),
          .centers = call.centers(),
          .silu = call.activation == EK_ACTIVATION_SILU,
          .rounds = call.casting == EK_CASTING_LLAMA};
}

inline char* aligned_workspace(const Call& call) {
  return call.workspace + -reinterpret_cast<uintptr_t>(call.workspace) % kWorkspaceAlignment;
}

}  // namespace evenkeel::cuda
