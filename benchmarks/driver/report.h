// What the driver shows: an aligned table on the terminal or in a pipe, and a CSV file.
//
// Colour, box characters and the progress line appear only on a terminal, and colour not where
// NO_COLOR is set.
#ifndef EVENKEEL_BENCH_REPORT_H_
#define EVENKEEL_BENCH_REPORT_H_

#include <fstream>
#include <string>
#include <vector>

#include "device.h"
#include "run_case.h"

namespace evenkeel::bench {

class Table {
 public:
  // `width`: of the longest label.
  Table(const Device& device, size_t width);

  void header() const;
  void line(const Line& line) const;
  // A line that the next output overwrites; nothing where output is not a terminal.
  void progress(const std::string& text) const;
  void footer() const;

  // Lines, failures and how near the limit, as one or two sentences.
  void summary(const std::vector<Line>& lines) const;

 private:
  std::string paint(const char* code, const std::string& text) const;
  void clear_progress() const;
  void rule() const;

  const Device& device_;
  size_t width_;
  bool terminal_, colour_;
};

// Appends to `path`; a new file gets a header. Throws std::runtime_error where it cannot be
// written.
class CsvFile {
 public:
  CsvFile(const std::string& path, const Device& device, const std::string& commit);

  void line(const Line& line);

 private:
  std::ofstream file_;
  std::vector<std::string> first_fields_;
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_BENCH_REPORT_H_
