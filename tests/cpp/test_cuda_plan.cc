// How a call of a row norm will run (src/cuda/plan.h): properties that every plan must have, on chips
// that need not be there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cuda/plan.h"
#include "cuda_devices.h"
#include "cuda_kinds.h"

namespace evenkeel::cuda {
namespace {

// A call that has the kind's tile: without alignment, its second tensor begins one element late.
Call call_of(const Kind& kind, int64_t rows, int64_t cols) {
  Call call = make_call(kind.pass, rows, cols, kind.x, kind.other);
  if (!kind.aligned) (kind.pass == Pass::kForward ? call.y : call.dy).data += kind.other_size();
  return call;
}

constexpr int64_t kManyRows = kMostBlocks;

// Calls body(choice, rows, call, plan) for rows of some lengths, of all kinds, on all devices.
template <typename Body>
void for_plans(Body body) {
  constexpr int64_t kLengths[] = {1,     7,     8,     64,    100,    512,    1000,    1024,   4096,
                                  10240, 12288, 16384, 20000, 100000, 262144, 1 << 20, 1 << 24};
  for (const NamedDevice& on : kDevices) {
    for (const Kind& kind : all_kinds()) {
      const Offer offer = offer_of(kind);
      for (const int64_t cols : kLengths) {
        if (cols % kind.vector() != 0) continue;
        const Tile tile = kind.typed() ? tile_of(kind, cols, on.device) : multi_pass_tile(cols);
        const Choice choice{on, kind, offer, cols, tile};
        for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{1000}, kManyRows}) {
          SCOPED_TRACE(describe(choice) + ", rows " + std::to_string(rows));
          const Call call = call_of(kind, rows, cols);
          body(choice, rows, call, make_plan(call, on.device));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

// for_plans() finds the tile without the number of rows.
TEST(CudaPlan, HasTheTileOfItsRowsWhateverTheirNumber) {
  for_plans([](const Choice& c, int64_t rows, const Call&, const Plan& plan) {
    EXPECT_EQ(plan.runtime_dtype == nullptr, c.kind.typed());
    EXPECT_EQ(plan.aligned, c.kind.aligned);
    const int x_size = c.kind.x_size();
    Tile tile = c.tile;
    if (c.kind.aligned && c.kind.x == c.kind.other) {
      // Parameters are float32.
      if (c.kind.pass == Pass::kBackward) {
        tile =
            specialize_backward(tile, c.cols, x_size, kNoTerms, c.device(), Specialization::kLayer);
      } else if (c.kind.x == Dtype::kF32) {
        tile = specialize_forward(tile, rows, c.cols, x_size, kNoTerms, Specialization::kLayer);
      }
    }
    EXPECT_TRUE(plan.tile == tile);
    EXPECT_EQ(plan.shared, shared_of(c.kind, c.cols, tile));
  });
}

// Rows that blocks prefetch for others are few enough to stay in L2, one at least.
TEST(CudaPlan, PrefetchesAFewMegabytesAhead) {
  int64_t fetching = 0;
  for_plans([&](const Choice& c, int64_t rows, const Call&, const Plan& plan) {
    if (plan.prefetch_rows == 0) return;
    ++fetching;
    EXPECT_EQ(c.kind.pass, Pass::kForward);
    EXPECT_FALSE(plan.tile.multi_pass());
    const int64_t row = c.cols * c.kind.x_size();
    EXPECT_GE(rows * row, 4 * kForwardPrefetchBytes);
    if (plan.prefetch_rows > 1) {
      EXPECT_LE(plan.prefetch_rows * row, kForwardPrefetchBytes);
    }
    EXPECT_GT((plan.prefetch_rows + 1) * row, kForwardPrefetchBytes);
  });
  EXPECT_GT(fetching, 0);
}

// What a block prefetches is one range, at one distance from its own rows.
TEST(CudaPlan, PrefetchesOnlyWhatLiesAtOneDistance) {
  const auto ahead = [](int64_t rows, int64_t cols, auto change) {
    Call call = make_call(Pass::kForward, rows, cols, Dtype::kBF16, Dtype::kBF16);
    change(call);
    return make_plan(call, kH200.device).prefetch_rows;
  };
  const auto nothing = [](Call&) {};
  const auto gaps = [](Call& call) { call.x.row_stride += 8; };
  const auto blocks = [](Call& call) {
    call.outer = call.inner / 2, call.inner = 2;
    call.x.outer_stride = 3 * call.x.row_stride;
  };
  EXPECT_EQ(ahead(8192, 4096, nothing), 512);
  EXPECT_EQ(ahead(8192, 4096, gaps), 512);
  EXPECT_EQ(ahead(8192, 4096, blocks), 0);
  EXPECT_EQ(ahead(1 << 18, 256, nothing), 8192);
  EXPECT_EQ(ahead(1 << 18, 256, gaps), 0);
  EXPECT_EQ(ahead(64, 1 << 18, nothing), 8);
  EXPECT_EQ(ahead(2047, 4096, nothing), 0);
  EXPECT_EQ(ahead(2048, 4096, nothing), 512);
}

// Blocks stay until all rows are done going backward; otherwise each row group has one row.
bool is_persistent(const Plan& plan, Pass pass) {
  return pass == Pass::kBackward && !plan.tile.multi_pass();
}

TEST(CudaPlan, NoMoreBlocksStayThanRunAtOnce) {
  for_plans([](const Choice& c, int64_t rows, const Call&, const Plan& plan) {
    if (!is_persistent(plan, c.kind.pass)) return;
    const int64_t at_once = c.device().clusters_of(plan.tile.cluster);
    EXPECT_LE(plan.groups, at_once);
    EXPECT_LE(plan.groups * plan.tile.cluster, c.device().sms);
    if (rows == kManyRows) {
      EXPECT_EQ(plan.groups, at_once);
    }
  });
}

TEST(CudaPlan, EveryRowHasABlockAndEveryBlockARow) {
  for_plans([](const Choice& c, int64_t rows, const Call&, const Plan& plan) {
    const bool stays = is_persistent(plan, c.kind.pass);
    const int64_t row_groups = plan.tile.row_groups();
    if (!stays || rows == 0) {
      EXPECT_GE(plan.groups * row_groups, std::min(rows, kMostBlocks));
    } else {
      EXPECT_GE(plan.groups, 1);
    }
    // Row groups that share a warp have neighbouring rows; the others of persistent blocks get a second
    // row for a block only when all blocks have one.
    const int64_t last = plan.groups - 1;
    EXPECT_LT(stays && plan.tile.threads_per_row >= kWarp ? last : last * row_groups, rows);
  });
}

// As many rows as the largest memory holds. A grid's first side has up to 2^31 - 1 blocks.
TEST(CudaPlan, HasAGridThatCanBeLaunched) {
  constexpr int64_t kMemory = int64_t{1} << 38;
  for (const NamedDevice& on : kDevices) {
    for (const Kind& kind : all_kinds()) {
      for (const bool in_f64 : {false, true}) {
        for (int64_t cols = kind.vector(); cols <= 1 << 24; cols *= 2) {
          const int64_t rows = kMemory / (cols * (kind.x_size() + kind.other_size()));
          Call call = call_of(kind, rows, cols);
          if (in_f64) call.compute = Dtype::kF64;
          const Plan plan = make_plan(call, on.device);
          ASSERT_LE(plan.groups * plan.tile.cluster, std::numeric_limits<int32_t>::max())
              << rows << " rows of " << cols << " " << name_of(kind.x)
              << (in_f64 ? ", arithmetic in f64" : "");
        }
      }
    }
  }
}

TEST(CudaPlan, EveryGroupHasARowOfPartialSums) {
  for_plans([](const Choice& c, int64_t rows, const Call&, const Plan& plan) {
    if (c.kind.pass == Pass::kForward) {
      EXPECT_EQ(plan.partials, 0);
    } else if (is_persistent(plan, c.kind.pass)) {
      EXPECT_EQ(plan.partials, plan.groups);
    } else {
      EXPECT_GE(plan.partials, rows == 0 ? 0 : 1);
      EXPECT_LE(plan.partials, std::min<int64_t>(rows, kMaxChunks));
    }
  });
}

// Room for the partial sums that are wanted, from the first aligned address on, and hardly more.
void expect_workspace(const Call& call, const DeviceProperties& device) {
  const Plan plan = make_plan(call, device);
  const int64_t one = plan.partials * call.width * size_of(call.compute);
  const int wanted = (call.dweight ? 1 : 0) + (call.dbias ? 1 : 0);
  if (wanted == 0 || plan.partials == 0) {
    EXPECT_EQ(plan.workspace, 0);
    return;
  }
  EXPECT_EQ(plan.dbias_at % kWorkspaceAlignment, 0);
  if (call.dweight) {
    EXPECT_GE(plan.dbias_at, one);
  }
  const int64_t end = call.dbias ? plan.dbias_at + one : one;
  EXPECT_GE(plan.workspace, end + kWorkspaceAlignment - 1);
  EXPECT_LE(plan.workspace, wanted * one + (wanted + 1) * kWorkspaceAlignment);
  // However many rows there are.
  const int64_t most = std::max(device.sms, kMaxChunks);
  EXPECT_LE(plan.workspace, 2 * (most + 1) * round_up(call.width * size_of(call.compute), 16));
}

TEST(CudaPlan, TheWorkspaceHasRoomForWhatIsWanted) {
  for_plans([](const Choice& c, int64_t, const Call& call, const Plan& plan) {
    if (c.kind.pass == Pass::kForward) {
      EXPECT_EQ(plan.workspace, 0);
      return;
    }
    for (const Dtype compute : {Dtype::kF32, Dtype::kF64}) {
      for (const bool dweight : {false, true}) {
        for (const bool dbias : {false, true}) {
          Call some = call;
          some.compute = compute;
          if (!dweight) some.dweight = {};
          if (!dbias) some.dbias = {};
          SCOPED_TRACE(testing::Message() << name_of(compute) << (dweight ? " dweight" : "")
                                          << (dbias ? " dbias" : ""));
          expect_workspace(some, c.device());
        }
      }
    }
  });
}

// Calls body(call) with every activation, casting order and a weight's offset.
template <typename Body>
void for_formulas(const Kind& kind, Body body) {
  for (const ek_activation activation : {EK_ACTIVATION_NONE, EK_ACTIVATION_SILU}) {
    for (const ek_casting casting : {EK_CASTING_NONE, EK_CASTING_LLAMA, EK_CASTING_GEMMA}) {
      for (const double weight_offset : {0.0, 1.0}) {
        Call call = call_of(kind, 1000, 1024);
        call.op = EK_RMS_NORM;
        call.activation = activation;
        call.casting = casting;
        call.weight_offset = weight_offset;
        SCOPED_TRACE(testing::Message() << "activation " << activation << ", casting " << casting
                                        << ", weight_offset " << weight_offset);
        body(call);
      }
    }
  }
}

// An entry of the table takes what the call has; only what none takes goes to a multi-pass kernel, and says
// why.
TEST(CudaPlan, HasAPolicyThatServesTheCall) {
  const auto expect = [](const Call& call, const Plan& plan, const auto& table) {
    ASSERT_GE(plan.policy, 0);
    ASSERT_LT(plan.policy, table.count);
    const auto& policy = table.entries[plan.policy];
    const Tile& tile = plan.tile;
    EXPECT_EQ(policy.elements, tile.elements);
    EXPECT_EQ(policy.aligned, plan.aligned);
    EXPECT_EQ(policy.specialization, tile.specialization);
    EXPECT_TRUE(policy.terms.cover(plan.terms));
    if (policy.multi_pass()) return;
    EXPECT_EQ(plan.fallback, nullptr);
    EXPECT_EQ(policy.scope, tile.scope);
    EXPECT_EQ(policy.lanes, tile.scope == Scope::kWarp ? tile.threads_per_row : kWarp);
    EXPECT_LE(tile.block_threads, policy.block_threads());
    EXPECT_EQ(tile.elements % policy.vector(), 0);
    EXPECT_LE(call.width, tile.capacity());
  };
  for_plans([&](const Choice& c, int64_t, const Call& call, const Plan& plan) {
    if (plan.runtime_dtype) return;
    const int x_size = c.kind.x_size(), other_size = c.kind.other_size();
    if (c.kind.pass == Pass::kForward) {
      expect(call, plan, forward_policies_of(x_size, other_size));
    } else {
      expect(call, plan, backward_policies_of(x_size, other_size));
    }
  });
}

// No entry is there twice, or beside one that serves the same calls.
TEST(CudaPolicies, AreDifferent) {
  const auto expect = [](const auto& table) {
    for (int i = 0; i < table.count; ++i) EXPECT_EQ(table.find(table.entries[i]), i) << i;
  };
  for (const int x_size : {2, 4}) {
    for (const int other_size : {2, 4}) {
      expect(forward_policies_of(x_size, other_size));
      expect(backward_policies_of(x_size, other_size));
    }
  }
}

// Aligned rows of one dtype have kernels for every formula, the others for a formula without further terms
// (backward, with a weight's offset). Beyond that a multi-pass kernel takes the call, and says why.
TEST(CudaPlan, EveryFormulaOfAlignedRowsOfOneTypeHasAKernel) {
  for (const Kind& kind : all_kinds()) {
    for_formulas(kind, [&](const Call& call) {
      const Plan plan = make_plan(call, kH200.device);
      const bool mixed = kind.x != kind.other;
      EXPECT_EQ(plan.terms.activation, call.activation != EK_ACTIVATION_NONE);
      EXPECT_EQ(plan.terms.casting, call.casting == EK_CASTING_LLAMA);
      EXPECT_EQ(plan.terms.weight_offset, call.weight_offset != 0);
      const bool few_terms = !plan.terms.activation && !plan.terms.casting &&
                             (call.pass == Pass::kBackward || !plan.terms.weight_offset);
      const bool has_kernel = kind.typed() && (few_terms || (!mixed && kind.aligned));
      EXPECT_EQ(plan.tile.multi_pass(), !has_kernel);
      EXPECT_EQ(plan.runtime_dtype == nullptr, kind.typed());
      EXPECT_EQ(plan.aligned, kind.aligned);
      ASSERT_EQ(plan.fallback == nullptr, has_kernel) << (has_kernel ? plan.fallback : "");
      if (!has_kernel) {
        const char* reason = mixed && kind.aligned ? "mixed" : "not aligned";
        EXPECT_NE(std::strstr(plan.fallback, reason), nullptr) << plan.fallback;
      }
    });
  }
}

// --- Types

struct TypesCase {
  const char* name;
  Pass pass;
  Dtype x, other;
  void (*change)(Call&);
  const char* reason;  // a word of it; nullptr: a kernel has been compiled for these types
};

const TypesCase kTypesCases[] = {
    {"f16", Pass::kForward, Dtype::kF16, Dtype::kF16, [](Call&) {}, nullptr},
    {"bf16 to f32", Pass::kForward, Dtype::kBF16, Dtype::kF32, [](Call&) {}, nullptr},
    {"f32 to f16", Pass::kBackward, Dtype::kF32, Dtype::kF16, [](Call&) {}, nullptr},
    {"f16 to bf16", Pass::kForward, Dtype::kF16, Dtype::kBF16, [](Call&) {}, "bf16"},
    {"bf16 to f16", Pass::kBackward, Dtype::kBF16, Dtype::kF16, [](Call&) {}, "bf16"},
    {"f64 x", Pass::kForward, Dtype::kF64, Dtype::kF64,
     [](Call& c) { c.compute = c.stats = Dtype::kF64; }, "f64"},
    {"f64 weight", Pass::kBackward, Dtype::kF32, Dtype::kF32,
     [](Call& c) { c.weight.dtype = c.compute = c.stats = Dtype::kF64; }, "f64"},
    {"dx of another type", Pass::kBackward, Dtype::kF16, Dtype::kF16,
     [](Call& c) { c.dx.dtype = Dtype::kF32; }, "dx"},
    {"dx of the other half type", Pass::kBackward, Dtype::kF16, Dtype::kF32,
     [](Call& c) { c.dx.dtype = Dtype::kBF16; }, "dx"},
    {"an absent dx", Pass::kBackward, Dtype::kF16, Dtype::kF16,
     [](Call& c) {
       c.dx = {nullptr, Dtype::kF32, 1, 1};
     },
     nullptr},
    {"parameters of one type", Pass::kForward, Dtype::kF16, Dtype::kF16,
     [](Call& c) { c.weight.dtype = c.bias.dtype = Dtype::kF16; }, nullptr},
    {"parameters of two types", Pass::kForward, Dtype::kF16, Dtype::kF16,
     [](Call& c) { c.weight.dtype = Dtype::kF16; }, "weight and bias"},
    {"an absent bias of another type", Pass::kForward, Dtype::kF16, Dtype::kF16,
     [](Call& c) {
       c.bias = {nullptr, Dtype::kBF16};
     },
     nullptr},
    {"parameters of the other half type", Pass::kForward, Dtype::kF16, Dtype::kF16,
     [](Call& c) { c.weight.dtype = c.bias.dtype = Dtype::kBF16; }, "a parameter"},
    {"a bias of the other half type", Pass::kForward, Dtype::kF16, Dtype::kF16,
     [](Call& c) { c.weight = {}, c.bias.dtype = Dtype::kBF16; }, "a parameter"},
    {"parameters of y's type", Pass::kForward, Dtype::kF32, Dtype::kBF16,
     [](Call& c) { c.weight.dtype = c.bias.dtype = Dtype::kBF16; }, nullptr},
    {"a weight of a half type", Pass::kBackward, Dtype::kF32, Dtype::kF32,
     [](Call& c) { c.weight.dtype = Dtype::kBF16; }, "a parameter"},
    {"a weight of dy's type", Pass::kBackward, Dtype::kF32, Dtype::kF16,
     [](Call& c) { c.weight.dtype = Dtype::kF16; }, nullptr},
    {"a bias of the other half type, backward", Pass::kBackward, Dtype::kF16, Dtype::kF16,
     [](Call& c) { c.bias.dtype = Dtype::kBF16; }, nullptr},
    {"parameters of two types, backward", Pass::kBackward, Dtype::kF16, Dtype::kF16,
     [](Call& c) { c.weight.dtype = Dtype::kF16; }, nullptr},
    {"results of other types", Pass::kBackward, Dtype::kF16, Dtype::kF16,
     [](Call& c) { c.dweight.dtype = Dtype::kBF16, c.dbias.dtype = Dtype::kF64; }, nullptr},
};

TEST(CudaPlan, LooksTypesUpAtRunTimeForAReason) {
  for (const TypesCase& c : kTypesCases) {
    SCOPED_TRACE(c.name);
    Call call = make_call(c.pass, 1000, 1024, c.x, c.other);
    c.change(call);
    const Plan plan = make_plan(call, kH200.device);
    EXPECT_EQ(plan.tile.multi_pass(), c.reason != nullptr);
    EXPECT_EQ(plan.aligned, c.reason == nullptr);
    ASSERT_EQ(plan.runtime_dtype != nullptr, c.reason != nullptr)
        << (plan.runtime_dtype ? plan.runtime_dtype : "");
    if (c.reason == nullptr) continue;
    EXPECT_NE(std::strstr(plan.runtime_dtype, c.reason), nullptr) << plan.runtime_dtype;
    EXPECT_EQ(plan.shared, 0);
  }
}

// --- Addresses and strides

// What kernels ask of an address.
struct Operand {
  const char* name;
  char*& (*address)(Call&);
  bool whole;    // it must not cut elements apart
  bool vectors;  // vectors of 16 bytes are read or written there
};

const Operand kOperands[] = {
    {"x", [](Call& c) -> char*& { return c.x.data; }, true, true},
    {"y", [](Call& c) -> char*& { return c.y.data; }, true, true},
    {"dy", [](Call& c) -> char*& { return c.dy.data; }, true, true},
    {"dx", [](Call& c) -> char*& { return c.dx.data; }, true, true},
    {"weight", [](Call& c) -> char*& { return c.weight.data; }, true, true},
    {"bias", [](Call& c) -> char*& { return c.bias.data; }, true, true},
    {"mean", [](Call& c) -> char*& { return c.mean; }, true, false},
    {"rstd", [](Call& c) -> char*& { return c.rstd; }, true, false},
    {"dweight", [](Call& c) -> char*& { return c.dweight.data; }, false, false},
    {"dbias", [](Call& c) -> char*& { return c.dbias.data; }, false, false},
};

// Everything is float32 here.
TEST(CudaPlan, EveryAddressCounts) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (const Operand& operand : kOperands) {
      for (int bytes = 0; bytes <= 32; ++bytes) {
        Call call = make_call(pass, 1000, 1024, Dtype::kF32, Dtype::kF32);
        char*& address = operand.address(call);
        if (address == nullptr) continue;
        address += bytes;
        SCOPED_TRACE(testing::Message() << operand.name << " + " << bytes);
        const Plan plan = make_plan(call, kH200.device);
        const bool typed = !operand.whole || bytes % 4 == 0;
        ASSERT_EQ(plan.runtime_dtype == nullptr, typed);
        if (!typed) {
          ASSERT_NE(std::strstr(plan.runtime_dtype, "address"), nullptr) << plan.runtime_dtype;
        }
        ASSERT_EQ(plan.aligned, typed && (!operand.vectors || bytes % 16 == 0));
      }
    }
  }
}

// A half type's address may be odd in fours, but not in twos.
TEST(CudaPlan, AnElementIsCutApartByItsOwnSize) {
  for (const int bytes : {1, 2, 3, 4}) {
    Call call = make_call(Pass::kForward, 1000, 1024, Dtype::kF16, Dtype::kF16);
    call.x.data += bytes;
    EXPECT_EQ(make_plan(call, kH200.device).runtime_dtype == nullptr, bytes % 2 == 0) << bytes;
    call.x.data -= bytes;
    call.weight.dtype = call.bias.dtype = Dtype::kF16;
    call.weight.data += bytes;
    EXPECT_EQ(make_plan(call, kH200.device).runtime_dtype == nullptr, bytes % 2 == 0) << bytes;
  }
}

TEST(CudaPlan, EveryStrideCounts) {
  constexpr int64_t Tensor::*kStrides[] = {&Tensor::row_stride, &Tensor::outer_stride};
  constexpr Tensor Call::*kTensors[] = {&Call::x, &Call::y, &Call::dy, &Call::dx};
  for (const Kind& kind : all_kinds()) {
    if (!kind.aligned) continue;
    for (const auto tensor : kTensors) {
      for (const auto stride : kStrides) {
        for (int more = 0; more <= 16; ++more) {
          Call call = make_call(kind.pass, 1000, 1024, kind.x, kind.other);
          if (!(call.*tensor)) continue;
          call.*tensor.*stride += more;
          ASSERT_EQ(make_plan(call, kH200.device).aligned,
                    more * size_of((call.*tensor).dtype) % 16 == 0)
              << more << " more elements of " << name_of((call.*tensor).dtype);
        }
      }
    }
  }
}

// Only the row's length is odd: strides leave a gap after it.
TEST(CudaPlan, TheRowsLengthCounts) {
  for (const Kind& kind : all_kinds()) {
    if (!kind.aligned) continue;
    for (int64_t cols = 1; cols <= 64; ++cols) {
      Call call = make_call(kind.pass, 1000, 64, kind.x, kind.other);
      call.width = call.channels = cols;
      ASSERT_EQ(make_plan(call, kH200.device).aligned, cols % kind.vector() == 0)
          << cols << " of " << name_of(kind.x) << " and " << name_of(kind.other);
    }
  }
}

}  // namespace
}  // namespace evenkeel::cuda
