// How a norm is differentiated.
//
// The forward operator leaves a node in the graph that calls the backward operator, and so one
// kernel. Where that is to be differentiated again, and where tangents flow forward, the formulas
// take over, so that derivatives of any order are right. Compiled autograd takes the node's call of the
// backward operator into its graph.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "norm.h"

namespace evenkeel::torch_binding {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
namespace compiled = torch::dynamo::autograd;

bool has_tangent(const MaybeTensor& tensor) {
  return given(tensor) && tensor->_fw_grad(/*level=*/0).defined();
}

bool requires_grad(const MaybeTensor& tensor) { return given(tensor) && tensor->requires_grad(); }

MaybeTensor or_nothing(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

// x for the backward operator. A compiler that traces both passes would keep what an operator reads,
// even where it could keep less and compute it again (a bfloat16 summand of a float32 sum). A part
// of x that is all of it stands between the two and costs nothing.
Tensor to_read(const Tensor& x) {
  const bool traced = x.key_set().has(c10::DispatchKey::Python);
  return traced ? x.split_symint(x.sym_size(-1), -1)[0] : x;
}

// What a node keeps, unpacked.
struct Saved {
  Tensor x;  // or the sum
  MaybeTensor weight, bias;
  Tensor mean, rstd;
  MaybeTensor scale, shift;

  bool modulated() const { return given(scale) || given(shift); }
};

// Whether x was added to a residual, and the dtypes of both.
struct Summands {
  bool present = false;
  at::ScalarType x = at::kFloat, residual = at::kFloat;

  bool same() const { return present && x == residual; }
};

// arriving: the gradients of y and, where it can have one, of the sum; undefined where nothing
// arrives.
variable_list gradients_of(const variable_list& arriving, const Saved& saved, const Norm& norm,
                           const Summands& summands, Wanted wanted) {
  const Tensor& dy = arriving[0];
  const MaybeTensor dsum = arriving.size() > 1 ? or_nothing(arriving[1]) : std::nullopt;
  Gradients result;
  if (dy.defined()) {
    Wanted computed = wanted;
    if (summands.same()) {  // one tensor for both
      computed[0] = wanted[0] || wanted[3];
      computed[3] = false;
    }
    const Tensor x = summands.present ? saved.x : to_read(saved.x);
    BackwardCall call{dy, x, saved.weight, saved.bias, saved.mean, saved.rstd, norm, computed};
    if (summands.present) call.added.emplace(AddedGradient{dsum, summands.x, summands.residual});
    if (saved.modulated()) call.modulated.emplace(Modulated{saved.scale, saved.shift});
    result = call_backward(call);
  } else if (dsum) {
    result.dx = dsum->to(summands.x);
    if (!summands.same()) result.dresidual = dsum->to(summands.residual);
  }
  if (summands.same()) result.dresidual = result.dx;
  variable_list list(saved.modulated() ? 6 : summands.present ? 4 : 3);
  if (wanted[0]) list[0] = result.dx;
  if (wanted[1]) list[1] = result.dweight;
  if (wanted[2]) list[2] = result.dbias;
  if (wanted[3]) list[3] = result.dresidual;
  if (wanted[4]) list[4] = result.dscale;
  if (wanted[5]) list[5] = result.dshift;
  return list;
}

// The arguments of gradients_of as compiled autograd carries them through its graph, in this order.
template <class Visit>
void visit_arguments(Saved& saved, Norm& norm, Summands& summands, Wanted& wanted, Visit visit) {
  visit(saved.x);
  visit(saved.weight);
  visit(saved.bias);
  visit(saved.mean);
  visit(saved.rstd);
  visit(saved.scale);
  visit(saved.shift);
  visit(norm.op);
  visit(norm.span);
  visit(norm.eps);
  visit(norm.activation);
  visit(norm.casting);
  visit(norm.weight_offset);
  visit(summands.present);
  visit(summands.x);
  visit(summands.residual);
  visit(wanted);
}

// gradients_of, as compiled autograd's graph calls it.
variable_list gradients_of_packed(const variable_list& gradients,
                                  const std::vector<c10::IValue>& arguments) {
  compiled::PackedArgs packed(arguments);
  Saved saved;
  Norm norm;
  Summands summands;
  Wanted wanted;
  visit_arguments(saved, norm, summands, wanted,
                  [&]<class Value>(Value& value) { value = packed.unpack<Value>(); });
  return gradients_of(gradients, saved, norm, summands, wanted);
}

// NOLINTNEXTLINE(readability-identifier-naming): the name that torch shows as grad_fn.
struct EvenkeelNormBackward : torch::autograd::Node {
  SavedVariable x, weight, bias, mean, rstd, scale, shift;
  Norm norm;
  Summands summands;
  bool x_is_output = false;  // the sum, and it has a gradient
  bool modulated = false;

  std::array<SavedVariable*, 7> all_saved() {
    return {&x, &weight, &bias, &mean, &rstd, &scale, &shift};
  }

  Saved unpacked() {
    return {x_is_output ? x.unpack(getptr()) : x.unpack(),
            or_nothing(weight.unpack()),
            or_nothing(bias.unpack()),
            mean.unpack(),
            rstd.unpack(),
            or_nothing(scale.unpack()),
            or_nothing(shift.unpack())};
  }

  Wanted wanted() const {
    return {task_should_compute_output(0),
            task_should_compute_output(1),
            task_should_compute_output(2),
            summands.present && task_should_compute_output(3),
            modulated && task_should_compute_output(4),
            modulated && task_should_compute_output(5)};
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gradients_of(gradients, unpacked(), norm, summands, wanted());
  }

  // What the compiled graph depends on, besides the tensors.
  void compiled_args(compiled::CompiledNodeArgs& arguments) const override {
    arguments.collect(x, x_is_output);
    for (const SavedVariable* saved : {&weight, &bias, &mean, &rstd, &scale, &shift})
      arguments.collect(*saved, /*is_output=*/false);
    for (const int64_t value : {norm.op, norm.span, norm.activation, norm.casting})
      arguments.collect(value);
    for (const double value : {norm.eps, norm.weight_offset}) arguments.collect(value);
    arguments.collect(summands.present);
    for (const at::ScalarType value : {summands.x, summands.residual}) arguments.collect(value);
    for (const bool value : wanted()) arguments.collect(value);
  }

  // Puts a call of gradients_of_packed into the compiled graph; the saved tensors are symbols of it then.
  variable_list apply_with_saved(const variable_list& gradients,
                                 compiled::SwapSavedVariables& symbols) override {
    for (SavedVariable* saved : all_saved()) symbols.before(*saved);
    Saved saved = unpacked();
    Wanted wanted = this->wanted();
    compiled::PackedArgs packed;
    std::vector<at::TypePtr> types;
    visit_arguments(saved, norm, summands, wanted, [&]<class Value>(const Value& value) {
      packed.pack(value);
      types.push_back(compiled::IValuePacker<Value>::packed_type());
    });
    const auto& python = compiled::getPyCompilerInterface();
    // One function for the process, with arguments of the same types in every call.
    static const std::string function = python->bind_function(
        symbols.get_py_compiler(), name(), gradients_of_packed, std::move(types));
    const auto results =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    variable_list list = python->call_function(symbols.get_py_compiler(), "apply_functional",
                                               function, gradients, packed.vec(), results);
    for (SavedVariable* saved : all_saved()) symbols.after(*saved);
    return list;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : all_saved()) saved->reset_data();
  }

  std::string name() const override { return "EvenkeelNormBackward"; }
};

// Nodes are counted by shared_ptr up to torch 2.11 or so, and by intrusive_ptr since.
template <class Node>
auto make_node() {
  using Pointer = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node, [](Node* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>();
  }
}

}  // namespace

Result differentiable_forward(const ForwardCall& call) {
  const auto& [x, weight, bias, norm, out_dtype, statistics, added, quantized, modulated] = call;
  const bool tangents =
      has_tangent(x) || has_tangent(weight) || has_tangent(bias) ||
      (added && has_tangent(added->residual)) ||
      (modulated && (has_tangent(modulated->scale) || has_tangent(modulated->shift)));
  const bool recording = !tangents && at::GradMode::is_enabled();
  const bool of_sum =
      recording && (x.requires_grad() || (added && added->residual.requires_grad()));
  const bool of_samples = recording && modulated &&
                          (requires_grad(modulated->scale) || requires_grad(modulated->shift));
  const bool gradients =
      of_sum || of_samples || (recording && (requires_grad(weight) || requires_grad(bias)));
  Result result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    ForwardCall lower = call;
    lower.statistics = statistics || gradients;
    result = call_forward(lower);
  }
  if (tangents) {
    Result differentiable = formula_forward(call);
    result.y = std::move(differentiable.y);
    result.sum = std::move(differentiable.sum);
  }
  if (!gradients) return result;
  const auto node = make_node<EvenkeelNormBackward>();
  node->norm = norm;
  if (added) node->summands = {true, x.scalar_type(), added->residual.scalar_type()};
  if (modulated) {
    const MaybeTensor residual = added ? MaybeTensor(added->residual) : std::nullopt;
    node->modulated = true;
    node->scale = SavedVariable(modulated->scale, /*is_output=*/false);
    node->shift = SavedVariable(modulated->shift, /*is_output=*/false);
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias, residual,
                                                             modulated->scale, modulated->shift));
  } else if (added) {
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias, added->residual));
  } else {
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  }
  torch::autograd::set_history(result.y, node);
  // Without a gradient of x or residual the sum has none either.
  node->x_is_output = added && of_sum;
  if (node->x_is_output) torch::autograd::set_history(result.sum, node);
  node->x = SavedVariable(added ? result.sum : x, node->x_is_output);
  node->weight = SavedVariable(weight, /*is_output=*/false);
  node->bias = SavedVariable(bias, /*is_output=*/false);
  node->mean = SavedVariable(result.mean, /*is_output=*/false);
  node->rstd = SavedVariable(result.rstd, /*is_output=*/false);
  return result;
}

Result refused_forward(const ForwardCall& call) {
  const auto refuse = [](const char* name, const MaybeTensor& tensor) {
    const bool wants = has_tangent(tensor) || (at::GradMode::is_enabled() && requires_grad(tensor));
    TORCH_CHECK_NOT_IMPLEMENTED(
        !wants, "evenkeel: a quantized norm has no gradient, but ", name,
        " requires one: call it under torch.no_grad() or torch.inference_mode()");
  };
  refuse("x", call.x);
  refuse("weight", call.weight);
  refuse("bias", call.bias);
  refuse("scale", call.quantized->scale);
  if (call.added) refuse("residual", call.added->residual);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_forward(call);
}

Gradients differentiable_backward(const BackwardCall& call) {
  const auto differentiated = [](const MaybeTensor& tensor) {
    return has_tangent(tensor) || (at::GradMode::is_enabled() && requires_grad(tensor));
  };
  if (differentiated(call.dy) || differentiated(call.x) || differentiated(call.weight) ||
      differentiated(call.bias) || (call.added && differentiated(call.added->dsum)) ||
      (call.modulated &&
       (differentiated(call.modulated->scale) || differentiated(call.modulated->shift))))
    return formula_backward(call);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(call);
}

}  // namespace evenkeel::torch_binding
