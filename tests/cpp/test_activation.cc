// The activations at every kind of number: beside the same functions in float64, and torch's NaN, infinities and kinks.
//
// y = activation(0 * normalized + bias), so that a bias is what is activated; dbias of one row is dy times the slope.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "support/bounds.h"

namespace evenkeel::support {
namespace {

// Values and slopes of the CPU backend at all z.
template <class T>
struct Computed {
  std::vector<T> y, slope;

  Computed(ek_activation activation, const std::vector<T>& z, T dy = 1)
      : y(z.size()), slope(z.size()) {
    const int32_t dtype = sizeof(T) == 4 ? EK_F32 : EK_F64;
    std::vector<T> x(z.size()), weight(z.size()), dys(z.size(), dy);
    x[0] = 1;
    T mean = 0, rstd = 1;
    ek_problem problem = EK_PROBLEM_INIT;
    problem.op = EK_LAYER_NORM;
    problem.rows = 1;
    problem.cols = static_cast<int64_t>(z.size());
    problem.activation = activation;
    const ek_tensor big = {x.data(), 0, 0, dtype, 0};
    const ek_vector bias = {const_cast<T*>(z.data()), dtype, 0}, scale = {weight.data(), dtype, 0};
    ek_execution execution = EK_EXECUTION_INIT;
    execution.backend = "cpu";
    ek_forward_args forward = EK_FORWARD_ARGS_INIT;
    forward.x = big;
    forward.y = {y.data(), 0, 0, dtype, 0};
    forward.weight = scale;
    forward.bias = bias;
    ek_backward_args backward = EK_BACKWARD_ARGS_INIT;
    backward.x = big;
    backward.dy = {dys.data(), 0, 0, dtype, 0};
    backward.weight = scale;
    backward.bias = bias;
    backward.mean = &mean;
    backward.rstd = &rstd;
    backward.dbias = {slope.data(), dtype, 0};
    size_t forward_bytes = 0, backward_bytes = 0;
    EXPECT_EQ(ek_forward_workspace(&problem, &forward, &execution, &forward_bytes), EK_OK);
    EXPECT_EQ(ek_backward_workspace(&problem, &backward, &execution, &backward_bytes), EK_OK);
    std::vector<char> workspace(std::max(forward_bytes, backward_bytes));
    execution.workspace = workspace.data();
    execution.workspace_size = workspace.size();
    EXPECT_EQ(ek_forward(&problem, &forward, &execution), EK_OK) << ek_last_error();
    EXPECT_EQ(ek_backward(&problem, &backward, &execution), EK_OK) << ek_last_error();
  }
};

// The largest errors in units in the last place: of the value, and of the slope in those of 1.
template <class T>
struct Errors {
  double value = 0, slope = 0;
  double value_at = 0, slope_at = 0;

  Errors(ek_activation activation, const std::vector<T>& z) {
    constexpr double kEpsilon = std::numeric_limits<T>::epsilon();
    constexpr double kLeast = std::numeric_limits<T>::min();
    const Computed<T> found(activation, z);
    for (size_t i = 0; i < z.size(); ++i) {
      const Activated exact(activation, z[i]);
      const double ulp = std::exp2(std::floor(std::log2(std::max(std::fabs(exact.value), kLeast))));
      const double off = std::fabs(found.y[i] - exact.value) / (ulp * kEpsilon);
      const double slope_off = std::fabs(found.slope[i] - exact.slope) / kEpsilon;
      if (!(off <= value)) value = off, value_at = z[i];
      if (!(slope_off <= slope)) slope = slope_off, slope_at = z[i];
    }
  }
};

struct Allowed {
  ek_activation activation;
  double value, slope;
};

template <class T>
void expect_within(const std::vector<Allowed>& allowed, const std::vector<T>& z) {
  for (const auto& [activation, value, slope] : allowed) {
    const Errors<T> off(activation, z);
    EXPECT_LE(off.value, value) << "of activation " << activation << " at " << off.value_at;
    EXPECT_LE(off.slope, slope) << "of activation " << activation << " at " << off.slope_at;
  }
}

// SiLU and GELU's tanh form have the error of an exponential with an argument of up to 104. GELU has no more than 10
// where the machine multiplies and adds in one step: what the square of z rounds is made good there.
TEST(Activation, FloatsFromTheLeastToTheGreatest) {
  std::vector<float> z;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 32771) {
    const auto number = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isfinite(number)) z.push_back(number);
  }
  for (float near = -20; near < 20; near += 1.0F / 4096) z.push_back(near);
  expect_within<float>({{EK_ACTIVATION_SILU, 60, 2.5},
                        {EK_ACTIVATION_RELU, 0, 0},
                        {EK_ACTIVATION_GELU, 70, 1.5},
                        {EK_ACTIVATION_GELU_TANH, 220, 2}},
                       z);
}

TEST(Activation, FloatsNearZero) {
  std::vector<float> z;
  for (float near = -4; near < 4; near += 1.0F / 16384) z.push_back(near);
  expect_within<float>({{EK_ACTIVATION_SILU, 5, 2.5},
                        {EK_ACTIVATION_RELU, 0, 0},
                        {EK_ACTIVATION_GELU, 12, 1.5},
                        {EK_ACTIVATION_GELU_TANH, 20, 2}},
                       z);
}

// What the oracle rounds counts here, too.
TEST(Activation, Doubles) {
  std::vector<double> z;
  for (double near = -6; near < 40; near += 1.0 / 4099) z.push_back(near);
  for (const double far : {-1e100, -1e10, -50.0, 50.0, 1e10, 1e100}) z.push_back(far);
  expect_within<double>({{EK_ACTIVATION_SILU, 8, 4},
                         {EK_ACTIVATION_RELU, 0, 0},
                         {EK_ACTIVATION_GELU, 100, 3},
                         {EK_ACTIVATION_GELU_TANH, 100, 8}},
                        z);
}

}  // namespace
}  // namespace evenkeel::support
