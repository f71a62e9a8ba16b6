// Prepared calls: the results and workspaces of plain calls, as often as wanted, from a copy, long
// after the structs they were made from are gone; and what ek_run() refuses.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <ostream>
#include <thread>
#include <vector>

#include "broken_call.h"

namespace evenkeel::support {
namespace {

// The structs exist only here. Returns the size of the workspace that a query gives.
size_t prepare_and_forget(const Problem& problem, bool backward, const ek_parallel& threads,
                          ek_prepared* prepared) {
  auto parallel = std::make_unique<ek_parallel>(threads);
  auto p = std::make_unique<ek_problem>(problem.problem());
  auto execution = std::make_unique<ek_execution>(ek_execution EK_EXECUTION_INIT);
  const std::string backend = "cpu";
  execution->backend = backend.c_str();
  execution->parallel = parallel.get();
  execution->workspace = parallel.get();  // must not be looked at
  size_t bytes = SIZE_MAX;
  const auto make = [&](const auto& args, auto query, auto prepare) {
    const auto copy = std::make_unique<std::decay_t<decltype(args)>>(args);
    EXPECT_EQ(query(p.get(), copy.get(), execution.get(), &bytes), EK_OK) << ek_last_error();
    EXPECT_EQ(prepare(p.get(), copy.get(), execution.get(), prepared), EK_OK) << ek_last_error();
  };
  if (backward) {
    make(problem.backward_args(), ek_backward_workspace, ek_prepare_backward);
  } else {
    make(problem.forward_args(), ek_forward_workspace, ek_prepare_forward);
  }
  return bytes;
}

class Prepared : public testing::TestWithParam<Case> {};

TEST_P(Prepared, GivesTheBitsOfAPlainCall) {
  Problem problem(GetParam());
  ASSERT_EQ(problem.save_statistics(kCpu), "");
  for (const bool backward : {false, true}) {
    const ek_parallel parallel = make_parallel(2, run_in_order);
    ASSERT_EQ(
        backward ? problem.backward({"cpu", 1, &parallel}) : problem.forward({"cpu", 1, &parallel}),
        "");
    const std::string expected = outputs_of(problem);
    ek_prepared prepared;
    const size_t bytes = prepare_and_forget(problem, backward, parallel, &prepared);
    EXPECT_EQ(prepared.workspace_size, bytes);
    ek_prepared copy;
    std::memcpy(&copy, &prepared, sizeof copy);
    std::memset(&prepared, 0xff, sizeof prepared);
    for (const size_t shift : {0, 1, 5}) {  // another workspace each time, on another thread
      problem.reset(backward);
      Buffer workspace(bytes, shift);
      std::thread([&] {
        EXPECT_EQ(ek_run(&copy, workspace.data(), bytes), EK_OK) << ek_last_error();
      }).join();
      EXPECT_TRUE(outputs_of(problem) == expected);
      EXPECT_TRUE(workspace.guards_intact());
      EXPECT_EQ(problem.check_memory(backward), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Prepared,
                         testing::ValuesIn(parse_cases(R"(
layer_norm rows=70 cols=7,64,5000 x=f32,bf16,f64
layer_norm rows=3 cols=100000 x=f32
rms_norm rows=20 cols=129 x=f16 casting=llama activation=silu
group_norm samples=3 channels=12 spatial=49,3000 groups=3 layout=nchw,nhwc x=f32,bf16
layer_norm rows=0 cols=8
)",
                                                       "prepared")));

TEST(PreparedErrors, WhatIsNotPreparedIsRefused) {
  const Problem problem(parse_case(kRows));
  const ek_execution execution = EK_EXECUTION_INIT;
  EXPECT_EQ(ek_prepare_forward(&problem.problem(), &problem.forward_args(), &execution, nullptr),
            EK_INVALID_ARGUMENT);
  expect_words({"prepared", "NULL"});
  EXPECT_EQ(ek_prepare_backward(&problem.problem(), &problem.backward_args(), &execution, nullptr),
            EK_INVALID_ARGUMENT);
  expect_words({"prepared", "NULL"});
  EXPECT_EQ(ek_run(nullptr, nullptr, 0), EK_INVALID_ARGUMENT);
  expect_words({"prepared", "NULL"});
  for (const int byte : {0x00, 0x5a, 0xff}) {
    ek_prepared prepared;
    std::memset(&prepared, byte, sizeof prepared);
    EXPECT_EQ(ek_run(&prepared, nullptr, 0), EK_INVALID_ARGUMENT) << byte;
    expect_words({"prepared", "ek_prepare_forward"});
  }
}

// A preparation that fails leaves nothing behind that could be run, even over one that had succeeded.
TEST(PreparedErrors, AFailedPreparationIsRefused) {
  Problem problem(parse_case(kRows));
  const ek_execution execution = EK_EXECUTION_INIT;
  ek_prepared prepared;
  ASSERT_EQ(ek_prepare_forward(&problem.problem(), &problem.forward_args(), &execution, &prepared),
            EK_OK);
  ek_problem wrong = problem.problem();
  wrong.cols = 0;
  EXPECT_EQ(ek_prepare_forward(&wrong, &problem.forward_args(), &execution, &prepared),
            EK_INVALID_ARGUMENT);
  EXPECT_EQ(ek_run(&prepared, nullptr, 0), EK_INVALID_ARGUMENT);
  expect_words({"prepared"});
}

TEST(PreparedErrors, TheWorkspaceIsChecked) {
  Problem problem(parse_case(kRows));
  ASSERT_EQ(problem.save_statistics(kReference), "");
  const ek_execution execution = EK_EXECUTION_INIT;
  ek_prepared prepared;
  ASSERT_EQ(
      ek_prepare_backward(&problem.problem(), &problem.backward_args(), &execution, &prepared),
      EK_OK);
  ASSERT_GT(prepared.workspace_size, 0u);
  const std::string before = outputs_of(problem);
  std::vector<char> workspace(prepared.workspace_size);
  EXPECT_EQ(ek_run(&prepared, nullptr, prepared.workspace_size), EK_INVALID_ARGUMENT);
  expect_words({"workspace is NULL", std::to_string(prepared.workspace_size).c_str()});
  EXPECT_EQ(ek_run(&prepared, workspace.data(), prepared.workspace_size - 1), EK_INVALID_ARGUMENT);
  expect_words({"workspace_size is", std::to_string(prepared.workspace_size).c_str()});
  EXPECT_EQ(ek_run(&prepared, problem.backward_args().dx.data, prepared.workspace_size),
            EK_INVALID_ARGUMENT);
  expect_words({"workspace", "dx", "overlap"});
  EXPECT_TRUE(outputs_of(problem) == before) << "a failed call has written";
  EXPECT_EQ(ek_run(&prepared, workspace.data(), prepared.workspace_size), EK_OK);
}

}  // namespace

void PrintTo(const Case& c, std::ostream* out) { *out << to_string(c); }

}  // namespace evenkeel::support
