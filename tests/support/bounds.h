// How far a result may be from the float64 one, for every element: a first-order error analysis.
//
// u is the unit roundoff of the compute type, and c(n) * u the relative error of a sum of n terms
// of one sign in a blocked order. The bounds follow the formulas term by term, so they scale with
// what is really added up and allow nothing for what a kernel should not do: dropping a term,
// summing in a storage type, or E[x^2] - E[x]^2. The mean may be off by u * |mean|, which is what
// storing it costs: at mean 1e4 and spread 1 that is half an ulp of x itself.
#ifndef EVENKEEL_TESTS_SUPPORT_BOUNDS_H_
#define EVENKEEL_TESTS_SUPPORT_BOUNDS_H_

#include <cstdint>
#include <vector>

#include "support/cases.h"

namespace evenkeel::support {

// The weight (with its offset) and bias of every parameter; 1 and 0 where they are absent. 1 + scale, and the shift,
// of every parameter of every sample; empty where there are no samples.
struct Parameters {
  std::vector<double> weight, bias;
  std::vector<double> scale, shift;
};

// Which parameter belongs to element `index` of `unit`, for elements in (channel, pixel) order.
class ParameterIndex {
 public:
  explicit ParameterIndex(const Case& c);
  int64_t operator()(int64_t unit, int64_t index) const {
    return unit % groups_ * group_channels_ + index / pixels_;
  }

 private:
  int64_t groups_, group_channels_, pixels_;
};

// An activation at z, and what becomes there of an error of z.
struct Activated {
  double value = 0, slope = 1;    // exact
  double steepest = 1, bend = 0;  // the most that value and slope change with z
  double exponent = 0;  // the value has an exponential's relative error: in unit roundoffs

  Activated(ek_activation activation, double z);
};

struct ForwardBounds {
  double mean = 0, rstd = 0;
  std::vector<double> y;
};

// Of one unit, whose elements are x.
void bound_forward(const Case& c, int64_t unit, const std::vector<double>& x,
                   const Parameters& parameters, ForwardBounds& bounds);

// Gradients of the parameters come together over all units, so the bounds are fed unit by unit.
class BackwardBounds {
 public:
  BackwardBounds(const Case& c, const Parameters& parameters);

  // `dx` receives the bounds of this unit's dx. mean and rstd are the saved ones. dsum: empty where there
  // is none.
  void add_unit(int64_t unit, const std::vector<double>& x, const std::vector<double>& dy,
                const std::vector<double>& dsum, double mean, double rstd, std::vector<double>& dx);

  std::vector<double> dweight() const;
  std::vector<double> dbias() const;
  // Of every parameter of every sample.
  std::vector<double> dscale() const;
  std::vector<double> dshift() const;

 private:
  // What the bound of a sum is made of: the terms' own errors and their magnitudes.
  struct Sum {
    double error = 0, magnitude = 0;
  };
  std::vector<double> total(const std::vector<Sum>& sums, int64_t terms) const;

  const Case& case_;
  const Parameters& parameters_;
  ParameterIndex parameter_;
  std::vector<Sum> dweight_, dbias_, dscale_, dshift_;
};

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_BOUNDS_H_
