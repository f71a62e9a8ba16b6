// Thousands of random cases against the oracle.
//
// The seed is fixed, so that a run can be repeated; EVENKEEL_TEST_SEED sets another one and
// EVENKEEL_TEST_COUNT another number of cases. A failure prints the line that parse_case()
// understands.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "support/compare.h"
#include "support/random_case.h"

namespace evenkeel::support {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kDefaultCount = 800;
#else
constexpr int64_t kDefaultCount = 4000;
#endif

int64_t number_from(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : otherwise;
}

TEST(Generated, AgreeWithTheReference) {
  const int64_t seed = number_from("EVENKEEL_TEST_SEED", 20240601);
  const int64_t count = number_from("EVENKEEL_TEST_COUNT", kDefaultCount);
  std::printf("EVENKEEL_TEST_SEED=%lld EVENKEEL_TEST_COUNT=%lld\n", static_cast<long long>(seed),
              static_cast<long long>(count));
  Random random(static_cast<uint64_t>(seed));
  int failures = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t max_elements = random.chance(50) ? 200000 : 4000;
    const Case c = random_case(random, max_elements);
    const Runner runner{"cpu", 1 + static_cast<int>(random.below(3)), nullptr};
    const std::string failure = check_case(c, runner);
    if (!failure.empty() && ++failures <= 20) {
      ADD_FAILURE() << failure << "\n  case " << i << " of EVENKEEL_TEST_SEED=" << seed;
    }
  }
  EXPECT_EQ(failures, 0) << "of " << count << " cases";
}

TEST(Generated, PrintWhatTheyParse) {
  Random random(1);
  for (int i = 0; i < 1000; ++i) {
    const std::string line = to_string(random_case(random, 5000));
    EXPECT_EQ(to_string(parse_case(line)), line);
  }
}

}  // namespace
}  // namespace evenkeel::support
