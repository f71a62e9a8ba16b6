// From TensorFlow's tensors to one call of the C ABI, for every operator.
//
// A kernel finds out when it is made which parts its operator has (roles.h). Memory comes from
// TensorFlow's allocator, threads from its pool for the insides of operators, and on a GPU the
// stream is TensorFlow's. y is written over x, and dx over dy or x, where nobody else needs them.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>

#include "evenkeel/evenkeel.h"
#include "roles.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/threadpool.h"
#ifdef EVENKEEL_TENSORFLOW_GPU
#include "tensorflow/core/platform/stream_executor.h"
#endif

namespace evenkeel::tensorflow_binding {
namespace {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

int32_t dtype_of(DataType type) {
  switch (type) {
    case tensorflow::DT_DOUBLE:
      return EK_F64;
    case tensorflow::DT_HALF:
      return EK_F16;
    case tensorflow::DT_BFLOAT16:
      return EK_BF16;
    default:  // the operators' signatures let nothing else through
      return EK_F32;
  }
}

ek_tensor tensor_of(const Tensor& tensor) {
  return {tensor.data(), 0, 0, dtype_of(tensor.dtype()), 0};
}

ek_vector vector_of(const Tensor* tensor) {
  if (tensor == nullptr) return EK_VECTOR_INIT;
  return {tensor->data(), dtype_of(tensor->dtype()), 0};
}

absl::Status to_status(ek_status status) {
  if (status == EK_OK) return {};
  const std::string message = std::string("evenkeel: ") + ek_last_error();
  if (status == EK_INVALID_ARGUMENT) return absl::InvalidArgumentError(message);
  if (status == EK_UNSUPPORTED) return absl::UnimplementedError(message);
  return absl::InternalError(message);
}

struct Cpu {
  using Workers = tensorflow::DeviceBase::CpuWorkerThreads;

  static void run_tasks(void* workers, int64_t tasks, void (*task)(void*, int64_t),
                        void* argument) {
    // One at a time: the library has made no more tasks than are worth a thread.
    static_cast<const Workers*>(workers)->workers->ParallelFor(
        tasks, tensorflow::thread::ThreadPool::SchedulingParams::Fixed(1),
        [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) task(argument, i);
        });
  }

  // Below so many elements the calling thread is done before another one of the pool has woken up
  // (fused backward of 128 x 128 on two threads: 177 us, on one: 40 us).
  static constexpr int64_t kElementsForThreads = 131072;

  ek_parallel parallel = EK_PARALLEL_INIT;

  void enter(OpKernelContext* context, int64_t elements, ek_execution& execution) {
    execution.threads = 1;
    if (elements < kElementsForThreads) return;
    const Workers* workers = context->device()->tensorflow_cpu_worker_threads();
    parallel.threads = workers->num_threads;
    parallel.run = run_tasks;
    parallel.context = const_cast<Workers*>(workers);
    execution.parallel = &parallel;
  }

  static absl::Status zero(OpKernelContext*, Tensor* tensor) {
    std::memset(tensor->data(), 0, tensor->TotalBytes());
    return {};
  }
};

#ifdef EVENKEEL_TENSORFLOW_GPU
struct Gpu {
  static stream_executor::Stream* stream(OpKernelContext* context) {
    return context->op_device_context()->stream();
  }

  void enter(OpKernelContext* context, int64_t, ek_execution& execution) {
    execution.device = EK_CUDA;
    execution.device_index = stream(context)->parent()->device_ordinal();
    execution.stream = stream(context)->platform_specific_handle().stream;
  }

  static absl::Status zero(OpKernelContext* context, Tensor* tensor) {
    stream_executor::DeviceAddressBase memory(tensor->data(), tensor->TotalBytes());
    return stream(context)->MemZero(&memory, tensor->TotalBytes());
  }
};
#endif

// Prepares a call (ek_prepare_forward or ek_prepare_backward), makes room for its workspace, runs it.
template <typename Device, typename Args, typename Prepare>
absl::Status call(OpKernelContext* context, const ek_problem& problem, int64_t elements,
                  const Args& args, Prepare prepare) {
  Device device;
  ek_execution execution = EK_EXECUTION_INIT;
  device.enter(context, elements, execution);
  ek_prepared prepared;
  TF_RETURN_IF_ERROR(to_status(prepare(&problem, &args, &execution, &prepared)));
  const size_t bytes = prepared.workspace_size;
  Tensor workspace;
  if (bytes != 0) {
    const TensorShape shape({static_cast<int64_t>(bytes)});
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8, shape, &workspace));
  }
  return to_status(ek_run(&prepared, bytes == 0 ? nullptr : workspace.data(), bytes));
}

// One input or output of an operator; absent where the index is negative.
struct Part {
  int index = -1;
  const char* name = nullptr;

  explicit operator bool() const { return index >= 0; }
};

template <typename Device>
class Norm : public OpKernel {
 public:
  explicit Norm(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, read_attributes(context, problem_));
    const auto input = [this](auto... arguments) { return InputRange(arguments...); };
    const auto output = [this](auto... arguments) { return OutputRange(arguments...); };
    OP_REQUIRES_OK(context, find(kX, input, x_));
    OP_REQUIRES_OK(context, find(kDy, input, dy_));
    OP_REQUIRES_OK(context, find(kWeight, input, weight_));
    OP_REQUIRES_OK(context, find(kBias, input, bias_));
    OP_REQUIRES_OK(context, find(kMean, input, mean_));
    OP_REQUIRES_OK(context, find(kRstd, input, rstd_));
    OP_REQUIRES_OK(context, find(dy_ ? kDx : kY, output, result_));
    OP_REQUIRES_OK(context, find(kDweight, output, dweight_));
    OP_REQUIRES_OK(context, find(kDbias, output, dbias_));
    OP_REQUIRES_OK(context, find(kMean, output, mean_out_));
    OP_REQUIRES_OK(context, find(kRstd, output, rstd_out_));

    const DataType type = input_type(x_.index);
    if (type == tensorflow::DT_DOUBLE) statistics_ = type;
    DataType given = statistics_;
    if (context->HasAttr("S")) OP_REQUIRES_OK(context, context->GetAttr("S", &given));
    OP_REQUIRES(context, given == statistics_,
                absl::InvalidArgumentError(absl::StrCat(
                    "S is ", DataTypeString(given), ", but must be ", DataTypeString(statistics_),
                    " where T is ", DataTypeString(type))));
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, dy_ ? backward(context) : forward(context));
  }

 private:
  // Sizes, and the shapes that follow from x's.
  struct Sizes {
    ek_problem problem;
    TensorShape channels, mean, rstd;
  };

  template <typename Range>
  static absl::Status find(const Role& role, const Range& range, Part& part) {
    for (const char* name : role) {
      int start = 0, stop = 0;
      if (name == nullptr || !range(name, &start, &stop).ok()) continue;
      if (stop - start > 1) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, " is a list of ", stop - start, ", but must be a list of 0 or 1"));
      }
      if (stop > start) part = {start, name};
    }
    return {};
  }

  static absl::Status expect(OpKernelContext* context, const Part& part, const TensorShape& allowed,
                             const char* reason) {
    if (!part) return {};
    const TensorShape& shape = context->input(part.index).shape();
    if (shape == allowed) return {};
    return wrong_shape(part.name, shape.DebugString(), allowed.DebugString(), reason);
  }

  absl::Status check(OpKernelContext* context, Sizes& sizes) const {
    const TensorShape& x = context->input(x_.index).shape();
    const int least = least_rank(problem_);
    if (x.dims() < least) return wrong_rank(x_.name, x.DebugString(), least);
    const int axis = channel_axis(problem_);
    const int64_t channels = x.dim_size(axis < 0 ? x.dims() + axis : axis);
    sizes.channels.AddDim(channels);
    sizes.problem = problem_;
    ek_problem& problem = sizes.problem;
    if (problem.op == EK_GROUP_NORM) {
      problem.samples = x.dim_size(0);
      problem.channels = channels;
      problem.spatial = x.num_elements() / std::max<int64_t>(1, problem.samples * channels);
      sizes.rstd = TensorShape({problem.samples, problem.groups});
    } else {
      problem.cols = channels;
      sizes.rstd = x;
      sizes.rstd.RemoveLastDims(1);
      problem.rows = sizes.rstd.num_elements();
    }
    sizes.mean = problem.op == EK_RMS_NORM ? TensorShape({0}) : sizes.rstd;

    TF_RETURN_IF_ERROR(expect(context, dy_, x, kLikeX));
    TF_RETURN_IF_ERROR(expect(context, weight_, sizes.channels, kPerChannel));
    TF_RETURN_IF_ERROR(expect(context, bias_, sizes.channels, kPerChannel));
    TF_RETURN_IF_ERROR(expect(context, mean_, sizes.mean, kAsReturned));
    return expect(context, rstd_, sizes.rstd, kAsReturned);
  }

  static const Tensor* input(OpKernelContext* context, const Part& part) {
    return part ? &context->input(part.index) : nullptr;
  }

  // Null where the operator has no such output.
  static absl::Status allocate(OpKernelContext* context, const Part& part, const TensorShape& shape,
                               Tensor*& tensor) {
    return part ? context->allocate_output(part.index, shape, &tensor) : absl::Status();
  }

  // There is nothing to read: sums are zero, and so are the statistics of rows without elements.
  static absl::Status zero(OpKernelContext* context, std::initializer_list<Tensor*> tensors) {
    for (Tensor* tensor : tensors) {
      if (tensor == nullptr || tensor->NumElements() == 0) continue;
      TF_RETURN_IF_ERROR(Device::zero(context, tensor));
    }
    return {};
  }

  absl::Status run_forward(OpKernelContext* context, const ek_problem& problem, const Tensor& y,
                           const Tensor* weight, const Tensor* bias, const Tensor* mean,
                           const Tensor* rstd) const {
    ek_forward_args args = EK_FORWARD_ARGS_INIT;
    args.x = tensor_of(context->input(x_.index));
    args.y = tensor_of(y);
    args.weight = vector_of(weight);
    args.bias = vector_of(bias);
    if (rstd != nullptr) {
      if (problem.op != EK_RMS_NORM) args.mean = mean->data();
      args.rstd = rstd->data();
    }
    return call<Device>(context, problem, y.NumElements(), args, ek_prepare_forward);
  }

  absl::Status forward(OpKernelContext* context) const {
    Sizes sizes;
    TF_RETURN_IF_ERROR(check(context, sizes));
    const Tensor& x = context->input(x_.index);
    Tensor *y = nullptr, *mean = nullptr, *rstd = nullptr;
    TF_RETURN_IF_ERROR(
        context->forward_input_or_allocate_output({x_.index}, result_.index, x.shape(), &y));
    TF_RETURN_IF_ERROR(allocate(context, mean_out_, sizes.mean, mean));
    TF_RETURN_IF_ERROR(allocate(context, rstd_out_, sizes.rstd, rstd));
    if (y->NumElements() == 0) return zero(context, {mean, rstd});
    return run_forward(context, sizes.problem, *y, input(context, weight_), input(context, bias_),
                       mean, rstd);
  }

  absl::Status backward(OpKernelContext* context) const {
    Sizes sizes;
    TF_RETURN_IF_ERROR(check(context, sizes));
    const bool saved{rstd_};
    const TensorShape& shape = context->input(x_.index).shape();
    Tensor *dx = nullptr, *dweight = nullptr, *dbias = nullptr;
    if (saved) {
      TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({dy_.index, x_.index},
                                                                   result_.index, shape, &dx));
    } else {
      TF_RETURN_IF_ERROR(context->allocate_output(result_.index, shape, &dx));
    }
    TF_RETURN_IF_ERROR(allocate(context, dweight_, sizes.channels, dweight));
    TF_RETURN_IF_ERROR(allocate(context, dbias_, sizes.channels, dbias));
    if (dx->NumElements() == 0) return zero(context, {dweight, dbias});

    Tensor mean, rstd;
    if (saved) {
      mean = context->input(mean_.index);
      rstd = context->input(rstd_.index);
    } else {
      // The forward pass once more; its y, which nobody needs, goes where dx will.
      TF_RETURN_IF_ERROR(context->allocate_temp(statistics_, sizes.mean, &mean));
      TF_RETURN_IF_ERROR(context->allocate_temp(statistics_, sizes.rstd, &rstd));
      TF_RETURN_IF_ERROR(run_forward(context, sizes.problem, *dx, nullptr, nullptr, &mean, &rstd));
    }
    ek_backward_args args = EK_BACKWARD_ARGS_INIT;
    args.dy = tensor_of(context->input(dy_.index));
    args.x = tensor_of(context->input(x_.index));
    args.weight = vector_of(input(context, weight_));
    args.bias = vector_of(input(context, bias_));
    if (sizes.problem.op != EK_RMS_NORM) args.mean = mean.data();
    args.rstd = rstd.data();
    args.dx = tensor_of(*dx);
    args.dweight = vector_of(dweight);
    args.dbias = vector_of(dbias);
    return call<Device>(context, sizes.problem, dx->NumElements(), args, ek_prepare_backward);
  }

  ek_problem problem_ = EK_PROBLEM_INIT;
  DataType statistics_ = tensorflow::DT_FLOAT;
  Part x_, dy_, weight_, bias_, mean_, rstd_;
  Part result_, dweight_, dbias_, mean_out_, rstd_out_;  // the result is y or dx
};

#ifdef EVENKEEL_TENSORFLOW_GPU
#define EVENKEEL_REGISTER_GPU(name) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU), Norm<Gpu>);
#else
#define EVENKEEL_REGISTER_GPU(name)
#endif
#define EVENKEEL_REGISTER(name)                                                  \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), Norm<Cpu>); \
  EVENKEEL_REGISTER_GPU(name)

EVENKEEL_REGISTER("LayerNormCustom")
EVENKEEL_REGISTER("LayerNormBackpropCustom")
EVENKEEL_REGISTER("LayerNormBiasAddCustom")
EVENKEEL_REGISTER("LayerNormBiasAddBackpropCustom")
EVENKEEL_REGISTER("LayerNormFusedCustom")
EVENKEEL_REGISTER("LayerNormFusedBackpropCustom")
EVENKEEL_REGISTER("EvenkeelNorm")
EVENKEEL_REGISTER("EvenkeelNormGrad")

}  // namespace
}  // namespace evenkeel::tensorflow_binding
