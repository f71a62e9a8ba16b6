// The operators: three public ones, with the meaning of torch.nn.functional's, and two internal ones
// that every other part of torch (autograd, autocast, meta tensors, compile, DTensor) meets. Those
// that take a residual have operators beside them, called add_..., since a schema has a fixed number of
// results: the internal ones end with what the residual adds to arguments and results.
//
// The public ones check their arguments and are composed of the internal ones, so that there is one
// place for each error message. Messages name the argument, what it was and what is allowed.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "evenkeel/evenkeel.h"
#include "norm.h"

namespace evenkeel::torch_binding {
namespace {

// ---- the internal operators ----

constexpr const char* kForward =
    "forward(Tensor x, Tensor? weight, Tensor? bias, int op, int span, float eps, int activation, "
    "int casting, float weight_offset, ScalarType out_dtype, bool statistics) "
    "-> (Tensor y, Tensor mean, Tensor rstd)";
constexpr const char* kBackward =
    "backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, int op, "
    "int span, float eps, int activation, int casting, float weight_offset, bool[3] wanted) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)";
constexpr const char* kAddForward =
    "add_forward(Tensor x, Tensor? weight, Tensor? bias, int op, int span, float eps, "
    "int activation, int casting, float weight_offset, ScalarType out_dtype, bool statistics, "
    "Tensor residual, ScalarType sum_dtype) -> (Tensor y, Tensor mean, Tensor rstd, Tensor sum)";
// x is the sum here.
constexpr const char* kAddBackward =
    "add_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "int op, int span, float eps, int activation, int casting, float weight_offset, "
    "bool[4] wanted, Tensor? dsum, ScalarType x_dtype, ScalarType residual_dtype) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual)";

// y in 8 bits, forward only. scale_of_rows is empty with a scale, and sum without a residual.
constexpr const char* kQuantizedForward =
    "quantized_forward(Tensor x, Tensor? weight, Tensor? bias, int op, int span, float eps, "
    "int activation, int casting, float weight_offset, ScalarType out_dtype, Tensor? scale, "
    "float amax_bound, Tensor? residual, ScalarType sum_dtype) "
    "-> (Tensor y, Tensor scale_of_rows, Tensor sum)";

// With a scale and a shift. Residual and dsum may be absent; then the sum is empty, and so are gradients that are not
// wanted. sum_dtype, x_dtype and residual_dtype count with a residual.
constexpr const char* kModulatedForward =
    "modulated_forward(Tensor x, Tensor? weight, Tensor? bias, int op, int span, float eps, "
    "int activation, int casting, float weight_offset, ScalarType out_dtype, bool statistics, "
    "Tensor? scale, Tensor? shift, Tensor? residual, ScalarType sum_dtype) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum)";
constexpr const char* kModulatedBackward =
    "modulated_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, "
    "Tensor rstd, int op, int span, float eps, int activation, int casting, float weight_offset, "
    "bool[6] wanted, Tensor? scale, Tensor? shift, Tensor? dsum, ScalarType x_dtype, "
    "ScalarType residual_dtype) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, "
    "Tensor dscale, Tensor dshift)";

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

using Forward = Three(const Tensor&, const MaybeTensor&, const MaybeTensor&, int64_t, int64_t,
                      double, int64_t, int64_t, double, at::ScalarType, bool);
using Backward = Three(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                       const Tensor&, const Tensor&, int64_t, int64_t, double, int64_t, int64_t,
                       double, std::array<bool, 3>);
using AddForward = Four(const Tensor&, const MaybeTensor&, const MaybeTensor&, int64_t, int64_t,
                        double, int64_t, int64_t, double, at::ScalarType, bool, const Tensor&,
                        at::ScalarType);
using AddBackward = Four(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                         const Tensor&, const Tensor&, int64_t, int64_t, double, int64_t, int64_t,
                         double, std::array<bool, 4>, const MaybeTensor&, at::ScalarType,
                         at::ScalarType);
using ModulatedForward = Four(const Tensor&, const MaybeTensor&, const MaybeTensor&, int64_t,
                              int64_t, double, int64_t, int64_t, double, at::ScalarType, bool,
                              const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                              at::ScalarType);
using ModulatedBackward = Six(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                              const Tensor&, const Tensor&, int64_t, int64_t, double, int64_t,
                              int64_t, double, Wanted, const MaybeTensor&, const MaybeTensor&,
                              const MaybeTensor&, at::ScalarType, at::ScalarType);

using QuantizedForward = Three(const Tensor&, const MaybeTensor&, const MaybeTensor&, int64_t,
                               int64_t, double, int64_t, int64_t, double, at::ScalarType,
                               const MaybeTensor&, double, const MaybeTensor&, at::ScalarType);

// A forward operator of the schema above, made of one with a ForwardCall.
template <auto kRun>
Three forward(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t op,
              int64_t span, double eps, int64_t activation, int64_t casting, double weight_offset,
              at::ScalarType out_dtype, bool statistics) {
  Result r = kRun(ForwardCall{
      x, weight, bias, {op, span, eps, activation, casting, weight_offset}, out_dtype, statistics});
  return {std::move(r.y), std::move(r.mean), std::move(r.rstd)};
}

template <auto kRun>
Three backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
               const MaybeTensor& bias, const Tensor& mean, const Tensor& rstd, int64_t op,
               int64_t span, double eps, int64_t activation, int64_t casting, double weight_offset,
               std::array<bool, 3> wanted) {
  Gradients g = kRun(BackwardCall{dy,
                                  x,
                                  weight,
                                  bias,
                                  mean,
                                  rstd,
                                  {op, span, eps, activation, casting, weight_offset},
                                  {wanted[0], wanted[1], wanted[2]}});
  return {std::move(g.dx), std::move(g.dweight), std::move(g.dbias)};
}

template <auto kRun>
Four add_forward(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t op,
                 int64_t span, double eps, int64_t activation, int64_t casting,
                 double weight_offset, at::ScalarType out_dtype, bool statistics,
                 const Tensor& residual, at::ScalarType sum_dtype) {
  Result r = kRun(ForwardCall{x,
                              weight,
                              bias,
                              {op, span, eps, activation, casting, weight_offset},
                              out_dtype,
                              statistics,
                              Added{residual, sum_dtype}});
  return {std::move(r.y), std::move(r.mean), std::move(r.rstd), std::move(r.sum)};
}

template <auto kRun>
Three quantized_forward(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                        int64_t op, int64_t span, double eps, int64_t activation, int64_t casting,
                        double weight_offset, at::ScalarType out_dtype, const MaybeTensor& scale,
                        double amax_bound, const MaybeTensor& residual, at::ScalarType sum_dtype) {
  ForwardCall call{x,         weight, bias, {op, span, eps, activation, casting, weight_offset},
                   out_dtype, false};
  if (given(residual)) call.added.emplace(Added{*residual, sum_dtype});
  call.quantized.emplace(Quantized{scale, amax_bound});
  Result r = kRun(call);
  if (!r.sum.defined()) r.sum = at::empty_symint({0}, x.options().dtype(sum_dtype));
  return {std::move(r.y), std::move(r.row_scale), std::move(r.sum)};
}

template <auto kRun>
Four add_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                  const MaybeTensor& bias, const Tensor& mean, const Tensor& rstd, int64_t op,
                  int64_t span, double eps, int64_t activation, int64_t casting,
                  double weight_offset, std::array<bool, 4> wanted, const MaybeTensor& dsum,
                  at::ScalarType x_dtype, at::ScalarType residual_dtype) {
  Gradients g = kRun(BackwardCall{dy,
                                  x,
                                  weight,
                                  bias,
                                  mean,
                                  rstd,
                                  {op, span, eps, activation, casting, weight_offset},
                                  {wanted[0], wanted[1], wanted[2], wanted[3]},
                                  AddedGradient{dsum, x_dtype, residual_dtype}});
  return {std::move(g.dx), std::move(g.dweight), std::move(g.dbias), std::move(g.dresidual)};
}

template <auto kRun>
Four modulated_forward(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                       int64_t op, int64_t span, double eps, int64_t activation, int64_t casting,
                       double weight_offset, at::ScalarType out_dtype, bool statistics,
                       const MaybeTensor& scale, const MaybeTensor& shift,
                       const MaybeTensor& residual, at::ScalarType sum_dtype) {
  ForwardCall call{x,         weight,    bias, {op, span, eps, activation, casting, weight_offset},
                   out_dtype, statistics};
  if (given(residual)) call.added.emplace(Added{*residual, sum_dtype});
  call.modulated.emplace(Modulated{scale, shift});
  Result r = kRun(call);
  if (!r.sum.defined()) r.sum = at::empty_symint({0}, x.options().dtype(sum_dtype));
  return {std::move(r.y), std::move(r.mean), std::move(r.rstd), std::move(r.sum)};
}

template <auto kRun>
Six modulated_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                       const MaybeTensor& bias, const Tensor& mean, const Tensor& rstd, int64_t op,
                       int64_t span, double eps, int64_t activation, int64_t casting,
                       double weight_offset, Wanted wanted, const MaybeTensor& scale,
                       const MaybeTensor& shift, const MaybeTensor& dsum, at::ScalarType x_dtype,
                       at::ScalarType residual_dtype) {
  Gradients g = kRun(BackwardCall{dy,
                                  x,
                                  weight,
                                  bias,
                                  mean,
                                  rstd,
                                  {op, span, eps, activation, casting, weight_offset},
                                  wanted,
                                  AddedGradient{dsum, x_dtype, residual_dtype},
                                  Modulated{scale, shift}});
  return {std::move(g.dx),        std::move(g.dweight), std::move(g.dbias),
          std::move(g.dresidual), std::move(g.dscale),  std::move(g.dshift)};
}

// ---- checks of the public operators ----

template <class... Parts>
std::string text(const Parts&... parts) {
  return c10::str("evenkeel: ", parts...);
}

std::string kind_of(const Tensor& tensor) {
  if (tensor.is_quantized()) return "quantized";
  if (tensor.is_nested()) return "nested (layer_norm and rms_norm take the layout torch.jagged)";
  return c10::str(tensor.layout());
}

bool is_computed(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

void check_tensor(const char* name, const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested(),
      text(name, " must be a dense tensor, but is ", kind_of(tensor)));
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_computed(type),
      text(name, " must be float64, float32, float16 or bfloat16, but is ", type));
}

// whose: the shape is.
void check_beside(const char* name, const Tensor& tensor, const Tensor& x,
                  c10::SymIntArrayRef shape, const char* whose = "") {
  check_tensor(name, tensor);
  TORCH_CHECK(tensor.sym_sizes().equals(shape),
              text(name, " must have the shape ", shape, whose, ", but has ", tensor.sym_sizes()));
  TORCH_CHECK(tensor.device() == x.device(),
              text("Expected all tensors on one device: ", name, " is on ", tensor.device(),
                   ", but x is on ", x.device()));
}

void check_parameter(const char* name, const MaybeTensor& parameter, const Tensor& x,
                     c10::SymIntArrayRef shape) {
  if (given(parameter)) check_beside(name, *parameter, x, shape);
}

void check_eps(double eps) {
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps),
                    text("eps must be finite and not negative, but is ", eps));
}

void check_offset(double offset, const MaybeTensor& weight) {
  TORCH_CHECK_VALUE(std::isfinite(offset), text("weight_offset must be finite, but is ", offset));
  TORCH_CHECK_VALUE(offset == 0 || given(weight),
                    text("weight_offset is ", offset, ", but there is no weight to add it to"));
}

int64_t activation_of(const std::optional<std::string_view>& name) {
  if (!name || *name == "none") return EK_ACTIVATION_NONE;
  if (*name == "silu") return EK_ACTIVATION_SILU;
  if (*name == "relu") return EK_ACTIVATION_RELU;
  if (*name == "gelu") return EK_ACTIVATION_GELU;
  TORCH_CHECK_VALUE(
      *name == "gelu_tanh",
      text("activation must be None, 'silu', 'relu', 'gelu' or 'gelu_tanh', but is '", *name, "'"));
  return EK_ACTIVATION_GELU_TANH;
}

int64_t casting_of(const std::optional<std::string_view>& name) {
  if (!name || *name == "none") return EK_CASTING_NONE;
  TORCH_CHECK_VALUE(*name == "llama" || *name == "gemma",
                    text("casting must be None, 'llama' or 'gemma', but is '", *name, "'"));
  return *name == "llama" ? EK_CASTING_LLAMA : EK_CASTING_GEMMA;
}

// The dtype of a result: what the argument `name` says, or that of `like`.
at::ScalarType result_dtype(const char* name, const std::optional<at::ScalarType>& wanted,
                            const Tensor& like) {
  const at::ScalarType type = wanted.value_or(like.scalar_type());
  TORCH_CHECK_VALUE(is_computed(type),
                    text(name, " must be float64, float32, float16 or bfloat16, but is ", type));
  return type;
}

Added checked_residual(const Tensor& x, const Tensor& residual,
                       const std::optional<at::ScalarType>& sum_dtype) {
  check_beside("residual", residual, x, x.sym_sizes(), " of x");
  const at::ScalarType type = result_dtype("sum_dtype", sum_dtype, residual);
  const bool wide = x.scalar_type() == at::kDouble || residual.scalar_type() == at::kDouble;
  TORCH_CHECK_VALUE(!wide || type == at::kDouble,
                    text("sum_dtype must be float64 where x or residual is, but is ", type,
                         sum_dtype ? "" : ", residual's", ", and x is ", x.scalar_type(),
                         ", residual ", residual.scalar_type()));
  return {residual, type};
}

void check_rows(const Tensor& x, c10::SymIntArrayRef shape) {
  check_tensor("x", x);
  TORCH_CHECK(!shape.empty(), text("normalized_shape must have at least one dimension, but is []"));
  const auto sizes = x.sym_sizes();
  TORCH_CHECK(
      sizes.size() >= shape.size() && sizes.slice(sizes.size() - shape.size()).equals(shape),
      text("x must end with the dimensions of normalized_shape ", shape, ", but has the shape ",
           sizes));
}

bool is_subclass(const MaybeTensor& tensor) {
  return given(tensor) && tensor->unsafeGetTensorImpl()->is_python_dispatch();
}

Result run(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Norm& norm,
           const std::optional<at::ScalarType>& out_dtype,
           const std::optional<Added>& added = std::nullopt,
           const std::optional<Modulated>& modulated = std::nullopt) {
  if (is_subclass(x) || is_subclass(weight) || is_subclass(bias) ||
      (added && is_subclass(added->residual)) ||
      (modulated && (is_subclass(modulated->scale) || is_subclass(modulated->shift))))
    before_subclass();
  const at::ScalarType dtype = result_dtype("out_dtype", out_dtype, x);
  return call_forward(
      {x, weight, bias, norm, dtype, /*statistics=*/false, added, std::nullopt, modulated});
}

Norm checked_layer_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                        const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                        const std::optional<c10::string_view>& activation, double weight_offset) {
  check_rows(x, normalized_shape);
  check_parameter("weight", weight, x, normalized_shape);
  check_parameter("bias", bias, x, normalized_shape);
  check_eps(eps);
  check_offset(weight_offset, weight);
  return {EK_LAYER_NORM,
          static_cast<int64_t>(normalized_shape.size()),
          eps,
          activation_of(activation),
          EK_CASTING_NONE,
          weight_offset};
}

Norm checked_rms_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                      const MaybeTensor& weight, double eps,
                      const std::optional<c10::string_view>& activation, double weight_offset,
                      const std::optional<c10::string_view>& casting) {
  TORCH_CHECK_VALUE(x.dim() >= static_cast<int64_t>(normalized_shape.size()),
                    text("x must have at least the dimensions of normalized_shape ",
                         normalized_shape, ", but has the shape ", x.sym_sizes()));
  check_rows(x, normalized_shape);
  check_parameter("weight", weight, x, normalized_shape);
  check_eps(eps);
  check_offset(weight_offset, weight);
  return {EK_RMS_NORM,
          static_cast<int64_t>(normalized_shape.size()),
          eps,
          activation_of(activation),
          casting_of(casting),
          weight_offset};
}

// That of x, or of the sum with a residual.
at::ScalarType normalized_dtype(const Tensor& x, const MaybeTensor& residual,
                                const std::optional<at::ScalarType>& sum_dtype) {
  return sum_dtype.value_or(given(residual) ? residual->scalar_type() : x.scalar_type());
}

// torch's: of the type that it computes in, for what is normalized.
double default_eps(at::ScalarType normalized) {
  return normalized == at::kDouble ? std::numeric_limits<double>::epsilon()
                                   : std::numeric_limits<float>::epsilon();
}

// ---- the public operators, composed ----

Tensor layer_norm_of_rows(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                          const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                          std::optional<c10::string_view> activation, double weight_offset,
                          std::optional<at::ScalarType> out_dtype) {
  const Norm norm =
      checked_layer_norm(x, normalized_shape, weight, bias, eps, activation, weight_offset);
  return run(x, weight, bias, norm, out_dtype).y;
}

WithSum add_layer_norm_of_rows(const Tensor& x, const Tensor& residual,
                               c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                               const MaybeTensor& bias, double eps,
                               std::optional<c10::string_view> activation, double weight_offset,
                               std::optional<at::ScalarType> sum_dtype,
                               std::optional<at::ScalarType> out_dtype) {
  const Norm norm =
      checked_layer_norm(x, normalized_shape, weight, bias, eps, activation, weight_offset);
  Result r = run(x, weight, bias, norm, out_dtype, checked_residual(x, residual, sum_dtype));
  return {std::move(r.y), std::move(r.sum)};
}

Tensor rms_norm_of_rows(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                        const MaybeTensor& weight, std::optional<double> eps,
                        std::optional<c10::string_view> activation, double weight_offset,
                        std::optional<c10::string_view> casting,
                        std::optional<at::ScalarType> out_dtype) {
  const double least = eps.value_or(default_eps(x.scalar_type()));
  const Norm norm =
      checked_rms_norm(x, normalized_shape, weight, least, activation, weight_offset, casting);
  return run(x, weight, std::nullopt, norm, out_dtype).y;
}

WithSum add_rms_norm_of_rows(const Tensor& x, const Tensor& residual,
                             c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                             std::optional<double> eps, std::optional<c10::string_view> activation,
                             double weight_offset, std::optional<c10::string_view> casting,
                             std::optional<at::ScalarType> sum_dtype,
                             std::optional<at::ScalarType> out_dtype) {
  const double least = eps.value_or(default_eps(sum_dtype.value_or(residual.scalar_type())));
  const Norm norm =
      checked_rms_norm(x, normalized_shape, weight, least, activation, weight_offset, casting);
  Result r =
      run(x, weight, std::nullopt, norm, out_dtype, checked_residual(x, residual, sum_dtype));
  return {std::move(r.y), std::move(r.sum)};
}

Tensor group_norm_of_images(const Tensor& x, int64_t num_groups, const MaybeTensor& weight,
                            const MaybeTensor& bias, double eps,
                            std::optional<c10::string_view> activation, double weight_offset,
                            std::optional<at::ScalarType> out_dtype) {
  check_tensor("x", x);
  TORCH_CHECK(x.dim() >= 2, text("x must have at least 2 dimensions (samples, channels, ...), but "
                                 "has the shape ",
                                 x.sym_sizes()));
  const c10::SymInt channels = x.sym_size(1);
  TORCH_CHECK(num_groups > 0, text("num_groups must be positive, but is ", num_groups));
  TORCH_CHECK(channels % num_groups == 0,
              text("num_groups must divide the number of channels, but is ", num_groups,
                   ", and x has ", channels, " channels"));
  check_parameter("weight", weight, x, {channels});
  check_parameter("bias", bias, x, {channels});
  check_eps(eps);
  check_offset(weight_offset, weight);
  return run(x, weight, bias,
             {EK_GROUP_NORM, num_groups, eps, activation_of(activation), EK_CASTING_NONE,
              weight_offset},
             out_dtype)
      .y;
}

// ---- with a scale and a shift ----

// A scale or a shift with as many dimensions as x. Its samples are the first dimensions of x, as many as it has; ones,
// or nothing, stand for the others.
MaybeTensor checked_samples(const char* name, const MaybeTensor& tensor, const Tensor& x,
                            c10::SymIntArrayRef shape) {
  if (!given(tensor)) return std::nullopt;
  check_tensor(name, *tensor);
  const auto sizes = tensor->sym_sizes(), x_sizes = x.sym_sizes();
  const size_t leading = x_sizes.size() - shape.size();
  bool fits = sizes.size() >= shape.size() && sizes.size() <= x_sizes.size();
  fits = fits && sizes.slice(sizes.size() - shape.size()).equals(shape);
  std::vector<c10::SymInt> full(x_sizes.begin(), x_sizes.end());
  bool ones = false;  // from here on
  for (size_t i = 0; fits && i < leading; ++i) {
    full[i] = i < sizes.size() - shape.size() ? sizes[i] : c10::SymInt(1);
    const bool same = !ones && full[i] == x_sizes[i];
    ones = ones || !same;
    fits = same || full[i] == 1;
  }
  TORCH_CHECK(
      fits,
      text(name, " must have the dimensions ", shape,
           " of normalized_shape behind the first of the dimensions ", x_sizes.slice(0, leading),
           " of x, and 1 or nothing for the others of these, but has the shape ", sizes));
  TORCH_CHECK(tensor->device() == x.device(),
              text("Expected all tensors on one device: ", name, " is on ", tensor->device(),
                   ", but x is on ", x.device()));
  return sizes.size() == x_sizes.size() ? *tensor : tensor->view_symint(full);
}

WithSum run_modulated(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                      const MaybeTensor& weight, const MaybeTensor& bias, const Norm& norm,
                      const MaybeTensor& given_scale, const MaybeTensor& given_shift,
                      const MaybeTensor& residual, const std::optional<at::ScalarType>& sum_dtype,
                      const std::optional<at::ScalarType>& out_dtype) {
  TORCH_CHECK_VALUE(given(given_scale) || given(given_shift),
                    text("scale and shift are None, but one of them must be a tensor"));
  TORCH_CHECK_VALUE(given(residual) || !sum_dtype,
                    text("sum_dtype is ", sum_dtype.value_or(at::kFloat),
                         ", but there is no residual to add to x"));
  const MaybeTensor scale = checked_samples("scale", given_scale, x, normalized_shape);
  const MaybeTensor shift = checked_samples("shift", given_shift, x, normalized_shape);
  TORCH_CHECK(!scale || !shift || scale->sym_sizes().equals(shift->sym_sizes()),
              text("shift must have the samples of scale, whose shape is ",
                   given_scale->sym_sizes(), ", but has the shape ", given_shift->sym_sizes()));
  std::optional<Added> added;
  if (given(residual)) added.emplace(checked_residual(x, *residual, sum_dtype));
  Result r = run(x, weight, bias, norm, out_dtype, added, Modulated{scale, shift});
  return {std::move(r.y), std::move(r.sum)};
}

WithSum modulated_layer_norm_of_rows(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                                     const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                     const MaybeTensor& scale, const MaybeTensor& shift,
                                     std::optional<c10::string_view> activation,
                                     double weight_offset, const MaybeTensor& residual,
                                     std::optional<at::ScalarType> sum_dtype,
                                     std::optional<at::ScalarType> out_dtype) {
  const Norm norm =
      checked_layer_norm(x, normalized_shape, weight, bias, eps, activation, weight_offset);
  return run_modulated(x, normalized_shape, weight, bias, norm, scale, shift, residual, sum_dtype,
                       out_dtype);
}

WithSum modulated_rms_norm_of_rows(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                                   const MaybeTensor& weight, std::optional<double> eps,
                                   const MaybeTensor& scale, const MaybeTensor& shift,
                                   std::optional<c10::string_view> activation, double weight_offset,
                                   std::optional<c10::string_view> casting,
                                   const MaybeTensor& residual,
                                   std::optional<at::ScalarType> sum_dtype,
                                   std::optional<at::ScalarType> out_dtype) {
  const Norm norm =
      checked_rms_norm(x, normalized_shape, weight,
                       eps.value_or(default_eps(normalized_dtype(x, residual, sum_dtype))),
                       activation, weight_offset, casting);
  return run_modulated(x, normalized_shape, weight, std::nullopt, norm, scale, shift, residual,
                       sum_dtype, out_dtype);
}

// ---- the quantized ones ----

void check_quantization(const Tensor& x, at::ScalarType dtype, const MaybeTensor& scale,
                        const std::optional<double>& amax_bound) {
  TORCH_CHECK_VALUE(dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2 || dtype == at::kChar,
                    text("dtype must be float8_e4m3fn, float8_e5m2 or int8, but is ", dtype));
  if (given(scale)) {
    TORCH_CHECK_VALUE(scale->scalar_type() == at::kFloat,
                      text("scale must be float32, but is ", scale->scalar_type()));
    TORCH_CHECK_VALUE(scale->sym_numel() == 1,
                      text("scale must have one element, but has the shape ", scale->sym_sizes()));
    TORCH_CHECK(scale->device() == x.device(),
                text("Expected all tensors on one device: scale is on ", scale->device(),
                     ", but x is on ", x.device()));
  }
  if (!amax_bound) return;
  TORCH_CHECK_VALUE(*amax_bound > 0 && std::isfinite(*amax_bound),
                    text("amax_bound must be positive and finite, but is ", *amax_bound));
  TORCH_CHECK_VALUE(!given(scale),
                    text("amax_bound is ", *amax_bound,
                         ", but bounds the scales of rows only: there must be no scale"));
}

Three run_quantized(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                    const Norm& norm, at::ScalarType dtype, const MaybeTensor& scale,
                    const std::optional<double>& amax_bound, const MaybeTensor& residual,
                    const std::optional<at::ScalarType>& sum_dtype) {
  check_quantization(x, dtype, scale, amax_bound);
  TORCH_CHECK_VALUE(given(residual) || !sum_dtype,
                    text("sum_dtype is ", sum_dtype.value_or(at::kFloat),
                         ", but there is no residual to add to x"));
  ForwardCall call{x, weight, bias, norm, dtype, /*statistics=*/false};
  if (given(residual)) call.added.emplace(checked_residual(x, *residual, sum_dtype));
  call.quantized.emplace(Quantized{scale, amax_bound.value_or(0)});
  Result r = call_forward(call);
  return {std::move(r.y), std::move(r.row_scale), std::move(r.sum)};
}

Three quantized_layer_norm_of_rows(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                                   const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                   at::ScalarType dtype, const MaybeTensor& scale,
                                   std::optional<double> amax_bound,
                                   std::optional<c10::string_view> activation, double weight_offset,
                                   const MaybeTensor& residual,
                                   std::optional<at::ScalarType> sum_dtype) {
  const Norm norm =
      checked_layer_norm(x, normalized_shape, weight, bias, eps, activation, weight_offset);
  return run_quantized(x, weight, bias, norm, dtype, scale, amax_bound, residual, sum_dtype);
}

Three quantized_rms_norm_of_rows(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                                 const MaybeTensor& weight, std::optional<double> eps,
                                 at::ScalarType dtype, const MaybeTensor& scale,
                                 std::optional<double> amax_bound,
                                 std::optional<c10::string_view> activation, double weight_offset,
                                 std::optional<c10::string_view> casting,
                                 const MaybeTensor& residual,
                                 std::optional<at::ScalarType> sum_dtype) {
  const at::ScalarType normalized = normalized_dtype(x, residual, sum_dtype);
  const Norm norm =
      checked_rms_norm(x, normalized_shape, weight, eps.value_or(default_eps(normalized)),
                       activation, weight_offset, casting);
  return run_quantized(x, weight, std::nullopt, norm, dtype, scale, amax_bound, residual,
                       sum_dtype);
}

// ---- autocast ----

// Under autocast x and the parameters are read as they come, and y is written in autocast's type:
// no casts before the kernel. float64 stays what it is, as in all of torch. So does the sum with a
// residual: torch's addition knows no autocast.
template <at::DeviceType kDevice, c10::DispatchKey kKey, auto kPublic>
struct Autocast;

template <at::DeviceType kDevice, c10::DispatchKey kKey, class Answer, class... Arguments,
          Answer (*kPublic)(const Tensor&, Arguments...)>
struct Autocast<kDevice, kKey, kPublic> {
  static Answer run(const Tensor& x, Arguments... arguments) {
    const c10::impl::ExcludeDispatchKeyGuard off(kKey);
    std::optional<at::ScalarType>& out_dtype =
        std::get<sizeof...(Arguments) - 1>(std::tie(arguments...));
    if (!out_dtype && x.is_floating_point() && x.scalar_type() != at::kDouble)
      out_dtype = at::autocast::get_autocast_dtype(kDevice);
    return kPublic(x, arguments...);
  }
};

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Apart from call_forward and call_backward, so that calls without a residual do not pay for them.
[[gnu::noinline]] Result call_add_forward(const ForwardCall& call) {
  static const auto op = find<AddForward>("evenkeel::add_forward");
  const Norm& norm = call.norm;
  auto [y, mean, rstd, sum] =
      op.call(call.x, call.weight, call.bias, norm.op, norm.span, norm.eps, norm.activation,
              norm.casting, norm.weight_offset, call.out_dtype, call.statistics,
              call.added->residual, call.added->sum_dtype);
  return {std::move(y), std::move(mean), std::move(rstd), std::move(sum)};
}

[[gnu::noinline]] Result call_modulated_forward(const ForwardCall& call) {
  static const auto op = find<ModulatedForward>("evenkeel::modulated_forward");
  const Norm& norm = call.norm;
  const MaybeTensor residual =
      call.added ? MaybeTensor(call.added->residual) : MaybeTensor(std::nullopt);
  auto [y, mean, rstd, sum] =
      op.call(call.x, call.weight, call.bias, norm.op, norm.span, norm.eps, norm.activation,
              norm.casting, norm.weight_offset, call.out_dtype, call.statistics,
              call.modulated->scale, call.modulated->shift, residual, call.normalized_dtype());
  return {std::move(y), std::move(mean), std::move(rstd), std::move(sum)};
}

[[gnu::noinline]] Gradients call_modulated_backward(const BackwardCall& call) {
  static const auto op = find<ModulatedBackward>("evenkeel::modulated_backward");
  const Norm& norm = call.norm;
  const MaybeTensor none;
  auto [dx, dweight, dbias, dresidual, dscale, dshift] =
      op.call(call.dy, call.x, call.weight, call.bias, call.mean, call.rstd, norm.op, norm.span,
              norm.eps, norm.activation, norm.casting, norm.weight_offset, call.wanted,
              call.modulated->scale, call.modulated->shift, call.added ? call.added->dsum : none,
              call.dx_dtype(), call.added ? call.added->residual_dtype : call.dx_dtype());
  return {std::move(dx),        std::move(dweight), std::move(dbias),
          std::move(dresidual), std::move(dscale),  std::move(dshift)};
}

[[gnu::noinline]] Result call_quantized_forward(const ForwardCall& call) {
  static const auto op = find<QuantizedForward>("evenkeel::quantized_forward");
  const Norm& norm = call.norm;
  const MaybeTensor residual =
      call.added ? MaybeTensor(call.added->residual) : MaybeTensor(std::nullopt);
  auto [y, row_scale, sum] = op.call(
      call.x, call.weight, call.bias, norm.op, norm.span, norm.eps, norm.activation, norm.casting,
      norm.weight_offset, call.out_dtype, call.quantized->scale, call.quantized->amax_bound,
      residual, call.added ? call.added->sum_dtype : call.x.scalar_type());
  return {std::move(y), Tensor(), Tensor(), std::move(sum), std::move(row_scale)};
}

[[gnu::noinline]] Gradients call_add_backward(const BackwardCall& call) {
  static const auto op = find<AddBackward>("evenkeel::add_backward");
  const Norm& norm = call.norm;
  auto [dx, dweight, dbias, dresidual] =
      op.call(call.dy, call.x, call.weight, call.bias, call.mean, call.rstd, norm.op, norm.span,
              norm.eps, norm.activation, norm.casting, norm.weight_offset,
              {call.wanted[0], call.wanted[1], call.wanted[2], call.wanted[3]}, call.added->dsum,
              call.added->x_dtype, call.added->residual_dtype);
  return {std::move(dx), std::move(dweight), std::move(dbias), std::move(dresidual)};
}

}  // namespace

Result call_forward(const ForwardCall& call) {
  if (call.quantized) return call_quantized_forward(call);
  if (call.modulated) return call_modulated_forward(call);
  if (call.added) return call_add_forward(call);
  static const auto op = find<Forward>("evenkeel::forward");
  const Norm& norm = call.norm;
  auto [y, mean, rstd] =
      op.call(call.x, call.weight, call.bias, norm.op, norm.span, norm.eps, norm.activation,
              norm.casting, norm.weight_offset, call.out_dtype, call.statistics);
  return {std::move(y), std::move(mean), std::move(rstd), Tensor()};
}

Gradients call_backward(const BackwardCall& call) {
  if (call.modulated) return call_modulated_backward(call);
  if (call.added) return call_add_backward(call);
  static const auto op = find<Backward>("evenkeel::backward");
  const Norm& norm = call.norm;
  auto [dx, dweight, dbias] =
      op.call(call.dy, call.x, call.weight, call.bias, call.mean, call.rstd, norm.op, norm.span,
              norm.eps, norm.activation, norm.casting, norm.weight_offset,
              {call.wanted[0], call.wanted[1], call.wanted[2]});
  return {std::move(dx), std::move(dweight), std::move(dbias), Tensor()};
}

Tensor layer_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                  const MaybeTensor& bias, double eps, std::optional<c10::string_view> activation,
                  double weight_offset, std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(layer_norm_of_rows)>("evenkeel::layer_norm");
  return op.call(x, normalized_shape, weight, bias, eps, activation, weight_offset, out_dtype);
}

Tensor rms_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                std::optional<double> eps, std::optional<c10::string_view> activation,
                double weight_offset, std::optional<c10::string_view> casting,
                std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(rms_norm_of_rows)>("evenkeel::rms_norm");
  return op.call(x, normalized_shape, weight, eps, activation, weight_offset, casting, out_dtype);
}

Tensor group_norm(const Tensor& x, int64_t num_groups, const MaybeTensor& weight,
                  const MaybeTensor& bias, double eps, std::optional<c10::string_view> activation,
                  double weight_offset, std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(group_norm_of_images)>("evenkeel::group_norm");
  return op.call(x, num_groups, weight, bias, eps, activation, weight_offset, out_dtype);
}

WithSum add_layer_norm(const Tensor& x, const Tensor& residual,
                       c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                       const MaybeTensor& bias, double eps,
                       std::optional<c10::string_view> activation, double weight_offset,
                       std::optional<at::ScalarType> sum_dtype,
                       std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(add_layer_norm_of_rows)>("evenkeel::add_layer_norm");
  return op.call(x, residual, normalized_shape, weight, bias, eps, activation, weight_offset,
                 sum_dtype, out_dtype);
}

WithSum add_rms_norm(const Tensor& x, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                     const MaybeTensor& weight, std::optional<double> eps,
                     std::optional<c10::string_view> activation, double weight_offset,
                     std::optional<c10::string_view> casting,
                     std::optional<at::ScalarType> sum_dtype,
                     std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(add_rms_norm_of_rows)>("evenkeel::add_rms_norm");
  return op.call(x, residual, normalized_shape, weight, eps, activation, weight_offset, casting,
                 sum_dtype, out_dtype);
}

WithSum modulated_layer_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                             const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                             const MaybeTensor& scale, const MaybeTensor& shift,
                             std::optional<c10::string_view> activation, double weight_offset,
                             const MaybeTensor& residual, std::optional<at::ScalarType> sum_dtype,
                             std::optional<at::ScalarType> out_dtype) {
  static const auto op =
      find<decltype(modulated_layer_norm_of_rows)>("evenkeel::modulated_layer_norm");
  return op.call(x, normalized_shape, weight, bias, eps, scale, shift, activation, weight_offset,
                 residual, sum_dtype, out_dtype);
}

WithSum modulated_rms_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                           const MaybeTensor& weight, std::optional<double> eps,
                           const MaybeTensor& scale, const MaybeTensor& shift,
                           std::optional<c10::string_view> activation, double weight_offset,
                           std::optional<c10::string_view> casting, const MaybeTensor& residual,
                           std::optional<at::ScalarType> sum_dtype,
                           std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(modulated_rms_norm_of_rows)>("evenkeel::modulated_rms_norm");
  return op.call(x, normalized_shape, weight, eps, scale, shift, activation, weight_offset, casting,
                 residual, sum_dtype, out_dtype);
}

TORCH_LIBRARY(evenkeel, m) {
  for (const char* schema : {kForward, kBackward, kAddForward, kAddBackward, kModulatedForward,
                             kModulatedBackward, kQuantizedForward})
    m.def(schema, {at::Tag::pt2_compliant_tag});
  m.def(
      "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-05, *, str? activation=None, float weight_offset=0., "
      "ScalarType? out_dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *, "
      "str? activation=None, float weight_offset=0., str? casting=None, "
      "ScalarType? out_dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "layer_norm_quantized(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, ScalarType dtype, Tensor? scale=None, "
      "float? amax_bound=None, str? activation=None, float weight_offset=0., "
      "Tensor? residual=None, ScalarType? sum_dtype=None) "
      "-> (Tensor y, Tensor scale_of_rows, Tensor sum)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "rms_norm_quantized(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, ScalarType dtype, Tensor? scale=None, float? amax_bound=None, "
      "str? activation=None, float weight_offset=0., str? casting=None, Tensor? residual=None, "
      "ScalarType? sum_dtype=None) -> (Tensor y, Tensor scale_of_rows, Tensor sum)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "group_norm(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-05, *, str? activation=None, float weight_offset=0., "
      "ScalarType? out_dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, str? activation=None, float weight_offset=0., "
      "ScalarType? sum_dtype=None, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, str? activation=None, float weight_offset=0., str? casting=None, "
      "ScalarType? sum_dtype=None, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "modulated_layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, Tensor? scale=None, Tensor? shift=None, "
      "str? activation=None, float weight_offset=0., Tensor? residual=None, "
      "ScalarType? sum_dtype=None, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "modulated_rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, Tensor? scale=None, Tensor? shift=None, str? activation=None, "
      "float weight_offset=0., str? casting=None, Tensor? residual=None, "
      "ScalarType? sum_dtype=None, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum)",
      {at::Tag::pt2_compliant_tag});
}

#define EVENKEEL_KERNELS(key, run_forward, run_backward)             \
  TORCH_LIBRARY_IMPL(evenkeel, key, m) {                             \
    m.impl("forward", &forward<run_forward>);                        \
    m.impl("backward", &backward<run_backward>);                     \
    m.impl("add_forward", &add_forward<run_forward>);                \
    m.impl("add_backward", &add_backward<run_backward>);             \
    m.impl("modulated_forward", &modulated_forward<run_forward>);    \
    m.impl("modulated_backward", &modulated_backward<run_backward>); \
  }
EVENKEEL_KERNELS(CPU, run_forward, run_backward)
EVENKEEL_KERNELS(CUDA, run_forward, run_backward)
EVENKEEL_KERNELS(Meta, meta_forward, meta_backward)
EVENKEEL_KERNELS(Autograd, differentiable_forward, differentiable_backward)

#define EVENKEEL_QUANTIZED(key, run) \
  TORCH_LIBRARY_IMPL(evenkeel, key, m) { m.impl("quantized_forward", &quantized_forward<run>); }
EVENKEEL_QUANTIZED(CPU, run_forward)
EVENKEEL_QUANTIZED(CUDA, run_forward)
EVENKEEL_QUANTIZED(Meta, meta_forward)
EVENKEEL_QUANTIZED(Autograd, refused_forward)

#define EVENKEEL_COMPOSED(key)                                     \
  TORCH_LIBRARY_IMPL(evenkeel, key, m) {                           \
    m.impl("layer_norm", &layer_norm_of_rows);                     \
    m.impl("rms_norm", &rms_norm_of_rows);                         \
    m.impl("group_norm", &group_norm_of_images);                   \
    m.impl("add_layer_norm", &add_layer_norm_of_rows);             \
    m.impl("add_rms_norm", &add_rms_norm_of_rows);                 \
    m.impl("modulated_layer_norm", &modulated_layer_norm_of_rows); \
    m.impl("modulated_rms_norm", &modulated_rms_norm_of_rows);     \
    m.impl("layer_norm_quantized", &quantized_layer_norm_of_rows); \
    m.impl("rms_norm_quantized", &quantized_rms_norm_of_rows);     \
  }
EVENKEEL_COMPOSED(CompositeImplicitAutograd)
EVENKEEL_COMPOSED(FuncTorchBatchedDecomposition)  // under vmap

#define EVENKEEL_AUTOCAST(device, key)                                                        \
  TORCH_LIBRARY_IMPL(evenkeel, key, m) {                                                      \
    m.impl("layer_norm", &Autocast<device, c10::DispatchKey::key, &layer_norm>::run);         \
    m.impl("rms_norm", &Autocast<device, c10::DispatchKey::key, &rms_norm>::run);             \
    m.impl("group_norm", &Autocast<device, c10::DispatchKey::key, &group_norm>::run);         \
    m.impl("add_layer_norm", &Autocast<device, c10::DispatchKey::key, &add_layer_norm>::run); \
    m.impl("add_rms_norm", &Autocast<device, c10::DispatchKey::key, &add_rms_norm>::run);     \
    m.impl("modulated_layer_norm",                                                            \
           &Autocast<device, c10::DispatchKey::key, &modulated_layer_norm>::run);             \
    m.impl("modulated_rms_norm",                                                              \
           &Autocast<device, c10::DispatchKey::key, &modulated_rms_norm>::run);               \
  }
EVENKEEL_AUTOCAST(at::kCPU, AutocastCPU)
EVENKEEL_AUTOCAST(at::kCUDA, AutocastCUDA)

}  // namespace evenkeel::torch_binding
