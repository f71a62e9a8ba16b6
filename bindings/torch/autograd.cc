// How a norm is differentiated.
//
// The forward operator leaves a node in the graph that calls the backward operator, and so one
// kernel. Where that is to be differentiated again, and where tangents flow forward, the formulas
// take over, so that derivatives of any order are right.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "norm.h"

namespace evenkeel::torch_binding {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

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

// NOLINTNEXTLINE(readability-identifier-naming): the name that torch shows as grad_fn.
struct EvenkeelNormBackward : torch::autograd::Node {
  SavedVariable x, weight, bias, mean, rstd;
  Norm norm;

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& dy = gradients[0];
    if (!dy.defined()) return variable_list(3);
    const Wanted wanted = {task_should_compute_output(0), task_should_compute_output(1),
                           task_should_compute_output(2)};
    const Gradients result =
        call_backward(dy, to_read(x.unpack()), or_nothing(weight.unpack()),
                      or_nothing(bias.unpack()), mean.unpack(), rstd.unpack(), norm, wanted);
    variable_list list(3);
    if (wanted[0]) list[0] = result.dx;
    if (wanted[1]) list[1] = result.dweight;
    if (wanted[2]) list[2] = result.dbias;
    return list;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&x, &weight, &bias, &mean, &rstd}) saved->reset_data();
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

Result differentiable_forward(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                              const Norm& norm, at::ScalarType out_dtype, bool statistics) {
  const bool tangents = has_tangent(x) || has_tangent(weight) || has_tangent(bias);
  const bool gradients = !tangents && at::GradMode::is_enabled() &&
                         (x.requires_grad() || requires_grad(weight) || requires_grad(bias));
  Result result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = call_forward(x, weight, bias, norm, out_dtype, statistics || gradients);
  }
  if (tangents) result.y = formula_forward(x, weight, bias, norm, out_dtype);
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

Gradients differentiable_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                                  const MaybeTensor& bias, const Tensor& mean, const Tensor& rstd,
                                  const Norm& norm, Wanted wanted) {
  const auto differentiated = [](const MaybeTensor& tensor) {
    return has_tangent(tensor) || (at::GradMode::is_enabled() && requires_grad(tensor));
  };
  if (differentiated(dy) || differentiated(x) || differentiated(weight) || differentiated(bias))
    return formula_backward(dy, x, weight, bias, norm, wanted);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(dy, x, weight, bias, mean, rstd, norm, wanted);
}

}  // namespace evenkeel::torch_binding
