// Options, their checks and their help (options.h).
#include "options.h"

#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>

#include "commit.h"
#include "evenkeel/evenkeel.h"

namespace evenkeel::bench {

const char kHelp[] =
    R"(evenkeel-bench: correctness and speed of evenkeel over lists of cases

  evenkeel-bench                       every line of tests/cases/peers.txt
  evenkeel-bench --filter "rms_norm" --threads 1 --csv out.csv

For each case, forward and backward: the result is compared with the float64 reference, and the time is
measured in alternating rounds with its ceiling: a copy of one tensor, or for the backward pass an add of
two tensors, with ordinary stores, of the same size and by as many threads. "of limit" is the ceiling's
time divided by evenkeel's; evenkeel may use non-temporal stores, so more than 1 is possible.

  --cases FILE...      case lists (the format is described in tests/support/cases.h)
  --filter WORD        only lines whose label, case line or pass contains this
  --device NAME        cpu (default) or cuda: the first GPU, where times are those of replays of a CUDA graph
                       over many sets of tensors, so that the cache holds none of them
  --backend NAME       run on this backend instead of the best one
  --generated N        check N random cases instead of lists
  --seed S             of the random cases (default 1)
  --threads N          threads of evenkeel and of the ceiling; 0 (default): one per processor
  --check              check only
  --time               time only
  --seconds S          timing of each line (default 1)
  --quiet              print lines that fail or are skipped, and the summary
  --csv FILE           append the results to FILE
  --commit TEXT        what the CSV calls the measured code (default: the commit it was built from)
  --list-targets       the instruction sets that this machine can run, best first
  --help               this text

EVENKEEL_CPU_TARGET=<name> makes the library use another instruction set than the best.
Exit code: 0, 1 if a check failed, 2 if the command line or a case list is wrong.
)";

namespace {

struct Range {
  double least, most;
  bool whole;
  const char* words;
};
constexpr Range kThreads{0, 1024, true, "a whole number from 0 to 1024"};
constexpr Range kCount{1, 1e6, true, "a whole number from 1 to 1000000"};
constexpr Range kSeed{0, 1e9, true, "a whole number from 0 to 1000000000"};
constexpr Range kSeconds{0, 3600, false, "a number from 0 to 3600"};

double to_number(const std::string& option, const std::string& text, const Range& range) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool number = end != text.c_str() && *end == '\0';
  const bool inside = value >= range.least && value <= range.most;
  if (!number || !inside || (range.whole && value != std::floor(value))) {
    throw OptionError(option + " " + text + ": must be " + range.words);
  }
  return value;
}

std::string known_backend(const std::string& name) {
  std::string known;
  for (int32_t i = 0; const char* backend = ek_backend_name(i); ++i) {
    if (name == backend) return name;
    known += (i ? ", " : "") + std::string(backend);
  }
  throw OptionError("--backend " + name + ": this build has " + known);
}

// The arguments, taken from the front.
class Arguments {
 public:
  explicit Arguments(const std::vector<std::string>& words) : words_(words) {}

  bool empty() const { return next_ == words_.size(); }
  std::string take() { return words_[next_++]; }
  std::string value_of(const std::string& option) {
    if (empty() || is_option()) throw OptionError(option + ": needs a value");
    return take();
  }
  std::vector<std::string> values_of(const std::string& option) {
    std::vector<std::string> values = {value_of(option)};
    while (!empty() && !is_option()) values.push_back(take());
    return values;
  }

 private:
  bool is_option() const { return words_[next_].starts_with("--"); }

  const std::vector<std::string>& words_;
  size_t next_ = 0;
};

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  Options options;
  options.commit = kCommit;
  Arguments rest(arguments);
  bool check_only = false, time_only = false;
  const std::map<std::string, std::function<void(const std::string&)>> handlers = {
      {"--cases",
       [&](const std::string& name) {
         for (std::string& file : rest.values_of(name)) options.cases.push_back(std::move(file));
       }},
      {"--filter", [&](const std::string& name) { options.filter = rest.value_of(name); }},
      {"--backend",
       [&](const std::string& name) { options.backend = known_backend(rest.value_of(name)); }},
      {"--device",
       [&](const std::string& name) {
         const std::string value = rest.value_of(name);
         if (value != "cpu" && value != "cuda")
           throw OptionError(name + " " + value + ": must be cpu or cuda");
         options.cuda = value == "cuda";
       }},
      {"--generated",
       [&](const std::string& name) {
         options.generated = static_cast<int>(to_number(name, rest.value_of(name), kCount));
       }},
      {"--seed",
       [&](const std::string& name) {
         options.seed = static_cast<uint64_t>(to_number(name, rest.value_of(name), kSeed));
       }},
      {"--threads",
       [&](const std::string& name) {
         options.threads = static_cast<int>(to_number(name, rest.value_of(name), kThreads));
       }},
      {"--check", [&](const std::string&) { check_only = true; }},
      {"--time", [&](const std::string&) { time_only = true; }},
      {"--seconds",
       [&](const std::string& name) {
         options.plan.seconds = to_number(name, rest.value_of(name), kSeconds);
       }},
      {"--quiet", [&](const std::string&) { options.quiet = true; }},
      {"--csv", [&](const std::string& name) { options.csv = rest.value_of(name); }},
      {"--commit", [&](const std::string& name) { options.commit = rest.value_of(name); }},
      {"--list-targets", [&](const std::string&) { options.list_targets = true; }},
      {"--help", [&](const std::string&) { options.help = true; }},
  };
  while (!rest.empty()) {
    const std::string name = rest.take();
    const auto found = handlers.find(name);
    if (found == handlers.end()) {
      std::string known;
      for (const auto& [option, handler] : handlers) known += " " + option;
      throw OptionError(name + ": unknown option; there are" + known);
    }
    found->second(name);
  }
  if (check_only && time_only) {
    throw OptionError("--check and --time: only one of them, or none for both");
  }
  options.plan.check = !time_only;
  options.plan.time = !check_only && options.generated == 0;
  if (options.cases.empty()) {
    options.cases.push_back(std::string(EVENKEEL_CASES_DIR) + "/peers.txt");
  }
  return options;
}

}  // namespace evenkeel::bench
