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
  Tensor x;
  MaybeTensor weight, bias;
  Tensor mean, rstd;
};

variable_list gradients_of(const Tensor& dy, const Saved& saved, const Norm& norm, Wanted wanted) {
  variable_list list(3);
  if (!dy.defined()) return list;
  const Tensor x = to_read(saved.x);
  const Gradients result =
      call_backward({dy, x, saved.weight, saved.bias, saved.mean, saved.rstd, norm, wanted});
  if (wanted[0]) list[0] = result.dx;
  if (wanted[1]) list[1] = result.dweight;
  if (wanted[2]) list[2] = result.dbias;
  return list;
}

// The arguments of gradients_of as compiled autograd carries them through its graph, in this order.
template <class Visit>
void visit_arguments(Saved& saved, Norm& norm, Wanted& wanted, Visit visit) {
  visit(saved.x);
  visit(saved.weight);
  visit(saved.bias);
  visit(saved.mean);
  visit(saved.rstd);
  visit(norm.op);
  visit(norm.span);
  visit(norm.eps);
  visit(norm.activation);
  visit(norm.casting);
  visit(norm.weight_offset);
  visit(wanted);
}

// gradients_of, as compiled autograd's graph calls it.
variable_list gradients_of_packed(const variable_list& gradients,
                                  const std::vector<c10::IValue>& arguments) {
  compiled::PackedArgs packed(arguments);
  Saved saved;
  Norm norm;
  Wanted wanted;
  visit_arguments(saved, norm, wanted,
                  [&]<class Value>(Value& value) { value = packed.unpack<Value>(); });
  return gradients_of(gradients[0], saved, norm, wanted);
}

// NOLINTNEXTLINE(readability-identifier-naming): the name that torch shows as grad_fn.
struct EvenkeelNormBackward : torch::autograd::Node {
  SavedVariable x, weight, bias, mean, rstd;
  Norm norm;

  std::array<SavedVariable*, 5> all_saved() { return {&x, &weight, &bias, &mean, &rstd}; }

  Saved unpacked() {
    return {x.unpack(), or_nothing(weight.unpack()), or_nothing(bias.unpack()), mean.unpack(),
            rstd.unpack()};
  }

  Wanted wanted() const {
    return {task_should_compute_output(0), task_should_compute_output(1),
            task_should_compute_output(2)};
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gradients_of(gradients[0], unpacked(), norm, wanted());
  }

  // What the compiled graph depends on, besides the tensors.
  void compiled_args(compiled::CompiledNodeArgs& arguments) const override {
    for (const SavedVariable* saved : {&x, &weight, &bias, &mean, &rstd})
      arguments.collect(*saved, /*is_output=*/false);
    for (const int64_t value : {norm.op, norm.span, norm.activation, norm.casting})
      arguments.collect(value);
    for (const double value : {norm.eps, norm.weight_offset}) arguments.collect(value);
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
    visit_arguments(saved, norm, wanted, [&]<class Value>(const Value& value) {
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
  const auto& [x, weight, bias, norm, out_dtype, statistics] = call;
  const bool tangents = has_tangent(x) || has_tangent(weight) || has_tangent(bias);
  const bool gradients = !tangents && at::GradMode::is_enabled() &&
                         (x.requires_grad() || requires_grad(weight) || requires_grad(bias));
  Result result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = call_forward({x, weight, bias, norm, out_dtype, statistics || gradients});
  }
  if (tangents) result.y = formula_forward(call);
  if (!gradients) return result;
  const auto node = make_node<EvenkeelNormBackward>();
  node->norm = norm;
  node->x = SavedVariable(x, /*is_output=*/false);
  node->weight = SavedVariable(weight, /*is_output=*/false);
  node->bias = SavedVariable(bias, /*is_output=*/false);
  node->mean = SavedVariable(result.mean, /*is_output=*/false);
  node->rstd = SavedVariable(result.rstd, /*is_output=*/false);
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  torch::autograd::set_history(result.y, node);
  return result;
}

Gradients differentiable_backward(const BackwardCall& call) {
  const auto differentiated = [](const MaybeTensor& tensor) {
    return has_tangent(tensor) || (at::GradMode::is_enabled() && requires_grad(tensor));
  };
  if (differentiated(call.dy) || differentiated(call.x) || differentiated(call.weight) ||
      differentiated(call.bias))
    return formula_backward(call);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(call);
}

}  // namespace evenkeel::torch_binding
