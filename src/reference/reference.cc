// The reference backend: plain float64 loops, one thread, no tricks. Everything else is measured
// against it.
//
// A unit is what shares one mean and rstd: a row, or a (sample, group) pair. Where its k-th element
// lies, and which weight belongs to it, is all that tells the three operations and two layouts
// apart.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "reference/backend.h"

namespace evenkeel {
namespace {

struct Element {
  int64_t outer, inner, position;  // in the tensor
  int64_t parameter;               // in weight and bias
  int64_t sample = 0;              // whose scale and shift it has

  double of(const Tensor& tensor) const {
    return load_scalar(tensor.data, tensor.dtype, tensor.offset(outer, inner) + position);
  }
  void set(const Tensor& tensor, double value) const {
    store_scalar(tensor.data, tensor.dtype, tensor.offset(outer, inner) + position, value);
  }
};

int64_t unit_length(const Call& call) {
  return call.is_group_norm() ? call.inner * call.width / call.groups : call.width;
}

Element element(const Call& call, int64_t unit, int64_t k) {
  if (!call.is_group_norm())
    return {unit / call.inner, unit % call.inner, k, k, unit / call.sample_statistics()};
  const int64_t sample = unit / call.groups, group = unit % call.groups;
  const int64_t channels_per_group = call.channels / call.groups;
  if (call.layout == EK_NCHW) {
    const int64_t channel = group * channels_per_group + k / call.width;
    return {sample, channel, k % call.width, channel};
  }
  const int64_t channel = group * channels_per_group + k % channels_per_group;
  return {sample, k / channels_per_group, channel, channel};
}

double weight_of(const Call& call, const Element& e) {
  return call.weight
             ? call.weight_offset + load_scalar(call.weight.data, call.weight.dtype, e.parameter)
             : 1.0;
}

double bias_of(const Call& call, const Element& e) {
  return call.bias ? load_scalar(call.bias.data, call.bias.dtype, e.parameter) : 0.0;
}

// Its value in a tensor with a row for each sample.
double of_sample(const Tensor& tensor, const Element& e) {
  return load_scalar(tensor.data, tensor.dtype, e.sample * tensor.row_stride + e.parameter);
}

double factor_of(const Call& call, const Element& e) {
  return call.scale ? 1 + of_sample(call.scale, e) : 1.0;
}

// A shift that is absent leaves the sign of a zero alone.
double modulate(const Call& call, const Element& e, double z) {
  const double scaled = z * factor_of(call, e);
  return call.shift ? scaled + of_sample(call.shift, e) : scaled;
}

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

// Of the normal distribution.
double cdf(double z) { return std::erfc(-z / std::numbers::sqrt2) / 2; }
double density(double z) {
  return std::exp(-z * z / 2) * std::numbers::inv_sqrtpi / std::numbers::sqrt2;
}

// (1 + tanh(u)) / 2 is sigmoid(2u); this is 2u, and how fast it grows.
double gelu_tanh_of(double z) {
  return 2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi * (z + 0.044715 * z * z * z);
}
double gelu_tanh_slope(double z) {
  return 2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi * (1 + 3 * 0.044715 * z * z);
}

double activate(ek_activation activation, double z) {
  switch (activation) {
    case EK_ACTIVATION_NONE:
      return z;
    case EK_ACTIVATION_SILU:
      return z * sigmoid(z);
    case EK_ACTIVATION_RELU:
      return z <= 0 ? 0 : z;
    case EK_ACTIVATION_GELU:
      return z * cdf(z);
    case EK_ACTIVATION_GELU_TANH:
      return z * sigmoid(gelu_tanh_of(z));
  }
  return z;
}

// dy times the slope at z.
double activation_gradient(ek_activation activation, double z, double dy) {
  // Far out the slope of a GELU is 0 or 1, and its terms would be infinity times nought.
  const double near = std::isnan(z) ? z : std::clamp(z, -50.0, 50.0);
  switch (activation) {
    case EK_ACTIVATION_NONE:
      return dy;
    case EK_ACTIVATION_SILU:
      return dy * sigmoid(z) * (1 + z * (1 - sigmoid(z)));
    case EK_ACTIVATION_RELU:
      return z <= 0 ? 0 : dy;
    case EK_ACTIVATION_GELU:
      return dy * (cdf(near) + near * density(near));
    case EK_ACTIVATION_GELU_TANH: {
      const double s = sigmoid(gelu_tanh_of(near));
      return dy * s * (1 + near * (1 - s) * gelu_tanh_slope(near));
    }
  }
  return dy;
}

// The normalized value that the weight is applied to.
double cast(const Call& call, double normalized) {
  return call.casting == EK_CASTING_LLAMA ? round_to(call.normalized(), normalized) : normalized;
}

// What is normalized: x, or the rounded sum.
double input(const Call& call, const Element& e) {
  if (!call.residual) return e.of(call.x);
  const double sum = e.of(call.x) + e.of(call.residual);
  return call.sum.dtype == Dtype::kF64 ? sum : round_to(call.sum.dtype, round_to(Dtype::kF32, sum));
}

// y in 8 bits.
class Quantizer {
 public:
  explicit Quantizer(const Call& call)
      : call_(call), inverse_(call.y_scale != nullptr ? 1 / load(call.y_scale) : 0) {}

  bool has_row_scales() const { return call_.y_row_scale != nullptr; }
  void see(double y) { amax_ = std::max(amax_, magnitude_bits(static_cast<float>(y))); }
  void finish_row(int64_t row) {
    const float largest =
        with_eight_bits(call_.y.dtype, [](auto format) { return decltype(format)::kLargest; });
    const float scale = row_scale_of(amax_, call_.y_amax_bound, largest);
    store_scalar(call_.y_row_scale, Dtype::kF32, row, scale);
    inverse_ = 1 / scale;
    amax_ = 0;
  }
  double scaled(double y) const { return static_cast<float>(y) * inverse_; }

 private:
  static float load(const float* from) {
    return static_cast<float>(load_scalar(from, Dtype::kF32));
  }

  const Call& call_;
  float inverse_;
  uint32_t amax_ = 0;
};

ek_status forward(const Call& call) {
  Quantizer quantizer(call);
  const int64_t length = unit_length(call);
  for (int64_t unit = 0; unit < call.statistics(); ++unit) {
    double mean = 0;
    if (call.centers()) {
      for (int64_t k = 0; k < length; ++k) mean += input(call, element(call, unit, k));
      mean /= static_cast<double>(length);
    }
    double variance = 0;
    for (int64_t k = 0; k < length; ++k) {
      const double centered = input(call, element(call, unit, k)) - mean;
      variance += centered * centered;
    }
    variance /= static_cast<double>(length);
    const double rstd = 1 / std::sqrt(variance + call.eps);
    const auto y_of = [&](const Element& e, double value) {
      const double normalized = cast(call, (value - mean) * rstd);
      const double z = normalized * weight_of(call, e) + bias_of(call, e);
      return activate(call.activation, modulate(call, e, z));
    };
    if (quantizer.has_row_scales()) {
      for (int64_t k = 0; k < length; ++k) {
        const Element e = element(call, unit, k);
        quantizer.see(y_of(e, input(call, e)));
      }
      quantizer.finish_row(unit);
    }
    for (int64_t k = 0; k < length; ++k) {
      const Element e = element(call, unit, k);
      const double value = input(call, e), y = y_of(e, value);
      if (call.sum) e.set(call.sum, value);  // over x or residual, perhaps
      e.set(call.y, call.quantizes() ? quantizer.scaled(y) : y);
    }
    if (call.mean != nullptr) store_scalar(call.mean, call.stats, unit, mean);
    if (call.rstd != nullptr) store_scalar(call.rstd, call.stats, unit, rstd);
  }
  return EK_OK;
}

// In the workspace: sums for each parameter.
enum class Sums { kDweight, kDbias, kDscale, kDshift };
constexpr int64_t kSums = 4;

char* sums_of(const Call& call, Sums which) {
  return call.workspace + static_cast<int64_t>(which) * call.channels * 8;
}
void accumulate(const Call& call, Sums which, int64_t parameter, double value) {
  char* const sums = sums_of(call, which);
  const double sum = load_scalar(sums, Dtype::kF64, parameter);
  store_scalar(sums, Dtype::kF64, parameter, sum + value);
}
void clear(const Call& call, Sums which) {
  for (int64_t p = 0; p < call.channels; ++p) store_scalar(sums_of(call, which), Dtype::kF64, p, 0);
}
// at: of the first.
void store_sums(const Call& call, Sums which, char* to, Dtype dtype, int64_t at = 0) {
  if (to == nullptr) return;
  for (int64_t p = 0; p < call.channels; ++p)
    store_scalar(to, dtype, at + p, load_scalar(sums_of(call, which), Dtype::kF64, p));
}

void backward_of_unit(const Call& call, int64_t unit) {
  const int64_t length = unit_length(call);
  const double mean = call.centers() ? load_scalar(call.mean, call.stats, unit) : 0;
  const double rstd = load_scalar(call.rstd, call.stats, unit);
  // The gradients with respect to z = normalized * weight + bias, and to what the activation is applied to.
  struct Gradients {
    double dz, modulated;
  };
  const auto gradients = [&](const Element& e, double normalized) -> Gradients {
    const double dy = e.of(call.dy);
    const double z = cast(call, normalized) * weight_of(call, e) + bias_of(call, e);
    const double modulated = call.activation == EK_ACTIVATION_NONE
                                 ? dy
                                 : activation_gradient(call.activation, modulate(call, e, z), dy);
    return {modulated * factor_of(call, e), modulated};
  };
  double sum = 0, sum_normalized = 0;
  for (int64_t k = 0; k < length; ++k) {
    const Element e = element(call, unit, k);
    const double normalized = (e.of(call.x) - mean) * rstd;
    const auto [dz, modulated] = gradients(e, normalized);
    sum += dz * weight_of(call, e);
    sum_normalized += dz * weight_of(call, e) * normalized;
    const double weighted = cast(call, normalized) * weight_of(call, e);
    accumulate(call, Sums::kDweight, e.parameter, dz * cast(call, normalized));
    accumulate(call, Sums::kDbias, e.parameter, dz);
    accumulate(call, Sums::kDscale, e.parameter, modulated * (weighted + bias_of(call, e)));
    accumulate(call, Sums::kDshift, e.parameter, modulated);
  }
  if (!call.wants_dx()) return;
  const double mean_gradient = call.centers() ? sum / static_cast<double>(length) : 0;
  const double mean_product = sum_normalized / static_cast<double>(length);
  for (int64_t k = 0; k < length; ++k) {
    const Element e = element(call, unit, k);
    const double normalized = (e.of(call.x) - mean) * rstd;
    const double dz = gradients(e, normalized).dz;
    const double own = rstd * (dz * weight_of(call, e) - mean_gradient - normalized * mean_product);
    const double dx = call.dsum ? own + e.of(call.dsum) : own;
    if (call.dx) e.set(call.dx, dx);
    if (call.dresidual) e.set(call.dresidual, dx);
  }
}

ek_status backward(const Call& call) {
  const int64_t units = call.samples == 0 ? 0 : call.sample_statistics();
  clear(call, Sums::kDweight);
  clear(call, Sums::kDbias);
  for (int64_t sample = 0; sample < call.samples; ++sample) {
    clear(call, Sums::kDscale);
    clear(call, Sums::kDshift);
    for (int64_t unit = sample * units; unit < (sample + 1) * units; ++unit)
      backward_of_unit(call, unit);
    const auto store = [&](Sums which, const Tensor& to) {
      store_sums(call, which, to.data, to.dtype, sample * to.row_stride);
    };
    store(Sums::kDscale, call.dscale);
    store(Sums::kDshift, call.dshift);
  }
  store_sums(call, Sums::kDweight, call.dweight.data, call.dweight.dtype);
  store_sums(call, Sums::kDbias, call.dbias.data, call.dbias.dtype);
  return EK_OK;
}

bool plan(const Call& call, AnyPlan& plan, Note& note) {
  if (call.device != EK_CPU) {
    note.set("tensors are on a device, and this backend reads host memory");
    return false;
  }
  plan.workspace = call.pass == Pass::kForward ? 0 : static_cast<size_t>(kSums * call.channels * 8);
  return true;
}

void describe(const Call&, const AnyPlan&, Note& note) {
  note.set("plain float64 loops, one thread");
}

ek_status run(const Call& call, const AnyPlan&) {
  return call.pass == Pass::kForward ? forward(call) : backward(call);
}

}  // namespace

const Backend kReferenceBackend = {"reference", plan, describe, run};

}  // namespace evenkeel
