// A good call and one way to break it, for the error suites.
//
// The same wrong call is made to the workspace query, the explanation, the preparation and the run,
// which must agree: the status, the words of the message (the argument, its value, what is allowed), and that
// nothing has been written.
#ifndef EVENKEEL_TESTS_CPP_BROKEN_CALL_H_
#define EVENKEEL_TESTS_CPP_BROKEN_CALL_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "parallels.h"
#include "support/problem.h"

namespace evenkeel::support {
template <typename Args>
struct Call {
  ek_problem problem;
  Args args;
  ek_execution execution;
  ek_parallel parallel;
};

using Forward = Call<ek_forward_args>;
using Backward = Call<ek_backward_args>;

inline ek_status run(const Forward& call) {
  return ek_forward(&call.problem, &call.args, &call.execution);
}
inline ek_status run(const Backward& call) {
  return ek_backward(&call.problem, &call.args, &call.execution);
}
inline ek_status query(const Forward& call, size_t* bytes) {
  return ek_forward_workspace(&call.problem, &call.args, &call.execution, bytes);
}
inline ek_status query(const Backward& call, size_t* bytes) {
  return ek_backward_workspace(&call.problem, &call.args, &call.execution, bytes);
}
inline ek_status prepare(const Forward& call, ek_prepared* prepared) {
  return ek_prepare_forward(&call.problem, &call.args, &call.execution, prepared);
}
inline ek_status prepare(const Backward& call, ek_prepared* prepared) {
  return ek_prepare_backward(&call.problem, &call.args, &call.execution, prepared);
}
inline ek_status explain(const Forward& call) {
  return ek_explain_forward(&call.problem, &call.args, &call.execution, nullptr, nullptr, 0);
}
inline ek_status explain(const Backward& call) {
  return ek_explain_backward(&call.problem, &call.args, &call.execution, nullptr, nullptr, 0);
}

template <typename Args>
struct Broken {
  const char* name;
  const char* line;  // the good case
  std::function<void(Call<Args>&)> breaks;
  std::vector<const char*> words;
  ek_status status = EK_INVALID_ARGUMENT;
  bool only_in_run = false;  // the workspace itself is not looked at by queries
};

inline std::string outputs_of(const Problem& problem) {
  std::string all;
  const auto add = [&](const Buffer& buffer) {
    all.append(reinterpret_cast<const char*>(buffer.data()), buffer.size());
  };
  for (Tensor tensor : {Tensor::kX, Tensor::kDy, Tensor::kY, Tensor::kDx, Tensor::kResidual,
                        Tensor::kSum, Tensor::kDsum, Tensor::kDresidual}) {
    add(problem.buffer(tensor));
  }
  for (Vector vector : {Vector::kWeight, Vector::kBias, Vector::kDweight, Vector::kDbias,
                        Vector::kMean, Vector::kRstd, Vector::kSavedMean, Vector::kSavedRstd,
                        Vector::kScale, Vector::kShift, Vector::kDscale, Vector::kDshift}) {
    add(problem.buffer(vector));
  }
  return all;
}

inline void expect_words(const std::vector<const char*>& words) {
  const std::string message = ek_last_error();
  EXPECT_GT(message.size(), 10u);
  for (const char* word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
  }
}

template <typename Args>
void check(const Broken<Args>& broken, bool backward) {
  SCOPED_TRACE(broken.name);
  Problem problem(parse_case(broken.line));
  ASSERT_EQ(problem.save_statistics(kReference), "");
  Call<Args> call{problem.problem(), {}, {}, make_parallel(1, run_in_order)};
  if constexpr (std::is_same_v<Args, ek_forward_args>) {
    call.args = problem.forward_args();
  } else {
    call.args = problem.backward_args();
  }
  ASSERT_EQ(problem.prepare(Runner{}, backward, &call.execution), "");
  broken.breaks(call);
  const std::string before = outputs_of(problem);
  size_t bytes = 12345;
  if (!broken.only_in_run) {
    EXPECT_EQ(query(call, &bytes), broken.status);
    EXPECT_EQ(bytes, 12345u);
    expect_words(broken.words);
    EXPECT_EQ(explain(call), broken.status);
    expect_words(broken.words);
    ek_prepared prepared;
    EXPECT_EQ(prepare(call, &prepared), broken.status);
    expect_words(broken.words);
    EXPECT_EQ(prepared.workspace_size, 0u);
    EXPECT_EQ(ek_run(&prepared, call.execution.workspace, call.execution.workspace_size),
              EK_INVALID_ARGUMENT);
    expect_words({"prepared"});
  }
  EXPECT_EQ(run(call), broken.status);
  expect_words(broken.words);
  EXPECT_TRUE(outputs_of(problem) == before) << "a failed call has written";
  EXPECT_EQ(problem.check_memory(backward), "");
}

inline constexpr char kRows[] = "layer_norm rows=3 cols=8";
inline constexpr char kRms[] = "rms_norm rows=3 cols=8";
inline constexpr char kGroups[] = "group_norm samples=2 channels=6 spatial=4 groups=3";

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_CPP_BROKEN_CALL_H_
