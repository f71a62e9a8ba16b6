// What the files of this binding share: a call of a norm, and the functions that are registered as
// operators.
//
//   ops.cc        the operators' schemas, their checks, autocast
//   autograd.cc   how a call is differentiated, compiled autograd included
//   kernels.cc    from torch's tensors to one call of the C ABI, and the shapes of its results
//   formulas.cc   the same in torch's own operations: for second derivatives and forward mode
//   module.cc     a short way from Python
//
// One host-only source serves CPU and CUDA builds of torch: no header of CUDA is included.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace evenkeel::torch_binding {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Values as in evenkeel.h: they travel through the operators' schemas as integers.
struct Norm {
  int64_t op;    // ek_op
  int64_t span;  // row norms: how many trailing dimensions are normalized; group norm: groups
  double eps;
  int64_t activation;  // ek_activation
  int64_t casting;     // ek_casting
  double weight_offset;

  bool is_group_norm() const;
  bool centers() const;
};

// sum and dresidual: undefined without a residual. row_scale: undefined unless y is quantized, and empty with a scale.
struct Result {
  Tensor y, mean, rstd, sum, row_scale{};
};

struct Gradients {
  Tensor dx, dweight, dbias, dresidual, dscale{}, dshift{};
};
using Wanted = std::array<bool, 6>;  // of Gradients

// What a residual adds to the arguments of a call: sum = x + residual is normalized.
struct Added {
  const Tensor& residual;
  at::ScalarType sum_dtype;
};

// The same in backward, where x is the sum, and dx and dresidual are one gradient in two dtypes.
struct AddedGradient {
  const MaybeTensor& dsum;  // that arrives at the sum from elsewhere
  at::ScalarType x_dtype, residual_dtype;
};

// What each sample has of its own: y = act(z * (1 + scale) + shift). Both have as many dimensions as x: its first ones,
// then ones, then those that are normalized.
struct Modulated {
  const MaybeTensor& scale;
  const MaybeTensor& shift;
};

// How y is quantized: by a scale, or by one for each row. amax_bound: 0 for none.
struct Quantized {
  const MaybeTensor& scale;
  double amax_bound;
};

// The arguments of the internal operators. The tensors are the caller's.
struct ForwardCall {
  const Tensor& x;
  const MaybeTensor& weight;
  const MaybeTensor& bias;
  Norm norm;
  at::ScalarType out_dtype;
  bool statistics;  // whether mean and rstd are wanted
  std::optional<Added> added = std::nullopt;
  std::optional<Quantized> quantized = std::nullopt;  // out_dtype has 8 bits
  std::optional<Modulated> modulated = std::nullopt;

  // Of what is normalized.
  at::ScalarType normalized_dtype() const { return added ? added->sum_dtype : x.scalar_type(); }
};

struct BackwardCall {
  const Tensor& dy;
  const Tensor& x;
  const MaybeTensor& weight;
  const MaybeTensor& bias;
  const Tensor& mean;
  const Tensor& rstd;
  Norm norm;
  Wanted wanted;
  std::optional<AddedGradient> added = std::nullopt;
  std::optional<Modulated> modulated = std::nullopt;

  at::ScalarType dx_dtype() const { return added ? added->x_dtype : x.scalar_type(); }
};

// kernels.cc
Result run_forward(const ForwardCall&);
Gradients run_backward(const BackwardCall&);
// The shapes, strides and dtypes of the results: for meta and fake tensors.
Result meta_forward(const ForwardCall&);
Gradients meta_backward(const BackwardCall&);

bool channels_last(const Tensor& x);  // (N, C, ...) with adjacent channels
at::MemoryFormat format_of_rows(const Tensor& x, const Norm&);  // of a row norm's y and dx

// formulas.cc: differentiable to any order, in both modes.
Result formula_forward(const ForwardCall&);  // y and sum
Gradients formula_backward(const BackwardCall&);

// autograd.cc: below them are the dispatcher's kernels.
Result differentiable_forward(const ForwardCall&);
Gradients differentiable_backward(const BackwardCall&);
Result refused_forward(const ForwardCall&);  // of a quantized y: refuses what wants a gradient

// ops.cc: the internal operators, by way of the dispatcher.
Result call_forward(const ForwardCall&);
Gradients call_backward(const BackwardCall&);

// ops.cc: the public operators, by way of the dispatcher.
Tensor layer_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                  const MaybeTensor& bias, double eps, std::optional<c10::string_view> activation,
                  double weight_offset, std::optional<at::ScalarType> out_dtype);
Tensor rms_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                std::optional<double> eps, std::optional<c10::string_view> activation,
                double weight_offset, std::optional<c10::string_view> casting,
                std::optional<at::ScalarType> out_dtype);
Tensor group_norm(const Tensor& x, int64_t num_groups, const MaybeTensor& weight,
                  const MaybeTensor& bias, double eps, std::optional<c10::string_view> activation,
                  double weight_offset, std::optional<at::ScalarType> out_dtype);

// The same with a residual: y and sum.
using WithSum = std::tuple<Tensor, Tensor>;
WithSum add_layer_norm(const Tensor& x, const Tensor& residual,
                       c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                       const MaybeTensor& bias, double eps,
                       std::optional<c10::string_view> activation, double weight_offset,
                       std::optional<at::ScalarType> sum_dtype,
                       std::optional<at::ScalarType> out_dtype);
WithSum add_rms_norm(const Tensor& x, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                     const MaybeTensor& weight, std::optional<double> eps,
                     std::optional<c10::string_view> activation, double weight_offset,
                     std::optional<c10::string_view> casting,
                     std::optional<at::ScalarType> sum_dtype,
                     std::optional<at::ScalarType> out_dtype);

// The same with a scale and a shift; without a residual the sum is empty.
WithSum modulated_layer_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                             const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                             const MaybeTensor& scale, const MaybeTensor& shift,
                             std::optional<c10::string_view> activation, double weight_offset,
                             const MaybeTensor& residual, std::optional<at::ScalarType> sum_dtype,
                             std::optional<at::ScalarType> out_dtype);
WithSum modulated_rms_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                           const MaybeTensor& weight, std::optional<double> eps,
                           const MaybeTensor& scale, const MaybeTensor& shift,
                           std::optional<c10::string_view> activation, double weight_offset,
                           std::optional<c10::string_view> casting, const MaybeTensor& residual,
                           std::optional<at::ScalarType> sum_dtype,
                           std::optional<at::ScalarType> out_dtype);

// module.cc: called before an operator meets a subclass of Tensor that is written in Python.
void before_subclass();

inline bool given(const MaybeTensor& tensor) { return tensor.has_value() && tensor->defined(); }

}  // namespace evenkeel::torch_binding
