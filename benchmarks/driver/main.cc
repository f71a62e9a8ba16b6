// evenkeel-bench: runs the cases of some lists on a device and reports. `--help` tells the rest.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "options.h"
#include "report.h"
#include "run_case.h"
#include "support/cases.h"
#include "support/random_case.h"

namespace evenkeel::bench {
namespace {

enum ExitCode { kFine = 0, kCheckFailed = 1, kWrongUse = 2 };

// Long enough for the kernels for long rows.
constexpr int64_t kGeneratedElements = 300000;

std::vector<support::Case> read_all(const Options& options) {
  std::vector<support::Case> cases;
  support::Random random(options.seed);
  while (static_cast<int>(cases.size()) < options.generated)
    cases.push_back(support::random_case(random, kGeneratedElements));
  if (options.generated > 0) return cases;
  for (const std::string& file : options.cases) {
    for (support::Case& c : support::read_cases(file)) cases.push_back(std::move(c));
  }
  return cases;
}

bool matches(const support::Case& c, bool backward, const std::string& filter) {
  const std::string pass = backward ? " backward" : " forward";
  return (label(c) + pass).find(filter) != std::string::npos ||
         to_string(c).find(filter) != std::string::npos;
}

int list_targets() {
  for (int32_t i = 0; const char* name = ek_cpu_target_name(i); ++i) std::printf("%s\n", name);
  return kFine;
}

int run(Options options) {
  if (!options.backend.empty()) options.plan.backend = options.backend.c_str();
  std::vector<support::Case> cases = read_all(options);
  std::erase_if(cases, [&](const support::Case& c) {
    return !(c.forward && matches(c, false, options.filter)) &&
           !(c.backward && matches(c, true, options.filter));
  });
  if (cases.empty()) throw OptionError("--filter " + options.filter + ": no case contains it");

  const std::unique_ptr<Device> device =
      options.cuda ? make_cuda_device() : make_host_device(options.threads);
  std::optional<CsvFile> csv;
  if (!options.csv.empty()) csv.emplace(options.csv, *device, options.commit);
  size_t width = 0;
  for (const support::Case& c : cases) width = std::max(width, label(c).size());
  const Table table(*device, width);
  table.header();
  std::vector<Line> lines;
  for (size_t i = 0; i < cases.size(); ++i) {
    const support::Case& c = cases[i];
    const auto wanted = [&](bool backward) { return matches(c, backward, options.filter); };
    const auto progress = [&](const std::string& step) {
      const std::string count = std::to_string(i + 1) + " of " + std::to_string(cases.size());
      table.progress(count + ": " + label(c) + ": " + step);
    };
    for (Line& line : run_case(c, *device, options.plan, wanted, progress)) {
      if (!options.quiet || !line.failure.empty() || !line.skipped.empty()) table.line(line);
      if (csv) csv->line(line);
      lines.push_back(std::move(line));
    }
  }
  table.footer();
  table.summary(lines);
  for (const Line& line : lines) {
    if (!line.failure.empty()) return kCheckFailed;
  }
  return kFine;
}

int start(const std::vector<std::string>& arguments) {
  const Options options = parse_options(arguments);
  if (options.help) {
    std::fputs(kHelp, stdout);
    return kFine;
  }
  return options.list_targets ? list_targets() : run(options);
}

}  // namespace
}  // namespace evenkeel::bench

int main(int argc, char** argv) {
  try {
    return evenkeel::bench::start({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "evenkeel-bench: %s\n", error.what());
    return 2;
  }
}
