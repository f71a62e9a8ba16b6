// The error analysis behind bounds.h. In the names, e_v is the allowed absolute error of v.
#include "support/bounds.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "support/half.h"

namespace evenkeel::support {
namespace {

struct Arithmetic {
  double u;     // unit roundoff
  double tiny;  // what underflow may cost a single operation
  bool wide;    // float64

  // A sum of that many terms is off by no more than this share of the sum of their magnitudes. Rounding
  // errors are random at best; small terms that are added to one large one are not. The factor leaves
  // room for an instruction set with one lane (four running sums per block). Blocks of a long sum are
  // added up on their own; the oracle, which counts for float64, adds up one term after the other.
  double sum_error(double terms) const {
    return u * (8 + (wide ? terms / 2 : 0.75 * std::sqrt(std::min(terms, 16384.0))));
  }
};

// In float64 the oracle's own rounding counts as well.
Arithmetic arithmetic_of(const Case& c, bool backward) {
  if (computes_in_f64(c, backward)) return {std::ldexp(1.0, -52), std::ldexp(1.0, -1022), true};
  return {std::ldexp(1.0, -24), std::ldexp(1.0, -148), false};
}

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

// The casting order llama rounds the normalized value, and an error below half an ulp can become a
// whole one where a rounding boundary is within reach.
double error_after_casting(const Case& c, double value, double e_value, double* rounded) {
  if (c.casting != EK_CASTING_LLAMA) {
    *rounded = value;
    return e_value;
  }
  const Format format = format_of(normalized(c).dtype);
  *rounded = round_to(value, format);
  return std::max(round_to(value + e_value, format) - *rounded,
                  *rounded - round_to(value - e_value, format));
}

// The weight and bias of one parameter in a unit's sample, and their errors but for those of the weight's own
// offset: the formula with a scale and a shift is that of a norm with such a weight and bias.
struct Modulated {
  double weight, bias;
  double e_weight = 0, e_bias = 0;
  double scale = 1;
  size_t at = 0;  // in the parameters of all samples

  Modulated(const Case& c, const Parameters& parameters, double u, int64_t unit, size_t p)
      : weight(parameters.weight[p]), bias(parameters.bias[p]) {
    if (!modulates(c)) return;
    at = static_cast<size_t>(unit / (unit_count(c) / c.samples)) * parameters.weight.size() + p;
    scale = parameters.scale[at];
    weight *= scale;
    e_weight = 3 * u * std::fabs(weight);
    e_bias = 3 * u * (std::fabs(bias * scale) + std::fabs(parameters.shift[at]));
    bias = bias * scale + parameters.shift[at];
  }
};

}  // namespace

Activated::Activated(ek_activation activation, double z) {
  const double root = std::sqrt(2 / std::numbers::pi);
  switch (activation) {
    case EK_ACTIVATION_NONE:
      value = z;
      break;
    case EK_ACTIVATION_SILU: {
      const double s = sigmoid(z);
      value = z * s;
      slope = s * (1 + z * sigmoid(-z));
      steepest = 1.1, bend = 0.5, exponent = std::fabs(z);
      break;
    }
    case EK_ACTIVATION_RELU:
      value = z <= 0 ? 0 : z;
      slope = z <= 0 ? 0 : 1;
      break;
    case EK_ACTIVATION_GELU: {
      const double cdf = std::erfc(-z / std::numbers::sqrt2) / 2;
      value = z * cdf;
      slope = cdf + z * std::exp(-z * z / 2) * root / 2;
      steepest = 1.13, bend = 0.8, exponent = z * z;
      break;
    }
    case EK_ACTIVATION_GELU_TANH: {
      const double s = sigmoid(2 * root * (z + 0.044715 * z * z * z));
      value = z * s;
      const double rest = sigmoid(-2 * root * (z + 0.044715 * z * z * z));
      slope = s * (1 + z * rest * 2 * root * (1 + 3 * 0.044715 * z * z));
      steepest = 1.13, bend = 0.9, exponent = 4 * root * std::fabs(z + 0.044715 * z * z * z);
      break;
    }
  }
}

ParameterIndex::ParameterIndex(const Case& c)
    : groups_(c.op == EK_GROUP_NORM ? c.groups : 1),
      group_channels_(c.op == EK_GROUP_NORM ? c.channels / c.groups : 0),
      pixels_(c.op == EK_GROUP_NORM ? c.spatial : 1) {}

void bound_forward(const Case& c, int64_t unit, const std::vector<double>& x,
                   const Parameters& parameters, ForwardBounds& bounds) {
  const Arithmetic arithmetic = arithmetic_of(c, false);
  const double u = arithmetic.u, tiny = arithmetic.tiny;
  const bool centers = c.op != EK_RMS_NORM;
  const auto size = static_cast<double>(x.size());
  const double sum_u = arithmetic.sum_error(size);

  double mean = 0, variance = 0;
  if (centers) {
    for (const double value : x) mean += value;
    mean /= size;
  }
  for (const double value : x) variance += (value - mean) * (value - mean);
  variance /= size;

  const double rstd = 1 / std::sqrt(variance + c.eps);
  const double e_stored = (arithmetic.wide ? sum_u : 2 * u) * std::fabs(mean);
  const double e_mean = centers ? e_stored + sum_u * std::sqrt(variance) + 4 * tiny : 0;
  // Means of blocks are float64 for float32, but no wider than the compute type for float64.
  const double e_merged = arithmetic.wide ? 8 * u * std::fabs(mean) * std::sqrt(variance) : 0;
  const double e_variance = 2 * sum_u * variance + e_merged + e_mean * e_mean + 4 * tiny;
  const double e_rstd = rstd * (0.5 * e_variance * rstd * rstd + 3 * u);
  bounds.mean = e_mean;
  bounds.rstd = e_rstd;

  const ParameterIndex parameter(c);
  bounds.y.resize(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const auto p = static_cast<size_t>(parameter(unit, static_cast<int64_t>(i)));
    const Modulated modulated(c, parameters, u, unit, p);
    const double weight = modulated.weight, bias = modulated.bias;
    const double normalized = (x[i] - mean) * rstd;
    const double e_normalized = e_mean * rstd + std::fabs(x[i] - mean) * e_rstd +
                                2 * u * std::fabs(normalized) + tiny * rstd;
    double cast;
    const double e_cast = error_after_casting(c, normalized, e_normalized, &cast);
    const double scaled = cast * weight, z = scaled + bias;
    const double e_z = std::fabs(weight) * e_cast + 3 * u * std::fabs(scaled) +
                       u * std::fabs(bias) + tiny + modulated.e_weight * std::fabs(cast) +
                       modulated.e_bias;
    if (c.activation == EK_ACTIVATION_NONE) {
      bounds.y[i] = e_z;
    } else {
      const Activated at(c.activation, z);
      bounds.y[i] = at.steepest * e_z + (8 + at.exponent) * u * std::fabs(at.value) +
                    std::ldexp(1.0, format_of(EK_F32).min_exponent);
    }
  }
}

BackwardBounds::BackwardBounds(const Case& c, const Parameters& parameters)
    : case_(c),
      parameters_(parameters),
      parameter_(c),
      dweight_(parameters.weight.size()),
      dbias_(parameters.weight.size()),
      dscale_(parameters.scale.size()),
      dshift_(parameters.scale.size()) {}

void BackwardBounds::add_unit(int64_t unit, const std::vector<double>& x,
                              const std::vector<double>& dy, const std::vector<double>& dsum,
                              double mean, double rstd, std::vector<double>& dx) {
  const Arithmetic arithmetic = arithmetic_of(case_, true);
  const double u = arithmetic.u, tiny = arithmetic.tiny;
  const bool centers = case_.op != EK_RMS_NORM;
  const auto size = static_cast<double>(x.size());
  const double sum_u = arithmetic.sum_error(size);

  // First the sums over the unit; dx[i] meanwhile holds the error of the element's own term.
  double sum = 0, product = 0;                  // of g, of g * normalized
  double magnitude = 0, product_magnitude = 0;  // the same of absolute values
  double e_terms = 0, e_product_terms = 0;
  dx.resize(x.size());
  const double e_center = u * std::fabs(mean) * rstd + tiny * rstd;
  const auto g_of = [&](size_t i, double* e_g, bool accumulate) {
    const auto p = static_cast<size_t>(parameter_(unit, static_cast<int64_t>(i)));
    const Modulated modulated(case_, parameters_, u, unit, p);
    const double weight = modulated.weight;
    const double normalized = (x[i] - mean) * rstd;
    const double e_normalized = 3 * u * std::fabs(normalized) + e_center;
    double cast;
    const double e_cast = error_after_casting(case_, normalized, e_normalized, &cast);
    double dz = dy[i], e_dz = 0;
    if (case_.activation != EK_ACTIVATION_NONE) {
      const double scaled = cast * weight, z = scaled + modulated.bias;
      const double e_z = std::fabs(weight) * e_cast + 3 * u * std::fabs(scaled) +
                         u * std::fabs(modulated.bias) + modulated.e_weight * std::fabs(cast) +
                         modulated.e_bias;
      const Activated at(case_.activation, z);
      dz *= at.slope;
      e_dz = std::fabs(dy[i]) * (at.bend * e_z + 8 * u) + u * std::fabs(dz);
      // A ReLU's slope is that of either side where its kink is within reach.
      if (case_.activation == EK_ACTIVATION_RELU) e_dz = std::fabs(z) <= e_z ? std::fabs(dy[i]) : 0;
    }
    if (accumulate) {
      // A product may underflow before it is multiplied by rstd, or after.
      const double e_product =
          std::fabs(cast) * e_dz + std::fabs(dz) * e_cast + tiny * std::max(1.0, rstd);
      const double product = std::fabs(dz * cast), scale = std::fabs(modulated.scale);
      const double rounding = modulates(case_) ? 3 * u : 0;
      dweight_[p].magnitude += scale * product;
      dweight_[p].error += scale * (e_product + rounding * product);
      dbias_[p].magnitude += scale * std::fabs(dz);
      dbias_[p].error += scale * (e_dz + rounding * std::fabs(dz)) + tiny;
      if (modulates(case_)) {
        const double own = std::fabs(parameters_.weight[p]), bias = std::fabs(parameters_.bias[p]);
        Sum &dscale = dscale_[modulated.at], &dshift = dshift_[modulated.at];
        dscale.magnitude += own * product + bias * std::fabs(dz);
        dscale.error += own * (e_product + rounding * product) +
                        bias * (e_dz + rounding * std::fabs(dz)) + tiny;
        dshift.magnitude += std::fabs(dz);
        dshift.error += e_dz + tiny;
      }
    }
    *e_g = std::fabs(weight) * e_dz + 2 * u * std::fabs(dz * weight) +
           modulated.e_weight * std::fabs(dz) + tiny;
    return dz * weight;
  };
  for (size_t i = 0; i < x.size(); ++i) {
    const double g = g_of(i, &dx[i], true);
    const double normalized = (x[i] - mean) * rstd;
    const double e_normalized = 3 * u * std::fabs(normalized) + e_center;
    sum += g;
    product += g * normalized;
    magnitude += std::fabs(g);
    product_magnitude += std::fabs(g * normalized);
    e_terms += dx[i];
    e_product_terms += dx[i] * std::fabs(normalized) + std::fabs(g) * e_normalized;
  }
  sum = centers ? sum / size : 0;
  product /= size;
  const double e_sum = centers ? (sum_u * magnitude + e_terms) / size + tiny : 0;
  const double e_product = (sum_u * product_magnitude + e_product_terms) / size + tiny;
  for (size_t i = 0; i < x.size(); ++i) {
    double e_g;
    const double g = g_of(i, &e_g, false);
    const double normalized = (x[i] - mean) * rstd;
    const double e_normalized = 3 * u * std::fabs(normalized) + e_center;
    dx[i] = rstd * (e_g + e_sum + std::fabs(normalized) * e_product +
                    std::fabs(product) * e_normalized +
                    4 * u * (std::fabs(g) + std::fabs(sum) + std::fabs(normalized * product))) +
            tiny;
    if (!dsum.empty()) {
      dx[i] += u * std::fabs(dsum[i] + rstd * (g - sum - normalized * product)) + tiny;
    }
  }
}

std::vector<double> BackwardBounds::total(const std::vector<Sum>& sums, int64_t terms) const {
  const double sum_u = arithmetic_of(case_, true).sum_error(static_cast<double>(terms));
  std::vector<double> bounds;
  for (const Sum& sum : sums) {
    bounds.push_back(sum.error + sum_u * sum.magnitude);
  }
  return bounds;
}

std::vector<double> BackwardBounds::dweight() const {
  return total(dweight_, element_count(case_) / parameter_count(case_));
}
std::vector<double> BackwardBounds::dbias() const {
  return total(dbias_, element_count(case_) / parameter_count(case_));
}
std::vector<double> BackwardBounds::dscale() const {
  return total(dscale_, unit_count(case_) / sample_count(case_));
}
std::vector<double> BackwardBounds::dshift() const {
  return total(dshift_, unit_count(case_) / sample_count(case_));
}

}  // namespace evenkeel::support
