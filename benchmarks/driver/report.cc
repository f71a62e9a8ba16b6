// Table, progress, summary and CSV (report.h).
#include "report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <stdexcept>

#include "support/cases.h"
#include "support/half.h"

namespace evenkeel::bench {
namespace {

constexpr char kBold[] = "1", kDim[] = "2", kRed[] = "31", kGreen[] = "32";
constexpr size_t kFiguresWidth = 71;

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

std::string right(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

std::string left(const std::string& text, size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return format("%.2f us", seconds * 1e6);
  return format("%.3f ms", seconds * 1e3);
}

const char* pass_name(bool backward) { return backward ? "backward" : "forward"; }

std::string quoted(const std::string& field) {
  if (field.find_first_of(",\"\n") == std::string::npos) return field;
  std::string result = "\"";
  for (char c : field) result += c == '"' ? std::string("\"\"") : std::string(1, c);
  return result + '"';
}

}  // namespace

Table::Table(const Device& device, size_t width)
    : device_(device), width_(std::max<size_t>(width, 20)), terminal_(isatty(STDOUT_FILENO)) {
  const char* no_colour = std::getenv("NO_COLOR");
  colour_ = terminal_ && !(no_colour && *no_colour);
}

std::string Table::paint(const char* code, const std::string& text) const {
  return colour_ ? "\033[" + std::string(code) + "m" + text + "\033[0m" : text;
}

void Table::clear_progress() const {
  if (terminal_) std::fputs("\r\033[K", stdout);
}

void Table::progress(const std::string& text) const {
  if (!terminal_) return;
  std::printf("\r\033[K%s", paint(kDim, text).c_str());
  std::fflush(stdout);
}

void Table::rule() const {
  std::string line;
  for (size_t i = 0; i < width_ + kFiguresWidth; ++i) line += terminal_ ? "─" : "-";
  std::printf("%s\n", paint(kDim, line).c_str());
}

void Table::header() const {
  std::printf("evenkeel %s (%s) on %s, %s\n", ek_version(), device_.target().c_str(),
              device_.name().c_str(), device_.size().c_str());
  std::printf(
      "of limit: time of a copy (backward: of an add of two tensors) by all of these "
      "/ evenkeel's\n\n");
  const std::string titles = left("case", width_) + "  " + left("pass", 10) + left("check", 7) +
                             right("max error", 10) + right("time", 14) + right("GB/s", 9) +
                             right("limit", 14) + right("of it", 7);
  std::printf("%s\n", paint(kBold, titles).c_str());
  rule();
}

void Table::line(const Line& line) const {
  clear_progress();
  const bool failed = !line.failure.empty();
  const std::string verdict = failed                  ? "FAIL"
                              : !line.skipped.empty() ? "skip"
                              : line.share            ? "ok"
                                                      : "-";
  std::string text = left(label(line.spec), width_) + "  " + left(pass_name(line.backward), 10);
  text += paint(failed ? kRed : kGreen, left(verdict, 7));
  text += right(line.error ? format("%.1e", *line.error) : "-", 10);
  if (line.race) {
    text += right(duration(line.race->seconds), 14);
    text += right(format("%.1f", line.bytes / line.race->seconds * 1e-9), 9);
    text += right(duration(line.race->limit_seconds), 14);
    text += paint(kBold, right(format("%.2f", line.race->of_limit), 7));
  } else {
    text += right("-", 14) + right("-", 9) + right("-", 14) + right("-", 7);
  }
  // A line that did not run where it would run best says so.
  if (line.backend == "reference") text += "  on " + line.backend;
  std::printf("%s\n", text.c_str());
  if (!line.skipped.empty()) std::printf("    %s\n", line.skipped.c_str());
  if (failed) {
    std::printf("    %s\n    repeat it with a case list of this line: %s\n", line.failure.c_str(),
                to_string(line.spec).c_str());
  }
  std::fflush(stdout);
}

void Table::footer() const {
  clear_progress();
  rule();
}

void Table::summary(const std::vector<Line>& lines) const {
  size_t checked = 0, failed = 0, skipped = 0;
  std::vector<double> of_limit[2];
  for (const Line& line : lines) {
    failed += !line.failure.empty();
    skipped += !line.skipped.empty();
    checked += line.share.has_value();
    if (line.race) of_limit[line.backward].push_back(line.race->of_limit);
  }
  if (failed > 0) {
    std::printf("%s\n", paint(kRed, std::to_string(failed) + " of " + std::to_string(lines.size()) +
                                        " lines failed.")
                            .c_str());
  } else if (checked > 0) {
    std::printf("All %zu results agree with float64, as closely as rounding allows.\n", checked);
  }
  if (skipped > 0) std::printf("%zu lines skipped: no backend can run them here.\n", skipped);
  for (bool backward : {false, true}) {
    const std::vector<double>& values = of_limit[backward];
    if (values.empty()) continue;
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    std::printf("%s: %.2f of the limit in the median, %.2f to %.2f.\n",
                backward ? "Backward" : "Forward", median(values), *least, *most);
  }
}

CsvFile::CsvFile(const std::string& path, const Device& device, const std::string& commit) {
  const bool fresh = std::ifstream(path).peek() == std::ifstream::traits_type::eof();
  file_.open(path, std::ios::app);
  if (!file_) throw std::runtime_error("--csv " + path + ": cannot be written");
  if (fresh) {
    file_ << "date,commit,version,machine,target,threads,backend,op,shape,case,dtype,pass,check,"
             "max_error,share_of_bound,time_us,gb_per_s,limit_us,of_limit\n";
  }
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M", std::gmtime(&now));
  first_fields_ = {date,          commit,          ek_version(),
                   device.name(), device.target(), std::to_string(device.threads())};
}

void CsvFile::line(const Line& line) {
  std::vector<std::string> fields = first_fields_;
  const std::string text = label(line.spec);
  const size_t op = text.find(' ');
  fields.insert(
      fields.end(),
      {line.backend, text.substr(0, op), text.substr(op + 1, text.find(' ', op + 1) - op - 1),
       to_string(line.spec), support::name_of(line.spec.x.dtype), pass_name(line.backward),
       !line.failure.empty()   ? "fail"
       : !line.skipped.empty() ? "skip"
       : line.share            ? "ok"
                               : "",
       line.error ? format("%.3e", *line.error) : "",
       line.share ? format("%.3f", *line.share) : ""});
  if (line.race) {
    fields.insert(fields.end(), {format("%.2f", line.race->seconds * 1e6),
                                 format("%.2f", line.bytes / line.race->seconds * 1e-9),
                                 format("%.2f", line.race->limit_seconds * 1e6),
                                 format("%.3f", line.race->of_limit)});
  } else {
    fields.insert(fields.end(), 4, "");
  }
  for (size_t i = 0; i < fields.size(); ++i) file_ << (i ? "," : "") << quoted(fields[i]);
  file_ << std::endl;
}

}  // namespace evenkeel::bench
