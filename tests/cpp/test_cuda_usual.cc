// Kernels that know their problem (Usual in src/cuda/tuning.h): which problems get them, and that tiles hold
// what such a kernel does not ask for.
#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/plan.h"
#include "cuda_chips.h"
#include "cuda_kinds.h"

namespace evenkeel::cuda {
namespace {

// --- Forward tiles

struct UsualChoice {
  int64_t cols, rows;
  int x_size;
  Usual usual;
  Tile general, tile;
};

template <typename Body>
void for_usual_tiles(const Body& body) {
  for (const int x_size : {2, 4}) {
    for (int64_t cols = 16 / x_size; cols <= 270000; cols += 16 / x_size) {
      const Tile general = forward_tile(cols, x_size, kH200.chip);
      for (const Usual usual : {Usual::kNone, Usual::kRms, Usual::kLayer}) {
        for (const int64_t rows : {1, 15, 16, 4096}) {
          body(UsualChoice{cols, rows, x_size, usual, general,
                           forward_usual(general, rows, cols, x_size, usual)});
          if (testing::Test::HasFailure()) {
            ADD_FAILURE() << rows << " rows of " << cols << " elements of " << x_size << " bytes";
            return;
          }
        }
      }
    }
  }
}

TEST(CudaUsualTile, IsTheGeneralOneWhereNoKernelKnowsMore) {
  for_usual_tiles([](const UsualChoice& c) {
    if (c.tile.usual == Usual::kNone) {
      EXPECT_TRUE(c.tile == c.general);
    } else {
      EXPECT_EQ(c.tile.usual, c.usual);
      EXPECT_FALSE(c.tile.streams());
    }
  });
}

TEST(CudaUsualTile, HoldsTheRowsThatItsKernelExpects) {
  for_usual_tiles([](const UsualChoice& c) {
    const Tile& t = c.tile;
    if (t.usual == Usual::kNone) return;
    const bool large = t.team > kForwardSmallBlock;
    if (forward_full(t.scope, c.x_size, t.elements, large, t.usual)) {
      EXPECT_EQ(t.capacity(), c.cols);
    } else {
      EXPECT_GE(t.capacity(), c.cols);
    }
    EXPECT_EQ(t.threads,
              t.scope == Scope::kWarp ? forward_warp_threads(c.x_size, t.elements) : t.team);
    EXPECT_EQ(t.threads % t.team, 0);
    if (t.rows > 1) {
      EXPECT_EQ(c.rows % t.block_rows(), 0);
    }
  });
}

// Or a row's bits would depend on them.
TEST(CudaUsualTile, SplitsARowTheSameWayWhateverTheNumberOfRows) {
  for_usual_tiles([](const UsualChoice& c) {
    const Tile one = forward_usual(c.general, 1, c.cols, c.x_size, c.usual);
    EXPECT_EQ(c.tile.team, one.team);
    EXPECT_EQ(c.tile.elements / c.tile.rows, one.elements / one.rows);
    EXPECT_EQ(c.tile.cluster, one.cluster);
  });
}

// Rows of 1536 and 2048 would be a warp's, with loads that say that they pass by; layer norm has no
// registers for more.
TEST(CudaUsualTile, LongRowsOfAWarpAreABlocks) {
  const auto tile = [](int64_t cols, int x_size, Usual usual) {
    return forward_usual(forward_tile(cols, x_size, kH200.chip), 4096, cols, x_size, usual);
  };
  for (const Usual usual : {Usual::kRms, Usual::kLayer}) {
    for (const int64_t cols : {1536, 2048}) {
      EXPECT_EQ(tile(cols, 2, usual).scope, Scope::kBlock);
      EXPECT_EQ(tile(cols, 2, usual).team, cols / 16);
    }
    EXPECT_EQ(tile(2040, 2, usual).scope, Scope::kWarp);
    EXPECT_EQ(tile(1024, 2, usual).scope, Scope::kWarp);
    EXPECT_EQ(tile(1024, 4, usual).scope, Scope::kWarp);
  }
  EXPECT_EQ(tile(4096, 2, Usual::kRms).team, 256);
  EXPECT_EQ(tile(4096, 2, Usual::kLayer).team, 128);
}

// --- Backward tiles

// Calls body(kind, columns, general tile, usual tile) for all lengths that a block holds.
template <typename Body>
void for_usual_backward_tiles(const Body& body) {
  for (const NamedChip& on : kChips) {
    for (const Kind& kind : all_kinds()) {
      if (kind.pass != Pass::kBackward || !kind.aligned || kind.x != kind.other) continue;
      const Offer offer = offer_of(kind);
      for (int64_t cols = kind.vector(); cols <= 10000; cols += kind.vector()) {
        const Tile general = tile_of(kind, cols, on.chip);
        for (const Usual usual : {Usual::kNone, Usual::kRms, Usual::kLayer}) {
          const Tile tile = backward_usual(general, cols, kind.x_size(), on.chip, usual);
          body(Choice{on, kind, offer, cols, tile}, general, usual);
          ASSERT_FALSE(testing::Test::HasFailure()) << describe({on, kind, offer, cols, tile});
        }
      }
    }
  }
}

// A kernel that knows its problem asks for no bounds, and that of half types has a ring of that length.
TEST(CudaUsualTile, GoingBackwardHoldsJustTheRow) {
  int known = 0, spread[2] = {};  // float32, half types
  for_usual_backward_tiles([&](const Choice& c, const Tile& general, Usual usual) {
    const Tile& t = c.tile;
    if (t.usual == Usual::kNone) {
      EXPECT_TRUE(t == general);
      return;
    }
    ++known;
    EXPECT_EQ(t.usual, usual);
    EXPECT_NE(t.scope, Scope::kCluster);
    EXPECT_EQ(t.capacity(), c.cols);
    if (backward_knows_stages(c.kind.x_size())) {
      EXPECT_EQ(t.stages, kMaxStages);
    } else {
      EXPECT_GE(t.stages, kMinStages);
    }
    EXPECT_GT(t.teams(), 1);
    EXPECT_EQ(t.threads % t.team, 0);
    EXPECT_LE(t.threads, backward_threads(t.elements, t.scope));
    const int64_t shared = shared_of(c.kind, c.cols, t);
    EXPECT_LE(shared, c.chip().shared_bytes);
    EXPECT_GE(shared, bytes_touched(c));
    if (t.elements == kBackwardElements) {
      EXPECT_EQ(t.team, general.team);
      EXPECT_EQ(c.kind.x_size(), 2);
      return;
    }
    ++spread[c.kind.x_size() == 2];
    EXPECT_EQ(t.scope, Scope::kWarp);
    EXPECT_EQ(t.team, kWarp);
  });
  EXPECT_GT(known, 0);
  EXPECT_GT(spread[0], 0);
  EXPECT_GT(spread[1], 0);
}

// --- Plans

Usual known(const Call& call) { return make_plan(call, kH200.chip).tile.usual; }

// Kernels that know their problem know one formula, and one type.
TEST(CudaUsualPlan, GoingForward) {
  const auto make = [](Dtype x, int64_t cols, bool rms) {
    Call call = make_call(Pass::kForward, 1000, cols, x, x);
    call.weight.dtype = call.bias.dtype = x;
    if (rms) {
      call.op = EK_RMS_NORM;
      call.bias = {};
    }
    return call;
  };
  for (const Dtype x : {Dtype::kF16, Dtype::kBF16}) {
    for (const int64_t cols : {64, 128, 1024, 2048, 2560, 4096, 5000, 8192, 12288, 65536, 500000})
      EXPECT_EQ(known(make(x, cols, true)), Usual::kRms) << cols;
    for (const int64_t cols : {72, 2040, 12000, 16384, 1 << 24})
      EXPECT_EQ(known(make(x, cols, true)), Usual::kNone) << cols;
    for (const int64_t cols : {64, 1024, 2048, 4096, 5120, 8192})
      EXPECT_EQ(known(make(x, cols, false)), Usual::kLayer) << cols;
    for (const int64_t cols : {72, 768, 2040, 5000, 12288, 65536})
      EXPECT_EQ(known(make(x, cols, false)), Usual::kNone) << cols;
  }
  EXPECT_EQ(known(make(Dtype::kF32, 4096, false)), Usual::kLayer);
  EXPECT_EQ(known(make(Dtype::kF32, 64, true)), Usual::kRms);
  EXPECT_EQ(known(make(Dtype::kF32, 512, true)), Usual::kNone);
  EXPECT_EQ(known(make(Dtype::kF32, 4096, true)), Usual::kRms);
  EXPECT_EQ(known(make(Dtype::kF32, 8192, true)), Usual::kNone);
  for (const bool rms : {false, true}) {
    const auto but = [&](auto change) {
      Call call = make(Dtype::kBF16, 4096, rms);
      change(call);
      return known(call);
    };
    EXPECT_NE(but([](Call&) {}), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.weight = {}; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.weight.dtype = Dtype::kF32; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.weight.dtype = Dtype::kF16; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.y.dtype = Dtype::kF32; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.activation = EK_ACTIVATION_SILU; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.weight_offset = 1; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.x.data += 2; }), Usual::kNone);
    EXPECT_EQ(but([&](Call& call) {
                call.bias = rms ? Vector{call.weight.data, Dtype::kBF16} : Vector{};
              }),
              Usual::kNone);
    EXPECT_EQ(but([](Call& call) {  // rows with two strides
                call.outer = 10, call.inner = 100;
                call.x.outer_stride = 100 * call.x.row_stride + 8;
                call.y.outer_stride = 100 * call.y.row_stride;
              }),
              Usual::kNone);
  }
}

TEST(CudaUsualPlan, GoingBackward) {
  const auto make = [](Dtype x, int64_t cols, bool rms) {
    Call call = make_call(Pass::kBackward, 1000, cols, x, x);
    if (rms) {
      call.op = EK_RMS_NORM;
      call.dbias = {};
    }
    return call;
  };
  for (const bool rms : {false, true}) {
    const Usual usual = rms ? Usual::kRms : Usual::kLayer;
    for (const Dtype x : {Dtype::kF16, Dtype::kBF16}) {
      for (const int64_t cols : {128, 256, 512, 768, 1024, 1536, 4096})
        EXPECT_EQ(known(make(x, cols, rms)), usual) << cols;
      for (const int64_t cols : {64, 136, 640, 760, 5120, 8192, 12288, 65536})
        EXPECT_EQ(known(make(x, cols, rms)), Usual::kNone) << cols;
    }
    for (const int64_t cols : {768, 1024})
      EXPECT_EQ(known(make(Dtype::kF32, cols, rms)), usual) << cols;
    for (const int64_t cols : {512, 1536, 4096})
      EXPECT_EQ(known(make(Dtype::kF32, cols, rms)), Usual::kNone) << cols;
    const auto but = [&](auto change) {
      Call call = make(Dtype::kBF16, 4096, rms);
      change(call);
      return known(call);
    };
    // It asks for the weight's type once, and for what is wanted at the end.
    EXPECT_EQ(but([](Call& call) { call.weight = {}; }), usual);
    EXPECT_EQ(but([](Call& call) { call.weight.dtype = Dtype::kBF16; }), usual);
    EXPECT_EQ(but([](Call& call) { call.weight_offset = 1; }), usual);
    EXPECT_EQ(but([](Call& call) { call.dx = {}; }), usual);
    EXPECT_EQ(but([](Call& call) { call.dweight = {}; }), usual);
    EXPECT_EQ(but([](Call& call) { call.dy.dtype = Dtype::kF32; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.activation = EK_ACTIVATION_SILU; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) { call.x.data += 2; }), Usual::kNone);
    EXPECT_EQ(but([](Call& call) {  // rows with two strides
                call.outer = 10, call.inner = 100;
                for (Tensor* tensor : {&call.x, &call.dy, &call.dx})
                  tensor->outer_stride = 100 * tensor->row_stride;
                call.dx.outer_stride += 8;
              }),
              Usual::kNone);
  }
  Call with_bias = make(Dtype::kBF16, 4096, true);
  with_bias.dbias = with_bias.dweight;
  EXPECT_EQ(known(with_bias), Usual::kNone);
}

}  // namespace
}  // namespace evenkeel::cuda
