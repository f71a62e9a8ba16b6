// src/cuda/launch.cc for the emulator: launches are runs on the host, of an H200 with three SMs.
#include "cuda/launch.h"

#include <string_view>

#include "core/backend.h"
#include "cpu/backend.h"
#include "cuda/arguments.h"
#include "grid.h"

namespace evenkeel {

// The library of these tests has kernels for GPUs, and the reference.
const Backend kCpuBackend = {"cpu",
                             [](const Call&, AnyPlan&, Note& note) {
                               note.set("it is not in this build");
                               return false;
                             },
                             nullptr, nullptr};
const char* cpu_target_name(int32_t) { return nullptr; }

namespace cuda {
namespace {

template <typename Arguments>
void run(const Launch& l, const void* arguments) {
  // Kernels without dynamic shared memory have their arrays elsewhere.
  const emulator::Launch launch{l.blocks, l.rows, l.threads, l.cluster,
                                static_cast<size_t>(l.shared)};
  using Function = void (*)(Arguments);
  const auto function = reinterpret_cast<Function>(const_cast<void*>(l.kernel.function));
  emulator::run(launch, [&] { function(*static_cast<const Arguments*>(arguments)); });
}

}  // namespace

const Device& device_at(int) {
  static const Device device{.properties = {.major = 9,
                                            .minor = 0,
                                            .sms = 3,
                                            .shared_bytes = 232448,
                                            .cluster_limit = kMaxCluster,
                                            .clusters = {3, 1, 1, 1, 1}}};
  return device;
}

ek_status launch(const Call&, const Launch& l, void* arguments) {
  const std::string_view name = l.kernel.name;
  if (name.starts_with("rows_forward")) {
    run<ForwardArguments>(l, arguments);
  } else if (name == "add_residual") {
    run<AddArguments>(l, arguments);
  } else if (name == "reduce_partials") {
    run<ReducePartialsArguments>(l, arguments);
  } else if (name == "group_forward") {
    run<GroupForwardArguments>(l, arguments);
  } else if (name == "group_backward") {
    run<GroupBackwardArguments>(l, arguments);
  } else if (name == "clear_counters") {
    run<ClearArguments>(l, arguments);
  } else {  // rows_backward, rows_backward_multi_pass, column_sums
    run<BackwardArguments>(l, arguments);
  }
  return EK_OK;
}

}  // namespace cuda
}  // namespace evenkeel
