// Layer norm and RMS norm: launches the kernels of a plan.
#include "cuda/rows.h"

#include "cuda/launch.h"
#include "cuda/operands.h"

namespace evenkeel::cuda {

void describe_rows(const Call& call, const Plan& plan, Note& note) {
  const Tile& tile = plan.tile;
  char team[64];
  if (tile.cluster > 1) {
    std::snprintf(team, sizeof team, "a cluster of %d x %d threads a row", tile.cluster, tile.team);
  } else {
    std::snprintf(team, sizeof team, "%d threads a row", tile.team);
  }
  char held[160];
  if (tile.streams()) {
    std::snprintf(held, sizeof held, "rows read again in every pass%s%s",
                  plan.untyped ? ", types looked up at run time: " : "",
                  plan.untyped ? plan.untyped : "");
  } else {
    std::snprintf(held, sizeof held, "%d elements a thread%s", tile.elements,
                  tile.usual == Usual::kNone ? "" : ", parameters of x's type");
  }
  char later[64] = "";
  if (plan.ahead > 0) {
    std::snprintf(later, sizeof later, ", rows fetched %lld ahead",
                  static_cast<long long>(plan.ahead));
  } else if (tile.stages > 0) {
    std::snprintf(later, sizeof later, ", ring of %d rows, %lld partial sums", tile.stages,
                  static_cast<long long>(plan.partials));
  }
  const char* loads = plan.aligned     ? "16-byte loads"
                      : tile.streams() ? "single loads"
                                       : "16-byte loads, put in place in shared memory";
  note.set("%s, %s, %s, blocks of %d threads%s, arithmetic in %s", team, held, loads, tile.threads,
           later, name_of(call.compute));
}

namespace {

const KernelSet& kernels_for(const Call& call, const Plan& plan) {
  if (plan.untyped) return call.compute == Dtype::kF64 ? kAnyF64 : kAnyF32;
  const Dtype y = call.pass == Pass::kForward ? call.y.dtype : call.dy.dtype;
  switch (call.x.dtype) {
    case Dtype::kF16:
      return y == Dtype::kF32 ? kF16F32 : kF16F16;
    case Dtype::kBF16:
      return y == Dtype::kF32 ? kBF16F32 : kBF16BF16;
    default:
      return y == Dtype::kF32 ? kF32F32 : y == Dtype::kF16 ? kF32F16 : kF32BF16;
  }
}

RowWalk walk_of(const Call& call, const Plan& plan) {
  const int64_t step = plan.groups * plan.tile.teams();
  const bool even = is_even(call, call.x) && is_even(call, call.y) && is_even(call, call.dy) &&
                    is_even(call, call.dx);
  return {step, even ? 0 : call.inner, even ? 0 : step % call.inner};
}

RowStep step_of(const RowWalk& walk, const Tensor& tensor) {
  const int64_t size = size_of(tensor.dtype);
  if (walk.inner == 0) return {walk.step * tensor.row_stride * size, 0};
  return {
      (walk.step / walk.inner * tensor.outer_stride + walk.step_inside * tensor.row_stride) * size,
      (tensor.outer_stride - walk.inner * tensor.row_stride) * size};
}

int part_of(const Call& call, const Tile& tile) {
  return tile.streams() ? 0 : static_cast<int>(part_cols(call.width, tile));
}

ek_status forward(const Call& call, const Plan& plan) {
  ForwardArguments arguments{.x = device_tensor(call, call.x),
                             .y = device_tensor(call, call.y),
                             .formula = formula_of(call, call.width),
                             .mean = call.mean,
                             .rstd = call.rstd,
                             .stats = call.stats,
                             .rows = call.statistics(),
                             .cols = call.width,
                             .part_cols = part_of(call, plan.tile),
                             .ahead = plan.ahead * call.x.row_stride * size_of(call.x.dtype)};
  if (arguments.rows == 0) return EK_OK;
  Kernel& kernel = kernels_for(call, plan).forward(plan.plain, plan.aligned, plan.tile);
  return launch(call,
                {.kernel = kernel,
                 .blocks = plan.groups * plan.tile.cluster,
                 .threads = plan.tile.threads,
                 .cluster = plan.tile.cluster,
                 .shared = plan.shared},
                &arguments);
}

ek_status backward(const Call& call, const Plan& plan) {
  const KernelSet& kernels = kernels_for(call, plan);
  const Tile& tile = plan.tile;
  const RowWalk walk = walk_of(call, plan);
  char* const workspace = aligned_workspace(call);
  BackwardArguments arguments{.x = device_tensor(call, call.x),
                              .dy = device_tensor(call, call.dy),
                              .dx = device_tensor(call, call.dx),
                              .formula = formula_of(call, call.width),
                              .mean = call.centers() ? call.mean : nullptr,
                              .rstd = call.rstd,
                              .stats = call.stats,
                              .rows = call.statistics(),
                              .cols = call.width,
                              .dweight_partials = call.dweight ? workspace : nullptr,
                              .dbias_partials = call.dbias ? workspace + plan.dbias_at : nullptr,
                              .team = tile.team,
                              .stages = tile.stages,
                              .part_cols = part_of(call, tile),
                              .walk = walk,
                              .x_step = step_of(walk, call.x),
                              .dy_step = step_of(walk, call.dy),
                              .dx_step = step_of(walk, call.dx)};
  const bool parameters = call.dweight || call.dbias;
  ek_status status = EK_OK;
  // Before dx, which may overwrite dy or x.
  if (arguments.rows > 0 && parameters && tile.streams()) {
    status = launch(call,
                    {.kernel = kernels.column_sums(),
                     .blocks = ceil_div(call.width, kColumnThreads),
                     .rows = static_cast<int>(plan.partials),
                     .threads = kColumnThreads},
                    &arguments);
  }
  if (status == EK_OK && arguments.rows > 0 && (call.dx || !tile.streams())) {
    status = launch(call,
                    {.kernel = kernels.backward(plan.plain, plan.aligned, tile),
                     .blocks = plan.groups * tile.cluster,
                     .threads = tile.threads,
                     .cluster = tile.cluster,
                     .shared = plan.shared},
                    &arguments);
  }
  if (status != EK_OK || !parameters) return status;
  return launch_fold(call, kernels.fold(), arguments.dweight_partials, arguments.dbias_partials,
                     plan.partials);
}

}  // namespace

ek_status run_rows(const Call& call, const Plan& plan) {
  return call.pass == Pass::kForward ? forward(call, plan) : backward(call, plan);
}

}  // namespace evenkeel::cuda
