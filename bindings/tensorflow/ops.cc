// The operators as TensorFlow knows them: signatures, attributes and shapes.
//
// The first six are fast-LayerNorm-TF's, with half types and shapes of rank 1 added. EvenkeelNorm
// and its gradient are for everything else: they keep the statistics, and take parameters of a type
// of their own.
#include <vector>

#include "roles.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace evenkeel::tensorflow_binding {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The shapes of an input, of which an operator may have none; says which name it goes by.
std::vector<ShapeHandle> inputs(InferenceContext* c, const Role& role, const char*& name) {
  std::vector<ShapeHandle> shapes;
  for (const char* candidate : role) {
    if (candidate == nullptr || !c->input(candidate, &shapes).ok()) continue;
    name = candidate;
    break;
  }
  return shapes;
}

absl::Status expect(InferenceContext* c, const Role& role, ShapeHandle allowed,
                    const char* reason) {
  const char* name = nullptr;
  for (const ShapeHandle shape : inputs(c, role, name)) {
    ShapeHandle merged;
    if (!c->Merge(shape, allowed, &merged).ok())
      return wrong_shape(name, c->DebugString(shape), c->DebugString(allowed), reason);
  }
  return {};
}

void set_outputs(InferenceContext* c, const Role& role, ShapeHandle shape) {
  for (const char* name : role) {
    std::vector<ShapeHandle> shapes;
    if (name == nullptr || !c->output(name, &shapes).ok()) continue;
    for (ShapeHandle& each : shapes) each = shape;
    TF_CHECK_OK(c->set_output(name, shapes));
  }
}

absl::Status infer_shapes(InferenceContext* c) {
  ek_problem problem = EK_PROBLEM_INIT;
  TF_RETURN_IF_ERROR(read_attributes(c, problem));
  const char* name = nullptr;
  const ShapeHandle given = inputs(c, kX, name)[0];
  const int least = least_rank(problem);
  ShapeHandle x;
  if (!c->WithRankAtLeast(given, least, &x).ok())
    return wrong_rank(name, c->DebugString(given), least);
  const ShapeHandle channels = c->Vector(c->Dim(x, channel_axis(problem)));
  ShapeHandle statistics, mean = c->Vector(0);
  if (problem.op == EK_GROUP_NORM) {
    statistics = c->Matrix(c->Dim(x, 0), problem.groups);
  } else {
    TF_RETURN_IF_ERROR(c->Subshape(x, 0, -1, &statistics));
  }
  if (problem.op != EK_RMS_NORM) mean = statistics;

  TF_RETURN_IF_ERROR(expect(c, kDy, x, kLikeX));
  TF_RETURN_IF_ERROR(expect(c, kWeight, channels, kPerChannel));
  TF_RETURN_IF_ERROR(expect(c, kBias, channels, kPerChannel));
  TF_RETURN_IF_ERROR(expect(c, kMean, mean, kAsReturned));
  TF_RETURN_IF_ERROR(expect(c, kRstd, statistics, kAsReturned));
  set_outputs(c, kY, x);
  set_outputs(c, kDx, x);
  set_outputs(c, kDweight, channels);
  set_outputs(c, kDbias, channels);
  set_outputs(c, kMean, mean);
  set_outputs(c, kRstd, statistics);
  return {};
}

constexpr char kType[] = "T: {float, double, half, bfloat16}";
constexpr char kEpsilon[] = "epsilon: float = 1e-7";
constexpr char kActivation[] = "activation: {'none', 'silu', 'relu', 'gelu', 'gelu_tanh'} = 'none'";

REGISTER_OP("LayerNormCustom")
    .Input("input: T")
    .Output("output: T")
    .Attr(kType)
    .Attr(kEpsilon)
    .SetShapeFn(infer_shapes);

REGISTER_OP("LayerNormBackpropCustom")
    .Input("input: T")
    .Input("out_back: T")
    .Output("in_back: T")
    .Attr(kType)
    .Attr(kEpsilon)
    .SetShapeFn(infer_shapes);

REGISTER_OP("LayerNormBiasAddCustom")
    .Input("input: T")
    .Input("beta: T")
    .Output("output: T")
    .Attr(kType)
    .Attr(kEpsilon)
    .SetShapeFn(infer_shapes);

REGISTER_OP("LayerNormBiasAddBackpropCustom")
    .Input("input: T")
    .Input("out_back: T")
    .Input("beta: T")
    .Output("in_back: T")
    .Output("beta_back: T")
    .Attr(kType)
    .Attr(kEpsilon)
    .SetShapeFn(infer_shapes);

REGISTER_OP("LayerNormFusedCustom")
    .Input("input: T")
    .Input("gamma: T")
    .Input("beta: T")
    .Output("output: T")
    .Attr(kType)
    .Attr(kEpsilon)
    .SetShapeFn(infer_shapes);

REGISTER_OP("LayerNormFusedBackpropCustom")
    .Input("input: T")
    .Input("out_back: T")
    .Input("gamma: T")
    .Output("in_back: T")
    .Output("gamma_back: T")
    .Output("beta_back: T")
    .Attr(kType)
    .Attr(kEpsilon)
    .SetShapeFn(infer_shapes);

// W has a default for calls without parameters, where nothing tells it; S has the one that fits all
// types of x but double.
#define EVENKEEL_GENERAL_ATTRIBUTES                           \
  Attr(kType)                                                 \
      .Attr("W: {float, double, half, bfloat16} = DT_FLOAT")  \
      .Attr("S: {float, double} = DT_FLOAT")                  \
      .Attr("NW: int >= 0")                                   \
      .Attr("NB: int >= 0")                                   \
      .Attr("norm: {'layer_norm', 'rms_norm', 'group_norm'}") \
      .Attr("epsilon: float")                                 \
      .Attr("groups: int >= 1 = 1")                           \
      .Attr("channels_last: bool = true")                     \
      .Attr(kActivation)                                      \
      .SetShapeFn(infer_shapes)

REGISTER_OP("EvenkeelNorm")
    .Input("x: T")
    .Input("weight: NW * W")
    .Input("bias: NB * W")
    .Output("y: T")
    .Output("mean: S")
    .Output("rstd: S")
    .EVENKEEL_GENERAL_ATTRIBUTES;

REGISTER_OP("EvenkeelNormGrad")
    .Input("dy: T")
    .Input("x: T")
    .Input("weight: NW * W")
    .Input("bias: NB * W")
    .Input("mean: S")
    .Input("rstd: S")
    .Output("dx: T")
    .Output("dweight: NW * W")
    .Output("dbias: NB * W")
    .EVENKEEL_GENERAL_ATTRIBUTES;

}  // namespace
}  // namespace evenkeel::tensorflow_binding
