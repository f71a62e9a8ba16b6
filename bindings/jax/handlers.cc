// From XLA's buffers to one call of the C ABI: the forward and the backward handler, for the CPU and
// for CUDA.
//
// Buffers come in the order of the ABI's fields, and boolean attributes say which of the optional ones
// are there; python/evenkeel/jax/calls.py is the other side. Everything is checked while JAX traces,
// where messages can name arguments; what could still be wrong here is found by the library. Calls
// without elements never get here.
//
// Memory: on the CPU a handler allocates its workspace, whose size depends on the threads that XLA
// has. On CUDA XLA allocates it, as one more result, so that a call is nothing but launches on XLA's
// stream and can be recorded into a command buffer. Its size depends on the GPU; a program that was
// lowered where there is none calls the handlers ..._scratch, which ask XLA for memory and are not
// recorded.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "../memory/pages.h"
#include "arithmetic.h"
#include "evenkeel/evenkeel.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace evenkeel::jax_binding {

namespace ffi = xla::ffi;

// Fields of ek_problem, and where x's leading dimensions (rows, samples) end.
struct Norm {
  int64_t op, layout, activation, casting, groups, lead;
  double eps, weight_offset;
};

struct Forward : Norm {
  bool has_residual, has_weight, has_bias, has_statistics;
};

struct Backward : Norm {
  bool has_weight, has_bias, has_dsum, wants_dx, wants_dresidual, wants_dweight, wants_dbias;
};

}  // namespace evenkeel::jax_binding

#define EVENKEEL_NUMBER(name) xla::ffi::StructMember<int64_t>(name)
#define EVENKEEL_FLAG(name) xla::ffi::StructMember<bool>(name)
#define EVENKEEL_NORM                                                                 \
  EVENKEEL_NUMBER("op"), EVENKEEL_NUMBER("layout"), EVENKEEL_NUMBER("activation"),    \
      EVENKEEL_NUMBER("casting"), EVENKEEL_NUMBER("groups"), EVENKEEL_NUMBER("lead"), \
      xla::ffi::StructMember<double>("eps"), xla::ffi::StructMember<double>("weight_offset")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(evenkeel::jax_binding::Forward, EVENKEEL_NORM,
                                      EVENKEEL_FLAG("has_residual"), EVENKEEL_FLAG("has_weight"),
                                      EVENKEEL_FLAG("has_bias"), EVENKEEL_FLAG("has_statistics"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(evenkeel::jax_binding::Backward, EVENKEEL_NORM,
                                      EVENKEEL_FLAG("has_weight"), EVENKEEL_FLAG("has_bias"),
                                      EVENKEEL_FLAG("has_dsum"), EVENKEEL_FLAG("wants_dx"),
                                      EVENKEEL_FLAG("wants_dresidual"),
                                      EVENKEEL_FLAG("wants_dweight"), EVENKEEL_FLAG("wants_dbias"));

namespace evenkeel::jax_binding {
namespace {

int32_t dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return EK_F32;
    case ffi::F64:
      return EK_F64;
    case ffi::F16:
      return EK_F16;
    case ffi::BF16:
      return EK_BF16;
    default:
      return -1;  // the library says that there is no such type
  }
}

using MaybeBuffer = std::optional<ffi::AnyBuffer>;

// What a buffer holds: something like x, a statistic (mean, rstd), or a parameter (weight, bias).
enum Kind { kTensor, kStatistic, kParameter };

// Hands out the buffers of a call in their order. Whether they are what the attributes announce is
// asked at the end.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs arguments, ffi::RemainingRets results)
      : arguments_(arguments), results_(results) {}

  MaybeBuffer argument(Kind kind, bool given = true) {
    if (!given) return std::nullopt;
    const auto buffer = arguments_.get<ffi::AnyBuffer>(argument_++);
    return buffer.has_value() ? counted(kind, *buffer) : missing();
  }

  MaybeBuffer result(Kind kind, bool given = true) {
    if (!given) return std::nullopt;
    auto buffer = results_.get<ffi::AnyBuffer>(result_++);
    return buffer.has_value() ? counted(kind, **buffer) : missing();
  }

  MaybeBuffer workspace(bool given) {
    if (!given) return std::nullopt;
    auto buffer = results_.get<ffi::AnyBuffer>(result_++);
    return buffer.has_value() ? MaybeBuffer(**buffer) : missing();
  }

  // All are there, no others, and each has as many elements as its kind has in the problem.
  bool agree(const ek_problem& problem) const {
    const bool groups = problem.op == EK_GROUP_NORM;
    const int64_t rows = groups ? problem.samples * problem.groups : problem.rows;
    const int64_t parameters = groups ? problem.channels : problem.cols;
    return agree_ && argument_ == arguments_.size() && result_ == results_.size() &&
           is(kStatistic, rows) && is(kParameter, parameters);
  }

 private:
  MaybeBuffer counted(Kind kind, const ffi::AnyBuffer& buffer) {
    const auto elements = static_cast<int64_t>(buffer.element_count());
    agree_ = agree_ && is(kind, elements);
    elements_[kind] = elements;
    return buffer;
  }

  MaybeBuffer missing() {
    agree_ = false;
    return std::nullopt;
  }

  bool is(Kind kind, int64_t elements) const {
    return elements_[kind] == kNone || elements_[kind] == elements;
  }

  static constexpr int64_t kNone = -1;

  ffi::RemainingArgs arguments_;
  ffi::RemainingRets results_;
  size_t argument_ = 0, result_ = 0;
  int64_t elements_[3] = {kNone, kNone, kNone};
  bool agree_ = true;
};

ek_tensor tensor_of(const MaybeBuffer& buffer) {
  if (!buffer) return EK_TENSOR_INIT;
  return {buffer->untyped_data(), 0, 0, dtype_of(buffer->element_type()), 0};
}

ek_vector vector_of(const MaybeBuffer& buffer) {
  if (!buffer) return EK_VECTOR_INIT;
  return {buffer->untyped_data(), dtype_of(buffer->element_type()), 0};
}

void* data_of(const MaybeBuffer& buffer) { return buffer ? buffer->untyped_data() : nullptr; }

// What the attributes say of x's dimensions; x is not empty.
bool fits(const Norm& norm, const ffi::AnyBuffer& x) {
  const auto rank = static_cast<int64_t>(x.dimensions().size());
  const int64_t least = norm.op == EK_GROUP_NORM ? 1 : 0;  // dimensions behind the leading ones
  return norm.lead >= 0 && norm.lead + least <= rank && x.element_count() > 0;
}

ek_problem problem_of(const Norm& norm, const ffi::AnyBuffer& x) {
  const auto sizes = x.dimensions();
  const auto lead = sizes.begin() + norm.lead;
  const auto product = [](auto first, auto last) {
    return std::accumulate(first, last, int64_t{1}, std::multiplies<>());
  };
  ek_problem problem = EK_PROBLEM_INIT;
  problem.op = static_cast<int32_t>(norm.op);
  problem.layout = static_cast<int32_t>(norm.layout);
  problem.activation = static_cast<int32_t>(norm.activation);
  problem.casting = static_cast<int32_t>(norm.casting);
  problem.eps = norm.eps;
  problem.weight_offset = norm.weight_offset;
  if (norm.op == EK_GROUP_NORM) {
    problem.samples = product(sizes.begin(), lead);
    problem.channels = norm.layout == EK_NHWC ? sizes[sizes.size() - 1] : *lead;
    problem.spatial = product(lead, sizes.end()) / problem.channels;
    problem.groups = norm.groups;
  } else {
    problem.rows = product(sizes.begin(), lead);
    problem.cols = product(lead, sizes.end());
  }
  return problem;
}

ffi::Error to_error(ek_status status) {
  if (status == EK_OK) return ffi::Error::Success();
  const auto code = status == EK_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                    : status == EK_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                                                  : ffi::ErrorCode::kInternal;
  return ffi::Error(code, std::string("evenkeel: ") + ek_last_error());
}

// Where a call runs, and where its workspace comes from.

class Cpu {
 public:
  static constexpr bool kWorkspaceIsResult = false;

  explicit Cpu(ffi::ThreadPool& pool) : pool_(pool) {}

  // Below so many elements the calling thread is done before another one of the pool has woken up.
  static constexpr size_t kElementsForThreads = 131072;

  void enter(size_t elements, ek_execution& execution) {
    execution.threads = 1;
    if (elements >= kElementsForThreads) execution.parallel = pool_.parallel();
  }

  void* allocate(size_t bytes, const MaybeBuffer&) {
    memory_.reset(new (std::align_val_t{kAlignment}, std::nothrow) std::byte[bytes]);
    return memory_.get();
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Delete {
    void operator()(std::byte* memory) const {
      operator delete[](memory, std::align_val_t{kAlignment});
    }
  };

  Pool pool_;
  std::unique_ptr<std::byte[], Delete> memory_;
};

class Cuda {
 public:
  static constexpr bool kWorkspaceIsResult = true;

  Cuda(void* stream, int32_t ordinal) : stream_(stream), ordinal_(ordinal) {}

  void enter(size_t, ek_execution& execution) const {
    execution.device = EK_CUDA;
    execution.device_index = ordinal_;
    execution.stream = stream_;
  }

  void* allocate(size_t bytes, const MaybeBuffer& workspace) const {
    return workspace->size_bytes() >= bytes ? workspace->untyped_data() : nullptr;
  }

 private:
  void* stream_;
  int32_t ordinal_;
};

class CudaScratch : public Cuda {
 public:
  static constexpr bool kWorkspaceIsResult = false;

  CudaScratch(void* stream, int32_t ordinal, ffi::ScratchAllocator& scratch)
      : Cuda(stream, ordinal), scratch_(scratch) {}

  void* allocate(size_t bytes, const MaybeBuffer&) {
    return scratch_.Allocate(bytes).value_or(nullptr);
  }

 private:
  ffi::ScratchAllocator& scratch_;
};

// Prepares a call (ek_prepare_forward or ek_prepare_backward), finds room for its workspace, runs it.
template <typename Device, typename Args, typename Prepare>
ffi::Error call(Device& device, Prepare prepare, const Norm& norm, const MaybeBuffer& x,
                const Args& args, Buffers& buffers) {
  const MaybeBuffer workspace = buffers.workspace(Device::kWorkspaceIsResult);
  ek_problem problem;
  const bool known = x && fits(norm, *x);
  if (known) problem = problem_of(norm, *x);
  if (!known || !buffers.agree(problem)) {
    return ffi::Error::InvalidArgument(
        "evenkeel: the buffers and attributes of a call do not agree: is it made by evenkeel.jax?");
  }
  ek_execution execution = EK_EXECUTION_INIT;
  device.enter(x->element_count(), execution);
  ek_prepared prepared;
  const ek_status status = prepare(&problem, &args, &execution, &prepared);
  if (status != EK_OK) return to_error(status);
  const size_t bytes = prepared.workspace_size;
  void* const memory = bytes == 0 ? nullptr : device.allocate(bytes, workspace);
  if (bytes != 0 && memory == nullptr) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "evenkeel: no workspace of " + std::to_string(bytes) +
                          " bytes: memory is exhausted, or the program was lowered for another "
                          "GPU than this one: lower it here, or where there is none");
  }
  return to_error(ek_run(&prepared, memory, bytes));
}

template <typename Device>
ffi::Error run(Device device, const Forward& pass, Buffers buffers) {
  ek_forward_args args = EK_FORWARD_ARGS_INIT;
  const MaybeBuffer x = buffers.argument(kTensor);
  args.x = tensor_of(x);
  args.residual = tensor_of(buffers.argument(kTensor, pass.has_residual));
  args.weight = vector_of(buffers.argument(kParameter, pass.has_weight));
  args.bias = vector_of(buffers.argument(kParameter, pass.has_bias));
  args.y = tensor_of(buffers.result(kTensor));
  args.sum = tensor_of(buffers.result(kTensor, pass.has_residual));
  args.mean = data_of(buffers.result(kStatistic, pass.has_statistics && pass.op != EK_RMS_NORM));
  args.rstd = data_of(buffers.result(kStatistic, pass.has_statistics));
  return call(device, ek_prepare_forward, pass, x, args, buffers);
}

template <typename Device>
ffi::Error run(Device device, const Backward& pass, Buffers buffers) {
  ek_backward_args args = EK_BACKWARD_ARGS_INIT;
  args.dy = tensor_of(buffers.argument(kTensor));
  const MaybeBuffer x = buffers.argument(kTensor);
  args.x = tensor_of(x);
  args.weight = vector_of(buffers.argument(kParameter, pass.has_weight));
  args.bias = vector_of(buffers.argument(kParameter, pass.has_bias));
  args.mean = data_of(buffers.argument(kStatistic, pass.op != EK_RMS_NORM));
  args.rstd = data_of(buffers.argument(kStatistic));
  args.dsum = tensor_of(buffers.argument(kTensor, pass.has_dsum));
  args.dx = tensor_of(buffers.result(kTensor, pass.wants_dx));
  args.dresidual = tensor_of(buffers.result(kTensor, pass.wants_dresidual));
  args.dweight = vector_of(buffers.result(kParameter, pass.wants_dweight));
  args.dbias = vector_of(buffers.result(kParameter, pass.wants_dbias));
  return call(device, ek_prepare_backward, pass, x, args, buffers);
}

// What XLA calls: the attributes and buffers of a pass, behind the contexts of a device.

template <typename Pass>
ffi::Error on_cpu(ffi::ThreadPool pool, Pass pass, ffi::RemainingArgs arguments,
                  ffi::RemainingRets results) {
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_value()) advise_large_pages((*result)->untyped_data(), (*result)->size_bytes());
  }
  const IeeeArithmetic arithmetic;
  return run(Cpu(pool), pass, {arguments, results});
}

template <typename Pass>
ffi::Error on_cuda(void* stream, int32_t ordinal, Pass pass, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results) {
  return run(Cuda(stream, ordinal), pass, {arguments, results});
}

template <typename Pass>
ffi::Error on_cuda_scratch(void* stream, int32_t ordinal, ffi::ScratchAllocator scratch, Pass pass,
                           ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return run(CudaScratch(stream, ordinal, scratch), pass, {arguments, results});
}

template <typename Pass>
auto cpu_binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attrs<Pass>().RemainingArgs().RemainingRets();
}

template <typename Pass>
auto cuda_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attrs<Pass>()
      .RemainingArgs()
      .RemainingRets();
}

template <typename Pass>
auto cuda_scratch_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::ScratchAllocator>()
      .Attrs<Pass>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace
}  // namespace evenkeel::jax_binding

extern "C" {
// The version of XLA's interface that this library was compiled with: major, minor.
EK_API extern const int32_t ek_jax_ffi_version[2] = {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};

EK_API XLA_FFI_Error* ek_jax_forward_cpu(XLA_FFI_CallFrame*);
EK_API XLA_FFI_Error* ek_jax_backward_cpu(XLA_FFI_CallFrame*);
EK_API XLA_FFI_Error* ek_jax_forward_cuda(XLA_FFI_CallFrame*);
EK_API XLA_FFI_Error* ek_jax_backward_cuda(XLA_FFI_CallFrame*);
EK_API XLA_FFI_Error* ek_jax_forward_cuda_scratch(XLA_FFI_CallFrame*);
EK_API XLA_FFI_Error* ek_jax_backward_cuda_scratch(XLA_FFI_CallFrame*);
}

using namespace evenkeel::jax_binding;

XLA_FFI_DEFINE_HANDLER_SYMBOL(ek_jax_forward_cpu, on_cpu<Forward>, cpu_binding<Forward>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ek_jax_backward_cpu, on_cpu<Backward>, cpu_binding<Backward>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ek_jax_forward_cuda, on_cuda<Forward>, cuda_binding<Forward>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(ek_jax_backward_cuda, on_cuda<Backward>, cuda_binding<Backward>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(ek_jax_forward_cuda_scratch, on_cuda_scratch<Forward>,
                              cuda_scratch_binding<Forward>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ek_jax_backward_cuda_scratch, on_cuda_scratch<Backward>,
                              cuda_scratch_binding<Backward>());
