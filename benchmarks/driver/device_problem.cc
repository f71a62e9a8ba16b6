// Tensors and calls of a case on a device (device_problem.h).
#include "device_problem.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace evenkeel::bench {
namespace {

std::string message(const char* call, ek_status status) {
  return std::string(call) + ": " + ek_status_name(status) + ": " + ek_last_error();
}

}  // namespace

DeviceProblem::DeviceProblem(support::Problem& host, Device& device, const char* backend)
    : host_(host),
      device_(device),
      forward_args_(host.forward_args()),
      backward_args_(host.backward_args()) {
  using support::Tensor;
  using support::Vector;
  for (Tensor t : {Tensor::kX, Tensor::kDy, Tensor::kY, Tensor::kDx, Tensor::kResidual,
                   Tensor::kSum, Tensor::kDsum, Tensor::kDresidual}) {
    mirror(host.buffer(t));
  }
  if (host.spec().residual.present) mirror(host.buffer(Tensor::kNormalized));
  for (Vector v :
       {Vector::kWeight, Vector::kBias, Vector::kDweight, Vector::kDbias, Vector::kMean,
        Vector::kRstd, Vector::kSavedMean, Vector::kSavedRstd, Vector::kYScale, Vector::kRowScale,
        Vector::kScale, Vector::kShift, Vector::kDscale, Vector::kDshift}) {
    mirror(host.buffer(v));
  }
  for (ek_tensor* t : {&forward_args_.x, &forward_args_.y, &forward_args_.residual,
                       &forward_args_.sum, &backward_args_.dy, &backward_args_.x,
                       &backward_args_.dx, &backward_args_.dsum, &backward_args_.dresidual,
                       &forward_args_.scale, &forward_args_.shift, &backward_args_.scale,
                       &backward_args_.shift, &backward_args_.dscale, &backward_args_.dshift}) {
    t->data = twin(t->data);
  }
  for (ek_vector* v : {&forward_args_.weight, &forward_args_.bias, &backward_args_.weight,
                       &backward_args_.bias, &backward_args_.dweight, &backward_args_.dbias}) {
    v->data = twin(v->data);
  }
  for (void** statistics : {&forward_args_.mean, &forward_args_.rstd}) {
    *statistics = twin(*statistics);
  }
  forward_args_.y_scale = static_cast<const float*>(twin(forward_args_.y_scale));
  forward_args_.y_row_scale = static_cast<float*>(twin(forward_args_.y_row_scale));
  for (const void** statistics : {&backward_args_.mean, &backward_args_.rstd}) {
    *statistics = twin(*statistics);
  }
  execution_.backend = backend;
  device_.direct(&execution_);
}

void DeviceProblem::mirror(const support::Buffer& buffer) {
  if (!buffer) return;
  const auto misalign = static_cast<size_t>(host_.spec().misalign);
  DeviceMemory memory(device_, buffer.size() + misalign);
  void* data = static_cast<char*>(memory.data()) + misalign;
  twins_.emplace(buffer.data(), Twin{std::move(memory), buffer.size(), data});
}

void* DeviceProblem::twin(const void* host) const { return host ? twins_.at(host).data : nullptr; }

std::string DeviceProblem::prepare(bool backward) {
  size_t bytes = 0;
  const ek_problem& problem = host_.problem();
  const ek_status status =
      backward ? ek_backward_workspace(&problem, &backward_args_, &execution_, &bytes)
               : ek_forward_workspace(&problem, &forward_args_, &execution_, &bytes);
  unsupported_ = status == EK_UNSUPPORTED;
  if (status != EK_OK) return message("workspace query", status);
  workspace_.emplace(device_, bytes);
  const std::vector<unsigned char> poison(bytes, support::Buffer::kPoison);
  device_.upload(workspace_->data(), poison.data(), bytes);
  execution_.workspace = workspace_->data();
  execution_.workspace_size = bytes;
  const char* name = nullptr;
  if (backward) {
    ek_explain_backward(&problem, &backward_args_, &execution_, &name, nullptr, 0);
  } else {
    ek_explain_forward(&problem, &forward_args_, &execution_, &name, nullptr, 0);
  }
  backend_ = name ? name : "none";
  host_.reset(backward);
  for (const auto& [host, twin] : twins_) device_.upload(twin.data, host, twin.bytes);
  return "";
}

std::string DeviceProblem::run(bool backward) {
  const ek_problem& problem = host_.problem();
  const ek_status status = backward ? ek_backward(&problem, &backward_args_, &execution_)
                                    : ek_forward(&problem, &forward_args_, &execution_);
  return status == EK_OK ? "" : message(backward ? "backward" : "forward", status);
}

void DeviceProblem::fetch(void* host) {
  if (!host) return;
  const Twin& twin = twins_.at(host);
  device_.download(host, twin.data, twin.bytes);
}

void DeviceProblem::download(bool backward) {
  if (backward) {
    const ek_backward_args& args = host_.backward_args();
    for (void* output : {args.dx.data, args.dresidual.data, args.dweight.data, args.dbias.data,
                         args.dscale.data, args.dshift.data})
      fetch(output);
  } else {
    const ek_forward_args& args = host_.forward_args();
    for (void* output :
         {args.y.data, args.sum.data, args.mean, args.rstd, static_cast<void*>(args.y_row_scale)})
      fetch(output);
  }
}

}  // namespace evenkeel::bench
