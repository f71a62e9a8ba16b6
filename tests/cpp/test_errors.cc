// Every way to make a call wrong that both passes share, once: structs, enumerations, sizes,
// numbers, strides, devices. A row of the table breaks a good call in one place.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "broken_call.h"

namespace evenkeel::support {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

template <typename Args>
std::vector<Broken<Args>> common() {
  using C = Call<Args>;
  constexpr bool kForward = std::is_same_v<Args, ek_forward_args>;
  return {
      {"problem size 0",
       kRows,
       [](C& c) { c.problem.struct_size = 0; },
       {"problem.struct_size", "0", "at least"}},
      // One byte less than in version 0.1, whatever the structs have grown to.
      {"problem size small",
       kRows,
       [](C& c) { c.problem.struct_size = 95; },
       {"problem.struct_size is 95", "at least 96"}},
      {"args size",
       kRows,
       [](C& c) { c.args.struct_size = kForward ? 119 : 183; },
       {"args.struct_size is 1", kForward ? "at least 120" : "at least 184"}},
      {"execution size",
       kRows,
       [](C& c) { c.execution.struct_size = 55; },
       {"execution.struct_size is 55", "at least 56"}},
      {"parallel size",
       kRows,
       [](C& c) {
         c.parallel.struct_size = 23;
         c.execution.parallel = &c.parallel;
       },
       {"parallel.struct_size is 23", "at least 24"}},
      {"op",
       kRows,
       [](C& c) { c.problem.op = 3; },
       {"problem.op", "3", "EK_LAYER_NORM", "EK_GROUP_NORM"}},
      {"op negative", kRows, [](C& c) { c.problem.op = -1; }, {"problem.op", "-1"}},
      {"layout", kGroups, [](C& c) { c.problem.layout = 2; }, {"problem.layout", "2", "EK_NHWC"}},
      {"activation",
       kRows,
       [](C& c) { c.problem.activation = 9; },
       {"problem.activation", "9", "EK_ACTIVATION_SILU"}},
      {"casting",
       kRms,
       [](C& c) { c.problem.casting = 7; },
       {"problem.casting", "7", "EK_CASTING_GEMMA"}},
      {"casting of layer norm",
       kRows,
       [](C& c) { c.problem.casting = EK_CASTING_LLAMA; },
       {"problem.casting", "1", "RMS norm"}},
      {"casting of group norm",
       kGroups,
       [](C& c) { c.problem.casting = EK_CASTING_GEMMA; },
       {"problem.casting", "2", "RMS norm"}},
      {"problem reserved",
       kRows,
       [](C& c) { c.problem.reserved = 1; },
       {"problem.reserved", "1", "0"}},
      {"args reserved", kRows, [](C& c) { c.args.reserved = 5; }, {"args.reserved", "5", "0"}},
      {"x reserved", kRows, [](C& c) { c.args.x.reserved = 5; }, {"x.reserved", "5", "0"}},
      {"weight reserved",
       kRows,
       [](C& c) { c.args.weight.reserved = 5; },
       {"weight.reserved", "5", "0"}},
      {"device",
       kRows,
       [](C& c) { c.execution.device = 4; },
       {"execution.device", "4", "EK_CPU", "EK_CUDA"}},
      {"threads",
       kRows,
       [](C& c) { c.execution.threads = -2; },
       {"execution.threads", "-2", "at least"}},
      {"parallel threads",
       kRows,
       [](C& c) {
         c.parallel.threads = 0;
         c.execution.parallel = &c.parallel;
       },
       {"parallel.threads", "0", "at least 1"}},
      {"parallel run",
       kRows,
       [](C& c) {
         c.parallel.run = nullptr;
         c.execution.parallel = &c.parallel;
       },
       {"parallel.run", "NULL"}},
      {"backend",
       kRows,
       [](C& c) { c.execution.backend = "gpu"; },
       {"execution.backend", "gpu", "cpu", "reference"}},
      {"backend empty",
       kRows,
       [](C& c) { c.execution.backend = ""; },
       {"execution.backend", "cpu"}},
      {"eps negative",
       kRows,
       [](C& c) { c.problem.eps = -0.25; },
       {"problem.eps", "-0.25", "at least 0"}},
      {"eps NaN", kRows, [](C& c) { c.problem.eps = kNaN; }, {"problem.eps", "nan", "finite"}},
      {"eps infinite",
       kRows,
       [](C& c) { c.problem.eps = kInfinity; },
       {"problem.eps", "inf", "finite"}},
      {"offset infinite",
       kRows,
       [](C& c) { c.problem.weight_offset = -kInfinity; },
       {"problem.weight_offset", "inf", "finite"}},
      {"offset NaN",
       kRows,
       [](C& c) { c.problem.weight_offset = kNaN; },
       {"problem.weight_offset", "nan"}},
      {"offset without weight",
       kRows,
       [](C& c) {
         c.problem.weight_offset = 1;
         c.args.weight.data = nullptr;
       },
       {"problem.weight_offset", "1", "weight"}},
      {"rows", kRows, [](C& c) { c.problem.rows = -3; }, {"problem.rows", "-3", "at least 0"}},
      {"cols zero", kRows, [](C& c) { c.problem.cols = 0; }, {"problem.cols", "0", "at least 1"}},
      {"cols negative",
       kRms,
       [](C& c) { c.problem.cols = -8; },
       {"problem.cols", "-8", "at least 1"}},
      {"inner_rows", kRows, [](C& c) { c.problem.inner_rows = -1; }, {"problem.inner_rows", "-1"}},
      {"inner_rows does not divide",
       kRows,
       [](C& c) { c.problem.inner_rows = 2; },
       {"problem.inner_rows", "2", "divide", "3"}},
      {"samples",
       kGroups,
       [](C& c) { c.problem.samples = -1; },
       {"problem.samples", "-1", "at least 0"}},
      {"channels",
       kGroups,
       [](C& c) { c.problem.channels = 0; },
       {"problem.channels", "0", "at least 1"}},
      {"spatial",
       kGroups,
       [](C& c) { c.problem.spatial = 0; },
       {"problem.spatial", "0", "at least 1"}},
      {"groups zero",
       kGroups,
       [](C& c) { c.problem.groups = 0; },
       {"problem.groups", "0", "at least 1"}},
      {"groups do not divide",
       kGroups,
       [](C& c) { c.problem.groups = 4; },
       {"problem.groups", "4", "divide", "6"}},
      {"too many elements", kRows, [](C& c) { c.problem.rows = kHuge / 2; }, {"elements", "8"}},
      {"too many elements in groups",
       kGroups,
       [](C& c) { c.problem.samples = kHuge / 8; },
       {"elements"}},
      {"cols too large",
       kRows,
       [](C& c) {
         c.problem.rows = 0;
         c.problem.cols = kHuge;
       },
       {"9223372036854775807"}},
      {"x NULL", kRows, [](C& c) { c.args.x.data = nullptr; }, {"x", "NULL", "required"}},
      {"x dtype", kRows, [](C& c) { c.args.x.dtype = 4; }, {"x.dtype", "4", "EK_F32", "EK_BF16"}},
      {"weight dtype",
       kRows,
       [](C& c) { c.args.weight.dtype = -1; },
       {"weight.dtype", "-1", "EK_BF16"}},
      {"bias dtype", kRows, [](C& c) { c.args.bias.dtype = 99; }, {"bias.dtype", "99"}},
      {"x stride negative",
       kRows,
       [](C& c) { c.args.x.row_stride = -8; },
       {"x.row_stride", "-8", "negative"}},
      {"x outer stride negative",
       kRows,
       [](C& c) { c.args.x.outer_stride = -8; },
       {"x.outer_stride", "-8", "negative"}},
      {"x stride small",
       kRows,
       [](C& c) { c.args.x.row_stride = 7; },
       {"x.row_stride", "7", "overlap"}},
      {"x outer stride small",
       kGroups,
       [](C& c) { c.args.x.outer_stride = 20; },
       {"x.outer_stride", "20", "overlap"}},
      {"x strides neither order",
       "layer_norm rows=4 cols=8 inner_rows=2",
       [](C& c) {
         c.args.x.row_stride = 12;
         c.args.x.outer_stride = 8;
       },
       {"x.row_stride", "12", "overlap"}},
      {"x stride beyond 64 bits",
       kRows,
       [](C& c) { c.args.x.row_stride = kHuge / 3; },
       {"x.row_stride", "64 bits"}},
      {"cuda",
       kRows,
       [](C& c) { c.execution.device = EK_CUDA; },
       {"cpu", "device"},
       EK_UNSUPPORTED},
      {"cuda on the cpu backend",
       kRows,
       [](C& c) {
         c.execution.device = EK_CUDA;
         c.execution.backend = "cpu";
       },
       {"cpu"},
       EK_UNSUPPORTED},
  };
}

TEST(Errors, OfBothPasses) {
  for (const auto& broken : common<ek_forward_args>()) check(broken, false);
  for (const auto& broken : common<ek_backward_args>()) check(broken, true);
}

}  // namespace
}  // namespace evenkeel::support
