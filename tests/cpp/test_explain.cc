// Which backend runs a call, and why: nothing may fall back silently.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "support/problem.h"
#include "support/random_case.h"

namespace evenkeel::support {
namespace {

struct Explanation {
  ek_status status;
  std::string backend, text;
};

Explanation explain(const Problem& problem, bool backward, const char* wanted,
                    ek_device device = EK_CPU) {
  ek_execution execution = EK_EXECUTION_INIT;
  execution.backend = wanted;
  execution.device = device;
  const char* name = "";
  char text[2048] = "";
  const ek_status status = backward
                               ? ek_explain_backward(&problem.problem(), &problem.backward_args(),
                                                     &execution, &name, text, sizeof text)
                               : ek_explain_forward(&problem.problem(), &problem.forward_args(),
                                                    &execution, &name, text, sizeof text);
  return {status, name, text};
}

std::vector<std::string> backends() {
  std::vector<std::string> names;
  for (int32_t i = 0; ek_backend_name(i) != nullptr; ++i) names.push_back(ek_backend_name(i));
  return names;
}

TEST(Explain, TheBackendsAreListedBestFirst) {
  const std::vector<std::string> names = backends();
  ASSERT_GE(names.size(), 2u);
  EXPECT_EQ(names.back(), "reference");
  EXPECT_EQ(std::count(names.begin(), names.end(), "cpu"), 1);
  EXPECT_EQ(ek_backend_name(-1), nullptr);
  EXPECT_EQ(ek_cpu_target_name(-1), nullptr);
  EXPECT_NE(ek_cpu_target_name(0), nullptr);
}

// The CPU backend takes every problem on the host.
TEST(Explain, NothingFallsBackToTheReference) {
  Random random(3);
  for (int i = 0; i < 500; ++i) {
    const Problem problem(random_case(random, 3000));
    for (const bool backward : {false, true}) {
      if (backward && !problem.spec().backward) continue;
      const Explanation explanation = explain(problem, backward, nullptr);
      ASSERT_EQ(explanation.status, EK_OK) << ek_last_error();
      ASSERT_EQ(explanation.backend, "cpu") << to_string(problem.spec()) << "\n"
                                            << explanation.text;
    }
  }
}

TEST(Explain, OneLineForEachBackend) {
  const Problem problem(parse_case("layer_norm rows=3 cols=40"));
  const std::string text = explain(problem, false, nullptr).text;
  EXPECT_EQ(static_cast<size_t>(std::count(text.begin(), text.end(), '\n')), backends().size());
  EXPECT_NE(text.find("cpu: runs: "), std::string::npos) << text;
  EXPECT_NE(text.find("reference: not needed: cpu comes first"), std::string::npos) << text;
}

// Of a machine with a GPU the text tells the kernel, of one without what is missing. (No pointer is
// followed.)
TEST(Explain, CallsForAGpu) {
  const std::vector<std::string> names = backends();
  if (names.front() != "cuda") GTEST_SKIP() << "this build has no CUDA backend";
  constexpr struct {
    const char *problem, *word;
  } kCalls[] = {{"layer_norm rows=3 cols=4096 x=bf16", "threads a row"},
                {"group_norm samples=1 channels=4 spatial=8 groups=2 x=bf16", "channels"},
                {"group_norm samples=1 channels=6 spatial=5 groups=2 layout=nhwc", "channels"}};
  for (const auto& call : kCalls) {
    const Problem problem(parse_case(call.problem));
    for (const bool backward : {false, true}) {
      const Explanation explanation = explain(problem, backward, nullptr, EK_CUDA);
      const std::string error = ek_last_error();
      SCOPED_TRACE(call.problem);
      if (explanation.status == EK_OK) {
        EXPECT_EQ(explanation.backend, "cuda");
        EXPECT_NE(explanation.text.find(call.word), std::string::npos) << explanation.text;
      } else {
        EXPECT_EQ(explanation.status, EK_UNSUPPORTED);
        EXPECT_NE(error.find("cuda: declined: device 0 cannot be used: "), std::string::npos)
            << error;
        EXPECT_NE(error.find("cpu: declined: tensors are on a device"), std::string::npos) << error;
      }
    }
  }
}

TEST(Explain, AForcedBackendRuns) {
  Problem problem(parse_case("layer_norm rows=3 cols=40"));
  const Explanation explanation = explain(problem, true, "reference");
  EXPECT_EQ(explanation.status, EK_OK);
  EXPECT_EQ(explanation.backend, "reference");
  EXPECT_NE(explanation.text.find("reference: runs: "), std::string::npos) << explanation.text;
  EXPECT_EQ(problem.forward(kReference), "");
}

TEST(Explain, AnUnknownBackendFails) {
  const Problem problem(parse_case("layer_norm rows=3 cols=40"));
  const Explanation explanation = explain(problem, false, "cuda_of_tomorrow");
  EXPECT_EQ(explanation.status, EK_INVALID_ARGUMENT);
  EXPECT_EQ(explanation.backend, "");
}

// Text is cut to the room there is, and stays a string.
TEST(Explain, AnyCapacityIsSafe) {
  const Problem problem(parse_case("layer_norm rows=3 cols=40"));
  const std::string whole = explain(problem, false, nullptr).text;
  ek_execution execution = EK_EXECUTION_INIT;
  for (size_t capacity = 0; capacity <= whole.size() + 2; ++capacity) {
    Buffer text(capacity);
    ASSERT_EQ(ek_explain_forward(&problem.problem(), &problem.forward_args(), &execution, nullptr,
                                 reinterpret_cast<char*>(text.data()), capacity),
              EK_OK);
    ASSERT_TRUE(text.guards_intact()) << capacity;
    if (capacity == 0) continue;
    const std::string part(reinterpret_cast<char*>(text.data()),
                           strnlen(reinterpret_cast<char*>(text.data()), capacity));
    ASSERT_LT(part.size(), capacity);
    ASSERT_EQ(part, whole.substr(0, part.size()));
  }
}

TEST(Explain, VersionsAgree) {
  const std::string header = std::to_string(EK_VERSION_MAJOR) + "." +
                             std::to_string(EK_VERSION_MINOR) + "." +
                             std::to_string(EK_VERSION_PATCH);
  EXPECT_EQ(ek_version(), header);
}

}  // namespace
}  // namespace evenkeel::support
