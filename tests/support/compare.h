// Results against the oracle: the reference backend with float64 outputs, on the very same inputs.
//
// An element passes if it lies between the roundings of (oracle - bound) and (oracle + bound) to
// its type, with the bounds of bounds.h. For half types that is tighter than one ulp of the rounded
// float64 result wherever nothing cancels. Where the oracle is NaN or infinite the result must be
// too. The backward oracle takes the same saved statistics, so their error is judged once, in the
// forward pass.
#ifndef EVENKEEL_TESTS_SUPPORT_COMPARE_H_
#define EVENKEEL_TESTS_SUPPORT_COMPARE_H_

#include <string>
#include <vector>

#include "support/problem.h"

namespace evenkeel::support {

struct OutputError {
  std::string name;
  double max_absolute = 0;
  double max_ulps = 0;   // in ulps of the output's type at the oracle's value
  double max_share = 0;  // of what is allowed beyond the final rounding; 1 is the limit
};

struct Accuracy {
  std::vector<OutputError> outputs;
  std::string failure;  // "" or the first element that is out of bounds
};

// The oracle of a problem: the same inputs, all outputs, in float64 and dense. Not run yet.
Problem make_oracle(const Problem& problem);

// Both have been run.
Accuracy compare_forward(const Problem& result, const Problem& oracle);
Accuracy compare_backward(const Problem& result, const Problem& oracle);

// Runs problem and oracle and compares. A quantized y is compared with the quantization of what the same runner gives
// in float32, bit by bit. The failure also tells of failed runs and damaged guards.
// check_backward() uses the problem's saved statistics.
Accuracy check_forward(Problem& problem, const Runner& runner);
Accuracy check_backward(Problem& problem, const Runner& runner);

// Forward and backward as the case asks. The backward pass runs on the statistics of the runner's
// own forward pass. "" or what is wrong, with the case line to repeat it.
std::string check_case(const Case& c, const Runner& runner);

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_COMPARE_H_
