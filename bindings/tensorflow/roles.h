// What the inputs and outputs of the operators are for.
//
// The eight operators are one norm with different parts of it present, under two sets of names:
// those of the general pair and those of fast-LayerNorm-TF. So the one kernel and the one shape
// function look each part up by either name, and an operator is nothing but its signature.
#ifndef EVENKEEL_BINDINGS_TENSORFLOW_ROLES_H_
#define EVENKEEL_BINDINGS_TENSORFLOW_ROLES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/evenkeel.h"

namespace evenkeel::tensorflow_binding {

using Role = const char* [2];

inline constexpr Role kX = {"x", "input"}, kDy = {"dy", "out_back"}, kWeight = {"weight", "gamma"},
                      kBias = {"bias", "beta"}, kMean = {"mean", nullptr},
                      kRstd = {"rstd", nullptr};
inline constexpr Role kY = {"y", "output"}, kDx = {"dx", "in_back"},
                      kDweight = {"dweight", "gamma_back"}, kDbias = {"dbias", "beta_back"};

// A problem without its sizes, from the attributes of an operator (a kernel's or a shape function's
// context). Those of fast-LayerNorm-TF have an epsilon only.
template <typename Context>
absl::Status read_attributes(Context* context, ek_problem& problem) {
  float epsilon = 0;
  absl::Status status = context->GetAttr("epsilon", &epsilon);
  problem.eps = epsilon;
  std::string norm, activation;
  if (!status.ok() || !context->GetAttr("norm", &norm).ok()) return status;
  bool channels_last = true;
  status = context->GetAttr("activation", &activation);
  if (status.ok()) status = context->GetAttr("channels_last", &channels_last);
  if (status.ok()) status = context->GetAttr("groups", &problem.groups);
  problem.op = norm == "layer_norm" ? EK_LAYER_NORM
               : norm == "rms_norm" ? EK_RMS_NORM
                                    : EK_GROUP_NORM;
  problem.layout = channels_last ? EK_NHWC : EK_NCHW;
  problem.activation = activation == "silu"        ? EK_ACTIVATION_SILU
                       : activation == "relu"      ? EK_ACTIVATION_RELU
                       : activation == "gelu"      ? EK_ACTIVATION_GELU
                       : activation == "gelu_tanh" ? EK_ACTIVATION_GELU_TANH
                                                   : EK_ACTIVATION_NONE;
  return status;
}

// Which axis weight and bias go along; -1 is the last.
inline int channel_axis(const ek_problem& problem) {
  return problem.op == EK_GROUP_NORM && problem.layout == EK_NCHW ? 1 : -1;
}

inline int least_rank(const ek_problem& problem) { return problem.op == EK_GROUP_NORM ? 2 : 1; }

// What both say of a shape that does not fit: the kernel of real ones, the shape function of those
// that a graph knows in advance.
inline absl::Status wrong_rank(const char* name, const std::string& shape, int least) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", shape, ", but must have rank ", least, " or more"));
}

inline absl::Status wrong_shape(const char* name, const std::string& shape,
                                const std::string& allowed, const char* reason) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", shape, ", but must have shape ", allowed, ": ", reason));
}

inline constexpr char kLikeX[] = "that of the normalized input";
inline constexpr char kPerChannel[] = "one value for each channel, or for each element of a row";
inline constexpr char kAsReturned[] = "as the forward operator returns it";

}  // namespace evenkeel::tensorflow_binding

#endif  // EVENKEEL_BINDINGS_TENSORFLOW_ROLES_H_
