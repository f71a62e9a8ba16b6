// The CUDA backend: row norms (rows.cc) and group norm (groups.cc). Launches kernels on the caller's
// stream; never allocates or waits.
#include "cuda/backend.h"

#include "core/error.h"
#include "cuda/groups.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

namespace evenkeel {
namespace cuda {
namespace {

bool plan(const Call& call, AnyPlan& result, Note& note) {
  if (call.device != EK_CUDA) {
    note.set("tensors are in host memory, and this backend reads a GPU's");
    return false;
  }
  if (call.device_index < 0 || call.device_index >= kMaxDevices) {
    note.set("execution.device_index is %d, but must be from 0 to %d", call.device_index,
             kMaxDevices - 1);
    return false;
  }
  const Device& device = device_at(call.device_index);
  if (device.error != cudaSuccess) {
    note.set("device %d cannot be used: %s", call.device_index, cudaGetErrorString(device.error));
    return false;
  }
  if (device.properties.major < 8) {
    note.set("device %d has compute capability %d.%d, but 8.0 is the least", call.device_index,
             device.properties.major, device.properties.minor);
    return false;
  }
  if (call.is_group_norm()) {
    const GroupPlan plan = make_group_plan(call, device.properties);
    result.set(plan, static_cast<size_t>(plan.workspace));
    return accepts_groups(call, plan, note);
  }
  const Plan plan = make_plan(call, device.properties);
  result.set(plan, static_cast<size_t>(plan.workspace));
  return true;
}

void describe(const Call& call, const AnyPlan& plan, Note& note) {
  call.is_group_norm() ? describe_groups(call, plan.get<GroupPlan>(), note)
                       : describe_rows(call, plan.get<Plan>(), note);
}

ek_status run(const Call& call, const AnyPlan& plan) {
  const Current current(call.device_index);
  if (current.error() != cudaSuccess) {
    return fail(EK_DEVICE_ERROR, "cuda: device %d cannot be made current: %s", call.device_index,
                cudaGetErrorString(current.error()));
  }
  return call.is_group_norm() ? run_groups(call, plan.get<GroupPlan>())
                              : run_rows(call, plan.get<Plan>());
}

}  // namespace
}  // namespace cuda

const Backend kCudaBackend = {"cuda", cuda::plan, cuda::describe, cuda::run};

}  // namespace evenkeel
