// Reads off a call which kernels can take it (plan.h).
#include "cuda/plan.h"

namespace evenkeel::cuda {
namespace {

bool multiple(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

bool is_half(Dtype dtype) { return dtype == Dtype::kF16 || dtype == Dtype::kBF16; }

struct Operands {
  const Tensor* tensors[3];  // x, y; or x, dy, dx
  int count;
};

Operands big_tensors(const Call& call) {
  if (call.pass == Pass::kForward) return {{&call.x, &call.y}, 2};
  return {{&call.x, &call.dy, &call.dx}, call.dx ? 3 : 2};
}

// Why no compiled kernel has these types and addresses; nullptr if one does.
const char* why_untyped(const Call& call, const Plan& plan) {
  if (call.compute == Dtype::kF64) return "arithmetic is in f64";
  const Operands big = big_tensors(call);
  const Dtype x = call.x.dtype, y = big.tensors[1]->dtype;
  if (is_half(x) && is_half(y) && x != y) return "f16 and bf16 are mixed";
  if (big.count == 3 && call.dx.dtype != x) return "dx has another type than x";
  if (x != y && !plan.aligned) return "types are mixed and rows are not aligned";
  if (x != y && !plan.plain) return "types are mixed beside an activation, casting order or offset";
  if (!plan.aligned && !plan.plain && call.pass == Pass::kBackward) {
    return "rows are not aligned and there is an activation or a casting order";
  }
  for (int i = 0; i < big.count; ++i) {
    const Tensor& tensor = *big.tensors[i];
    if (!multiple(tensor.data, size_of(tensor.dtype))) return "an address cuts elements apart";
  }
  for (const Vector* vector : {&call.weight, &call.bias}) {
    if (!*vector) continue;
    if (!multiple(vector->data, size_of(vector->dtype))) return "an address cuts elements apart";
  }
  if (call.pass == Pass::kForward && call.weight && call.bias &&
      call.weight.dtype != call.bias.dtype) {
    return "weight and bias have different types";
  }
  if (!multiple(call.mean, 4) || !multiple(call.rstd, 4)) return "an address cuts elements apart";
  return nullptr;
}

bool is_aligned(const Call& call) {
  const Operands big = big_tensors(call);
  int64_t vector = 4;
  for (int i = 0; i < big.count; ++i) {
    const Tensor& tensor = *big.tensors[i];
    const int64_t size = size_of(tensor.dtype);
    if (size == 2) vector = 8;
    if (!multiple(tensor.data, 16) || tensor.row_stride * size % 16 != 0 ||
        tensor.outer_stride * size % 16 != 0) {
      return false;
    }
  }
  return call.width % vector == 0 && multiple(call.weight.data, 16) && multiple(call.bias.data, 16);
}

// Blocks, or clusters, that share the rows between them.
int64_t persistent_groups(int64_t rows, const Tile& tile, const Chip& chip) {
  const int64_t needed = tile.team < kWarp ? ceil_div(rows, tile.teams()) : rows;
  return std::min<int64_t>(needed, chip.clusters_of(tile.cluster));
}

void plan_forward(const Call& call, const Chip& chip, Plan& plan) {
  const int64_t rows = call.statistics();
  const auto x_size = static_cast<int>(size_of(call.x.dtype));
  plan.tile = plan.untyped ? streamed_tile(call.width)
                           : forward_tile(call.width, x_size, plan.aligned, chip);
  // 2^36 rows or more; only streamed blocks take several rows, one after the other.
  if (ceil_div(rows, plan.tile.teams()) > kMostBlocks) plan.tile = streamed_tile(call.width);
  plan.groups = std::min(ceil_div(rows, plan.tile.teams()), kMostBlocks);
}

void plan_backward(const Call& call, const Chip& chip, Plan& plan) {
  const auto x_size = static_cast<int>(size_of(call.x.dtype));
  const auto dy_size = static_cast<int>(size_of(call.dy.dtype));
  const int64_t rows = call.statistics();
  plan.tile = plan.untyped ? streamed_tile(call.width)
                           : backward_tile(call.width, x_size, dy_size, plan.aligned, chip);
  if (plan.tile.streams()) {
    plan.groups = std::min(rows, kMostBlocks);
    plan.partials = column_chunks(rows, call.width, chip);
  } else {
    plan.groups = persistent_groups(rows, plan.tile, chip);
    plan.partials = plan.groups;
    plan.shared = backward_shared(call.width, x_size, dy_size, plan.aligned, plan.tile);
  }
  const int64_t bytes =
      round_up(plan.partials * call.width * size_of(call.compute), kWorkspaceAlignment);
  plan.dbias_at = call.dweight ? bytes : 0;
  plan.workspace = plan.dbias_at + (call.dbias ? bytes : 0);
  if (plan.workspace > 0) plan.workspace += kWorkspaceAlignment;
}

}  // namespace

Plan make_plan(const Call& call, const Chip& chip) {
  Plan plan;
  plan.plain = call.activation == EK_ACTIVATION_NONE && call.casting != EK_CASTING_LLAMA &&
               (call.pass == Pass::kBackward || call.weight_offset == 0);
  plan.aligned = is_aligned(call);
  plan.untyped = why_untyped(call, plan);
  if (plan.untyped) plan.aligned = false;
  call.pass == Pass::kForward ? plan_forward(call, chip, plan) : plan_backward(call, chip, plan);
  return plan;
}

}  // namespace evenkeel::cuda
