// What only one pass can get wrong, and what is wrong before there is a pass: overlaps, missing
// statistics, the workspace, NULL structs, structs of other versions; and whom a message belongs
// to.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "broken_call.h"

namespace evenkeel::support {
namespace {

TEST(Errors, OfTheForwardPass) {
  const Broken<ek_forward_args> table[] = {
      {"y NULL", kRows, [](Forward& c) { c.args.y.data = nullptr; }, {"y", "NULL", "required"}},
      {"y dtype", kRows, [](Forward& c) { c.args.y.dtype = 17; }, {"y.dtype", "17", "EK_F16"}},
      {"y stride",
       kRows,
       [](Forward& c) { c.args.y.row_stride = 1; },
       {"y.row_stride", "1", "overlap"}},
      {"mean of RMS norm",
       kRms,
       [](Forward& c) { c.args.mean = c.args.rstd; },
       {"mean", "RMS norm", "NULL"}},
      {"y shifted from x",
       kRows,
       [](Forward& c) { c.args.y.data = static_cast<char*>(c.args.x.data) + 4; },
       {"y", "x", "overlap", "exactly"}},
      {"y is x with another type",
       kRows,
       [](Forward& c) {
         c.args.y.data = c.args.x.data;
         c.args.y.dtype = EK_BF16;
       },
       {"y", "x", "overlap"}},
      {"y is x with another stride",
       kRows,
       [](Forward& c) {
         c.args.y.data = c.args.x.data;
         c.args.y.row_stride = 9;
       },
       {"y", "x", "overlap"}},
      {"y on the weight",
       kRows,
       [](Forward& c) { c.args.y.data = c.args.weight.data; },
       {"y", "weight", "overlap"}},
      {"mean on rstd",
       kRows,
       [](Forward& c) { c.args.mean = c.args.rstd; },
       {"mean", "rstd", "overlap"}},
      {"rstd in y",
       kRows,
       [](Forward& c) { c.args.rstd = c.args.y.data; },
       {"y", "rstd", "overlap"}},
      {"mean on the bias",
       kRows,
       [](Forward& c) { c.args.mean = c.args.bias.data; },
       {"mean", "bias", "overlap"}},
  };
  for (const auto& broken : table) check(broken, false);
}

TEST(Errors, OfTheBackwardPass) {
  const Broken<ek_backward_args> table[] = {
      {"dy NULL", kRows, [](Backward& c) { c.args.dy.data = nullptr; }, {"dy", "NULL", "required"}},
      {"dy dtype", kRows, [](Backward& c) { c.args.dy.dtype = 5; }, {"dy.dtype", "5"}},
      {"dx dtype", kRows, [](Backward& c) { c.args.dx.dtype = 5; }, {"dx.dtype", "5"}},
      {"dweight dtype",
       kRows,
       [](Backward& c) { c.args.dweight.dtype = 5; },
       {"dweight.dtype", "5"}},
      {"dbias dtype", kRows, [](Backward& c) { c.args.dbias.dtype = 5; }, {"dbias.dtype", "5"}},
      {"dx stride",
       kRows,
       [](Backward& c) { c.args.dx.row_stride = 2; },
       {"dx.row_stride", "2", "overlap"}},
      {"mean missing",
       kRows,
       [](Backward& c) { c.args.mean = nullptr; },
       {"mean", "NULL", "required"}},
      {"mean of a group norm missing",
       kGroups,
       [](Backward& c) { c.args.mean = nullptr; },
       {"mean", "NULL"}},
      {"rstd missing",
       kRms,
       [](Backward& c) { c.args.rstd = nullptr; },
       {"rstd", "NULL", "required"}},
      {"mean of RMS norm",
       kRms,
       [](Backward& c) { c.args.mean = c.args.rstd; },
       {"mean", "RMS norm"}},
      {"no gradient",
       kRows,
       [](Backward& c) { c.args.dx.data = c.args.dweight.data = c.args.dbias.data = nullptr; },
       {"dx", "dweight", "dbias", "at least one"}},
      {"dweight on dbias",
       kRows,
       [](Backward& c) { c.args.dbias.data = static_cast<char*>(c.args.dweight.data) + 4; },
       {"dweight", "dbias", "overlap"}},
      {"dx shifted from dy",
       kRows,
       [](Backward& c) { c.args.dx.data = static_cast<char*>(c.args.dy.data) + 8; },
       {"dx", "dy", "overlap"}},
      {"dx shifted from x",
       kRows,
       [](Backward& c) { c.args.dx.data = static_cast<char*>(c.args.x.data) + 8; },
       {"dx", "x", "overlap"}},
      {"dweight is the weight",
       kRows,
       [](Backward& c) { c.args.dweight.data = c.args.weight.data; },
       {"dweight", "weight", "overlap"}},
      {"dbias in x",
       kRows,
       [](Backward& c) { c.args.dbias.data = c.args.x.data; },
       {"dbias", "x", "overlap"}},
      {"dx on mean",
       kRows,
       [](Backward& c) { c.args.dx.data = const_cast<void*>(c.args.mean); },
       {"dx", "mean", "overlap"}},
      {"workspace NULL",
       kRows,
       [](Backward& c) { c.execution.workspace = nullptr; },
       {"execution.workspace", "NULL", "bytes"},
       EK_INVALID_ARGUMENT,
       true},
      {"workspace small",
       kRows,
       [](Backward& c) { --c.execution.workspace_size; },
       {"execution.workspace_size", "at least", "bytes"},
       EK_INVALID_ARGUMENT,
       true},
      {"workspace is dx",
       kRows,
       [](Backward& c) { c.execution.workspace = c.args.dx.data; },
       {"execution.workspace", "dx", "overlap"},
       EK_INVALID_ARGUMENT,
       true},
  };
  for (const auto& broken : table) check(broken, true);
}

TEST(Errors, NullStructs) {
  Problem problem(parse_case(kRows));
  ek_execution execution = EK_EXECUTION_INIT;
  size_t bytes = 0;
  EXPECT_EQ(ek_forward(nullptr, &problem.forward_args(), &execution), EK_INVALID_ARGUMENT);
  expect_words({"problem", "NULL"});
  EXPECT_EQ(ek_forward(&problem.problem(), nullptr, &execution), EK_INVALID_ARGUMENT);
  expect_words({"args", "NULL"});
  EXPECT_EQ(ek_forward(&problem.problem(), &problem.forward_args(), nullptr), EK_INVALID_ARGUMENT);
  expect_words({"execution", "NULL"});
  EXPECT_EQ(ek_backward(nullptr, &problem.backward_args(), &execution), EK_INVALID_ARGUMENT);
  EXPECT_EQ(ek_backward(&problem.problem(), nullptr, &execution), EK_INVALID_ARGUMENT);
  EXPECT_EQ(ek_backward(&problem.problem(), &problem.backward_args(), nullptr),
            EK_INVALID_ARGUMENT);
  EXPECT_EQ(ek_forward_workspace(nullptr, nullptr, nullptr, &bytes), EK_INVALID_ARGUMENT);
  EXPECT_EQ(ek_forward_workspace(&problem.problem(), &problem.forward_args(), &execution, nullptr),
            EK_INVALID_ARGUMENT);
  expect_words({"bytes", "NULL"});
  EXPECT_EQ(ek_explain_forward(nullptr, nullptr, nullptr, nullptr, nullptr, 0),
            EK_INVALID_ARGUMENT);
}

// A struct as a later header would have it: longer.
template <typename Struct>
struct Longer {
  Struct known;
  char unknown[16] = {};
};

// A caller compiled against a later header: its new fields may be there as long as they are zero.
TEST(Errors, LongerStructs) {
  Problem problem(parse_case(kRows));
  ek_execution execution;
  ASSERT_EQ(problem.prepare(Runner{}, false, &execution), "");
  Longer<ek_problem> longer{problem.problem()};
  longer.known.struct_size = sizeof longer;
  EXPECT_EQ(ek_forward(&longer.known, &problem.forward_args(), &execution), EK_OK)
      << ek_last_error();
  longer.unknown[7] = 1;
  EXPECT_EQ(ek_forward(&longer.known, &problem.forward_args(), &execution), EK_INVALID_ARGUMENT);
  expect_words({"problem.struct_size", std::to_string(sizeof longer).c_str()});
}

TEST(Errors, MessagesBelongToTheThreadAndTheLastCall) {
  EXPECT_EQ(ek_forward(nullptr, nullptr, nullptr), EK_INVALID_ARGUMENT);
  EXPECT_STRNE(ek_last_error(), "");
  std::thread([] { EXPECT_STREQ(ek_last_error(), ""); }).join();
  Problem problem(parse_case(kRows));
  EXPECT_EQ(problem.forward(kCpu), "");
  EXPECT_STREQ(ek_last_error(), "");
}

TEST(Errors, StatusNames) {
  EXPECT_STREQ(ek_status_name(EK_OK), "EK_OK");
  EXPECT_STREQ(ek_status_name(EK_INVALID_ARGUMENT), "EK_INVALID_ARGUMENT");
  EXPECT_STREQ(ek_status_name(EK_UNSUPPORTED), "EK_UNSUPPORTED");
  EXPECT_STREQ(ek_status_name(EK_DEVICE_ERROR), "EK_DEVICE_ERROR");
  EXPECT_STREQ(ek_status_name(EK_INTERNAL_ERROR), "EK_INTERNAL_ERROR");
  EXPECT_NE(ek_status_name(static_cast<ek_status>(5)), nullptr);
}

}  // namespace
}  // namespace evenkeel::support
