// Every check of the C ABI and every message, once. A message names the argument, its value and
// what is allowed.
//
// Order: structs, enumerations, sizes, numbers, tensors, overlaps. Nothing is written before all
// have passed.
#include "core/validate.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/growth.h"

// Hands a failure on to the caller, before anything else is looked at.
#define EK_TRY(expression)                                                        \
  do {                                                                            \
    if (const ek_status status_ = (expression); status_ != EK_OK) return status_; \
  } while (0)

namespace evenkeel {
namespace {

template <typename... Args>
[[gnu::cold]] ek_status invalid(const char* format, Args... args) {
  fail(EK_INVALID_ARGUMENT, format, args...);
  return EK_INVALID_ARGUMENT;
}

// Copies a caller's struct into one that holds the values of the EK_..._INIT macro.
template <typename Struct>
ek_status take(const Struct* from, Struct& to, const char* name) {
  static_assert(kFirstSize<Struct> > 0, "core/growth.h must list the struct");
  if (from == nullptr) return invalid("%s is NULL, but is required", name);
  const size_t size = from->struct_size;
  switch (copy_known(from, kFirstSize<Struct>, to)) {
    case Taken::kYes:
      break;
    case Taken::kTooSmall:
      return invalid(
          "%s.struct_size is %zu, but must be at least %zu: initialize the struct with its "
          "EK_..._INIT macro",
          name, size, kFirstSize<Struct>);
    case Taken::kUnknownFields:
      return invalid(
          "%s.struct_size is %zu and uses fields that evenkeel %s (size %zu) does not know: update "
          "the library",
          name, size, ek_version(), sizeof(Struct));
  }
  return EK_OK;
}

ek_status check_enum(const char* name, int32_t value, int32_t count, const char* allowed) {
  if (value >= 0 && value < count) return EK_OK;
  return invalid("%s is %" PRId32 ", but must be one of %s", name, value, allowed);
}

constexpr char kWideDtypes[] = "EK_F32 (0), EK_F64 (1), EK_F16 (2), EK_BF16 (3)";

ek_status check_dtype(const char* name, int32_t dtype) {
  if (dtype >= 0 && dtype < kWideDtypeCount) return EK_OK;
  const bool eight_bits = dtype >= 0 && dtype < kDtypeCount;
  return invalid("%s.dtype is %" PRId32 ", but %smust be one of %s", name, dtype,
                 eight_bits ? "only y can have 8 bits: " : "", kWideDtypes);
}

// y's, which may have 8 bits.
ek_status check_y_dtype(int32_t dtype, const Call& call) {
  if (dtype >= 0 && dtype < kWideDtypeCount) return EK_OK;
  const bool eight_bits = dtype >= 0 && dtype < kDtypeCount;
  if (eight_bits && !call.is_group_norm()) return EK_OK;
  return invalid("y.dtype is %" PRId32 ", but %smust be one of %s%s", dtype,
                 eight_bits ? "group norm does not quantize: " : "", kWideDtypes,
                 call.is_group_norm() ? "" : ", EK_F8_E4M3 (4), EK_F8_E5M2 (5), EK_I8 (6)");
}

ek_status check_size(const char* name, int64_t value, int64_t least, const char* why) {
  if (value >= least) return EK_OK;
  return invalid("%s is %" PRId64 ", but must be at least %" PRId64 "%s", name, value, least, why);
}

ek_status check_reserved(const char* name, int64_t value) {
  if (value == 0) return EK_OK;
  return invalid("%s.reserved is %" PRId64 ", but must be 0", name, value);
}

// The sizes of the problem.
ek_status set_shape(const ek_problem& problem, Call& call) {
  if (call.is_group_norm()) {
    EK_TRY(check_size("problem.samples", problem.samples, 0, ""));
    EK_TRY(check_size("problem.channels", problem.channels, 1, ""));
    EK_TRY(check_size("problem.spatial", problem.spatial, 1, ": a group of length 0 has no mean"));
    EK_TRY(check_size("problem.groups", problem.groups, 1, ""));
    if (problem.channels % problem.groups != 0) {
      return invalid("problem.groups is %" PRId64 ", but must divide problem.channels = %" PRId64,
                     problem.groups, problem.channels);
    }
    const bool channels_last = call.layout == EK_NHWC;
    call.outer = problem.samples;
    call.inner = channels_last ? problem.spatial : problem.channels;
    call.width = channels_last ? problem.channels : problem.spatial;
    call.groups = problem.groups;
    call.channels = problem.channels;
  } else {
    EK_TRY(check_size("problem.rows", problem.rows, 0, ""));
    EK_TRY(check_size("problem.cols", problem.cols, 1, ": a row of length 0 has no mean"));
    EK_TRY(check_size("problem.inner_rows", problem.inner_rows, 0, ""));
    call.inner = problem.inner_rows == 0 ? problem.rows : problem.inner_rows;
    if (call.inner != 0 && problem.rows % call.inner != 0) {
      return invalid("problem.inner_rows is %" PRId64 ", but must divide problem.rows = %" PRId64,
                     problem.inner_rows, problem.rows);
    }
    call.outer = call.inner == 0 ? 0 : problem.rows / call.inner;
    call.width = problem.cols;
    call.groups = 1;
    call.channels = problem.cols;
  }
  int64_t elements;
  if (__builtin_mul_overflow(call.outer, call.inner, &elements) ||
      __builtin_mul_overflow(elements, call.width, &elements) || elements > INT64_MAX / 16) {
    return invalid("problem has %" PRId64 " x %" PRId64 " x %" PRId64
                   " elements, but at most 2^59 can be addressed",
                   call.outer, call.inner, call.width);
  }
  return EK_OK;
}

ek_status set_problem(const ek_problem* given, Call& call) {
  ek_problem problem = EK_PROBLEM_INIT;
  EK_TRY(take(given, problem, "problem"));
  EK_TRY(check_enum("problem.op", problem.op, 3,
                    "EK_LAYER_NORM (0), EK_RMS_NORM (1), EK_GROUP_NORM (2)"));
  EK_TRY(check_enum("problem.layout", problem.layout, 2, "EK_NCHW (0), EK_NHWC (1)"));
  EK_TRY(check_enum("problem.activation", problem.activation, 5,
                    "EK_ACTIVATION_NONE (0), EK_ACTIVATION_SILU (1), EK_ACTIVATION_RELU (2), "
                    "EK_ACTIVATION_GELU (3), EK_ACTIVATION_GELU_TANH (4)"));
  EK_TRY(check_enum("problem.casting", problem.casting, 3,
                    "EK_CASTING_NONE (0), EK_CASTING_LLAMA (1), EK_CASTING_GEMMA (2)"));
  EK_TRY(check_reserved("problem", problem.reserved));
  call.op = static_cast<ek_op>(problem.op);
  call.layout = static_cast<ek_layout>(problem.layout);
  call.activation = static_cast<ek_activation>(problem.activation);
  call.casting = static_cast<ek_casting>(problem.casting);
  if (call.casting != EK_CASTING_NONE && call.op != EK_RMS_NORM) {
    return invalid("problem.casting is %" PRId32
                   ", but only RMS norm has a casting order: must be EK_CASTING_NONE (0)",
                   problem.casting);
  }
  EK_TRY(set_shape(problem, call));
  if (!(problem.eps >= 0) || std::isinf(problem.eps)) {
    return invalid("problem.eps is %g, but must be finite and at least 0", problem.eps);
  }
  if (!std::isfinite(problem.weight_offset)) {
    return invalid("problem.weight_offset is %g, but must be finite", problem.weight_offset);
  }
  call.eps = problem.eps;
  call.weight_offset = problem.weight_offset;
  call.samples = problem.samples;  // until set_modulation()
  return EK_OK;
}

ek_status set_execution(const ek_execution* given, Call& call) {
  ek_execution execution = EK_EXECUTION_INIT;
  EK_TRY(take(given, execution, "execution"));
  EK_TRY(check_enum("execution.device", execution.device, 2, "EK_CPU (0), EK_CUDA (1)"));
  EK_TRY(check_size("execution.device_index", execution.device_index, 0, ""));
  EK_TRY(check_size("execution.threads", execution.threads, 0, " (0 = one per processor)"));
  call.device = static_cast<ek_device>(execution.device);
  call.device_index = execution.device_index;
  call.stream = execution.stream;
  call.workspace = static_cast<char*>(execution.workspace);
  call.workspace_size = execution.workspace_size;
  if (execution.parallel != nullptr) {
    ek_parallel parallel = EK_PARALLEL_INIT;
    EK_TRY(take(execution.parallel, parallel, "execution.parallel"));
    EK_TRY(check_size("execution.parallel.threads", parallel.threads, 1, ""));
    if (parallel.run == nullptr) return invalid("execution.parallel.run is NULL, but is required");
    call.parallel = Parallel(parallel);
  } else {
    call.parallel = Parallel(execution.threads);
  }
  return EK_OK;
}

// Whether a stack of `count` runs, `stride` apart and each `extent` long, has no overlaps.
bool spread(int64_t count, int64_t stride, int64_t extent) {
  return count <= 1 || stride >= extent;
}

// Resolves the strides and checks that no two runs overlap and that the last byte can be addressed.
ek_status set_tensor(const char* name, const ek_tensor& given, const Call& call, Tensor& tensor) {
  EK_TRY(&tensor == &call.y ? check_y_dtype(given.dtype, call) : check_dtype(name, given.dtype));
  EK_TRY(check_reserved(name, given.reserved));
  tensor.data = static_cast<char*>(given.data);
  tensor.dtype = static_cast<Dtype>(given.dtype);
  if (given.row_stride < 0 || given.outer_stride < 0) {
    return invalid("%s.row_stride is %" PRId64 " and %s.outer_stride is %" PRId64
                   ", but strides must not be negative (0 = dense)",
                   name, given.row_stride, name, given.outer_stride);
  }
  int64_t row = given.row_stride == 0 ? call.width : given.row_stride;
  int64_t outer = given.outer_stride;
  const auto dense_blocks = [&] {
    if (__builtin_mul_overflow(call.inner, row, &outer)) outer = INT64_MAX;
  };
  if (outer == 0) dense_blocks();
  // The stride of a single run or block is never used, however large it is.
  if (call.inner <= 1) row = call.width;
  if (call.outer <= 1) dense_blocks();
  tensor.row_stride = row;
  tensor.outer_stride = outer;

  int64_t rows_extent, blocks_extent, bytes;
  const int64_t inner_gaps = std::max<int64_t>(call.inner - 1, 0);
  const int64_t outer_gaps = std::max<int64_t>(call.outer - 1, 0);
  if (__builtin_mul_overflow(inner_gaps, row, &rows_extent) ||
      __builtin_mul_overflow(outer_gaps, outer, &blocks_extent) ||
      __builtin_add_overflow(rows_extent, call.width, &rows_extent) ||
      __builtin_add_overflow(blocks_extent, call.width, &blocks_extent) ||
      __builtin_add_overflow(rows_extent, blocks_extent, &bytes) ||
      __builtin_mul_overflow(bytes, size_of(tensor.dtype), &bytes)) {
    return invalid("%s.row_stride is %" PRId64 " and %s.outer_stride is %" PRId64
                   ", but then its last element is beyond what 64 bits can address",
                   name, row, name, outer);
  }
  const bool nested =
      outer >= row
          ? spread(call.inner, row, call.width) && spread(call.outer, outer, rows_extent)
          : spread(call.outer, outer, call.width) && spread(call.inner, row, blocks_extent);
  if (!nested && call.outer > 0) {
    return invalid("%s.row_stride is %" PRId64 " and %s.outer_stride is %" PRId64
                   ", but then rows overlap: %" PRId64 " x %" PRId64 " rows of %" PRId64
                   " elements need at least that much between them",
                   name, row, name, outer, call.outer, call.inner, call.width);
  }
  return EK_OK;
}

ek_status require(const char* name, const void* data, const Call& call) {
  if (data != nullptr || call.elements() == 0) return EK_OK;
  return invalid("%s is NULL, but is required", name);
}

ek_status set_required_tensor(const char* name, const ek_tensor& given, const Call& call,
                              Tensor& tensor) {
  EK_TRY(require(name, given.data, call));
  return set_tensor(name, given, call, tensor);
}

ek_status set_vector(const char* name, const ek_vector& given, Vector& vector) {
  EK_TRY(check_dtype(name, given.dtype));
  EK_TRY(check_reserved(name, given.reserved));
  vector.data = static_cast<char*>(given.data);
  vector.dtype = static_cast<Dtype>(given.dtype);
  return EK_OK;
}

// A piece of memory that a call reads or writes. Vectors are single runs.
struct Region {
  const char* name;
  const char* data;
  const Tensor* tensor;  // nullptr for what has no run for every row
  int64_t width;         // bytes of a run
  int64_t extent;        // bytes from the first to past the last
  int64_t stride;  // bytes between runs; 0 for a vector, and where they lie at several distances
};

Region region_of(const char* name, const Tensor& tensor, const Call& call) {
  const int64_t size = size_of(tensor.dtype);
  const bool any = tensor && call.elements() != 0;
  const int64_t last = any ? tensor.offset(call.outer - 1, call.inner - 1) + call.width : 0;
  const bool even = call.outer == 1 || tensor.outer_stride == call.inner * tensor.row_stride;
  return {name,        tensor.data,
          &tensor,     call.width * size,
          last * size, even ? tensor.row_stride * size : 0};
}

// The same of a tensor with a row for each sample.
Region region_of_samples(const char* name, const Tensor& tensor, const Call& call) {
  const int64_t size = size_of(tensor.dtype);
  const bool any = tensor && call.samples != 0;
  const int64_t last = any ? (call.samples - 1) * tensor.row_stride + call.width : 0;
  return {name, tensor.data, nullptr, call.width * size, last * size, tensor.row_stride * size};
}

Region region_of(const char* name, const void* data, int64_t bytes) {
  return {name, static_cast<const char*>(data), nullptr, bytes, data == nullptr ? 0 : bytes, 0};
}

Region region_of(const char* name, const Vector& vector, const Call& call) {
  return region_of(name, vector.data, call.channels * size_of(vector.dtype));
}

bool same_place(const Region& a, const Region& b) {
  return a.tensor != nullptr && b.tensor != nullptr && a.data == b.data &&
         a.tensor->dtype == b.tensor->dtype && a.tensor->row_stride == b.tensor->row_stride &&
         a.tensor->outer_stride == b.tensor->outer_stride;
}

// Two column slices of one wider tensor interleave in memory without sharing an element.
bool interleaved(const Region& a, const Region& b) {
  if (a.stride == 0 || a.stride != b.stride) return false;
  const int64_t between = ((b.data - a.data) % a.stride + a.stride) % a.stride;
  return between >= a.width && between + b.width <= a.stride;
}

ek_status check_overlap(const Region& output, const Region& other, bool in_place_allowed) {
  if (output.extent == 0 || other.extent == 0) return EK_OK;
  const auto a = reinterpret_cast<uintptr_t>(output.data),
             b = reinterpret_cast<uintptr_t>(other.data);
  if (a + static_cast<uintptr_t>(output.extent) <= b ||
      b + static_cast<uintptr_t>(other.extent) <= a)
    return EK_OK;
  if (in_place_allowed && same_place(output, other)) return EK_OK;
  if (interleaved(output, other)) return EK_OK;
  return invalid(
      "%s at %p overlaps %s at %p, but must %s", output.name, static_cast<const void*>(output.data),
      other.name, static_cast<const void*>(other.data),
      in_place_allowed ? "be apart from it or exactly it (same address, dtype and strides)"
                       : "be apart from it");
}

ek_status check_parameters(Call& call) {
  if (call.weight_offset != 0 && !call.weight) {
    return invalid("problem.weight_offset is %g, but without a weight it must be 0",
                   call.weight_offset);
  }
  call.stats = call.normalized() == Dtype::kF64 ? Dtype::kF64 : Dtype::kF32;
  const auto is_f64 = [](const auto& operand) { return operand && operand.dtype == Dtype::kF64; };
  const bool wide = is_f64(call.x) || is_f64(call.y) || is_f64(call.dy) || is_f64(call.dx) ||
                    is_f64(call.dsum) || is_f64(call.dresidual) || is_f64(call.weight) ||
                    is_f64(call.bias) || is_f64(call.scale) || is_f64(call.shift) ||
                    call.stats == Dtype::kF64;
  call.compute = wide ? Dtype::kF64 : Dtype::kF32;
  return EK_OK;
}

ek_status refuse_for_group_norm(const char* name, const ek_tensor& given, const Call& call) {
  if (given.data == nullptr || !call.is_group_norm()) return EK_OK;
  return invalid("%s is %p, but group norm takes none: it must be NULL", name, given.data);
}

// residual and sum. Without a residual there is no sum.
ek_status set_residual(const ek_forward_args& args, Call& call) {
  EK_TRY(refuse_for_group_norm("residual", args.residual, call));
  EK_TRY(set_tensor("residual", args.residual, call, call.residual));
  EK_TRY(set_tensor("sum", args.sum, call, call.sum));
  if (call.sum && !call.residual) {
    return invalid("sum is %p, but without a residual there is none: it must be NULL",
                   args.sum.data);
  }
  if (!call.residual || call.sum.dtype == Dtype::kF64) return EK_OK;
  for (const auto& [name, tensor] : {std::pair{"x", call.x}, {"residual", call.residual}}) {
    if (tensor.dtype == Dtype::kF64) {
      return invalid("sum.dtype is %" PRId32 ", but must be EK_F64 (1), because %s.dtype is",
                     args.sum.dtype, name);
    }
  }
  return EK_OK;
}

// A scale, a shift, or the gradient of one, as a caller gave it and as a row for each sample.
struct SampleTensor {
  const char* name;
  const ek_tensor& given;
  Tensor& tensor;
};

ek_status set_sample_tensor(const SampleTensor& t, const Call& call) {
  EK_TRY(refuse_for_group_norm(t.name, t.given, call));
  EK_TRY(check_dtype(t.name, t.given.dtype));
  EK_TRY(check_reserved(t.name, t.given.reserved));
  if (t.given.outer_stride != 0) {
    return invalid("%s.outer_stride is %" PRId64
                   ", but its rows have one stride, row_stride: it must be 0",
                   t.name, t.given.outer_stride);
  }
  // The stride of a single sample is never used, however large it is.
  const bool dense = t.given.row_stride == 0 || call.samples <= 1;
  const int64_t stride = dense ? call.width : t.given.row_stride;
  if (t.given.row_stride < 0 || stride < call.width) {
    return invalid("%s.row_stride is %" PRId64
                   ", but must be 0 (dense) or at least problem.cols = %" PRId64,
                   t.name, t.given.row_stride, call.width);
  }
  int64_t bytes;
  if (__builtin_mul_overflow(call.samples, stride, &bytes) ||
      __builtin_mul_overflow(bytes, size_of(static_cast<Dtype>(t.given.dtype)), &bytes)) {
    return invalid("%s.row_stride is %" PRId64
                   ", but then its last element is beyond what 64 bits can address",
                   t.name, t.given.row_stride);
  }
  t.tensor = {static_cast<char*>(t.given.data), static_cast<Dtype>(t.given.dtype), stride, 0};
  return EK_OK;
}

// The samples, and what has a row for each of them. Without any, all rows are one sample.
template <size_t kCount>
ek_status set_modulation(const SampleTensor (&tensors)[kCount], Call& call) {
  const auto given = [](const SampleTensor& t) { return t.given.data != nullptr; };
  if (std::none_of(std::begin(tensors), std::end(tensors), given) || call.is_group_norm()) {
    call.samples = 1;
  } else {
    const int64_t rows = call.statistics(), samples = call.samples;
    if (samples < (rows == 0 ? 0 : 1) || (rows != 0 && rows % samples != 0)) {
      const char* name = std::find_if(std::begin(tensors), std::end(tensors), given)->name;
      return invalid("problem.samples is %" PRId64
                     ", but beside %s it must be at least 1 and divide problem.rows = %" PRId64,
                     samples, name, rows);
    }
  }
  for (const SampleTensor& t : tensors) EK_TRY(set_sample_tensor(t, call));
  return EK_OK;
}

// The scale of a y of 8 bits, or where those of its rows go.
ek_status set_quantization(const ek_forward_args& args, Call& call) {
  const bool whole = args.y_scale != nullptr, rows = args.y_row_scale != nullptr;
  if (!call.quantizes()) {
    const char* name = whole ? "y_scale" : rows ? "y_row_scale" : nullptr;
    if (name != nullptr) {
      return invalid("%s is %p, but y.dtype is %" PRId32
                     ", and only a y of 8 bits has a scale: it must be NULL",
                     name, whole ? static_cast<const void*>(args.y_scale) : args.y_row_scale,
                     args.y.dtype);
    }
  } else if (whole && rows) {
    return invalid("y_scale is %p and y_row_scale is %p, but one of them must be NULL",
                   static_cast<const void*>(args.y_scale),
                   static_cast<const void*>(args.y_row_scale));
  } else if (!whole && !rows && call.elements() != 0) {
    return invalid("y_scale and y_row_scale are NULL, but y.dtype is %" PRId32
                   ": a y of 8 bits needs one of them",
                   args.y.dtype);
  }
  const double bound = args.y_amax_bound;
  if (!(bound >= 0) || std::isinf(bound)) {
    return invalid("y_amax_bound is %g, but must be finite and at least 0 (0 = none)", bound);
  }
  if (bound > 0 && !rows) {
    return invalid("y_amax_bound is %g, but without y_row_scale it must be 0", bound);
  }
  call.y_scale = args.y_scale;
  call.y_row_scale = args.y_row_scale;
  call.y_amax_bound =
      bound == 0 ? std::numeric_limits<float>::infinity() : static_cast<float>(bound);
  return EK_OK;
}

// Outputs may not touch each other, nor an input, except big outputs that are exactly one of the
// big inputs.
template <size_t kOutputs, size_t kInputs>
ek_status check_overlaps(const Region (&outputs)[kOutputs], const Region (&inputs)[kInputs]) {
  for (size_t i = 0; i < kOutputs; ++i) {
    for (size_t j = i + 1; j < kOutputs; ++j) EK_TRY(check_overlap(outputs[i], outputs[j], false));
    for (const Region& input : inputs) EK_TRY(check_overlap(outputs[i], input, true));
  }
  return EK_OK;
}

}  // namespace

ek_status validate(const ek_problem* problem, const ek_forward_args* given,
                   const ek_execution* execution, Call& call) {
  call = Call{};
  call.pass = Pass::kForward;
  EK_TRY(set_problem(problem, call));
  ek_forward_args args = EK_FORWARD_ARGS_INIT;
  EK_TRY(take(given, args, "args"));
  EK_TRY(check_reserved("args", args.reserved));
  EK_TRY(set_execution(execution, call));
  EK_TRY(set_required_tensor("x", args.x, call, call.x));
  EK_TRY(set_required_tensor("y", args.y, call, call.y));
  EK_TRY(set_residual(args, call));
  EK_TRY(set_quantization(args, call));
  EK_TRY(set_vector("weight", args.weight, call.weight));
  EK_TRY(set_vector("bias", args.bias, call.bias));
  EK_TRY(
      set_modulation({{"scale", args.scale, call.scale}, {"shift", args.shift, call.shift}}, call));
  if (args.mean != nullptr && !call.centers()) {
    return invalid("mean is %p, but RMS norm has no mean: it must be NULL", args.mean);
  }
  call.mean = static_cast<char*>(args.mean);
  call.rstd = static_cast<char*>(args.rstd);
  EK_TRY(check_parameters(call));
  const int64_t stats_bytes = call.statistics() * size_of(call.stats);
  const Region outputs[] = {region_of("y", call.y, call), region_of("sum", call.sum, call),
                            region_of("mean", call.mean, stats_bytes),
                            region_of("rstd", call.rstd, stats_bytes),
                            region_of("y_row_scale", call.y_row_scale, call.statistics() * 4)};
  const Region inputs[] = {region_of("x", call.x, call),
                           region_of("residual", call.residual, call),
                           region_of("weight", call.weight, call),
                           region_of("bias", call.bias, call),
                           region_of("y_scale", call.y_scale, 4),
                           region_of_samples("scale", call.scale, call),
                           region_of_samples("shift", call.shift, call)};
  EK_TRY(check_overlap(outputs[0], inputs[1], false));  // y, residual
  return check_overlaps(outputs, inputs);
}

ek_status validate(const ek_problem* problem, const ek_backward_args* given,
                   const ek_execution* execution, Call& call) {
  call = Call{};
  call.pass = Pass::kBackward;
  EK_TRY(set_problem(problem, call));
  ek_backward_args args = EK_BACKWARD_ARGS_INIT;
  EK_TRY(take(given, args, "args"));
  EK_TRY(check_reserved("args", args.reserved));
  EK_TRY(set_execution(execution, call));
  EK_TRY(set_required_tensor("dy", args.dy, call, call.dy));
  EK_TRY(set_required_tensor("x", args.x, call, call.x));
  EK_TRY(set_tensor("dx", args.dx, call, call.dx));
  EK_TRY(refuse_for_group_norm("dsum", args.dsum, call));
  EK_TRY(refuse_for_group_norm("dresidual", args.dresidual, call));
  EK_TRY(set_tensor("dsum", args.dsum, call, call.dsum));
  EK_TRY(set_tensor("dresidual", args.dresidual, call, call.dresidual));
  EK_TRY(set_vector("weight", args.weight, call.weight));
  EK_TRY(set_vector("bias", args.bias, call.bias));
  EK_TRY(set_vector("dweight", args.dweight, call.dweight));
  EK_TRY(set_vector("dbias", args.dbias, call.dbias));
  EK_TRY(set_modulation({{"scale", args.scale, call.scale},
                         {"shift", args.shift, call.shift},
                         {"dscale", args.dscale, call.dscale},
                         {"dshift", args.dshift, call.dshift}},
                        call));
  if (!call.wants_dx() && !call.sums_columns() && call.elements() != 0) {
    return invalid(
        "dx, dresidual, dweight, dbias, dscale and dshift are all NULL, but at least one gradient "
        "must be asked for");
  }
  if (call.centers()) {
    EK_TRY(require("mean", args.mean, call));
  } else if (args.mean != nullptr) {
    return invalid("mean is %p, but RMS norm has no mean: it must be NULL", args.mean);
  }
  EK_TRY(require("rstd", args.rstd, call));
  call.mean = const_cast<char*>(static_cast<const char*>(args.mean));
  call.rstd = const_cast<char*>(static_cast<const char*>(args.rstd));
  EK_TRY(check_parameters(call));
  const int64_t stats_bytes = call.statistics() * size_of(call.stats);
  const Region outputs[] = {region_of("dx", call.dx, call),
                            region_of("dresidual", call.dresidual, call),
                            region_of("dweight", call.dweight, call),
                            region_of("dbias", call.dbias, call),
                            region_of_samples("dscale", call.dscale, call),
                            region_of_samples("dshift", call.dshift, call)};
  const Region inputs[] = {region_of("dy", call.dy, call),
                           region_of("x", call.x, call),
                           region_of("dsum", call.dsum, call),
                           region_of("weight", call.weight, call),
                           region_of("bias", call.bias, call),
                           region_of("mean", call.mean, stats_bytes),
                           region_of("rstd", call.rstd, stats_bytes),
                           region_of_samples("scale", call.scale, call),
                           region_of_samples("shift", call.shift, call)};
  return check_overlaps(outputs, inputs);
}

ek_status validate_workspace(const Call& call, size_t needed, const char* name) {
  if (needed == 0) return EK_OK;
  if (call.workspace == nullptr) {
    return invalid("%s is NULL, but this call needs %zu bytes", name, needed);
  }
  if (call.workspace_size < needed) {
    return invalid("%s_size is %zu, but this call needs at least %zu bytes", name,
                   call.workspace_size, needed);
  }
  const Region workspace = region_of(name, call.workspace, static_cast<int64_t>(needed));
  const int64_t stats_bytes = call.statistics() * size_of(call.stats);
  const Region others[] = {region_of("x", call.x, call),
                           region_of("y", call.y, call),
                           region_of("dy", call.dy, call),
                           region_of("dx", call.dx, call),
                           region_of("residual", call.residual, call),
                           region_of("sum", call.sum, call),
                           region_of("dsum", call.dsum, call),
                           region_of("dresidual", call.dresidual, call),
                           region_of("weight", call.weight, call),
                           region_of("bias", call.bias, call),
                           region_of("dweight", call.dweight, call),
                           region_of("dbias", call.dbias, call),
                           region_of("mean", call.mean, stats_bytes),
                           region_of("rstd", call.rstd, stats_bytes),
                           region_of("y_scale", call.y_scale, 4),
                           region_of("y_row_scale", call.y_row_scale, call.statistics() * 4),
                           region_of_samples("scale", call.scale, call),
                           region_of_samples("shift", call.shift, call),
                           region_of_samples("dscale", call.dscale, call),
                           region_of_samples("dshift", call.dshift, call)};
  for (const Region& other : others) EK_TRY(check_overlap(workspace, other, false));
  return EK_OK;
}

}  // namespace evenkeel
