// One case on one device: checked against the float64 oracle and timed beside its ceiling.
#ifndef EVENKEEL_BENCH_RUN_CASE_H_
#define EVENKEEL_BENCH_RUN_CASE_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "measure.h"
#include "support/cases.h"

namespace evenkeel::bench {

// What one pass of a case gave: a line of the table.
struct Line {
  support::Case spec;
  bool backward = false;
  std::string backend;
  std::string failure;          // "" or what went wrong
  std::string skipped;          // "" or why no backend of the device can run it
  std::optional<double> error;  // the largest of y or dx, absolute
  std::optional<double> share;  // of all outputs, the largest error / what is allowed
  std::optional<Race> race;
  double bytes = 0;  // that have to move
};

struct Plan {
  bool check = true;
  bool time = true;
  double seconds = 1;             // of timing, for each line
  const char* backend = nullptr;  // nullptr: the best
};

// "layer_norm 4096x1024 bf16", then whatever else is not default.
std::string label(const support::Case& c);

// One line for each pass that the case asks for and `wanted` accepts. `progress` is told what
// begins.
std::vector<Line> run_case(const support::Case& c, Device& device, const Plan& plan,
                           const std::function<bool(bool backward)>& wanted,
                           const std::function<void(const std::string&)>& progress);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_BENCH_RUN_CASE_H_
