// How structs of the ABI grow (core/growth.h), with a struct that has grown.
#include "core/growth.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace evenkeel {
namespace {

// Version 0.1, and what two later versions made of it. Absent means 1 for `scale`, and 0 for `mode`.
struct First {
  uint32_t struct_size;
  int32_t op;
  double eps;
};
struct Second {
  uint32_t struct_size;
  int32_t op;
  double eps;
  double scale;
};
struct Third {
  uint32_t struct_size;
  int32_t op;
  double eps;
  double scale;
  int64_t mode;
};
constexpr Third kInit = {sizeof(Third), 0, 1e-5, 1, 0};

// A caller's struct behind which lies what must not be read.
template <typename Struct>
struct Caller {
  Struct given;
  unsigned char behind[64];

  explicit Caller(const Struct& s) : given(s) { std::memset(behind, 0x5a, sizeof behind); }
  const Third* get() const { return reinterpret_cast<const Third*>(&given); }
};

TEST(Growth, FieldsThatAnOlderCallerDoesNotKnowAreAbsent) {
  const Caller<First> first({sizeof(First), 7, 0.25});
  Third taken = kInit;
  ASSERT_EQ(copy_known(first.get(), sizeof(First), taken), Taken::kYes);
  EXPECT_EQ(taken.op, 7);
  EXPECT_EQ(taken.eps, 0.25);
  EXPECT_EQ(taken.scale, 1);
  EXPECT_EQ(taken.mode, 0);

  const Caller<Second> second({sizeof(Second), 7, 0.25, 3});
  taken = kInit;
  ASSERT_EQ(copy_known(second.get(), sizeof(First), taken), Taken::kYes);
  EXPECT_EQ(taken.op, 7);
  EXPECT_EQ(taken.scale, 3);
  EXPECT_EQ(taken.mode, 0);
}

TEST(Growth, AnUpToDateCallersFieldsAreTaken) {
  const Caller<Third> third({sizeof(Third), 7, 0.25, 3, 9});
  Third taken = kInit;
  ASSERT_EQ(copy_known(third.get(), sizeof(First), taken), Taken::kYes);
  EXPECT_EQ(taken.scale, 3);
  EXPECT_EQ(taken.mode, 9);
}

TEST(Growth, LaterFieldsMustBeZero) {
  struct {
    Third known;
    char later[16];
  } call = {{sizeof call, 7, 0.25, 3, 9}, {}};
  Third taken = kInit;
  EXPECT_EQ(copy_known(&call.known, sizeof(First), taken), Taken::kYes);
  EXPECT_EQ(taken.mode, 9);
  call.later[15] = 1;
  EXPECT_EQ(copy_known(&call.known, sizeof(First), taken), Taken::kUnknownFields);
  call.known.struct_size = sizeof call - 1;
  EXPECT_EQ(copy_known(&call.known, sizeof(First), taken), Taken::kYes);
}

TEST(Growth, NothingBelowTheFirstVersionIsTaken) {
  Caller<First> caller({0, 7, 0.25});
  for (uint32_t size = 0; size < sizeof(First); ++size) {
    caller.given.struct_size = size;
    Third taken = kInit;
    EXPECT_EQ(copy_known(caller.get(), sizeof(First), taken), Taken::kTooSmall) << size;
    EXPECT_EQ(taken.eps, kInit.eps) << "a struct that is refused was copied";
  }
}

}  // namespace
}  // namespace evenkeel
