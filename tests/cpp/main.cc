// The main() of every test program: makes sure that the instruction set that was asked for is the
// one that runs, then runs the tests.
//
// EVENKEEL_CPU_TARGET names the instruction set. If this machine lacks it the program ends with
// code 77, which ctest reports as skipped. A library that ignored the variable would be found out
// here.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "support/problem.h"

namespace evenkeel::support {
namespace {

constexpr int kSkipped = 77;

bool machine_has(const std::string& target) {
  for (int32_t i = 0; ek_cpu_target_name(i) != nullptr; ++i) {
    if (target == ek_cpu_target_name(i)) return true;
  }
  return false;
}

bool library_uses(const std::string& target) {
  const Problem problem(parse_case("layer_norm rows=1 cols=64"));
  ek_execution execution = EK_EXECUTION_INIT;
  char text[1024];
  return ek_explain_forward(&problem.problem(), &problem.forward_args(), &execution, nullptr, text,
                            sizeof text) == EK_OK &&
         std::string(text).find("runs: " + target) != std::string::npos;
}

}  // namespace
}  // namespace evenkeel::support

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* target = std::getenv("EVENKEEL_CPU_TARGET")) {
    if (!evenkeel::support::machine_has(target)) {
      std::printf("skipped: this machine or build has no instruction set %s\n", target);
      return evenkeel::support::kSkipped;
    }
    if (!evenkeel::support::library_uses(target)) {
      std::printf("EVENKEEL_CPU_TARGET is %s, but ek_explain_forward() names another\n", target);
      return EXIT_FAILURE;
    }
  }
  return RUN_ALL_TESTS();
}
