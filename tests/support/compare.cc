// Compares results with the oracle's, unit by unit, so that large cases need no copies (compare.h).
#include "support/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "support/bounds.h"
#include "support/half.h"
#include "support/quantized.h"

namespace evenkeel::support {
namespace {

enum class NonFinite { kSame, kAny };

// One output's judge: takes (result, oracle, bound) triples and keeps the worst.
class Judge {
 public:
  Judge(const char* name, ek_dtype dtype, NonFinite non_finite = NonFinite::kSame)
      : format_(format_of(dtype)), non_finite_(non_finite) {
    error_.name = name;
  }

  void see(double result, double oracle, double bound, int64_t unit, int64_t index) {
    if (!std::isfinite(oracle)) {
      const double expected = round_to(oracle, format_);
      const bool same = std::isnan(expected) ? std::isnan(result) : result == expected;
      if (!same && (non_finite_ == NonFinite::kSame || std::isfinite(result))) {
        fail(result, oracle, 0, unit, index);
      }
      return;
    }
    // A unit with an infinity can have finite outputs, but its sums give no bound.
    if (!std::isfinite(bound)) bound = std::ldexp(1 + std::fabs(oracle), -20);
    if (std::isnan(result)) return fail(result, oracle, bound, unit, index);
    const double error = std::fabs(result - oracle);
    if (std::isfinite(error)) {
      const double step = ulp(oracle, format_);
      error_.max_absolute = std::max(error_.max_absolute, error);
      error_.max_ulps = std::max(error_.max_ulps, error / step);
      error_.max_share = std::max(error_.max_share, (error - 0.5 * step) / bound);
    }
    if (error <= bound) return;
    if (result < round_to(oracle - bound, format_) || result > round_to(oracle + bound, format_)) {
      fail(result, oracle, bound, unit, index);
    }
  }

  void finish(Accuracy& accuracy) {
    accuracy.outputs.push_back(error_);
    if (accuracy.failure.empty()) accuracy.failure = failure_;
  }

 private:
  void fail(double result, double oracle, double bound, int64_t unit, int64_t index) {
    if (!failure_.empty()) return;
    char text[256];
    std::snprintf(
        text, sizeof text,
        "%s of unit %lld, element %lld, is %.17g, but must be %.17g, give or take %.3g and "
        "the final rounding",
        error_.name.c_str(), static_cast<long long>(unit), static_cast<long long>(index), result,
        oracle, bound);
    failure_ = text;
  }

  Format format_;
  NonFinite non_finite_;
  OutputError error_;
  std::string failure_;
};

Parameters parameters_of(const Problem& problem) {
  const Case& c = problem.spec();
  const auto count = static_cast<size_t>(parameter_count(c));
  Parameters parameters{std::vector<double>(count, 1), std::vector<double>(count, 0), {}, {}};
  if (c.weight.present) {
    parameters.weight = problem.read(Vector::kWeight);
    for (double& weight : parameters.weight) weight += c.offset;
  }
  if (c.bias.present) parameters.bias = problem.read(Vector::kBias);
  if (!modulates(c)) return parameters;
  parameters.scale.assign(count * static_cast<size_t>(c.samples), 0);
  parameters.shift = parameters.scale;
  if (c.scale.present) parameters.scale = problem.read(Vector::kScale);
  if (c.shift.present) parameters.shift = problem.read(Vector::kShift);
  for (double& scale : parameters.scale) scale += 1;
  return parameters;
}

void judge_vector(const char* name, const Problem& result, const Problem& oracle, Vector vector,
                  const std::vector<double>& bounds, Accuracy& accuracy,
                  NonFinite non_finite = NonFinite::kSame) {
  if (!result.buffer(vector)) return;
  Judge judge(name, result.dtype(vector), non_finite);
  const std::vector<double> results = result.read(vector), expected = oracle.read(vector);
  // Statistics of the oracle are rounded, too.
  const bool rounded = vector == Vector::kMean || vector == Vector::kRstd;
  for (size_t i = 0; i < results.size(); ++i) {
    const double own = rounded ? 0.5 * ulp(expected[i], format_of(oracle.dtype(vector))) : 0;
    judge.see(results[i], expected[i], bounds[i] + own, static_cast<int64_t>(i), 0);
  }
  judge.finish(accuracy);
}

}  // namespace

Problem make_oracle(const Problem& problem) {
  Case c = problem.spec();
  c.y = c.dx = TensorSpec{EK_F64, true, 0, 0};
  c.dresidual.present = false;  // dx is the same
  c.dweight = c.dbias = VectorSpec{EK_F64, true};
  if (modulates(c)) c.dscale = c.dshift = SampleSpec{EK_F64, true, 0};
  c.mean = c.op != EK_RMS_NORM;
  c.rstd = true;
  c.in_place = InPlace::kNone;
  return Problem(c, problem.inputs());
}

Accuracy compare_forward(const Problem& result, const Problem& oracle) {
  const Case& c = result.spec();
  const Parameters parameters = parameters_of(result);
  Judge judge("y", result.dtype(Tensor::kY)), sum_judge("sum", result.dtype(Tensor::kSum));
  std::vector<double> x, y, sum, expected, mean_bounds, rstd_bounds;
  ForwardBounds bounds;
  for (int64_t unit = 0; unit < unit_count(c); ++unit) {
    result.read(Tensor::kNormalized, unit, x);
    result.read(Tensor::kY, unit, y);
    if (c.sum.present) {
      result.read(Tensor::kSum, unit, sum);
      // The one right value.
      for (size_t i = 0; i < sum.size(); ++i)
        sum_judge.see(sum[i], x[i], 0, unit, static_cast<int64_t>(i));
    }
    oracle.read(Tensor::kY, unit, expected);
    bound_forward(c, unit, x, parameters, bounds);
    mean_bounds.push_back(bounds.mean);
    rstd_bounds.push_back(bounds.rstd);
    for (size_t i = 0; i < y.size(); ++i) {
      judge.see(y[i], expected[i], bounds.y[i], unit, static_cast<int64_t>(i));
    }
  }
  Accuracy accuracy;
  judge.finish(accuracy);
  if (c.sum.present) sum_judge.finish(accuracy);
  judge_vector("mean", result, oracle, Vector::kMean, mean_bounds, accuracy, NonFinite::kAny);
  judge_vector("rstd", result, oracle, Vector::kRstd, rstd_bounds, accuracy);
  return accuracy;
}

Accuracy compare_backward(const Problem& result, const Problem& oracle) {
  const Case& c = result.spec();
  const Parameters parameters = parameters_of(result);
  const std::vector<double> mean = result.read(Vector::kSavedMean);
  const std::vector<double> rstd = result.read(Vector::kSavedRstd);
  BackwardBounds bounds(c, parameters);
  Judge judge("dx", result.dtype(Tensor::kDx)),
      second("dresidual", result.dtype(Tensor::kDresidual));
  std::vector<double> x, dy, dsum, dx, expected, dx_bounds;
  for (int64_t unit = 0; unit < unit_count(c); ++unit) {
    const auto at = static_cast<size_t>(unit);
    result.read(Tensor::kNormalized, unit, x);
    result.read(Tensor::kDy, unit, dy);
    if (c.dsum.present) result.read(Tensor::kDsum, unit, dsum);
    bounds.add_unit(unit, x, dy, dsum, mean.empty() ? 0 : mean[at], rstd[at], dx_bounds);
    oracle.read(Tensor::kDx, unit, expected);
    const auto see = [&](const TensorSpec& spec, Tensor tensor, Judge& by) {
      if (!spec.present) return;
      result.read(tensor, unit, dx);
      for (size_t i = 0; i < dx.size(); ++i) {
        by.see(dx[i], expected[i], dx_bounds[i], unit, static_cast<int64_t>(i));
      }
    };
    see(c.dx, Tensor::kDx, judge);
    see(c.dresidual, Tensor::kDresidual, second);
  }
  Accuracy accuracy;
  if (c.dx.present) judge.finish(accuracy);
  if (c.dresidual.present) second.finish(accuracy);
  judge_vector("dweight", result, oracle, Vector::kDweight, bounds.dweight(), accuracy);
  judge_vector("dbias", result, oracle, Vector::kDbias, bounds.dbias(), accuracy);
  judge_vector("dscale", result, oracle, Vector::kDscale, bounds.dscale(), accuracy);
  judge_vector("dshift", result, oracle, Vector::kDshift, bounds.dshift(), accuracy);
  return accuracy;
}

Accuracy check_forward(Problem& problem, const Runner& runner) {
  Accuracy failed;
  if (failed.failure = problem.forward(runner); !failed.failure.empty()) return failed;
  if (quantizes(problem.spec())) {
    Problem norm = make_unquantized(problem);
    failed.failure = check_forward(norm, runner).failure;
    failed.failure = failed.failure.empty() ? compare_quantized(problem, norm)
                                            : "before quantization: " + failed.failure;
    return failed;
  }
  Problem oracle = make_oracle(problem);
  if (failed.failure = oracle.forward(kReference); !failed.failure.empty()) return failed;
  return compare_forward(problem, oracle);
}

Accuracy check_backward(Problem& problem, const Runner& runner) {
  Accuracy failed;
  if (failed.failure = problem.backward(runner); !failed.failure.empty()) return failed;
  Problem oracle = make_oracle(problem);
  oracle.take_statistics(problem);
  if (failed.failure = oracle.backward(kReference); !failed.failure.empty()) return failed;
  return compare_backward(problem, oracle);
}

std::string check_case(const Case& c, const Runner& runner) {
  Problem problem(c);
  const auto report = [&](const char* pass, const std::string& failure) {
    return failure.empty() ? "" : std::string(pass) + ": " + failure + "\n  " + to_string(c);
  };
  if (c.forward) {
    const std::string failure = check_forward(problem, runner).failure;
    if (!failure.empty()) return report("forward", failure);
  }
  if (!c.backward) return "";
  const std::string failure = problem.save_statistics(runner);
  if (!failure.empty()) return report("statistics", failure);
  return report("backward", check_backward(problem, runner).failure);
}

}  // namespace evenkeel::support
