// Overwriting fields and judging what is left (mutate.h).
#include "mutate.h"

#include <iterator>
#include <limits>

#include "support/half.h"

namespace evenkeel::support {
namespace {

// Wide enough for every size without overflow; that large ones are rounded does not matter here.
using Wide = long double;

void run_serially(void*, int64_t tasks, void (*task)(void*, int64_t), void* argument) {
  for (int64_t i = 0; i < tasks; ++i) task(argument, i);
}

int64_t interesting_integer(uint8_t kind, uint8_t value) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const int64_t table[] = {0,
                           1,
                           -1,
                           2,
                           value,
                           -value,
                           kMax,
                           -kMax - 1,
                           kMax / 2,
                           kMax / 16,
                           int64_t{1} << 31,
                           int64_t{1} << 32,
                           int64_t{1} << (value % 63),
                           kMax / (value + 1),
                           (int64_t{1} << 60) + value,
                           3};
  return table[kind % std::size(table)];
}

double interesting_double(uint8_t kind, uint8_t value) {
  using Limits = std::numeric_limits<double>;
  const double table[] = {0,
                          -0.0,
                          1,
                          -1,
                          value / 16.0,
                          Limits::quiet_NaN(),
                          Limits::infinity(),
                          -Limits::infinity(),
                          Limits::max(),
                          Limits::denorm_min(),
                          -1e-300,
                          1e-5};
  return table[kind % std::size(table)];
}

// Bytes from `address` to the end of the buffer that it lies in.
Wide room(const Problem& problem, const void* address) {
  for (const Buffer* buffer : buffers_of(problem)) {
    const auto start = reinterpret_cast<uintptr_t>(buffer->data());
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (buffer->data() != nullptr && at >= start && at <= start + buffer->size()) {
      return static_cast<Wide>(start + buffer->size() - at);
    }
  }
  return -1;
}

Wide tensor_bytes(const ek_problem& problem, const ek_tensor& tensor) {
  const bool group = problem.op == EK_GROUP_NORM;
  const bool nhwc = problem.layout == EK_NHWC;
  const Wide width = !group ? problem.cols : nhwc ? problem.channels : problem.spatial;
  const Wide inner = !group ? (problem.inner_rows ? problem.inner_rows : problem.rows)
                     : nhwc ? problem.spatial
                            : problem.channels;
  const Wide outer = group ? problem.samples : inner == 0 ? 0 : problem.rows / inner;
  if (outer * inner == 0) return 0;
  const Wide row_stride = tensor.row_stride ? tensor.row_stride : width;
  const Wide outer_stride = tensor.outer_stride ? tensor.outer_stride : inner * row_stride;
  const Wide last = (outer - 1) * outer_stride + (inner - 1) * row_stride + width;
  return last * static_cast<Wide>(size_of(static_cast<ek_dtype>(tensor.dtype)));
}

}  // namespace

std::vector<Buffer*> buffers_of(const Problem& problem) {
  std::vector<Buffer*> buffers;
  const auto add = [&](const Buffer& buffer) {
    if (buffer) buffers.push_back(const_cast<Buffer*>(&buffer));
  };
  for (Tensor tensor : {Tensor::kX, Tensor::kY, Tensor::kDy, Tensor::kDx, Tensor::kResidual,
                        Tensor::kSum, Tensor::kDsum, Tensor::kDresidual}) {
    add(problem.buffer(tensor));
  }
  if (problem.spec().residual.present) add(problem.buffer(Tensor::kNormalized));
  for (Vector vector :
       {Vector::kWeight, Vector::kBias, Vector::kDweight, Vector::kDbias, Vector::kMean,
        Vector::kRstd, Vector::kSavedMean, Vector::kSavedRstd, Vector::kYScale, Vector::kRowScale,
        Vector::kScale, Vector::kShift, Vector::kDscale, Vector::kDshift}) {
    add(problem.buffer(vector));
  }
  return buffers;
}

CallStructs::CallStructs(const Problem& problem, int threads) {
  *problem_ = problem.problem();
  *forward_ = problem.forward_args();
  *backward_ = problem.backward_args();
  *execution_ = EK_EXECUTION_INIT;
  (*execution_).threads = threads;
  *parallel_ = {sizeof(ek_parallel), threads, run_serially, nullptr};
}

std::vector<CallStructs::Field> CallStructs::fields(bool backward) {
  using Kind = Field::Kind;
  ek_problem& p = *problem_;
  ek_execution& e = *execution_;
  std::vector<Field> all = {
      {Kind::kStructSize, &p.struct_size},
      {Kind::kInt32, &p.op},
      {Kind::kInt32, &p.layout},
      {Kind::kInt32, &p.activation},
      {Kind::kInt32, &p.casting},
      {Kind::kInt32, &p.reserved},
      {Kind::kInt64, &p.rows},
      {Kind::kInt64, &p.cols},
      {Kind::kInt64, &p.inner_rows},
      {Kind::kInt64, &p.samples},
      {Kind::kInt64, &p.channels},
      {Kind::kInt64, &p.spatial},
      {Kind::kInt64, &p.groups},
      {Kind::kDouble, &p.eps},
      {Kind::kDouble, &p.weight_offset},
      {Kind::kStructSize, &e.struct_size},
      {Kind::kInt32, &e.device},
      {Kind::kInt32, &e.device_index},
      {Kind::kInt32, &e.threads},
      {Kind::kPointer, &e.stream},
  };
  const auto tensor = [&](ek_tensor& t) {
    all.insert(all.end(), {{Kind::kPointer, &t.data},
                           {Kind::kInt64, &t.row_stride},
                           {Kind::kInt64, &t.outer_stride},
                           {Kind::kDtype, &t.dtype},
                           {Kind::kInt32, &t.reserved}});
  };
  const auto vector = [&](ek_vector& v) {
    all.insert(all.end(),
               {{Kind::kPointer, &v.data}, {Kind::kDtype, &v.dtype}, {Kind::kInt32, &v.reserved}});
  };
  if (backward) {
    ek_backward_args& a = *backward_;
    all.insert(all.end(), {{Kind::kStructSize, &a.struct_size},
                           {Kind::kInt32, &a.reserved},
                           {Kind::kPointer, &a.mean},
                           {Kind::kPointer, &a.rstd}});
    for (ek_tensor* t :
         {&a.dy, &a.x, &a.dx, &a.dsum, &a.dresidual, &a.scale, &a.shift, &a.dscale, &a.dshift})
      tensor(*t);
    for (ek_vector* v : {&a.weight, &a.bias, &a.dweight, &a.dbias}) vector(*v);
  } else {
    ek_forward_args& a = *forward_;
    all.insert(all.end(), {{Kind::kStructSize, &a.struct_size},
                           {Kind::kInt32, &a.reserved},
                           {Kind::kPointer, &a.mean},
                           {Kind::kPointer, &a.rstd},
                           {Kind::kPointer, &a.y_scale},
                           {Kind::kPointer, &a.y_row_scale},
                           {Kind::kDouble, &a.y_amax_bound}});
    for (ek_tensor* t : {&a.x, &a.y, &a.residual, &a.sum, &a.scale, &a.shift}) tensor(*t);
    for (ek_vector* v : {&a.weight, &a.bias}) vector(*v);
  }
  return all;
}

void CallStructs::mutate(const Problem& problem, uint8_t field, uint8_t kind, uint8_t value,
                         bool backward) {
  const std::vector<Field> all = fields(backward);
  // Past the plain fields: the caller's threads, the backend's name, bytes behind a struct.
  constexpr size_t kSpecial = 4;
  const size_t which = field % (all.size() + kSpecial);
  if (which >= all.size()) {
    ek_execution& execution = *execution_;
    switch (which - all.size()) {
      case 0:
        execution.parallel = parallel_.get();
        if (kind % 4 == 0)
          (*parallel_).threads = static_cast<int32_t>(interesting_integer(value, kind));
        if (kind % 4 == 1) (*parallel_).run = nullptr;
        if (kind % 4 == 2) (*parallel_).struct_size = value;
        return;
      case 1: {
        static const char* const kNames[] = {"cpu", "reference", "cuda", "", "CPU", "cpu "};
        execution.backend = kNames[kind % std::size(kNames)];
        return;
      }
      case 2:
        problem_.unknown(kind) = value;
        return;
      default:
        execution_.unknown(kind) = value;
        return;
    }
  }
  using Kind = Field::Kind;
  void* address = all[which].address;
  const int64_t integer = interesting_integer(kind, value);
  switch (all[which].kind) {
    case Kind::kInt32:
      *static_cast<int32_t*>(address) = static_cast<int32_t>(integer);
      return;
    case Kind::kDtype:
      *static_cast<int32_t*>(address) = kind % 4 != 0 ? value % 4 : value - 128;
      return;
    case Kind::kInt64:
      *static_cast<int64_t*>(address) = integer;
      return;
    case Kind::kDouble:
      *static_cast<double*>(address) = interesting_double(kind, value);
      return;
    case Kind::kStructSize: {
      uint32_t& size = *static_cast<uint32_t*>(address);
      size = kind % 2 == 0 ? size + value : static_cast<uint32_t>(integer);
      return;
    }
    case Kind::kPointer: {
      // Nothing, another buffer, or the same one a few bytes on.
      void*& pointer = *static_cast<void**>(address);
      const std::vector<Buffer*> buffers = buffers_of(problem);
      if (kind % 4 == 0) {
        pointer = nullptr;
      } else if (kind % 4 == 1 && pointer != nullptr) {
        pointer = static_cast<char*>(pointer) + value % 16;
      } else {
        pointer = buffers[value % buffers.size()]->data();
      }
      return;
    }
  }
}

ek_status CallStructs::query(bool backward, size_t* bytes) {
  return backward ? ek_backward_workspace(problem_.get(), backward_.get(), execution_.get(), bytes)
                  : ek_forward_workspace(problem_.get(), forward_.get(), execution_.get(), bytes);
}

ek_status CallStructs::run(bool backward) {
  return backward ? ek_backward(problem_.get(), backward_.get(), execution_.get())
                  : ek_forward(problem_.get(), forward_.get(), execution_.get());
}

ek_status CallStructs::prepare(bool backward, ek_prepared* prepared) {
  return backward ? ek_prepare_backward(problem_.get(), backward_.get(), execution_.get(), prepared)
                  : ek_prepare_forward(problem_.get(), forward_.get(), execution_.get(), prepared);
}

ek_status CallStructs::explain(bool backward, char* text, size_t capacity) {
  return backward ? ek_explain_backward(problem_.get(), backward_.get(), execution_.get(), nullptr,
                                        text, capacity)
                  : ek_explain_forward(problem_.get(), forward_.get(), execution_.get(), nullptr,
                                       text, capacity);
}

bool CallStructs::is_backed(const Problem& problem, bool backward) {
  const ek_problem& p = *problem_;
  const bool group = p.op == EK_GROUP_NORM;
  const Wide units = group ? static_cast<Wide>(p.samples) * p.groups : p.rows;
  const Wide parameters = group ? p.channels : p.cols;
  const auto there = [&](const void* data, Wide bytes) {
    return data == nullptr || bytes == 0 || room(problem, data) >= bytes;
  };
  const auto tensor = [&](const ek_tensor& t) { return there(t.data, tensor_bytes(p, t)); };
  const auto vector = [&](const ek_vector& v) {
    return there(v.data, parameters * static_cast<Wide>(size_of(static_cast<ek_dtype>(v.dtype))));
  };
  const auto samples = [&](const ek_tensor& t) {
    const Wide stride = t.row_stride != 0 && p.samples > 1 ? t.row_stride : p.cols;
    const Wide elements = p.samples <= 0 ? 0 : (p.samples - 1) * stride + p.cols;
    return there(t.data, elements * static_cast<Wide>(size_of(static_cast<ek_dtype>(t.dtype))));
  };
  const auto statistics = [&](const void* data, const ek_tensor& x) {
    return there(data, units * (x.dtype == EK_F64 ? 8 : 4));
  };
  // Thousands of threads are valid, but not what is tried here.
  if ((*execution_).threads > 16 || (*parallel_).threads > 16) return false;
  if (backward) {
    const ek_backward_args& a = *backward_;
    return tensor(a.dy) && tensor(a.x) && tensor(a.dx) && tensor(a.dsum) && tensor(a.dresidual) &&
           vector(a.weight) && vector(a.bias) && vector(a.dweight) && vector(a.dbias) &&
           samples(a.scale) && samples(a.shift) && samples(a.dscale) && samples(a.dshift) &&
           statistics(a.mean, a.x) && statistics(a.rstd, a.x);
  }
  const ek_forward_args& a = *forward_;
  const ek_tensor& normalized = a.residual.data == nullptr ? a.x : a.sum;
  return tensor(a.x) && tensor(a.y) && tensor(a.residual) && tensor(a.sum) && vector(a.weight) &&
         vector(a.bias) && statistics(a.mean, normalized) && statistics(a.rstd, normalized) &&
         there(a.y_scale, 4) && there(a.y_row_scale, units * 4) && samples(a.scale) &&
         samples(a.shift);
}

}  // namespace evenkeel::support
