// From torch's tensors to one call of the C ABI.
//
// A tensor is handed over as it lies in memory where its rows are contiguous and the dimensions
// before them fold into two strides (row norms), or where it is NCHW or channels-last (group norm);
// otherwise it is copied first. Memory comes from torch's allocator, threads from at::parallel_for,
// the stream from torch's current one.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

#include "../memory/pages.h"
#include "evenkeel/evenkeel.h"
#include "norm.h"

namespace evenkeel::torch_binding {
namespace {

int32_t dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return EK_F32;
    case at::kDouble:
      return EK_F64;
    case at::kHalf:
      return EK_F16;
    case at::kBFloat16:
      return EK_BF16;
    case at::kFloat8_e4m3fn:
      return EK_F8_E4M3;
    case at::kFloat8_e5m2:
      return EK_F8_E5M2;
    case at::kChar:
      return EK_I8;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "evenkeel: no kernel for ", type,
                                  "; allowed are float64, float32, float16 and bfloat16");
  }
}

// The address of a tensor's elements. data_ptr() would copy a lazy clone, though it is only read; what is
// written was made here, and is no such clone.
void* address_of(const Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

// A tensor in the form of the ABI, and what must stay alive for it.
struct Operand {
  Tensor keep;
  ek_tensor view = EK_TENSOR_INIT;

  void set(const Tensor& tensor, int64_t row_stride, int64_t outer_stride) {
    keep = tensor;
    view.data = address_of(tensor);
    view.dtype = dtype_of(tensor.scalar_type());
    view.row_stride = row_stride;
    view.outer_stride = outer_stride;
  }
};

// The dimensions before the normalized ones, folded into two: `inner` rows that lie `row_stride`
// apart, and blocks of them.
struct Fold {
  bool possible = false;
  int64_t inner = 1, row_stride = 0, outer_stride = 0;

  bool is_even() const { return outer_stride == row_stride * inner; }
};

Fold fold_rows(const Tensor& x, int64_t span, int64_t cols) {
  const auto sizes = x.sizes(), strides = x.strides();
  int64_t dense = 1;
  for (int64_t i = x.dim() - 1; i >= x.dim() - span; --i) {
    if (sizes[i] != 1 && strides[i] != dense) return {};
    dense *= sizes[i];
  }
  // From the last dimension on: each goes on with the current fold, or begins the second.
  Fold fold;
  int64_t outer = 0, next = cols;  // blocks, none yet; the stride that would go on
  fold.row_stride = cols;
  for (int64_t i = x.dim() - span - 1; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (fold.inner == 1) {
      fold.row_stride = strides[i];
      fold.inner = sizes[i];
    } else if (strides[i] != next) {
      if (outer != 0) return {};
      fold.outer_stride = strides[i];
      outer = sizes[i];
    } else {
      (outer == 0 ? fold.inner : outer) *= sizes[i];
    }
    next = strides[i] * sizes[i];
  }
  if (outer == 0) fold.outer_stride = fold.row_stride * fold.inner;
  // Rows must not overlap: blocks one after the other, or interleaved.
  fold.possible =
      (fold.row_stride >= cols && fold.outer_stride >= fold.row_stride * fold.inner) ||
      (outer != 0 && fold.outer_stride >= cols && fold.row_stride >= fold.outer_stride * outer);
  return fold;
}

// All tensors of a call have rows in blocks of the same number, which is no matter to those that
// have one stride only.
bool rows_as_they_lie(const Tensor& x, int64_t span, int64_t cols, int64_t inner, Operand& result) {
  const Fold fold = fold_rows(x, span, cols);
  if (!fold.possible || (fold.inner != inner && !fold.is_even())) return false;
  result.set(x, fold.row_stride, fold.inner == inner ? fold.outer_stride : fold.row_stride * inner);
  return true;
}

// (N, C, spatial...) where the spatial dimensions have one stride between pixels.
bool pixels_as_they_lie(const Tensor& x, bool last, Operand& result) {
  const int64_t channels = x.size(1);
  int64_t pixel = last ? channels : 1, next = 0;
  bool first = true;
  for (int64_t i = x.dim() - 1; i >= 2; --i) {
    if (x.size(i) == 1) continue;
    if (first) {
      pixel = x.stride(i);
      first = false;
    } else if (x.stride(i) != next) {
      return false;
    }
    next = x.stride(i) * x.size(i);
  }
  const int64_t spatial = x.numel() / (x.size(0) * channels);
  const int64_t row_stride = last ? pixel : channels == 1 ? spatial : x.stride(1);
  const bool rows_apart = last ? pixel >= channels && (channels == 1 || x.stride(1) == 1)
                               : pixel == 1 && row_stride >= spatial;
  const int64_t block = row_stride * (last ? spatial : channels);
  const int64_t outer_stride = x.size(0) == 1 ? block : x.stride(0);
  if (!rows_apart || outer_stride < block) return false;
  result.set(x, row_stride, outer_stride);
  return true;
}

// Makes tensors beside `like`: real ones, or (meta, fake) only their shapes.
struct Memory {
  const Tensor& like;
  bool real;

  // On the CPU without the detour through the dispatcher, which costs more than a small norm.
  Tensor make(c10::SymIntArrayRef sizes, at::ScalarType dtype) const {
    if (!real || !like.is_cpu()) return at::empty_symint(sizes, like.options().dtype(dtype));
    Tensor made = at::detail::empty_cpu(C10_AS_INTARRAYREF_SLOW(sizes), dtype);
    advise_large_pages(made.const_data_ptr(), made.nbytes());
    return made;
  }
  Tensor nothing(at::ScalarType dtype) const { return make({c10::SymInt(0)}, dtype); }

  // Of a row norm.
  Tensor rows(const Norm& norm, at::ScalarType dtype) const {
    const at::MemoryFormat format = format_of_rows(like, norm);
    if (format == at::MemoryFormat::Contiguous) return make(like.sym_sizes(), dtype);
    return at::empty_symint(like.sym_sizes(), like.options().dtype(dtype), format);
  }

  // Dense, in NCHW or channels-last order.
  Tensor images(bool last, at::ScalarType dtype) const {
    if (!last) return make(like.sym_sizes(), dtype);
    std::vector<c10::SymInt> sizes(like.sym_sizes().begin(), like.sym_sizes().end());
    sizes.erase(sizes.begin() + 1);
    sizes.push_back(like.sym_size(1));
    return make(sizes, dtype).movedim(-1, 1);
  }
};

struct Shape {
  ek_problem problem = EK_PROBLEM_INIT;
  bool last = false;  // group norm: channels-last

  // others: what else is read (nullptr: absent). Where x's rows have one stride, the blocks of the
  // first of them that has two are the call's.
  Shape(const Tensor& x, const Norm& norm, std::initializer_list<const Tensor*> others) {
    problem.op = static_cast<int32_t>(norm.op);
    problem.activation = static_cast<int32_t>(norm.activation);
    problem.casting = static_cast<int32_t>(norm.casting);
    problem.eps = norm.eps;
    problem.weight_offset = norm.weight_offset;
    if (norm.is_group_norm()) {
      last = channels_last(x);
      problem.layout = last ? EK_NHWC : EK_NCHW;
      problem.samples = x.size(0);
      problem.channels = x.size(1);
      problem.spatial = x.numel() / std::max<int64_t>(1, x.size(0) * x.size(1));
      problem.groups = norm.span;
    } else {
      problem.cols = 1;
      for (int64_t i = x.dim() - norm.span; i < x.dim(); ++i) problem.cols *= x.size(i);
      problem.rows = x.numel() / problem.cols;
      Fold fold = fold_rows(x, norm.span, problem.cols);
      for (const Tensor* other : others)
        if (other != nullptr && (!fold.possible || fold.is_even()))
          fold = fold_rows(*other, norm.span, problem.cols);
      problem.inner_rows = fold.possible ? fold.inner : problem.rows;
    }
  }

  // What is read: as it lies, or a copy.
  Operand source(const Tensor& tensor, const Norm& norm) const {
    Operand operand = target(tensor, norm);
    if (!operand.keep.is_same(tensor)) operand.keep.copy_(tensor);
    return operand;
  }

  // What is written: the result itself, or memory that finish() copies to it.
  Operand target(const Tensor& result, const Norm& norm) const {
    Operand operand;
    if (!as_it_lies(result, norm, operand)) as_it_lies(dense(result, norm), norm, operand);
    return operand;
  }

  static void finish(const Operand& target, const Tensor& result) {
    if (!target.keep.is_same(result)) result.copy_(target.keep);
  }

 private:
  bool as_it_lies(const Tensor& tensor, const Norm& norm, Operand& operand) const {
    return norm.is_group_norm()
               ? pixels_as_they_lie(tensor, last, operand)
               : rows_as_they_lie(tensor, norm.span, problem.cols, problem.inner_rows, operand);
  }

  Tensor dense(const Tensor& like, const Norm& norm) const {
    const Memory memory{like, true};
    return norm.is_group_norm() ? memory.images(last, like.scalar_type())
                                : memory.make(like.sym_sizes(), like.scalar_type());
  }
};

// A parameter as a dense vector.
struct Parameter {
  Tensor keep;
  ek_vector view = EK_VECTOR_INIT;

  explicit Parameter(const MaybeTensor& tensor) {
    if (!given(tensor)) return;
    keep = tensor->contiguous();
    view.data = address_of(keep);
    view.dtype = dtype_of(keep.scalar_type());
  }
};

// A tensor with a row of `cols` values for each sample: as it lies, if samples have one distance, or a copy.
struct SampleTensor {
  Tensor keep;
  ek_tensor view = EK_TENSOR_INIT;

  SampleTensor(const MaybeTensor& tensor, const Norm& norm, ek_problem& problem) {
    if (given(tensor)) set(*tensor, norm, problem);
  }
  SampleTensor(const Tensor& tensor, bool wanted, const Norm& norm, ek_problem& problem) {
    if (wanted) set(tensor, norm, problem);
  }

 private:
  void set(const Tensor& tensor, const Norm& norm, ek_problem& problem) {
    const Fold fold = fold_rows(tensor, norm.span, problem.cols);
    const bool even = fold.possible && fold.is_even();
    keep = even ? tensor : tensor.contiguous();
    problem.samples = tensor.numel() / problem.cols;
    view.data = address_of(keep);
    view.dtype = dtype_of(keep.scalar_type());
    view.row_stride = even ? fold.row_stride : 0;
  }
};

// The threads of torch's OpenMP do not survive a fork, and at::parallel_for waits for them forever;
// the library's own pool starts over in the child.
bool forked = false;
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

void run_tasks(void*, int64_t tasks, void (*task)(void*, int64_t), void* argument) {
  at::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) task(argument, i);
  });
}

void check(ek_status status) {
  if (status == EK_OK) return;
  const std::string message = std::string("evenkeel: ") + ek_last_error();
  TORCH_CHECK_NOT_IMPLEMENTED(status != EK_UNSUPPORTED, message);
  TORCH_CHECK(false, message);
}

struct Execution {
  ek_parallel parallel = EK_PARALLEL_INIT;
  ek_execution execution = EK_EXECUTION_INIT;
  c10::OptionalDeviceGuard guard;

  explicit Execution(const Tensor& x) {
    if (x.is_cpu()) {
      parallel.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
      parallel.run = run_tasks;
      execution.threads = parallel.threads;
      if (!forked) execution.parallel = &parallel;
      return;
    }
    guard.reset_device(x.device());
    execution.device = EK_CUDA;
    execution.device_index = x.device().index();
    const c10::impl::VirtualGuardImpl impl(x.device().type());
    execution.stream = impl.getStream(x.device()).native_handle();
  }

  // Checked and planned once: prepare is ek_prepare_forward or ek_prepare_backward.
  template <class Args, class Prepare>
  void run(const Tensor& x, const ek_problem& problem, const Args& args, Prepare prepare) const {
    ek_prepared prepared;
    check(prepare(&problem, &args, &execution, &prepared));
    Tensor workspace;
    const size_t bytes = prepared.workspace_size;
    if (bytes != 0)
      workspace = Memory{x, true}.make({c10::SymInt(static_cast<int64_t>(bytes))}, at::kByte);
    check(ek_run(&prepared, bytes == 0 ? nullptr : address_of(workspace), bytes));
  }
};

at::ScalarType statistics_dtype(const ForwardCall& call) {
  return call.normalized_dtype() == at::kDouble ? at::kDouble : at::kFloat;
}

// The results without values.
Result empty_results(const ForwardCall& call, bool real) {
  const auto& [x, weight, bias, norm, out_dtype, statistics, added, quantized, _] = call;
  const Memory memory{x, real};
  const at::ScalarType type = statistics_dtype(call);
  Result result;
  if (norm.is_group_norm()) {
    result.y = memory.images(channels_last(x), out_dtype);
    if (statistics) result.rstd = memory.make({x.sym_size(0), c10::SymInt(norm.span)}, type);
  } else {
    result.y = memory.rows(norm, out_dtype);
    if (statistics) result.rstd = memory.make(x.sym_sizes().slice(0, x.dim() - norm.span), type);
  }
  if (!statistics) result.rstd = memory.nothing(type);
  result.mean = statistics && norm.centers() ? memory.make(result.rstd.sym_sizes(), type)
                                             : memory.nothing(type);
  if (added) result.sum = memory.rows(norm, added->sum_dtype);
  if (quantized && !given(quantized->scale)) {
    // As a reduction that keeps its dimensions: (..., 1).
    c10::SmallVector<c10::SymInt, 5> sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    std::fill(sizes.end() - norm.span, sizes.end(), 1);
    result.row_scale = memory.make(sizes, at::kFloat);
  } else if (quantized) {
    result.row_scale = memory.nothing(at::kFloat);
  }
  return result;
}

Gradients empty_gradients(const BackwardCall& call, bool real) {
  const Tensor& x = call.x;
  const Memory memory{x, real};
  const auto parameter = [&](const MaybeTensor& like, bool want) {
    if (want) return memory.make(like->sym_sizes(), like->scalar_type());
    return memory.nothing(given(like) ? like->scalar_type() : x.scalar_type());
  };
  const auto like_x = [&](at::ScalarType dtype, bool want) {
    if (!want) return memory.nothing(dtype);
    return call.norm.is_group_norm() ? memory.images(channels_last(x), dtype)
                                     : memory.rows(call.norm, dtype);
  };
  Gradients result;
  result.dx = like_x(call.dx_dtype(), call.wanted[0]);
  if (call.added) result.dresidual = like_x(call.added->residual_dtype, call.wanted[3]);
  result.dweight = parameter(call.weight, call.wanted[1]);
  result.dbias = parameter(call.bias, call.wanted[2]);
  if (!call.modulated) return result;
  result.dscale = parameter(call.modulated->scale, call.wanted[4]);
  result.dshift = parameter(call.modulated->shift, call.wanted[5]);
  return result;
}

}  // namespace

bool channels_last(const Tensor& x) {
  return x.dim() > 2 && x.sym_size(1) > 1 && x.sym_stride(1) == 1 && !x.is_contiguous();
}

// As torch has it: its RMS norm keeps channels-last, its layer norm does not.
at::MemoryFormat format_of_rows(const Tensor& x, const Norm& norm) {
  return norm.op == EK_RMS_NORM ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

bool Norm::is_group_norm() const { return op == EK_GROUP_NORM; }
bool Norm::centers() const { return op != EK_RMS_NORM; }

Result meta_forward(const ForwardCall& call) { return empty_results(call, /*real=*/false); }
Gradients meta_backward(const BackwardCall& call) { return empty_gradients(call, /*real=*/false); }

Result run_forward(const ForwardCall& call) {
  const auto& [x, weight, bias, norm, out_dtype, statistics, added, quantized, modulated] = call;
  Result result = empty_results(call, /*real=*/true);
  if (x.numel() == 0) {
    result.mean.zero_();
    result.rstd.zero_();
    if (quantized) result.row_scale.fill_(std::numeric_limits<float>::min());
    return result;
  }
  Shape shape(x, norm, {added ? &added->residual : nullptr});
  const Operand from = shape.source(x, norm), to = shape.target(result.y, norm);
  const Parameter w(weight), b(bias);
  ek_forward_args args = EK_FORWARD_ARGS_INIT;
  args.x = from.view;
  args.y = to.view;
  args.weight = w.view;
  args.bias = b.view;
  if (statistics) {
    if (norm.centers()) args.mean = address_of(result.mean);
    args.rstd = address_of(result.rstd);
  }
  Operand residual, sum;
  if (added) {
    residual = shape.source(added->residual, norm);
    sum = shape.target(result.sum, norm);
    args.residual = residual.view;
    args.sum = sum.view;
  }
  const MaybeTensor none;
  const SampleTensor scale(modulated ? modulated->scale : none, norm, shape.problem);
  const SampleTensor shift(modulated ? modulated->shift : none, norm, shape.problem);
  args.scale = scale.view;
  args.shift = shift.view;
  if (quantized && given(quantized->scale)) {
    args.y_scale = static_cast<const float*>(address_of(*quantized->scale));
  } else if (quantized) {
    args.y_row_scale = static_cast<float*>(address_of(result.row_scale));
    args.y_amax_bound = quantized->amax_bound;
  }
  Execution(x).run(x, shape.problem, args, ek_prepare_forward);
  Shape::finish(to, result.y);
  if (added) Shape::finish(sum, result.sum);
  return result;
}

Gradients run_backward(const BackwardCall& call) {
  const auto& [dy, x, weight, bias, mean, rstd, norm, wanted, added, modulated] = call;
  Gradients result = empty_gradients(call, /*real=*/true);
  if (wanted == Wanted{}) return result;
  if (x.numel() == 0) {
    result.dweight.zero_();
    result.dbias.zero_();
    if (modulated) {
      result.dscale.zero_();
      result.dshift.zero_();
    }
    return result;
  }
  const Tensor* dsum = added && given(added->dsum) ? &*added->dsum : nullptr;
  Shape shape(x, norm, {&dy, dsum});
  const Operand from = shape.source(x, norm), gradient = shape.source(dy, norm);
  const Parameter w(weight), b(bias);
  ek_backward_args args = EK_BACKWARD_ARGS_INIT;
  args.x = from.view;
  args.dy = gradient.view;
  args.weight = w.view;
  args.bias = b.view;
  if (norm.centers()) args.mean = address_of(mean);
  args.rstd = address_of(rstd);
  Operand to, twin, other;
  if (wanted[0]) {
    to = shape.target(result.dx, norm);
    args.dx = to.view;
  }
  if (wanted[3]) {
    twin = shape.target(result.dresidual, norm);
    args.dresidual = twin.view;
  }
  if (dsum != nullptr && (wanted[0] || wanted[3])) {
    other = shape.source(*dsum, norm);
    args.dsum = other.view;
  }
  const auto parameter = [](const Tensor& tensor) {
    return ek_vector{address_of(tensor), dtype_of(tensor.scalar_type()), 0};
  };
  if (wanted[1]) args.dweight = parameter(result.dweight);
  if (wanted[2]) args.dbias = parameter(result.dbias);
  const MaybeTensor none;
  const SampleTensor scale(modulated ? modulated->scale : none, norm, shape.problem);
  const SampleTensor shift(modulated ? modulated->shift : none, norm, shape.problem);
  const SampleTensor dscale(result.dscale, wanted[4], norm, shape.problem);
  const SampleTensor dshift(result.dshift, wanted[5], norm, shape.problem);
  args.scale = scale.view;
  args.shift = shift.view;
  args.dscale = dscale.view;
  args.dshift = dshift.view;
  Execution(x).run(x, shape.problem, args, ek_prepare_backward);
  if (wanted[0]) Shape::finish(to, result.dx);
  if (wanted[3]) Shape::finish(twin, result.dresidual);
  return result;
}

}  // namespace evenkeel::torch_binding
