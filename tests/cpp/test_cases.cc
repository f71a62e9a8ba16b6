// The case lists of tests/cases against the oracle, forward and backward, on the CPU backend.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/compare.h"

namespace evenkeel::support {
namespace {

class CaseList : public testing::TestWithParam<const char*> {
 protected:
  static std::string path(const std::string& name) {
    return std::string(EVENKEEL_CASES_DIR) + "/" + name + ".txt";
  }
};

class CheckedList : public CaseList {};

TEST_P(CheckedList, AgreesWithTheReference) {
  const std::vector<Case> cases = read_cases(path(GetParam()));
  ASSERT_FALSE(cases.empty());
  int failures = 0;
  for (const Case& c : cases) {
    const std::string failure = check_case(c, kCpu);
    if (!failure.empty() && ++failures <= 20) ADD_FAILURE() << failure;
  }
  EXPECT_EQ(failures, 0) << "of " << cases.size() << " cases";
}

INSTANTIATE_TEST_SUITE_P(Cases, CheckedList, testing::Values("basic", "hostile"),
                         [](const auto& list) { return std::string(list.param); });

TEST_P(CaseList, PrintsWhatItParses) {
  for (const Case& c : read_cases(path(GetParam()))) {
    const std::string line = to_string(c);
    EXPECT_EQ(to_string(parse_case(line)), line);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CaseList, testing::Values("basic", "hostile", "peers"),
                         [](const auto& list) { return std::string(list.param); });

// The saved statistics need not come from the same backend.
TEST(Cases, BackwardTakesTheStatisticsOfAnotherBackend) {
  for (const char* line : {"layer_norm rows=5 cols=300 x=bf16", "rms_norm rows=5 cols=300 x=f32",
                           "layer_norm rows=5 cols=300 values=mean1e4",
                           "group_norm samples=2 channels=12 spatial=49 groups=3 layout=nhwc"}) {
    Problem problem(parse_case(line));
    ASSERT_EQ(problem.save_statistics(kReference), "") << line;
    EXPECT_EQ(check_backward(problem, kCpu).failure, "") << line;
  }
}

}  // namespace
}  // namespace evenkeel::support
