// Layer norm and RMS norm: launches the kernels of a plan.
#include "cuda/rows.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/operands.h"

namespace evenkeel::cuda {

void describe_rows(const Call& call, const Plan& plan, Note& note) {
  const Tile& tile = plan.tile;
  char split[64];
  if (tile.cluster > 1) {
    std::snprintf(split, sizeof split, "a cluster of %d x %d threads a row", tile.cluster,
                  tile.threads_per_row);
  } else {
    std::snprintf(split, sizeof split, "%d threads a row", tile.threads_per_row);
  }
  char held[160];
  if (tile.multi_pass()) {
    const char* reason = plan.runtime_dtype ? plan.runtime_dtype : plan.fallback;
    std::snprintf(held, sizeof held, "rows read again in every pass%s%s%s",
                  plan.runtime_dtype ? ", types looked up at run time" : "", reason ? ": " : "",
                  reason ? reason : "");
  } else {
    std::snprintf(held, sizeof held, "%d elements a thread%s", tile.elements,
                  tile.specialization == Specialization::kNone ? "" : ", parameters of x's type");
  }
  char later[64] = "";
  if (plan.prefetch_rows > 0) {
    std::snprintf(later, sizeof later, ", rows prefetched %lld ahead",
                  static_cast<long long>(plan.prefetch_rows));
  } else if (tile.stages > 0) {
    std::snprintf(later, sizeof later, ", ring of %d rows, %lld partial sums", tile.stages,
                  static_cast<long long>(plan.partials));
  }
  const char* loads = plan.aligned        ? "16-byte loads"
                      : tile.multi_pass() ? "single loads"
                                          : "16-byte loads, put in place in shared memory";
  char residual[96] = "";
  if (plan.added_first) {
    std::snprintf(residual, sizeof residual, ", the residual is added before: %s",
                  plan.added_first);
  } else if (plan.residual) {
    std::snprintf(residual, sizeof residual, ", with the residual%s",
                  call.pass == Pass::kForward ? "" : "'s gradient");
  }
  char modulated[128] = "";
  if (plan.modulated) {
    std::snprintf(modulated, sizeof modulated, ", modulated by %lld sample%s%s%s",
                  static_cast<long long>(call.samples), call.samples == 1 ? "" : "s",
                  plan.parameters_made ? ", parameters made before: " : "",
                  plan.parameters_made ? plan.parameters_made : "");
  }
  char quantized[128] = "";
  if (call.quantizes()) {
    std::snprintf(quantized, sizeof quantized, ", y quantized to %s%s%s", name_of(call.y.dtype),
                  plan.quantized_last ? " behind, from f32: " : "",
                  plan.quantized_last ? plan.quantized_last : "");
  }
  note.set("%s, %s, %s, blocks of %d threads%s%s%s%s, arithmetic in %s", split, held, loads,
           tile.block_threads, later, modulated, residual, quantized, name_of(call.compute));
}

namespace {

const KernelSet& kernels_for(const Call& call, const Plan& plan) {
  if (plan.runtime_dtype) {
    const bool wide = call.compute == Dtype::kF64;
    if (plan.modulated) return wide ? kModulatedRuntimeDtypeF64 : kModulatedRuntimeDtypeF32;
    return wide ? kRuntimeDtypeF64 : kRuntimeDtypeF32;
  }
  if (plan.quantizes) return call.normalized() == Dtype::kF16 ? kF16EightBits : kBF16EightBits;
  const Dtype y = call.pass == Pass::kForward ? call.y.dtype : call.dy.dtype;
  switch (call.normalized()) {
    case Dtype::kF16:
      return y == Dtype::kF32 ? kF16F32 : kF16F16;
    case Dtype::kBF16:
      return y == Dtype::kF32 ? kBF16F32 : kBF16BF16;
    default:
      return y == Dtype::kF32 ? kF32F32 : y == Dtype::kF16 ? kF32F16 : kF32BF16;
  }
}

RowStride stride_of(const Call& call, const Plan& plan) {
  const int64_t blocks = plan.modulated ? plan.sample_blocks : plan.groups;
  const int64_t step = blocks * plan.tile.row_groups();
  const bool even = is_even(call, call.x) && is_even(call, call.dy) && is_even(call, call.dx) &&
                    is_even(call, call.dsum) && is_even(call, call.dresidual);
  return {step, even ? 0 : call.inner, even ? 0 : step % call.inner};
}

RowStep step_of(const RowStride& stride, const Tensor& tensor) {
  const int64_t size = size_of(tensor.dtype);
  if (stride.inner == 0) return {stride.step * tensor.row_stride * size, 0};
  return {
      (stride.step / stride.inner * tensor.outer_stride + stride.step_inside * tensor.row_stride) *
          size,
      (tensor.outer_stride - stride.inner * tensor.row_stride) * size};
}

int part_of(const Call& call, const Tile& tile) {
  return tile.multi_pass() ? 0 : static_cast<int>(part_cols(call.width, tile));
}

DeviceVector device_vector(const Vector& vector) { return {vector.data, vector.dtype}; }
DeviceSamples device_samples(const Tensor& tensor) {
  return {tensor.data, tensor.dtype, tensor.row_stride};
}

// The grid of kernels with a thread for each column, and samples that their blocks share.
Launch over_samples(const Call& call, Kernel& kernel) {
  return {.kernel = kernel,
          .blocks = ceil_div(call.width, kColumnThreads),
          .rows = static_cast<int>(std::min(call.samples, kMostGridRows)),
          .threads = kColumnThreads};
}

// The norm of the samples, whose weight and bias are made first if the plan says so.
ek_status prepare_samples(const Call& call, const Plan& plan, NormOfSamples& samples) {
  if (!plan.parameters_made) {
    samples = norm_of_samples(call);
    return EK_OK;
  }
  char* const workspace = aligned_workspace(call);
  SampleParametersArguments arguments{
      .weight = device_vector(call.weight),
      .bias = device_vector(call.bias),
      .weight_offset = call.weight_offset,
      .scale = device_samples(call.scale),
      .shift = device_samples(call.shift),
      .weights = workspace + plan.weights_at,
      .biases = reads_bias(call) ? workspace + plan.biases_at : nullptr,
      .samples = call.samples,
      .cols = call.width};
  samples = norm_of_samples(call, arguments.weights, arguments.biases);
  if (call.statistics() == 0) return EK_OK;
  return launch(call, over_samples(call, sample_parameters_kernel(call.compute)), &arguments);
}

Samples samples_of(const Call& call, const Plan& plan, const NormOfSamples& samples) {
  return {.count = call.samples,
          .rows = call.samples == 0 ? 0 : call.sample_statistics(),
          .weight_bytes = samples.weight_stride * size_of(samples.norm.weight.dtype),
          .bias_bytes = samples.bias_stride * size_of(samples.norm.bias.dtype),
          .blocks = plan.sample_blocks};
}

ek_status reduce_samples(const Call& call, const Plan& plan, Kernel& reduce, const char* products,
                         const char* gradients) {
  char* const workspace = aligned_workspace(call);
  ReduceSamplesArguments arguments{
      .products = products,
      .gradients = gradients,
      .weight = device_vector(call.weight),
      .bias = device_vector(call.bias),
      .weight_offset = call.weight_offset,
      .scale = device_samples(call.scale),
      .dscale = device_samples(call.dscale),
      .dshift = device_samples(call.dshift),
      .dweight_shares = call.dweight ? workspace + plan.dweight_shares_at : nullptr,
      .dbias_shares = call.dbias ? workspace + plan.dbias_shares_at : nullptr,
      .samples = call.samples,
      .cols = call.width,
      .count = plan.sample_blocks};
  ek_status status = EK_OK;
  if (call.samples > 0)
    status = launch(call, over_samples(call, reduce_samples_kernel(call.compute)), &arguments);
  if (status != EK_OK || (!call.dweight && !call.dbias)) return status;
  return launch_reduce_partials(call, reduce, arguments.dweight_shares, arguments.dbias_shares,
                                call.samples);
}

ek_status add_residual(const Call& call, const Tensor& sum) {
  AddArguments arguments{.x = device_tensor(call, call.x),
                         .residual = device_tensor(call, call.residual),
                         .sum = device_tensor(call, sum),
                         .rows = call.statistics(),
                         .cols = call.width};
  if (arguments.rows == 0) return EK_OK;
  const int64_t threads = std::min<int64_t>(round_up(call.width, kWarp), kMaxThreads);
  return launch(call,
                {.kernel = add_residual_kernel(sum.dtype),
                 .blocks = std::min(arguments.rows, kMostBlocks),
                 .threads = static_cast<int>(threads)},
                &arguments);
}

Quantization quantization_of(const Call& call) {
  if (!call.quantizes()) return {};
  const auto largest = [](auto format) { return decltype(format)::kLargest; };
  return {.scale = call.y_scale,
          .row_scale = call.y_row_scale,
          .amax_bound = call.y_amax_bound,
          .largest = with_eight_bits(call.y.dtype, largest)};
}

// from: y in float32.
ek_status quantize(const Call& call, const Call& from) {
  QuantizeArguments arguments{.from = device_tensor(from, from.y),
                              .y = device_tensor(call, call.y),
                              .quantization = quantization_of(call),
                              .rows = call.statistics(),
                              .cols = call.width};
  if (arguments.rows == 0) return EK_OK;
  return launch(call,
                {.kernel = quantize_kernel(),
                 .blocks = std::min(arguments.rows, kMostBlocks),
                 .threads = multi_pass_tile(call.width).block_threads},
                &arguments);
}

ek_status launch_forward(const Call& call, const Plan& plan, const Samples& samples) {
  ForwardArguments arguments{
      .x = device_tensor(call, call.x),
      .y = device_tensor(call, call.y),
      .formula = formula_of(call, call.width),
      .mean = call.mean,
      .rstd = call.rstd,
      .stats = call.stats,
      .rows = call.statistics(),
      .cols = call.width,
      .part_cols = part_of(call, plan.tile),
      .prefetch_bytes = plan.prefetch_rows * call.x.row_stride * size_of(call.x.dtype),
      .residual = device_tensor(call, call.residual),
      .sum = device_tensor(call, call.sum),
      .residual_prefetch_bytes =
          plan.prefetch_rows * call.residual.row_stride * size_of(call.residual.dtype),
      .quantization = quantization_of(call),
      .samples = samples};
  if (arguments.rows == 0) return EK_OK;
  Kernel& kernel = kernels_for(call, plan).forward(plan.policy);
  return launch(call,
                {.kernel = kernel,
                 .blocks = plan.groups * plan.tile.cluster,
                 .threads = plan.tile.block_threads,
                 .cluster = plan.tile.cluster,
                 .shared = plan.shared},
                &arguments);
}

ek_status forward(const Call& call, const Plan& plan) {
  if (plan.quantized_last) {
    const Call norm = norm_in_f32(call, aligned_workspace(call) + plan.y_at);
    Plan rest = plan;
    rest.quantized_last = nullptr;
    const ek_status status = forward(norm, rest);
    return status == EK_OK ? quantize(call, norm) : status;
  }
  if (plan.added_first) {
    const Call norm = norm_of_sum(call, aligned_workspace(call) + plan.sum_at);
    const ek_status status = add_residual(call, norm.x);
    Plan rest = plan;
    rest.added_first = nullptr;
    return status == EK_OK ? forward(norm, rest) : status;
  }
  if (!plan.modulated) return launch_forward(call, plan, {});
  NormOfSamples samples;
  const ek_status status = prepare_samples(call, plan, samples);
  return status == EK_OK ? launch_forward(samples.norm, plan, samples_of(call, plan, samples))
                         : status;
}

ek_status launch_backward(const Call& call, const Plan& plan, const Samples& samples) {
  const KernelSet& kernels = kernels_for(call, plan);
  const Tile& tile = plan.tile;
  const RowStride stride = stride_of(call, plan);
  char* const workspace = aligned_workspace(call);
  const DxOutputs dx = dx_outputs(call);
  BackwardArguments arguments{
      .x = device_tensor(call, call.x),
      .dy = device_tensor(call, call.dy),
      .dx = device_tensor(call, dx.first),
      .formula = formula_of(call, call.width),
      .mean = call.centers() ? call.mean : nullptr,
      .rstd = call.rstd,
      .stats = call.stats,
      .rows = call.statistics(),
      .cols = call.width,
      .dweight_partials = plan.products ? workspace : nullptr,
      .dbias_partials = plan.gradients ? workspace + plan.dbias_at : nullptr,
      .threads_per_row = tile.threads_per_row,
      .stages = tile.stages,
      .part_cols = part_of(call, tile),
      .stride = stride,
      .x_step = step_of(stride, call.x),
      .dy_step = step_of(stride, call.dy),
      .dx_step = step_of(stride, dx.first),
      .dsum = device_tensor(call, call.dsum),
      .second_dx = device_tensor(call, dx.second),
      .dsum_step = step_of(stride, call.dsum),
      .second_dx_step = step_of(stride, dx.second),
      .samples = samples};
  const bool parameters = plan.products || plan.gradients;
  ek_status status = EK_OK;
  // Before dx, which may overwrite dy or x.
  if (arguments.rows > 0 && parameters && tile.multi_pass()) {
    status = launch(call,
                    {.kernel = kernels.column_sums(),
                     .blocks = ceil_div(call.width, kColumnThreads),
                     .rows = static_cast<int>(std::min(plan.partials, kMostGridRows)),
                     .threads = kColumnThreads},
                    &arguments);
  }
  if (status == EK_OK && arguments.rows > 0 && (call.wants_dx() || !tile.multi_pass())) {
    status = launch(call,
                    {.kernel = kernels.backward(plan.policy),
                     .blocks = plan.groups * tile.cluster,
                     .threads = tile.block_threads,
                     .cluster = tile.cluster,
                     .shared = plan.shared},
                    &arguments);
  }
  return status;
}

ek_status backward(const Call& call, const Plan& plan) {
  ek_status status = EK_OK;
  if (plan.modulated) {
    NormOfSamples samples;
    status = prepare_samples(call, plan, samples);
    if (status == EK_OK)
      status = launch_backward(samples.norm, plan, samples_of(call, plan, samples));
  } else {
    status = launch_backward(call, plan, {});
  }
  if (status != EK_OK || !(plan.products || plan.gradients)) return status;
  Kernel& reduce = kernels_for(call, plan).reduce_partials();
  char* const workspace = aligned_workspace(call);
  const char* const products = plan.products ? workspace : nullptr;
  const char* const gradients = plan.gradients ? workspace + plan.dbias_at : nullptr;
  return plan.modulated ? reduce_samples(call, plan, reduce, products, gradients)
                        : launch_reduce_partials(call, reduce, products, gradients, plan.partials);
}

}  // namespace

ek_status run_rows(const Call& call, const Plan& plan) {
  return call.pass == Pass::kForward ? forward(call, plan) : backward(call, plan);
}

}  // namespace evenkeel::cuda
