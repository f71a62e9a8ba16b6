// Threads and sizes at their limits: many callers at once, calls from inside tasks, empty problems,
// and tensors that reach beyond 2^31 elements.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "parallels.h"
#include "support/half.h"
#include "support/problem.h"

namespace evenkeel::support {
namespace {

const char* const kLines[] = {
    "layer_norm rows=300 cols=257 x=f32",
    "rms_norm rows=700 cols=64 x=bf16",
    "layer_norm rows=2 cols=50001 x=f32",
    "group_norm samples=2 channels=32 spatial=300 groups=8 x=f32",
    "group_norm samples=2 channels=32 spatial=300 groups=8 x=bf16 layout=nhwc",
};

std::unique_ptr<Problem> run_once(const char* line, const Runner& runner) {
  auto problem = std::make_unique<Problem>(parse_case(line));
  EXPECT_EQ(problem->forward(runner), "") << line;
  EXPECT_EQ(problem->save_statistics(runner), "") << line;
  EXPECT_EQ(problem->backward(runner), "") << line;
  return problem;
}

bool same(const Problem& a, const Problem& b) {
  return a.buffer(Tensor::kY) == b.buffer(Tensor::kY) &&
         a.buffer(Tensor::kDx) == b.buffer(Tensor::kDx) &&
         a.buffer(Vector::kDweight) == b.buffer(Vector::kDweight) &&
         a.buffer(Vector::kDbias) == b.buffer(Vector::kDbias);
}

TEST(Pool, ServesManyCallersAtOnce) {
  std::vector<std::unique_ptr<Problem>> expected;
  for (const char* line : kLines) expected.push_back(run_once(line, kCpu));
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&, caller] {
      for (int turn = 0; turn < 15; ++turn) {
        const size_t which = static_cast<size_t>(caller + turn) % std::size(kLines);
        const auto problem = run_once(kLines[which], {"cpu", 1 + (caller + turn) % 4, nullptr});
        EXPECT_TRUE(same(*problem, *expected[which])) << kLines[which];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// A caller's threads that themselves call the library, with the built-in pool, before they do the
// task.
TEST(Pool, MayBeUsedFromInsideATask) {
  const auto expected = run_once(kLines[0], kCpu);
  const auto nested = [](void* context, int64_t tasks, Task task, void* argument) {
    const auto again = run_once(kLines[1], {"cpu", 3, nullptr});
    EXPECT_TRUE(same(*again, *static_cast<const Problem*>(context)));
    run_on_threads(nullptr, tasks, task, argument);
  };
  const auto inner = run_once(kLines[1], kCpu);
  const ek_parallel parallel = make_parallel(3, nested, inner.get());
  EXPECT_TRUE(same(*run_once(kLines[0], {"cpu", 0, &parallel}), *expected));
}

// One thread per processor, and more threads than there is work.
TEST(Pool, AnyNumberOfThreads) {
  for (const char* line : kLines) {
    const auto expected = run_once(line, kCpu);
    for (const int threads : {0, 64, 1000}) {
      EXPECT_TRUE(same(*run_once(line, {"cpu", threads, nullptr}), *expected))
          << line << ", " << threads;
    }
  }
}

// Without rows there is nothing to point to; parameter gradients are sums of nothing.
TEST(Empty, NeedsNoTensors) {
  for (const char* line : {"layer_norm rows=0 cols=9", "rms_norm rows=0 cols=9 bias=f32",
                           "group_norm samples=0 channels=9 spatial=4 groups=3",
                           "group_norm samples=0 channels=9 spatial=100 groups=3",
                           "group_norm samples=0 channels=9 spatial=4 groups=3 layout=nhwc"}) {
    for (const char* backend : {"cpu", "reference"}) {
      Problem problem(parse_case(line));
      ek_execution execution;
      ek_forward_args forward = problem.forward_args();
      forward.x.data = forward.y.data = forward.mean = forward.rstd = nullptr;
      ASSERT_EQ(problem.prepare({backend, 2, nullptr}, false, &execution), "");
      EXPECT_EQ(ek_forward(&problem.problem(), &forward, &execution), EK_OK) << ek_last_error();
      ek_backward_args backward = problem.backward_args();
      backward.dy.data = backward.x.data = backward.dx.data = nullptr;
      backward.mean = backward.rstd = nullptr;
      ASSERT_EQ(problem.prepare({backend, 2, nullptr}, true, &execution), "");
      EXPECT_EQ(ek_backward(&problem.problem(), &backward, &execution), EK_OK) << ek_last_error();
      EXPECT_EQ(problem.check_memory(true), "") << line << ", " << backend;
      EXPECT_EQ(problem.read(Vector::kDweight), std::vector<double>(9)) << line << ", " << backend;
      EXPECT_EQ(problem.read(Vector::kDbias), std::vector<double>(9)) << line << ", " << backend;
    }
  }
}

// --- Beyond 32 bits
// -------------------------------------------------------------------------------

// Address space without memory behind it: only the pages of the rows get any.
class Reserved {
 public:
  explicit Reserved(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reserved() {
    if (ok()) munmap(data_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

  bool ok() const { return data_ != MAP_FAILED; }
  unsigned char* data() { return static_cast<unsigned char*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

constexpr int64_t kFar = (int64_t{1} << 32) + 24;  // elements

struct FarCase {
  const char* dense;
  bool outer;  // the far stride is that between samples and not between rows
};

class Far : public testing::TestWithParam<FarCase> {};

TEST_P(Far, StridesGiveTheSameBits) {
  const auto expected = run_once(GetParam().dense, kCpu);
  const Case dense = expected->spec();
  Case spread = dense;
  for (TensorSpec* spec : {&spread.x, &spread.y, &spread.dy, &spread.dx}) {
    (GetParam().outer ? spec->outer_stride : spec->row_stride) = kFar;
  }
  const Placement far_place(spread, spread.x), near_place(dense, dense.x);
  const auto element = static_cast<int64_t>(size_of(dense.x.dtype));
  const auto bytes = static_cast<size_t>(far_place.extent() * element);
  Reserved x(bytes), y(bytes), dy(bytes), dx(bytes);
  if (!x.ok() || !y.ok() || !dy.ok() || !dx.ok()) GTEST_SKIP() << "no address space to reserve";

  const auto each = [&](const auto& visit) {
    for (int64_t unit = 0; unit < unit_count(dense); ++unit) {
      for (int64_t i = 0; i < unit_size(dense); ++i) {
        visit(far_place.element(unit, i) * element, near_place.element(unit, i) * element);
      }
    }
  };
  each([&](int64_t far, int64_t near) {
    std::memcpy(x.data() + far, expected->inputs()->x.data() + near, static_cast<size_t>(element));
    std::memcpy(dy.data() + far, expected->inputs()->dy.data() + near,
                static_cast<size_t>(element));
  });
  const auto at = [&](Reserved& memory, const TensorSpec& spec) {
    return ek_tensor{memory.data(), spec.row_stride, spec.outer_stride, spec.dtype, 0};
  };
  ek_execution execution;
  ek_forward_args forward = expected->forward_args();
  forward.x = at(x, spread.x);
  forward.y = at(y, spread.y);
  ASSERT_EQ(expected->prepare(kCpu, false, &execution), "");
  ASSERT_EQ(ek_forward(&expected->problem(), &forward, &execution), EK_OK) << ek_last_error();
  ek_backward_args backward = expected->backward_args();
  backward.dy = at(dy, spread.dy);
  backward.x = at(x, spread.x);
  backward.dx = at(dx, spread.dx);
  ASSERT_EQ(expected->prepare(kCpu, true, &execution), "");
  ASSERT_EQ(ek_backward(&expected->problem(), &backward, &execution), EK_OK) << ek_last_error();
  bool equal = true;
  each([&](int64_t far, int64_t near) {
    const auto size = static_cast<size_t>(element);
    equal = equal &&
            std::memcmp(y.data() + far, expected->buffer(Tensor::kY).data() + near, size) == 0 &&
            std::memcmp(dx.data() + far, expected->buffer(Tensor::kDx).data() + near, size) == 0;
  });
  EXPECT_TRUE(equal);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Far,
    testing::Values(
        FarCase{"layer_norm rows=3 cols=300 x=f32", false},
        FarCase{"rms_norm rows=3 cols=300 x=bf16", false},
        FarCase{"layer_norm rows=4 cols=30 inner_rows=2 x=f32", true},
        FarCase{"group_norm samples=3 channels=6 spatial=100 groups=2 x=f32", true},
        FarCase{"group_norm samples=3 channels=6 spatial=100 groups=2 x=f32 layout=nhwc", true}),
    [](const auto& far) { return "Case" + std::to_string(far.index); });

}  // namespace
}  // namespace evenkeel::support
