// oneDNN's norms and its addition behind plain C functions, for the rivals' comparison.
//
// rivals.py compiles this against the headers of the `onednn-devel` wheel and loads it with ctypes.
// One handle is one prepared primitive with its memory bound to the caller's pointers, so that an
// execution costs nothing but oneDNN. Statistics are saved by the forward pass (oneDNN keeps mean
// and variance), as training needs them.

#include <cstdint>
#include <exception>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <unordered_map>
#include <utility>

namespace {

using dnnl::memory;

thread_local std::string last_error;
thread_local std::string last_name;

dnnl::engine& cpu_engine() {
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::stream& cpu_stream() {
  static dnnl::stream stream(cpu_engine());
  return stream;
}

struct Prepared {
  dnnl::primitive primitive;
  std::unordered_map<int, memory> arguments;

  void bind(int argument, const memory::desc& desc, void* pointer) {
    arguments.emplace(argument, memory(desc, cpu_engine(), pointer));
  }
};

constexpr memory::data_type kTypes[] = {memory::data_type::f32, memory::data_type::bf16,
                                        memory::data_type::f16};

}  // namespace

extern "C" {

// Mirrored by onednn_norm.py. Pointers that a pass does not use are null.
struct NormRequest {
  int32_t op;       // 0 layer norm, 1 RMS norm, 2 group norm
  int32_t nhwc;     // group norm: 1 for channels last
  int32_t dtype;    // of x and dx: 0 f32, 1 bf16, 2 f16
  int32_t y_dtype;  // of y and dy; group norm: the same
  int32_t backward;
  int64_t rows, cols;                                // layer and RMS norm
  int64_t samples, channels, height, width, groups;  // group norm
  float eps;
  void *x, *y, *scale, *shift, *mean, *variance;
  void *dy, *dx, *dscale, *dshift;
};

// out = a + b; out may be a.
struct AddRequest {
  int64_t rows, cols;
  int32_t a_dtype, b_dtype, out_dtype;
  void *a, *b, *out;
};

const char* onednn_last_error() { return last_error.c_str(); }
const char* onednn_last_name() { return last_name.c_str(); }

// "3.13.2"
const char* onednn_version() {
  static const std::string text = std::to_string(dnnl_version()->major) + "." +
                                  std::to_string(dnnl_version()->minor) + "." +
                                  std::to_string(dnnl_version()->patch);
  return text.c_str();
}

void onednn_destroy(void* handle) { delete static_cast<Prepared*>(handle); }

// NULL on failure; onednn_last_name() then tells nothing and onednn_last_error() why.
void* onednn_create(const NormRequest* r) try {
  using Flags = dnnl::normalization_flags;
  const bool group = r->op == 2;
  const bool rms = r->op == 1;
  const auto data =
      group ? memory::desc({r->samples, r->channels, r->height, r->width}, kTypes[r->dtype],
                           r->nhwc ? memory::format_tag::nhwc : memory::format_tag::nchw)
            : memory::desc({r->rows, r->cols}, kTypes[r->dtype], memory::format_tag::ab);
  const auto result =
      group ? data : memory::desc({r->rows, r->cols}, kTypes[r->y_dtype], memory::format_tag::ab);
  const memory::desc vector({group ? r->channels : r->cols}, memory::data_type::f32,
                            memory::format_tag::a);
  const Flags flags =
      rms ? Flags::use_scale | Flags::rms_norm : Flags::use_scale | Flags::use_shift;

  auto norm = std::make_unique<Prepared>();
  const auto bind = [&](int argument, const memory::desc& desc, void* pointer) {
    norm->bind(argument, desc, pointer);
  };
  const auto finish = [&](auto&& hint, auto&& description, auto&& primitive) {
    bind(DNNL_ARG_SRC, data, r->x);
    bind(DNNL_ARG_SCALE, vector, r->scale);
    if (!rms) bind(DNNL_ARG_MEAN, hint.mean_desc(), r->mean);
    bind(DNNL_ARG_VARIANCE, hint.variance_desc(), r->variance);
    if (r->backward) {
      bind(DNNL_ARG_DIFF_DST, result, r->dy);
      bind(DNNL_ARG_DIFF_SRC, data, r->dx);
      bind(DNNL_ARG_DIFF_SCALE, vector, r->dscale);
      if (!rms) bind(DNNL_ARG_DIFF_SHIFT, vector, r->dshift);
    } else {
      bind(DNNL_ARG_DST, result, r->y);
      if (!rms) bind(DNNL_ARG_SHIFT, vector, r->shift);
    }
    last_name = description.impl_info_str();
    norm->primitive = std::forward<decltype(primitive)>(primitive);
  };

  const auto training = dnnl::prop_kind::forward_training;
  if (group) {
    const dnnl::group_normalization_forward::primitive_desc forward(cpu_engine(), training, data,
                                                                    data, r->groups, r->eps, flags);
    if (r->backward) {
      const dnnl::group_normalization_backward::primitive_desc backward(
          cpu_engine(), dnnl::prop_kind::backward, data, data, data, r->groups, r->eps, flags,
          forward);
      finish(forward, backward, dnnl::group_normalization_backward(backward));
    } else {
      finish(forward, forward, dnnl::group_normalization_forward(forward));
    }
  } else {
    const dnnl::layer_normalization_forward::primitive_desc forward(cpu_engine(), training, data,
                                                                    result, r->eps, flags);
    if (r->backward) {
      const dnnl::layer_normalization_backward::primitive_desc backward(
          cpu_engine(), dnnl::prop_kind::backward, data, result, data, r->eps, flags, forward);
      finish(forward, backward, dnnl::layer_normalization_backward(backward));
    } else {
      finish(forward, forward, dnnl::layer_normalization_forward(forward));
    }
  }
  return norm.release();
} catch (const std::exception& error) {
  last_error = error.what();
  return nullptr;
}

// As onednn_create().
void* onednn_create_add(const AddRequest* r) try {
  const auto desc = [r](int32_t dtype) {
    return memory::desc({r->rows, r->cols}, kTypes[dtype], memory::format_tag::ab);
  };
  const auto a = desc(r->a_dtype), b = desc(r->b_dtype), out = desc(r->out_dtype);
  const dnnl::binary::primitive_desc description(cpu_engine(), dnnl::algorithm::binary_add, a, b,
                                                 out);
  last_name = description.impl_info_str();
  auto add = std::make_unique<Prepared>();
  add->bind(DNNL_ARG_SRC_0, a, r->a);
  add->bind(DNNL_ARG_SRC_1, b, r->b);
  add->bind(DNNL_ARG_DST, out, r->out);
  add->primitive = dnnl::binary(description);
  return add.release();
} catch (const std::exception& error) {
  last_error = error.what();
  return nullptr;
}

int onednn_execute(void* handle) try {
  const auto* prepared = static_cast<const Prepared*>(handle);
  prepared->primitive.execute(cpu_stream(), prepared->arguments);
  cpu_stream().wait();
  return 0;
} catch (const std::exception& error) {
  last_error = error.what();
  return 1;
}

}  // extern "C"
