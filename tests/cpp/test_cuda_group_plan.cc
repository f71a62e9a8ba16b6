// What a CUDA group norm's plan makes of a call (src/cuda/plan.h), on devices that need not be there:
// one split for any number of samples, a workspace whose regions keep apart, kernels by types and
// addresses, and cases for compute-sanitizer that reach every kernel.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/plan.h"
#include "cuda_devices.h"
#include "support/cases.h"

namespace evenkeel::cuda {
namespace {

using support::Case;
using support::parse_case;
using support::TensorSpec;
using support::VectorSpec;

Dtype dtype_of(ek_dtype dtype) { return static_cast<Dtype>(dtype); }

// The call of a case, as validation would make it.
Call call_of(const Case& c, Pass pass) {
  const bool last = c.layout == EK_NHWC, backward = pass == Pass::kBackward;
  const int64_t inner = last ? c.spatial : c.channels, width = last ? c.channels : c.spatial;
  uintptr_t used = 0;
  const auto address = [&] { return nowhere(++used) + c.misalign; };
  const auto tensor = [&](const TensorSpec& spec, bool wanted) -> Tensor {
    if (!spec.present || !wanted) return {};
    const int64_t row = spec.row_stride ? spec.row_stride : width;
    return {address(), dtype_of(spec.dtype), row,
            spec.outer_stride ? spec.outer_stride : inner * row};
  };
  const auto vector = [&](const VectorSpec& spec, bool wanted) -> Vector {
    if (!spec.present || !wanted) return {};
    return {address(), dtype_of(spec.dtype)};
  };
  return {.pass = pass,
          .op = c.op,
          .layout = c.layout,
          .activation = c.activation,
          .casting = c.casting,
          .eps = c.eps,
          .weight_offset = c.offset,
          .outer = c.samples,
          .inner = inner,
          .width = width,
          .groups = c.groups,
          .channels = c.channels,
          .x = tensor(c.x, true),
          .y = tensor(c.y, !backward),
          .dy = tensor(c.dy, backward),
          .dx = tensor(c.dx, backward),
          .weight = vector(c.weight, true),
          .bias = vector(c.bias, true),
          .dweight = vector(c.dweight, backward),
          .dbias = vector(c.dbias, backward),
          .mean = c.mean || backward ? address() : nullptr,
          .rstd = c.rstd || backward ? address() : nullptr,
          .stats = c.x.dtype == EK_F64 ? Dtype::kF64 : Dtype::kF32,
          .compute = computes_in_f64(c, backward) ? Dtype::kF64 : Dtype::kF32,
          .device = EK_CUDA,
          .device_index = 0,
          .stream = nullptr,
          .workspace = nullptr,
          .workspace_size = 0,
          .parallel = Parallel(ek_parallel{})};
}

// The kernel of a plan.
const GroupPolicy& policy_of(const GroupPlan& plan) {
  return group_policies_of(plan.problem.x_size).entries[plan.policy];
}

constexpr Pass kPasses[] = {Pass::kForward, Pass::kBackward};

// Calls body(device, case, call, plan) for groups of many sizes, all types, layouts and passes, and
// with some of the results only.
template <typename Body>
void for_plans(const Body& body) {
  const char* const kLists[] = {
      "group_norm samples=2 channels=320 groups=32,1,320 spatial=1,64,4096 layout=nchw,nhwc "
      "x=f32,bf16,f64 dx=none,f32,bf16 misalign=0,4 dweight=none,f32 dbias=none,f32",
      "group_norm samples=2 channels=128 groups=2,32 spatial=262144,1000003 layout=nchw,nhwc "
      "x=f32,f16 y=f16,f32",
      "group_norm samples=2 channels=12297 groups=3 spatial=7,8 layout=nchw,nhwc x=f16 "
      "dbias=none,f32"};
  for (const NamedDevice& on : kDevices) {
    for (const char* list : kLists) {
      for (const Case& c : support::parse_cases(list, "here")) {
        for (const Pass pass : kPasses) {
          SCOPED_TRACE(testing::Message()
                       << on.name << (pass == Pass::kForward ? " forward " : " backward ")
                       << to_string(c));
          const Call call = call_of(c, pass);
          body(on.device, c, call, make_group_plan(call, on.device));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

// A sample's bits do not depend on the others.
TEST(CudaGroupPlan, SplitsSamplesTheSameWayWhateverTheirNumber) {
  for_plans([](const DeviceProperties& device, const Case& c, Call call, const GroupPlan& plan) {
    for (const int64_t samples : {0, 1, 3, 1000, 100000}) {
      call.outer = samples;
      const GroupPlan other = make_group_plan(call, device);
      EXPECT_TRUE(other.tile == plan.tile) << samples << " samples";
      EXPECT_EQ(other.runtime_dtype, plan.runtime_dtype);
      EXPECT_EQ(other.policy, plan.policy);
      EXPECT_EQ(other.aligned, plan.aligned);
      EXPECT_EQ(other.shared, plan.shared);
      EXPECT_EQ(other.sets, samples * ceil_div(c.channels, plan.tile.span));
    }
  });
}

// The entry of the table is that of the call and the tile; none falls back.
TEST(CudaGroupPlan, HasAPolicyThatServesTheCall) {
  for_plans([](const DeviceProperties&, const Case& c, const Call& call, const GroupPlan& plan) {
    ASSERT_GE(plan.policy, 0);
    ASSERT_LT(plan.policy, group_policies_of(plan.problem.x_size).count);
    EXPECT_EQ(plan.fallback, nullptr);
    const GroupPolicy& policy = policy_of(plan);
    EXPECT_EQ(policy.backward, call.pass == Pass::kBackward);
    EXPECT_EQ(policy.channels_last, c.layout == EK_NHWC);
    EXPECT_EQ(policy.x_size, plan.runtime_dtype ? 0 : size_of(call.x.dtype));
    EXPECT_EQ(policy.vector > 1, plan.aligned);
    EXPECT_EQ(policy, group_policy_of(plan.problem, plan.tile));
  });
}

TEST(CudaGroupPlan, SharedMemoryIsTheTiles) {
  for_plans([](const DeviceProperties& device, const Case&, const Call&, const GroupPlan& plan) {
    const int64_t resident = resident_bytes(plan.problem, plan.tile);
    const int64_t exchange = group_exchange_bytes(plan.problem, plan.tile);
    EXPECT_LE(resident + exchange, plan.shared);
    EXPECT_LE(plan.shared, device.shared_bytes);
    EXPECT_EQ(resident > 0, plan.tile.resident);
    EXPECT_EQ(exchange > 0, plan.tile.resident && plan.tile.chunks > 1);
  });
}

// Where a region begins, and its bytes.
using Region = std::pair<int64_t, int64_t>;

// What kernels write (GroupScratch): in the order of their offsets.
std::vector<Region> regions_of(const Call& call, const GroupPlan& plan) {
  const int64_t size = size_of(call.compute), groups = call.outer * call.groups;
  std::vector<Region> regions;
  if (!plan.tile.resident) {
    const int64_t parts = groups * plan.tile.chunks * policy_of(plan).part_values();
    regions.emplace_back(0, plan.sets * static_cast<int64_t>(sizeof(GroupCounters)));
    regions.emplace_back(plan.parts_at, parts * size);
    regions.emplace_back(plan.results_at, groups * kGroupResults * size);
  }
  // A kernel that writes one of them writes both.
  if (call.dweight || call.dbias) {
    const int64_t partials = call.outer * plan.tile.slices * call.channels * size;
    regions.emplace_back(plan.partials_at, partials);
    regions.emplace_back(plan.partials_at + plan.partials_bytes, partials);
  }
  return regions;
}

TEST(CudaGroupPlan, RegionsOfTheWorkspaceKeepApart) {
  for_plans([](const DeviceProperties& device, const Case&, Call call, const GroupPlan&) {
    for (const int64_t samples : {0, 1, 2, 1001}) {
      call.outer = samples;
      const GroupPlan plan = make_group_plan(call, device);
      int64_t end = 0, needed = 0;
      for (const auto& [begin, bytes] : regions_of(call, plan)) {
        EXPECT_EQ(begin % size_of(call.compute), 0);
        EXPECT_GE(begin, end);
        end = begin + bytes;
        needed += bytes;
      }
      EXPECT_EQ(plan.parts_at % kWorkspaceAlignment, 0);  // of Moments
      if (needed == 0) {
        EXPECT_EQ(plan.workspace, 0);
        continue;
      }
      // From the first aligned address on, and hardly more.
      EXPECT_GE(plan.workspace, end + kWorkspaceAlignment - 1);
      EXPECT_LE(plan.workspace, needed + 6 * kWorkspaceAlignment);
    }
  });
}

// A set is read for the second time when its sums are known; without dx no set is.
TEST(CudaGroupPlan, TheLagIsOfWholeUnits) {
  for_plans([](const DeviceProperties& device, const Case&, const Call& call,
               const GroupPlan& plan) {
    if (plan.tile.resident) return;
    const int64_t chunks = plan.tile.chunks;
    const bool second_pass = call.pass == Pass::kForward || call.dx;
    EXPECT_EQ(plan.lag, second_pass ? group_lag(plan.sets, chunks, call.layout == EK_NHWC, device)
                                    : plan.sets * chunks);
    EXPECT_EQ(plan.lag % chunks, 0);
  });
}

// --- Types and addresses

struct TypesCase {
  const char* spec;
  const char* reason;  // a word of it; nullptr: a kernel has been compiled for these types
  bool aligned;
};

const TypesCase kTypesCases[] = {
    {"x=f32", nullptr, true},
    {"x=f16 weight=bf16 bias=f32", nullptr, true},
    {"x=bf16 weight=none bias=none activation=silu", nullptr, true},
    {"x=bf16 dweight=f64 dbias=f16", nullptr, true},
    {"x=f32 y=f16", "differ in type", false},
    {"x=f16 y=bf16", "differ in type", false},
    {"x=f64", "f64", false},
    {"x=f32 weight=f64", "f64", false},
    {"x=f32 misalign=4", nullptr, false},
    {"x=f32 misalign=2", "address", false},
    {"x=bf16 weight=bf16 bias=bf16 mean=no rstd=no misalign=2 pass=forward", nullptr, false},
    {"x=bf16 misalign=1", "address", false},
    {"x=bf16 x_row_stride=72", nullptr, true},
    {"x=bf16 x_row_stride=68", nullptr, false},
    {"x=bf16 x_outer_stride=4100", nullptr, false},
    {"x=f32 y_row_stride=66 dy_row_stride=66", nullptr, false},
};

TEST(CudaGroupPlan, LooksTypesUpAtRunTimeForAReason) {
  for (const TypesCase& types : kTypesCases) {
    for (const char* layout : {"nchw ", "nhwc "}) {
      const Case c = parse_case("group_norm samples=2 channels=64 spatial=64 groups=4 layout=" +
                                std::string(layout) + types.spec);
      for (const Pass pass : kPasses) {
        if (pass == Pass::kBackward && !c.backward) continue;
        SCOPED_TRACE(to_string(c));
        const GroupPlan plan = make_group_plan(call_of(c, pass), kH200.device);
        EXPECT_EQ(plan.aligned, types.aligned);
        EXPECT_EQ(plan.tile.resident, types.aligned);
        ASSERT_EQ(plan.runtime_dtype == nullptr, types.reason == nullptr);
        if (types.reason == nullptr) continue;
        EXPECT_NE(std::strstr(plan.runtime_dtype, types.reason), nullptr) << plan.runtime_dtype;
      }
    }
  }
}

// Vectors are resident, whose last one must not reach into the next line.
TEST(CudaGroupPlan, TheLengthOfLinesCounts) {
  for (const bool last : {false, true}) {
    for (int64_t length = 1; length <= 64; ++length) {
      Case c = parse_case("group_norm samples=2 channels=64 spatial=64 groups=1 x=bf16");
      if (last) c.layout = EK_NHWC;
      (last ? c.channels : c.spatial) = length;
      c.x.row_stride = c.y.row_stride = 64;
      ASSERT_EQ(make_group_plan(call_of(c, Pass::kForward), kH200.device).aligned, length % 8 == 0)
          << length;
    }
  }
}

// --- Cases for compute-sanitizer

// Something that has code of its own.
struct Way {
  bool backward, last;
  std::string what;  // types or an option
  std::string split;

  auto operator<=>(const Way&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Way& way) {
  return out << (way.backward ? "backward" : "forward") << (way.last ? ", channels last, " : ", ")
             << way.what << ", " << way.split;
}

std::string split_of(const GroupPlan& plan) {
  const GroupTile& tile = plan.tile;
  if (!tile.resident) return plan.aligned ? "vectors read twice" : "elements read twice";
  if (tile.reloads_dy) return "dy read twice";
  const auto cluster = std::bit_ceil(static_cast<unsigned>(tile.chunks));
  return "resident by up to " + std::to_string(cluster);
}

// The group norms of gpu_tiers.txt must take every way there is on an H200.
class GpuTiers : public testing::Test {
 protected:
  GpuTiers() {
    for (const Case& c : support::read_cases(std::string(EVENKEEL_CASES_DIR) + "/gpu_tiers.txt")) {
      if (c.op != EK_GROUP_NORM) continue;
      elements_ += element_count(c);
      for (const Pass pass : kPasses) {
        if (pass == Pass::kForward ? c.forward : c.backward) add(c, call_of(c, pass));
      }
    }
  }

  void expect(const Way& way) const { EXPECT_TRUE(seen_.contains(way)) << "no case: " << way; }
  void expect(const std::string& what, const std::string& split) const {
    for (const bool backward : {false, true}) {
      for (const bool last : {false, true}) expect({backward, last, what, split});
    }
  }

  // Of all entries of a table, for x of a dtype or, if it is looked up, for arithmetic in it.
  void expect_kernels(int x_size, Dtype dtype) const {
    for (int i = 0; i < group_policies_of(x_size).count; ++i) {
      EXPECT_TRUE(kernels_.contains({x_size, dtype, i}))
          << "no case: " << (x_size == 0 ? "types looked up, " : "") << name_of(dtype)
          << ", policy " << i;
    }
  }

  int64_t elements_ = 0;

 private:
  void add(const Case& c, const Call& call) {
    const GroupPlan plan = make_group_plan(call, kH200.device);
    const bool backward = call.pass == Pass::kBackward;
    const auto see = [&](const std::string& what, const std::string& how) {
      seen_.insert({backward, c.layout == EK_NHWC, what, how});
    };
    const std::string split = split_of(plan);
    kernels_.emplace(plan.problem.x_size, plan.runtime_dtype ? call.compute : call.x.dtype,
                     plan.policy);
    if (!plan.runtime_dtype) see("any type", split);
    const std::string resident = plan.tile.resident ? "resident" : "read twice";
    if (call.activation == EK_ACTIVATION_SILU) see("SiLU", resident);
    if (c.in_place != support::InPlace::kNone) see("in place", resident);
    if (backward ? !call.dx : !call.mean) see("fewer results", resident);
    if (backward ? call.dweight && !call.dbias : !call.bias) see("no bias", resident);
    if (plan.tile.resident) return;
    if (plan.tile.vectors > policy_of(plan).vectors()) see("any type", split + " in many sets");
    const int64_t chunks = plan.sets * plan.tile.chunks;
    if (plan.tile.chunks == 1) see("any type", "sets of one chunk read twice");
    if (call.pass == Pass::kForward || call.dx)
      see("any type", split + (plan.lag < chunks ? ", in turns" : ", at the end"));
  }

  std::set<Way> seen_;
  std::set<std::tuple<int, Dtype, int>> kernels_;
};

TEST_F(GpuTiers, ReachEveryKernel) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16})
    expect_kernels(static_cast<int>(size_of(dtype)), dtype);
  for (const Dtype compute : {Dtype::kF32, Dtype::kF64}) expect_kernels(0, compute);
}

TEST_F(GpuTiers, ReachEverySplit) {
  for (const int cluster : {1, 2, 4, 8, 16})
    expect("any type", "resident by up to " + std::to_string(cluster));
  for (const char* order : {", in turns", ", at the end"}) {
    expect("any type", std::string("vectors read twice") + order);
    expect("any type", std::string("elements read twice") + order);
  }
  expect("any type", "sets of one chunk read twice");
  for (const bool backward : {false, true}) {
    expect({backward, true, "any type", "vectors read twice in many sets"});
    expect({backward, true, "any type", "elements read twice in many sets"});
  }
}

TEST_F(GpuTiers, HaveEveryOptionInEveryKindOfKernel) {
  for (const char* option : {"SiLU", "in place", "fewer results", "no bias"}) {
    expect(option, "resident");
    expect(option, "read twice");
  }
}

// compute-sanitizer takes a hundred times as long.
TEST_F(GpuTiers, AreSmall) { EXPECT_LT(elements_, 30'000'000); }

}  // namespace
}  // namespace evenkeel::cuda
