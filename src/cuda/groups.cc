// Group norm: launches the kernels of a plan.
#include "cuda/groups.h"

#include "cuda/group/shape.h"
#include "cuda/launch.h"
#include "cuda/operands.h"

namespace evenkeel::cuda {
namespace {

const GroupKernelSet& kernels_for(const Call& call, const GroupPlan& plan) {
  if (plan.runtime_dtype)
    return call.compute == Dtype::kF64 ? kGroupsRuntimeDtypeF64 : kGroupsRuntimeDtypeF32;
  switch (call.x.dtype) {
    case Dtype::kF16:
      return kGroupsF16;
    case Dtype::kBF16:
      return kGroupsBF16;
    default:
      return kGroupsF32;
  }
}

GroupScratch scratch_of(const Call& call, const GroupPlan& plan) {
  char* const workspace = aligned_workspace(call);
  const bool parameters = call.dweight || call.dbias;
  return {
      .counters = reinterpret_cast<GroupCounters*>(workspace),
      .parts = workspace + plan.parts_at,
      .results = workspace + plan.results_at,
      .dweight_partials = parameters ? workspace + plan.partials_at : nullptr,
      .dbias_partials = parameters ? workspace + plan.partials_at + plan.partials_bytes : nullptr};
}

// The kernel of either pass, and before it the one that clears its counters.
ek_status launch_main(const Call& call, const GroupPlan& plan, bool again,
                      const GroupScratch& scratch, void* arguments) {
  const GroupKernelSet& kernels = kernels_for(call, plan);
  const GroupTile& tile = plan.tile;
  const int64_t chunks = plan.sets * tile.chunks;
  const int64_t blocks = !tile.resident && again ? 2 * chunks : chunks;
  if (!tile.resident) {
    ClearArguments clear{scratch.counters, plan.sets};
    const ek_status status = launch(call,
                                    {.kernel = kernels.clear(),
                                     .blocks = ceil_div(plan.sets, kClearThreads),
                                     .threads = kClearThreads},
                                    &clear);
    if (status != EK_OK) return status;
  }
  return launch(call,
                {.kernel = kernels.main(plan.policy),
                 .blocks = blocks,
                 .threads = tile.threads,
                 .cluster = tile.resident ? tile.chunks : 1,
                 .shared = plan.shared},
                arguments);
}

int64_t group_size(const Call& call) { return call.inner * call.width / call.groups; }

ek_status forward(const Call& call, const GroupPlan& plan) {
  if (call.outer == 0) return EK_OK;
  GroupForwardArguments arguments{
      .x = device_tensor(call, call.x),
      .y = device_tensor(call, call.y),
      .formula = formula_of(call, group_size(call)),
      .mean = call.mean,
      .rstd = call.rstd,
      .stats = call.stats,
      .shape = group_shape(plan.problem, plan.tile, plan.sets, plan.lag),
      .scratch = scratch_of(call, plan)};
  return launch_main(call, plan, true, arguments.scratch, &arguments);
}

ek_status backward(const Call& call, const GroupPlan& plan) {
  GroupBackwardArguments arguments{
      .x = device_tensor(call, call.x),
      .dy = device_tensor(call, call.dy),
      .dx = device_tensor(call, call.dx),
      .formula = formula_of(call, group_size(call)),
      .mean = call.mean,
      .rstd = call.rstd,
      .stats = call.stats,
      .shape = group_shape(plan.problem, plan.tile, plan.sets, plan.lag),
      .scratch = scratch_of(call, plan)};
  if (call.outer > 0) {
    const ek_status status =
        launch_main(call, plan, call.dx.data != nullptr, arguments.scratch, &arguments);
    if (status != EK_OK) return status;
  }
  if (!call.dweight && !call.dbias) return EK_OK;
  return launch_reduce_partials(call, kernels_for(call, plan).reduce_partials(),
                                arguments.scratch.dweight_partials,
                                arguments.scratch.dbias_partials, call.outer * plan.tile.slices);
}

}  // namespace

bool accepts_groups(const Call& call, const GroupPlan& plan, Note& note) {
  if (plan.policy < 0) {
    note.set("group norm: %s", plan.fallback);
    return false;
  }
  const int64_t blocks = 2 * plan.sets * plan.tile.chunks;
  if (call.channels <= kMostBlocks && blocks <= kMostBlocks) return true;
  note.set("group norm of %lld channels takes %lld blocks, but each must be at most %lld",
           static_cast<long long>(call.channels), static_cast<long long>(blocks),
           static_cast<long long>(kMostBlocks));
  return false;
}

void describe_groups(const Call& call, const GroupPlan& plan, Note& note) {
  const GroupTile& tile = plan.tile;
  char held[64];
  if (tile.resident) {
    std::snprintf(held, sizeof held, "held by clusters of %d%s", tile.chunks,
                  tile.reloads_dy ? ", dy read twice" : "");
  } else {
    std::snprintf(held, sizeof held, "in %d chunks that are read twice", tile.chunks);
  }
  const char* reason = plan.runtime_dtype ? plan.runtime_dtype : plan.fallback;
  note.set("units of %lld channels %s, %s loads, blocks of %d threads, arithmetic in %s%s%s%s",
           static_cast<long long>(tile.span), held, plan.aligned ? "16-byte" : "single",
           tile.threads, name_of(call.compute),
           plan.runtime_dtype ? ", types looked up at run time" : "", reason ? ": " : "",
           reason ? reason : "");
}

ek_status run_groups(const Call& call, const GroupPlan& plan) {
  return call.pass == Pass::kForward ? forward(call, plan) : backward(call, plan);
}

}  // namespace evenkeel::cuda
