// The C++ face of the C ABI: spans instead of pointers, exceptions instead of statuses, and a
// workspace that owns itself. It adds what C cannot know (how long an array is, whether it may be
// written, the type of the statistics) and leaves every other check to the library.
//
//   evenkeel::forward(evenkeel::layer_norm(rows, cols), {.x = x, .y = y, .weight = weight});
//
// x, y, weight are any contiguous ranges of float or double. Half types have no C++ type to deduce
// from: pass {pointer, elements, EK_BF16}. A slice passes its strides: {span, row_stride}.
#ifndef EVENKEEL_EVENKEEL_HPP_
#define EVENKEEL_EVENKEEL_HPP_

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <ranges>
#include <stdexcept>
#include <string>
#include <type_traits>

#include <evenkeel/evenkeel.h>

namespace evenkeel {

// What every call throws that fails: the status, and ek_last_error() as what().
class Error : public std::runtime_error {
 public:
  Error(ek_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  ek_status status() const noexcept { return status_; }

 private:
  ek_status status_;
};

// Throws an Error unless the status is EK_OK.
inline void check(ek_status status) {
  if (status != EK_OK) throw Error(status, ek_last_error());
}

template <typename T, typename Plain = std::remove_cv_t<T>>
inline constexpr bool kIsReal = std::is_same_v<Plain, float> || std::is_same_v<Plain, double>;

template <typename T>
concept Real = kIsReal<T>;

template <Real T>
inline constexpr ek_dtype kDtype = std::same_as<std::remove_cv_t<T>, float> ? EK_F32 : EK_F64;

template <typename R>
concept RealRange = std::ranges::contiguous_range<R> && std::ranges::sized_range<R> &&
    Real<std::remove_reference_t<std::ranges::range_reference_t<R>>>;

template <typename R>
concept WritableRange =
    RealRange<R> && !std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<R>>>;

// A contiguous range with its dtype and strides; absent by default.
struct Array {
  void* data = nullptr;
  std::size_t size = 0;  // in elements
  ek_dtype dtype = EK_F32;
  std::int64_t row_stride = 0;
  std::int64_t outer_stride = 0;

  ek_tensor tensor() const { return {data, row_stride, outer_stride, dtype, 0}; }
  ek_vector vector() const { return {data, dtype, 0}; }
};

// An array that a call reads.
struct Input : Array {
  Input() = default;
  Input(const void* data, std::size_t size, ek_dtype dtype, std::int64_t row_stride = 0,
        std::int64_t outer_stride = 0)
      : Array{const_cast<void*>(data), size, dtype, row_stride, outer_stride} {}
  template <RealRange R>
  Input(R&& range, std::int64_t row_stride = 0, std::int64_t outer_stride = 0)
      : Input(std::ranges::data(range), std::ranges::size(range),
              kDtype<std::ranges::range_value_t<R>>, row_stride, outer_stride) {}
};

// An array that a call writes.
struct Output : Array {
  Output() = default;
  Output(void* data, std::size_t size, ek_dtype dtype, std::int64_t row_stride = 0,
         std::int64_t outer_stride = 0)
      : Array{data, size, dtype, row_stride, outer_stride} {}
  template <WritableRange R>
  Output(R&& range, std::int64_t row_stride = 0, std::int64_t outer_stride = 0)
      : Output(std::ranges::data(range), std::ranges::size(range),
               kDtype<std::ranges::range_value_t<R>>, row_stride, outer_stride) {}
};

// The arguments of a forward call, field by field.
struct ForwardArgs {
  Input x = {};
  Output y = {};
  Input weight = {};
  Input bias = {};
  Output mean = {};
  Output rstd = {};
  Input residual = {};
  Output sum = {};  // its dtype counts even where it is absent
  // Of a y of 8 bits, {pointer, elements, EK_F8_E4M3}: one scale, or those of its rows.
  Input y_scale = {};
  Output y_row_scale = {};
  double y_amax_bound = 0;
  // A row for each sample, set problem.samples: {range, distance between samples}.
  Input scale = {};
  Input shift = {};
};

// The arguments of a backward call, field by field.
struct BackwardArgs {
  Input dy = {};
  Input x = {};
  Input weight = {};
  Input bias = {};
  Input mean = {};
  Input rstd = {};
  Output dx = {};
  Output dweight = {};
  Output dbias = {};
  Input dsum = {};
  Output dresidual = {};
  Input scale = {};
  Input shift = {};
  Output dscale = {};
  Output dshift = {};
};

// How to execute: ek_execution, with its defaults set.
struct Execution : ek_execution {
  Execution() : ek_execution EK_EXECUTION_INIT {}
};

// A problem is a plain ek_problem: set whatever else it needs on the result.
using Problem = ek_problem;

// Layer norm of `rows` rows of `cols` elements.
inline Problem layer_norm(std::int64_t rows, std::int64_t cols, double eps = 1e-5) {
  Problem problem = EK_PROBLEM_INIT;
  problem.op = EK_LAYER_NORM;
  problem.rows = rows;
  problem.cols = cols;
  problem.eps = eps;
  return problem;
}

// RMS norm of `rows` rows of `cols` elements.
inline Problem rms_norm(std::int64_t rows, std::int64_t cols, double eps = 1e-5) {
  Problem problem = layer_norm(rows, cols, eps);
  problem.op = EK_RMS_NORM;
  return problem;
}

// Group norm of `samples` images of `channels` channels of `spatial` pixels.
inline Problem group_norm(std::int64_t samples, std::int64_t channels, std::int64_t spatial,
                          std::int64_t groups, ek_layout layout = EK_NCHW, double eps = 1e-5) {
  Problem problem = EK_PROBLEM_INIT;
  problem.op = EK_GROUP_NORM;
  problem.layout = layout;
  problem.samples = samples;
  problem.channels = channels;
  problem.spatial = spatial;
  problem.groups = groups;
  problem.eps = eps;
  return problem;
}

// Host scratch memory that grows to the largest call it has served. One per thread of calls.
class Workspace {
 public:
  void* at_least(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
      size_ = bytes;
    }
    return memory_.get();
  }
  std::size_t size() const noexcept { return size_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

namespace detail {

// The elements that a problem needs of each kind of array, once the library has accepted it.
struct Extents {
  explicit Extents(const Problem& p) {
    const bool group = p.op == EK_GROUP_NORM;
    const bool channels_last = group && p.layout == EK_NHWC;
    parameter = group ? p.channels : p.cols;
    statistic = group ? p.samples * p.groups : p.rows;
    width = !group ? p.cols : channels_last ? p.channels : p.spatial;
    inner = channels_last ? p.spatial : group ? p.channels : p.inner_rows;
    if (inner == 0) inner = p.rows;
    outer = group ? p.samples : p.rows / (inner > 0 ? inner : 1);
    samples = p.samples;
  }

  std::int64_t tensor(const Array& array) const {
    if (outer == 0 || inner == 0 || width == 0) return 0;
    const std::int64_t row = array.row_stride ? array.row_stride : width;
    const std::int64_t block = array.outer_stride ? array.outer_stride : inner * row;
    return (outer - 1) * block + (inner - 1) * row + width;
  }

  // Of an array with a row for each sample.
  std::int64_t of_samples(const Array& array) const {
    if (samples <= 0) return 0;
    return (samples - 1) * (array.row_stride ? array.row_stride : width) + width;
  }

  std::int64_t parameter, statistic, width, inner, outer, samples;
};

inline void need(const char* name, const Array& array, std::int64_t elements) {
  if (array.data == nullptr || static_cast<std::int64_t>(array.size) >= elements) return;
  throw Error(EK_INVALID_ARGUMENT, std::string(name) + " has " + std::to_string(array.size) +
                                       " elements; the problem needs " + std::to_string(elements));
}

// of, of_name: what the statistic is of, x or the sum.
inline void need_statistic(const char* name, const Array& array, const Array& of,
                           const char* of_name, std::int64_t elements) {
  const ek_dtype dtype = of.dtype == EK_F64 ? EK_F64 : EK_F32;
  if (array.data != nullptr && array.dtype != dtype) {
    const bool wide = dtype == EK_F64;
    throw Error(EK_INVALID_ARGUMENT, std::string(name) +
                                         (wide ? " must be double: " : " must be float: ") +
                                         of_name + (wide ? " is" : " is not double"));
  }
  need(name, array, elements);
}

// A scale of a y of 8 bits.
inline void need_scale(const char* name, const Array& array, std::int64_t elements) {
  if (array.data != nullptr && array.dtype != EK_F32)
    throw Error(EK_INVALID_ARGUMENT, std::string(name) + " must be float");
  need(name, array, elements);
}

inline ek_forward_args convert(const ForwardArgs& a) {
  return {sizeof(ek_forward_args),
          0,
          a.x.tensor(),
          a.y.tensor(),
          a.weight.vector(),
          a.bias.vector(),
          a.mean.data,
          a.rstd.data,
          a.residual.tensor(),
          a.sum.tensor(),
          static_cast<const float*>(a.y_scale.data),
          static_cast<float*>(a.y_row_scale.data),
          a.y_amax_bound,
          a.scale.tensor(),
          a.shift.tensor()};
}

inline ek_backward_args convert(const BackwardArgs& a) {
  return {sizeof(ek_backward_args),
          0,
          a.dy.tensor(),
          a.x.tensor(),
          a.weight.vector(),
          a.bias.vector(),
          a.mean.data,
          a.rstd.data,
          a.dx.tensor(),
          a.dweight.vector(),
          a.dbias.vector(),
          a.dsum.tensor(),
          a.dresidual.tensor(),
          a.scale.tensor(),
          a.shift.tensor(),
          a.dscale.tensor(),
          a.dshift.tensor()};
}

inline void check_arrays(const Problem& problem, const ForwardArgs& a) {
  const Extents extents(problem);
  need("x", a.x, extents.tensor(a.x));
  need("y", a.y, extents.tensor(a.y));
  need("residual", a.residual, extents.tensor(a.residual));
  need("sum", a.sum, extents.tensor(a.sum));
  need("weight", a.weight, extents.parameter);
  need("bias", a.bias, extents.parameter);
  need("scale", a.scale, extents.of_samples(a.scale));
  need("shift", a.shift, extents.of_samples(a.shift));
  const bool has_sum = a.residual.data != nullptr;
  const Array& normalized = has_sum ? static_cast<const Array&>(a.sum) : a.x;
  const char* const name = has_sum ? "sum" : "x";
  need_statistic("mean", a.mean, normalized, name, extents.statistic);
  need_statistic("rstd", a.rstd, normalized, name, extents.statistic);
  need_scale("y_scale", a.y_scale, 1);
  need_scale("y_row_scale", a.y_row_scale, extents.statistic);
}

inline void check_arrays(const Problem& problem, const BackwardArgs& a) {
  const Extents extents(problem);
  need("dy", a.dy, extents.tensor(a.dy));
  need("x", a.x, extents.tensor(a.x));
  need("weight", a.weight, extents.parameter);
  need("bias", a.bias, extents.parameter);
  need_statistic("mean", a.mean, a.x, "x", extents.statistic);
  need_statistic("rstd", a.rstd, a.x, "x", extents.statistic);
  need("dsum", a.dsum, extents.tensor(a.dsum));
  need("dx", a.dx, extents.tensor(a.dx));
  need("dresidual", a.dresidual, extents.tensor(a.dresidual));
  need("dweight", a.dweight, extents.parameter);
  need("dbias", a.dbias, extents.parameter);
  need("scale", a.scale, extents.of_samples(a.scale));
  need("shift", a.shift, extents.of_samples(a.shift));
  need("dscale", a.dscale, extents.of_samples(a.dscale));
  need("dshift", a.dshift, extents.of_samples(a.dshift));
}

template <typename Args, typename Prepare>
void call(const Problem& problem, const Args& args, Workspace& workspace,
          const Execution& execution, Prepare prepare) {
  const auto c_args = convert(args);
  ek_prepared prepared;
  check(prepare(&problem, &c_args, &execution, &prepared));
  check_arrays(problem, args);
  void* memory = execution.workspace;
  std::size_t size = execution.workspace_size;
  if (memory == nullptr) {
    memory = workspace.at_least(prepared.workspace_size);
    size = workspace.size();
  }
  check(ek_run(&prepared, memory, size));
}

template <typename Args, typename Explain>
std::string explain(const Problem& problem, const Args& args, const Execution& execution,
                    Explain explain) {
  const auto c_args = convert(args);
  char text[2048] = "";
  check(explain(&problem, &c_args, &execution, nullptr, text, sizeof text));
  return text;
}

}  // namespace detail

// Runs the call. A workspace that is set in the execution is used as it is (device memory, for example);
// otherwise `workspace` provides it, and a caller that keeps it allocates only once.
inline void forward(const Problem& problem, const ForwardArgs& args, Workspace& workspace,
                    const Execution& execution = {}) {
  detail::call(problem, args, workspace, execution, ek_prepare_forward);
}

// The same for the gradients.
inline void backward(const Problem& problem, const BackwardArgs& args, Workspace& workspace,
                     const Execution& execution = {}) {
  detail::call(problem, args, workspace, execution, ek_prepare_backward);
}

// Runs the call with a workspace of its own.
inline void forward(const Problem& problem, const ForwardArgs& args,
                    const Execution& execution = {}) {
  Workspace workspace;
  forward(problem, args, workspace, execution);
}

// The same for the gradients.
inline void backward(const Problem& problem, const BackwardArgs& args,
                     const Execution& execution = {}) {
  Workspace workspace;
  backward(problem, args, workspace, execution);
}

// Which backend a call will run on, and why each other one will not: one line for each.
inline std::string explain(const Problem& problem, const ForwardArgs& args,
                           const Execution& execution = {}) {
  return detail::explain(problem, args, execution, ek_explain_forward);
}

// The same for a backward call.
inline std::string explain(const Problem& problem, const BackwardArgs& args,
                           const Execution& execution = {}) {
  return detail::explain(problem, args, execution, ek_explain_backward);
}

}  // namespace evenkeel

#endif  // EVENKEEL_EVENKEEL_HPP_
