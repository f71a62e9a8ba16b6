// Reads off a call which kernels can take it (plan.h).
#include "cuda/plan.h"

#include "cuda/arguments.h"
#include "cuda/operands.h"

namespace evenkeel::cuda {
namespace {

bool multiple(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

bool is_half(Dtype dtype) { return dtype == Dtype::kF16 || dtype == Dtype::kBF16; }

constexpr char kInF64[] = "arithmetic is in f64", kCuts[] = "an address cuts elements apart";
constexpr char kNoSplit[] = "no kernel is compiled for this split";

struct Operands {
  const Tensor* tensors[5];  // x, y; or x, dy and those of dx, dsum and dresidual that there are
  int count;
};

Operands big_tensors(const Call& call) {
  if (call.pass == Pass::kForward) return {{&call.x, &call.y}, 2};
  Operands big{{&call.x, &call.dy}, 2};
  for (const Tensor* tensor : {&call.dx, &call.dsum, &call.dresidual}) {
    if (*tensor) big.tensors[big.count++] = tensor;
  }
  return big;
}

// Whether an element of a tensor or parameter lies where the GPU cannot load it at once.
bool cuts_elements(const Call& call) {
  const Operands big = big_tensors(call);
  for (int i = 0; i < big.count; ++i) {
    const Tensor& tensor = *big.tensors[i];
    if (!multiple(tensor.data, size_of(tensor.dtype))) return true;
  }
  for (const Vector* vector : {&call.weight, &call.bias}) {
    if (*vector && !multiple(vector->data, size_of(vector->dtype))) return true;
  }
  return !multiple(call.mean, 4) || !multiple(call.rstd, 4);
}

// Why no kernel is compiled for these dtypes and addresses; nullptr if one is.
const char* why_runtime_dtype(const Call& call) {
  if (call.compute == Dtype::kF64) return kInF64;
  const Operands big = big_tensors(call);
  const Dtype x = call.x.dtype, y = big.tensors[1]->dtype;
  if (is_half(x) && is_half(y) && x != y) return "f16 and bf16 are mixed";
  if (call.pass == Pass::kBackward) {
    const DxOutputs dx = dx_outputs(call);
    if (dx.first && dx.first.dtype != x) return "dx has another type than x";
    if (dx.second && dx.second.dtype != y) return "dx is stored in a type that is not x's or dy's";
    if (call.dsum && call.dsum.dtype != x) return "dsum has another type than x";
  }
  if (cuts_elements(call)) return kCuts;
  const bool forward = call.pass == Pass::kForward;
  if (forward && call.weight && call.bias && call.weight.dtype != call.bias.dtype)
    return "weight and bias have different types";
  const Vector& parameter = forward && !call.weight ? call.bias : call.weight;
  if (parameter && parameter.dtype != Dtype::kF32 && parameter.dtype != x && parameter.dtype != y)
    return "a parameter is neither f32 nor of the type of x, y or dy";
  return nullptr;
}

// Why no entry of the table of policies serves a call whose dtypes have kernels.
const char* why_no_policy(const Call& call, const Plan& plan) {
  const bool mixed = big_tensors(call).tensors[1]->dtype != call.x.dtype;
  if (plan.modulated) {
    if (plan.terms.activation || plan.terms.casting)
      return "an activation or casting order beside a scale or a shift";
    if (!plan.aligned) return "rows are not aligned beside a scale or a shift";
    if (plan.residual) return "a gradient of the residual beside a scale or a shift";
    return kNoSplit;
  }
  if (mixed && !plan.aligned) return "types are mixed and rows are not aligned";
  if (mixed) return "types are mixed beside an activation, casting order or offset";
  if (!plan.aligned) return "rows are not aligned beside an activation, casting order or offset";
  return kNoSplit;
}

// Whether every row begins at a multiple of 16 bytes.
bool has_aligned_rows(const Tensor& tensor) {
  const int64_t size = size_of(tensor.dtype);
  return multiple(tensor.data, 16) && tensor.row_stride * size % 16 == 0 &&
         tensor.outer_stride * size % 16 == 0;
}

bool is_aligned(const Call& call) {
  const Operands big = big_tensors(call);
  int64_t vector = 4;
  for (int i = 0; i < big.count; ++i) {
    if (size_of(big.tensors[i]->dtype) == 2) vector = 8;
    if (!has_aligned_rows(*big.tensors[i])) return false;
  }
  return call.width % vector == 0 && multiple(call.weight.data, 16) && multiple(call.bias.data, 16);
}

// Blocks, or clusters, that share the rows between them.
int64_t persistent_groups(int64_t rows, const Tile& tile, const DeviceProperties& properties) {
  const int64_t needed = tile.threads_per_row < kWarp ? ceil_div(rows, tile.row_groups()) : rows;
  return std::min<int64_t>(needed, properties.clusters_of(tile.cluster));
}

Specialization specialization_of(const Call& call, const Plan& plan) {
  if (!plan.aligned || plan.modulated) return Specialization::kNone;
  const Operands big = big_tensors(call);
  for (int i = 0; i < big.count; ++i) {
    if (big.tensors[i]->dtype != call.x.dtype || !is_even(call, *big.tensors[i]))
      return Specialization::kNone;
  }
  if (call.pass == Pass::kBackward) {
    if (call.centers()) return Specialization::kLayer;
    return call.dbias ? Specialization::kNone : Specialization::kRms;
  }
  const auto same = [&](const Vector& vector) { return vector && vector.dtype == call.x.dtype; };
  if (!same(call.weight)) return Specialization::kNone;
  if (call.centers()) return same(call.bias) ? Specialization::kLayer : Specialization::kNone;
  return call.bias ? Specialization::kNone : Specialization::kRms;
}

// Finds the kernel of the plan's tile. Where the table has none, the multi-pass kernel of these dtypes takes
// the call, or else the one that looks dtypes up, and the plan says why.
template <typename Table, typename PolicyOf>
void choose_policy(const Call& call, const Table& table, const PolicyOf& policy_of, Plan& plan) {
  if (!plan.runtime_dtype) plan.policy = table.find(policy_of(plan.tile));
  if (plan.policy < 0) {
    plan.fallback = why_no_policy(call, plan);
    plan.tile = multi_pass_tile(call.width);
    plan.policy = table.find(policy_of(plan.tile));
    if (plan.policy < 0) plan.runtime_dtype = plan.fallback;
  }
  if (!plan.runtime_dtype) return;
  plan.tile = multi_pass_tile(call.width);
  plan.policy = 0;
  plan.aligned = false;
}

// Whether the rows of a block are one range, which can be prefetched.
bool is_one_range(const Call& call, const Tensor& tensor, const Tile& tile) {
  return is_even(call, tensor) && (tensor.row_stride == call.width || tile.block_rows() == 1);
}

void plan_forward(const Call& call, const DeviceProperties& properties, Plan& plan) {
  const int64_t rows = call.statistics();
  const auto x_size = static_cast<int>(size_of(call.x.dtype));
  const auto y_size = static_cast<int>(size_of(call.y.dtype));
  if (!plan.runtime_dtype) {
    plan.tile = specialize_forward(forward_tile(call.width, x_size, properties), rows, call.width,
                                   x_size, plan.terms, specialization_of(call, plan));
  }
  // 2^36 rows or more; only multi-pass blocks take several rows, one after the other.
  if (ceil_div(rows, plan.tile.block_rows()) > kMostBlocks) plan.tile = multi_pass_tile(call.width);
  choose_policy(
      call, forward_policies_of(x_size, y_size),
      [&](const Tile& tile) {
        return forward_policy_of(tile, x_size, y_size, plan.aligned, plan.terms, false,
                                 plan.modulated);
      },
      plan);
  plan.groups = std::min(ceil_div(rows, plan.tile.block_rows()), kMostBlocks);
  plan.shared = forward_shared(call.width, x_size, plan.aligned, plan.tile);
  if (is_one_range(call, call.x, plan.tile))
    plan.prefetch_rows = forward_prefetch_rows(rows, call.width, x_size, plan.tile);
}

// Why no kernel that would normalize the sum also adds the residual; nullptr: plan.policy is that of one that does.
const char* why_added_first(const Call& call, Plan& plan) {
  const Dtype sum = call.sum.dtype;
  if (plan.tile.multi_pass()) return "rows are read again in every pass";
  if (call.residual.dtype != sum) return "residual and sum have different types";
  if (call.x.dtype != call.y.dtype) return "x and y have different types";
  for (const Tensor* tensor : {&call.x, &call.residual}) {
    if (plan.aligned && !has_aligned_rows(*tensor)) return "rows of x or residual are not aligned";
    if (!multiple(tensor->data, size_of(tensor->dtype))) return kCuts;
    if (plan.tile.specialization != Specialization::kNone && !is_even(call, *tensor))
      return "rows of x or residual have several strides";
  }
  const auto x_size = static_cast<int>(size_of(sum)),
             y_size = static_cast<int>(size_of(call.y.dtype));
  const int policy = forward_policies_of(x_size, y_size)
                         .find(forward_policy_of(plan.tile, x_size, y_size, plan.aligned,
                                                 plan.terms, true, plan.modulated));
  if (policy < 0) return "no kernel with a residual is compiled for this split";
  plan.policy = policy;
  plan.shared = forward_shared(call.width, x_size, plan.aligned, plan.tile, true);
  return nullptr;
}

// The plan of the norm of the sum, so that the bits are the same; and who adds the residual.
Plan plan_with_residual(const Call& call, const DeviceProperties& properties) {
  Plan plan = make_plan(norm_of_sum(call, nullptr), properties);
  plan.added_first = why_added_first(call, plan);
  plan.residual = plan.added_first == nullptr;
  if (plan.residual) {
    if (!is_one_range(call, call.x, plan.tile) || !is_one_range(call, call.residual, plan.tile))
      plan.prefetch_rows = 0;
  } else if (!call.sum) {
    plan.sum_at = round_up(plan.workspace, kWorkspaceAlignment);
    plan.workspace = plan.sum_at + call.elements() * size_of(call.sum.dtype) + kWorkspaceAlignment;
  }
  return plan;
}

// Why no kernel that would give y in float32 quantizes it instead; nullptr: plan is that of one that does.
const char* why_quantized_last(const Call& call, const DeviceProperties& properties, Plan& plan) {
  const Call norm = norm_in_f32(call, nullptr);
  Plan alone = call.residual ? make_plan(norm_of_sum(norm, nullptr), properties) : plan;
  if (alone.tile.multi_pass()) return "rows are read again in every pass";
  if (!is_half(call.normalized())) return "no kernel for x of f32 quantizes";
  if (!alone.aligned) return "rows are not aligned";
  const auto aligned_by = [](const Tensor& tensor, int64_t bytes) {
    const int64_t size = size_of(tensor.dtype);
    return multiple(tensor.data, bytes) && tensor.row_stride * size % bytes == 0 &&
           tensor.outer_stride * size % bytes == 0;
  };
  const int64_t vector = 16 / size_of(call.normalized());
  if (!aligned_by(call.y, vector)) return "rows of y are not aligned";
  if (!multiple(call.y_scale, 4) || !multiple(call.y_row_scale, 4)) return kCuts;
  if (call.residual) {
    if (call.x.dtype != call.sum.dtype || call.residual.dtype != call.sum.dtype)
      return "x, residual and sum have different types";
    if (!aligned_by(call.x, 16) || !aligned_by(call.residual, 16))
      return "rows of x or residual are not aligned";
  }
  const auto x_size = static_cast<int>(size_of(call.normalized()));
  const int policy = forward_policies_of(x_size, 1).find(forward_policy_of(
      alone.tile, x_size, 1, true, alone.terms, bool{call.residual}, alone.modulated));
  if (policy < 0) return "no kernel that quantizes is compiled for this split";
  plan = alone;
  plan.policy = policy;
  plan.residual = bool{call.residual};
  plan.shared = forward_shared(call.width, x_size, true, plan.tile, plan.residual);
  if (call.residual &&
      (!is_one_range(call, call.x, plan.tile) || !is_one_range(call, call.residual, plan.tile)))
    plan.prefetch_rows = 0;
  return nullptr;
}

// The plan of the norm with a y in float32, so that the bits are the same; and who quantizes it.
Plan plan_with_quantization(const Call& call, const DeviceProperties& properties) {
  Plan plan = make_plan(norm_in_f32(call, nullptr), properties);
  plan.quantized_last = why_quantized_last(call, properties, plan);
  plan.quantizes = plan.quantized_last == nullptr;
  if (plan.quantizes) return plan;
  plan.y_at = round_up(plan.workspace, kWorkspaceAlignment);
  plan.workspace = plan.y_at + call.elements() * 4 + kWorkspaceAlignment;
  return plan;
}

void plan_backward(const Call& call, const DeviceProperties& properties, Plan& plan) {
  const auto x_size = static_cast<int>(size_of(call.x.dtype));
  const auto dy_size = static_cast<int>(size_of(call.dy.dtype));
  const int64_t rows = call.statistics();
  if (!plan.runtime_dtype) {
    plan.tile = specialize_backward(
        backward_tile(call.width, x_size, dy_size, plan.aligned, properties, plan.residual),
        call.width, x_size, plan.terms, properties, specialization_of(call, plan), plan.residual);
  }
  const auto blocks_of_sample = [&](const Tile& tile) {
    const int64_t own = call.samples == 0 ? 0 : call.sample_statistics();
    if (tile.multi_pass()) return std::min<int64_t>(kMaxChunks, ceil_div(own, kSampleChunkRows));
    return std::min(persistent_groups(own, tile, properties),
                    sample_blocks(own, call.width, x_size));
  };
  if (plan.modulated && !plan.tile.multi_pass() &&
      blocks_of_sample(plan.tile) * plan.tile.cluster >
          kMostBlocks / std::max<int64_t>(call.samples, 1))
    plan.tile = multi_pass_tile(call.width);
  choose_policy(
      call, backward_policies_of(x_size, dy_size),
      [&](const Tile& tile) {
        return backward_policy_of(tile, x_size, dy_size, plan.aligned, plan.terms, plan.residual,
                                  plan.modulated);
      },
      plan);
  if (plan.modulated) plan.sample_blocks = blocks_of_sample(plan.tile);
  if (plan.tile.multi_pass()) {
    plan.groups = std::min(rows, kMostBlocks);
    plan.partials = plan.modulated ? call.samples * plan.sample_blocks
                                   : column_chunks(rows, call.width, properties);
  } else {
    plan.groups = plan.modulated ? call.samples * plan.sample_blocks
                                 : persistent_groups(rows, plan.tile, properties);
    plan.partials = plan.groups;
    plan.shared =
        backward_shared(call.width, x_size, dy_size, plan.aligned, plan.tile, plan.residual);
  }
  const int64_t bytes =
      round_up(plan.partials * call.width * size_of(call.compute), kWorkspaceAlignment);
  plan.dbias_at = plan.products ? bytes : 0;
  plan.workspace = plan.dbias_at + (plan.gradients ? bytes : 0);
  if (plan.workspace > 0) plan.workspace += kWorkspaceAlignment;
}

// How rows are normalized, in a plan that says which sums are wanted, and whether all parameters are aligned beyond what the
// call says. call: with the weight and bias of samples, where it has any.
Plan plan_norm(const Call& call, const DeviceProperties& properties, Plan plan) {
  plan.residual = call.dsum || dx_outputs(call).second;
  plan.terms = {.activation = call.activation != EK_ACTIVATION_NONE,
                .casting = call.casting == EK_CASTING_LLAMA,
                .weight_offset = call.weight_offset != 0};
  plan.aligned = plan.aligned && is_aligned(call);
  plan.runtime_dtype = why_runtime_dtype(call);
  call.pass == Pass::kForward ? plan_forward(call, properties, plan)
                              : plan_backward(call, properties, plan);
  return plan;
}

// The plan of the norm with the samples' weight and bias, and where these are. They are made before if they are to be
// combined, or if no fast kernel reads them as they are.
Plan plan_with_samples(const Call& call, const DeviceProperties& properties) {
  const auto plan_of = [&](const NormOfSamples& samples) {
    const auto aligned = [&](const Vector& vector, int64_t stride) {
      return call.samples <= 1 || stride * size_of(vector.dtype) % 16 == 0;
    };
    Plan plan;
    plan.aligned = aligned(samples.norm.weight, samples.weight_stride) &&
                   aligned(samples.norm.bias, samples.bias_stride);
    plan.modulated = true;
    plan.products = call.sums_products();
    plan.gradients = call.sums_gradients();
    return plan_norm(samples.norm, properties, plan);
  };
  const auto is_slow = [](const Plan& plan) { return plan.runtime_dtype || plan.fallback; };
  const bool as_given = has_sample_parameters(call);
  Plan plan;
  if (as_given) plan = plan_of(norm_of_samples(call));
  if (!as_given || is_slow(plan)) {
    char* const somewhere = reinterpret_cast<char*>(kWorkspaceAlignment);
    Plan made = plan_of(norm_of_samples(call, somewhere, reads_bias(call) ? somewhere : nullptr));
    if (!as_given || !is_slow(made)) {
      made.parameters_made = as_given ? plan.runtime_dtype ? plan.runtime_dtype : plan.fallback
                                      : "there is a weight or a bias beside them";
      plan = made;
    }
  }
  const auto reserve = [&](bool wanted) {
    const int64_t at = round_up(plan.workspace, kWorkspaceAlignment);
    if (wanted) plan.workspace = at + call.samples * call.width * size_of(call.compute);
    return at;
  };
  plan.weights_at = reserve(plan.parameters_made != nullptr);
  plan.biases_at = reserve(plan.parameters_made != nullptr && reads_bias(call));
  plan.dweight_shares_at = reserve(bool{call.dweight});
  plan.dbias_shares_at = reserve(bool{call.dbias});
  if (plan.workspace > 0) plan.workspace += kWorkspaceAlignment;
  return plan;
}

// The same for group norm, whose kernels have one type for all big tensors.
const char* why_runtime_dtype_groups(const Call& call) {
  if (call.compute == Dtype::kF64) return kInF64;
  const Operands big = big_tensors(call);
  for (int i = 1; i < big.count; ++i) {
    if (big.tensors[i]->dtype != call.x.dtype) return "x and the other big tensors differ in type";
  }
  return cuts_elements(call) ? kCuts : nullptr;
}

GroupProblem group_problem(const Call& call, const GroupPlan& plan) {
  const bool last = call.layout == EK_NHWC, runtime = plan.runtime_dtype != nullptr;
  return {.channels = call.channels,
          .spatial = last ? call.inner : call.width,
          .per_group = call.channels / call.groups,
          .channels_last = last,
          .backward = call.pass == Pass::kBackward,
          .aligned = !runtime && is_aligned(call),
          .x_size = runtime ? 0 : static_cast<int>(size_of(call.x.dtype)),
          .size = static_cast<int>(size_of(call.compute)),
          .activations = activations_with(call.activation)};
}

// Finds tile and kernel. Where the table has none for the tile, one that reads single elements takes the call, of
// these dtypes or else the one that looks dtypes up, and the plan says why.
void choose_group_policy(const Call& call, const DeviceProperties& properties, GroupPlan& plan) {
  const auto choose = [&] {
    const GroupProblem problem = group_problem(call, plan);
    const GroupChoice choice =
        choose_group_tile(problem, properties, group_policies_of(problem.x_size));
    if (choice.fallback) plan.fallback = kNoSplit;
    plan.problem = choice.problem;
    plan.aligned = choice.problem.aligned;
    plan.tile = choice.tile;
    plan.policy = choice.policy;
  };
  choose();
  if (plan.policy >= 0) return;
  plan.runtime_dtype = plan.fallback;
  choose();
}

// What GroupScratch points to, one after the other.
void plan_group_workspace(const Call& call, const DeviceProperties& properties, GroupPlan& plan) {
  const GroupTile& tile = plan.tile;
  const GroupPolicy policy = group_policy_of(plan.problem, tile);
  const int64_t size = plan.problem.size, groups = call.outer * call.groups;
  int64_t at = 0;
  const auto reserve = [&](int64_t bytes) {
    const int64_t offset = at;
    at += round_up(bytes, kWorkspaceAlignment);
    return offset;
  };
  if (!tile.resident) {
    const bool again = !policy.backward || call.dx;
    plan.lag = again ? group_lag(plan.sets, tile.chunks, policy.channels_last, properties)
                     : plan.sets * tile.chunks;
    reserve(plan.sets * static_cast<int64_t>(sizeof(GroupCounters)));
    plan.parts_at = reserve(groups * tile.chunks * policy.part_values() * size);
    plan.results_at = reserve(groups * kGroupResults * size);
  }
  if (call.dweight || call.dbias) {
    plan.partials_bytes = call.outer * tile.slices * call.channels * size;
    plan.partials_at = reserve(2 * plan.partials_bytes);
  }
  plan.workspace = at > 0 ? at + kWorkspaceAlignment : 0;
}

}  // namespace

Plan make_plan(const Call& call, const DeviceProperties& properties) {
  if (call.quantizes()) return plan_with_quantization(call, properties);
  if (call.residual) return plan_with_residual(call, properties);
  if (call.modulates()) return plan_with_samples(call, properties);
  Plan plan;
  plan.aligned = true;
  plan.products = bool{call.dweight};
  plan.gradients = bool{call.dbias};
  return plan_norm(call, properties, plan);
}

GroupPlan make_group_plan(const Call& call, const DeviceProperties& properties) {
  GroupPlan plan;
  plan.runtime_dtype = why_runtime_dtype_groups(call);
  choose_group_policy(call, properties, plan);
  plan.sets = call.outer * ceil_div(call.channels, plan.tile.span);
  plan.shared = group_shared(plan.problem, plan.tile);
  plan_group_workspace(call, properties, plan);
  return plan;
}

}  // namespace evenkeel::cuda
