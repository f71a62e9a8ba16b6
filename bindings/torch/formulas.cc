// The norms and their gradients written out in torch's own operations, which torch can differentiate
// any number of times, in reverse and in forward mode. Slower than the kernels: only for derivatives of
// derivatives and for tangents.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "evenkeel/evenkeel.h"
#include "norm.h"

namespace evenkeel::torch_binding {
namespace {

// Where GELU's tanh form ends: beyond, its slope is 0 or 1, and at::gelu_backward() overflows.
constexpr double kGeluTanhEnd = 24;

Tensor within_gelu_tanh(const Tensor& z) { return z.clamp(-kGeluTanhEnd, kGeluTanhEnd); }

Tensor activate(int64_t activation, const Tensor& z) {
  switch (activation) {
    case EK_ACTIVATION_SILU:
      return at::silu(z);
    case EK_ACTIVATION_RELU:
      return at::relu(z);
    case EK_ACTIVATION_GELU:
      return at::gelu(z);
    case EK_ACTIVATION_GELU_TANH:
      return at::where(z > kGeluTanhEnd, z, at::gelu(within_gelu_tanh(z), "tanh"));
    default:
      return z;
  }
}

// dy times the slope at z.
Tensor activation_gradient(int64_t activation, const Tensor& dy, const Tensor& z) {
  switch (activation) {
    case EK_ACTIVATION_SILU: {  // at::silu_backward() has no derivative
      const Tensor s = z.sigmoid();
      return dy * s * (1 + z * (1 - s));
    }
    case EK_ACTIVATION_RELU:
      return at::threshold_backward(dy, z, 0);
    case EK_ACTIVATION_GELU:
      return at::gelu_backward(dy, z);
    case EK_ACTIVATION_GELU_TANH:
      return at::gelu_backward(dy, within_gelu_tanh(z), "tanh");
    default:
      return dy;
  }
}

struct Formula {
  const Norm& norm;
  at::ScalarType compute;
  c10::SymDimVector shape;  // of x, and, split into groups, of what is normalized
  c10::SymDimVector grouped;
  std::vector<int64_t> dims;  // that are normalized, of `grouped`
  std::vector<int64_t> sums;  // over which parameter gradients are summed, of `shape`
  Tensor weight, bias;        // to be multiplied with `shape`; undefined where absent
  Tensor factor, shift;       // 1 + scale, and the shift, likewise
  Tensor rstd, normalized;    // of x; normalized has `shape`

  Formula(const Tensor& x, const MaybeTensor& given_weight, const MaybeTensor& given_bias,
          const Norm& n, const std::optional<Modulated>& modulated)
      : norm(n), shape(x.sym_sizes().begin(), x.sym_sizes().end()) {
    bool wide = x.scalar_type() == at::kDouble;
    const MaybeTensor none, &scale = modulated ? modulated->scale : none,
                            &given_shift = modulated ? modulated->shift : none;
    for (const MaybeTensor& parameter : {given_weight, given_bias, scale, given_shift})
      wide = wide || (given(parameter) && parameter->scalar_type() == at::kDouble);
    compute = wide ? at::kDouble : at::kFloat;
    if (norm.is_group_norm()) {
      c10::SymInt group = shape[1] / norm.span;
      for (size_t i = 2; i < shape.size(); ++i) group *= shape[i];
      grouped = {shape[0], norm.span, group};
      dims = {2};
      for (int64_t i = 0; i < x.dim(); ++i)
        if (i != 1) sums.push_back(i);
    } else {
      grouped = shape;
      for (int64_t i = 0; i < x.dim(); ++i) (i < x.dim() - norm.span ? sums : dims).push_back(i);
    }
    if (given(given_weight)) weight = spread(*given_weight) + norm.weight_offset;
    if (given(given_bias)) bias = spread(*given_bias);
    if (given(scale)) factor = 1 + scale->to(compute);
    if (given(given_shift)) shift = given_shift->to(compute);
    Tensor value = x.to(compute).reshape_symint(grouped);
    if (norm.centers()) value = value - value.mean(dims, /*keepdim=*/true);
    rstd = (value.square().mean(dims, /*keepdim=*/true) + norm.eps).rsqrt();
    normalized = (value * rstd).reshape_symint(shape);
  }

  // A parameter over all elements.
  Tensor spread(const Tensor& parameter) const {
    const Tensor wide = parameter.to(compute);
    if (!norm.is_group_norm()) return wide;
    std::vector<int64_t> sizes(shape.size(), 1);
    sizes[1] = -1;
    return wide.view(sizes);
  }

  Tensor cast(const Tensor& x) const {
    return norm.casting == EK_CASTING_LLAMA ? normalized.to(x.scalar_type()).to(compute)
                                            : normalized;
  }

  Tensor before_modulation(const Tensor& x) const {
    Tensor z = cast(x);
    if (weight.defined()) z = z * weight;
    if (bias.defined()) z = z + bias;
    return z;
  }

  Tensor before_activation(const Tensor& x) const {
    Tensor z = before_modulation(x);
    if (factor.defined()) z = z * factor;
    if (shift.defined()) z = z + shift;
    return z;
  }

  // In memory as the kernels leave their results.
  Tensor laid_out(const Tensor& result, const Tensor& x) const {
    if (!norm.is_group_norm()) return result.contiguous(format_of_rows(x, norm));
    if (!channels_last(x)) return result.contiguous();
    return result.movedim(1, -1).contiguous().movedim(-1, 1);
  }

  // The sum of a gradient over everything but its parameter's dimensions.
  Tensor fold(const Tensor& gradient, const Tensor& parameter) const {
    const Tensor sum = sums.empty() ? gradient : gradient.sum(sums);
    return sum.reshape_symint(parameter.sym_sizes()).to(parameter.scalar_type());
  }
};

}  // namespace

Result formula_forward(const ForwardCall& call) {
  Result result;
  if (call.added) {
    const auto& [residual, dtype] = *call.added;
    const at::ScalarType compute = dtype == at::kDouble ? at::kDouble : at::kFloat;
    result.sum = (call.x.to(compute) + residual.to(compute)).to(dtype);
    result.sum = result.sum.contiguous(format_of_rows(call.x, call.norm));
  }
  const Tensor& x = call.added ? result.sum : call.x;
  const Formula f(x, call.weight, call.bias, call.norm, call.modulated);
  const Tensor y = activate(call.norm.activation, f.before_activation(x));
  result.y = f.laid_out(y.to(call.out_dtype), x);
  return result;
}

Gradients formula_backward(const BackwardCall& call) {
  const auto& [dy, x, weight, bias, mean, rstd, norm, wanted, added, modulated] = call;
  const Formula f(x, weight, bias, norm, modulated);
  Tensor dz = dy.to(f.compute);
  if (norm.activation != EK_ACTIVATION_NONE)
    dz = activation_gradient(norm.activation, dz, f.before_activation(x));
  Gradients result;
  const auto nothing = [&](const MaybeTensor& like) {
    return at::empty({0}, given(like) ? like->options() : x.options());
  };
  if (modulated) {
    // Scale and shift are broadcast, so their gradients are summed.
    const auto of_samples = [&](const Tensor& terms, const MaybeTensor& like, bool want) {
      if (!want) return nothing(like);
      return terms.sum_to_size_symint(like->sym_sizes()).to(like->scalar_type());
    };
    result.dscale =
        of_samples(wanted[4] ? dz * f.before_modulation(x) : dz, modulated->scale, wanted[4]);
    result.dshift = of_samples(dz, modulated->shift, wanted[5]);
    if (f.factor.defined()) dz = dz * f.factor;
  }
  Tensor gradient;
  if (wanted[0] || wanted[3]) {
    const Tensor g = (f.weight.defined() ? dz * f.weight : dz).reshape_symint(f.grouped);
    const Tensor n = f.normalized.reshape_symint(f.grouped);
    Tensor dx = g - n * (g * n).mean(f.dims, /*keepdim=*/true);
    if (norm.centers()) dx = dx - g.mean(f.dims, /*keepdim=*/true);
    gradient = (dx * f.rstd).reshape_symint(f.shape);
    if (added && given(added->dsum)) gradient = gradient + added->dsum->to(f.compute);
  }
  const auto in_dtype = [&](at::ScalarType dtype, bool want) {
    return want ? f.laid_out(gradient.to(dtype), x) : at::empty({0}, x.options().dtype(dtype));
  };
  result.dx = in_dtype(call.dx_dtype(), wanted[0]);
  if (added) result.dresidual = in_dtype(added->residual_dtype, wanted[3]);
  result.dweight = wanted[1] ? f.fold(dz * f.cast(x), *weight) : nothing(weight);
  result.dbias = wanted[2] ? f.fold(dz, *bias) : nothing(bias);
  return result;
}

}  // namespace evenkeel::torch_binding
