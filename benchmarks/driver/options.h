// The command line of evenkeel-bench.
#ifndef EVENKEEL_BENCH_OPTIONS_H_
#define EVENKEEL_BENCH_OPTIONS_H_

#include <stdexcept>
#include <string>
#include <vector>

#include "run_case.h"

namespace evenkeel::bench {

// Names the option and what is allowed.
class OptionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  std::vector<std::string> cases;
  std::string backend;  // "": the best
  bool cuda = false;    // on the GPU
  int generated = 0;    // random cases instead of lists
  uint64_t seed = 1;
  int threads = 0;
  Plan plan;
  std::string csv;
  std::string commit;
  std::string filter;
  bool quiet = false;
  bool list_targets = false;
  bool help = false;
};

Options parse_options(const std::vector<std::string>& arguments);

extern const char kHelp[];

}  // namespace evenkeel::bench

#endif  // EVENKEEL_BENCH_OPTIONS_H_
