// Specialized kernels (Specialization in src/cuda/row/policy.h): which problems get them, and that tiles hold
// what such a kernel takes for granted.
#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/plan.h"
#include "cuda_devices.h"
#include "cuda_kinds.h"

namespace evenkeel::cuda {
namespace {

// --- Forward tiles

struct SpecializedChoice {
  int64_t cols, rows;
  int x_size;
  Specialization specialization;
  Tile general, tile;
};

template <typename Body>
void for_specialized_tiles(const Body& body) {
  for (const int x_size : {2, 4}) {
    for (int64_t cols = 16 / x_size; cols <= 270000; cols += 16 / x_size) {
      const Tile general = forward_tile(cols, x_size, kH200.device);
      for (const Specialization specialization :
           {Specialization::kNone, Specialization::kRms, Specialization::kLayer}) {
        for (const int64_t rows : {1, 15, 16, 4096}) {
          body(SpecializedChoice{
              cols, rows, x_size, specialization, general,
              specialize_forward(general, rows, cols, x_size, kNoTerms, specialization)});
          if (testing::Test::HasFailure()) {
            ADD_FAILURE() << rows << " rows of " << cols << " elements of " << x_size << " bytes";
            return;
          }
        }
      }
    }
  }
}

TEST(CudaSpecializedTile, IsTheGeneralOneWhereNoKernelIsSpecialized) {
  for_specialized_tiles([](const SpecializedChoice& c) {
    if (c.tile.specialization == Specialization::kNone) {
      EXPECT_TRUE(c.tile == c.general);
    } else {
      EXPECT_EQ(c.tile.specialization, c.specialization);
      EXPECT_FALSE(c.tile.multi_pass());
    }
  });
}

TEST(CudaSpecializedTile, HoldsTheRowsThatItsKernelExpects) {
  for_specialized_tiles([](const SpecializedChoice& c) {
    const Tile& t = c.tile;
    if (t.specialization == Specialization::kNone) return;
    const ForwardPolicy policy = forward_policy_of(t, c.x_size, c.x_size, true, kNoTerms);
    EXPECT_GE(forward_policies_of(c.x_size, c.x_size).find(policy), 0);
    if (policy.full()) {
      EXPECT_EQ(t.capacity(), c.cols);
    } else {
      EXPECT_GE(t.capacity(), c.cols);
    }
    EXPECT_EQ(t.block_threads, t.scope == Scope::kWarp ? forward_warp_threads(c.x_size, t.elements)
                                                       : t.threads_per_row);
    EXPECT_EQ(t.block_threads % t.threads_per_row, 0);
    if (t.rows > 1) {
      EXPECT_EQ(c.rows % t.block_rows(), 0);
    }
  });
}

// Or a row's bits would depend on them.
TEST(CudaSpecializedTile, SplitsARowTheSameWayWhateverTheNumberOfRows) {
  for_specialized_tiles([](const SpecializedChoice& c) {
    const Tile one = specialize_forward(c.general, 1, c.cols, c.x_size, kNoTerms, c.specialization);
    EXPECT_EQ(c.tile.threads_per_row, one.threads_per_row);
    EXPECT_EQ(c.tile.elements / c.tile.rows, one.elements / one.rows);
    EXPECT_EQ(c.tile.cluster, one.cluster);
  });
}

// Rows of 1536 and 2048 would be a warp's, with loads that say that they pass by; layer norm has no
// registers for more.
TEST(CudaSpecializedTile, LongRowsOfAWarpAreABlocks) {
  const auto tile = [](int64_t cols, int x_size, Specialization specialization) {
    return specialize_forward(forward_tile(cols, x_size, kH200.device), 4096, cols, x_size,
                              kNoTerms, specialization);
  };
  for (const Specialization specialization : {Specialization::kRms, Specialization::kLayer}) {
    for (const int64_t cols : {1536, 2048}) {
      EXPECT_EQ(tile(cols, 2, specialization).scope, Scope::kBlock);
      EXPECT_EQ(tile(cols, 2, specialization).threads_per_row, cols / 16);
    }
    EXPECT_EQ(tile(2040, 2, specialization).scope, Scope::kWarp);
    EXPECT_EQ(tile(1024, 2, specialization).scope, Scope::kWarp);
    EXPECT_EQ(tile(1024, 4, specialization).scope, Scope::kWarp);
  }
  EXPECT_EQ(tile(4096, 2, Specialization::kRms).threads_per_row, 256);
  EXPECT_EQ(tile(4096, 2, Specialization::kLayer).threads_per_row, 128);
}

// --- Backward tiles

// Calls body(kind, columns, general tile, specialized tile) for all lengths that a block holds.
template <typename Body>
void for_specialized_backward_tiles(const Body& body) {
  for (const NamedDevice& on : kDevices) {
    for (const Kind& kind : all_kinds()) {
      if (kind.pass != Pass::kBackward || !kind.aligned || kind.x != kind.other) continue;
      const Offer offer = offer_of(kind);
      for (int64_t cols = kind.vector(); cols <= 10000; cols += kind.vector()) {
        const Tile general = tile_of(kind, cols, on.device);
        for (const Specialization specialization :
             {Specialization::kNone, Specialization::kRms, Specialization::kLayer}) {
          const Tile tile = specialize_backward(general, cols, kind.x_size(), kOffsetOnly,
                                                on.device, specialization);
          body(Choice{on, kind, offer, cols, tile}, general, specialization);
          ASSERT_FALSE(testing::Test::HasFailure()) << describe({on, kind, offer, cols, tile});
        }
      }
    }
  }
}

// A specialized kernel tests no bounds, and that of half types has a ring of that length.
TEST(CudaSpecializedTile, GoingBackwardHoldsJustTheRow) {
  int known = 0, spread[2] = {};  // float32, half types
  for_specialized_backward_tiles(
      [&](const Choice& c, const Tile& general, Specialization specialization) {
        const Tile& t = c.tile;
        if (t.specialization == Specialization::kNone) {
          EXPECT_TRUE(t == general);
          return;
        }
        ++known;
        EXPECT_EQ(t.specialization, specialization);
        EXPECT_NE(t.scope, Scope::kCluster);
        EXPECT_EQ(t.capacity(), c.cols);
        const int x_size = c.kind.x_size();
        const BackwardPolicy policy = backward_policy_of(t, x_size, x_size, true, kOffsetOnly);
        EXPECT_GE(backward_policies_of(x_size, x_size).find(policy), 0);
        if (policy.knows_stages()) {
          EXPECT_EQ(t.stages, kMaxStages);
        } else {
          EXPECT_GE(t.stages, kMinStages);
        }
        EXPECT_GT(t.row_groups(), 1);
        EXPECT_EQ(t.block_threads % t.threads_per_row, 0);
        EXPECT_LE(t.block_threads, policy.block_threads());
        const int64_t shared = shared_of(c.kind, c.cols, t);
        EXPECT_LE(shared, c.device().shared_bytes);
        EXPECT_GE(shared, bytes_touched(c));
        if (t.elements == kBackwardElements) {
          EXPECT_EQ(t.threads_per_row, general.threads_per_row);
          EXPECT_EQ(c.kind.x_size(), 2);
          return;
        }
        ++spread[c.kind.x_size() == 2];
        EXPECT_EQ(t.scope, Scope::kWarp);
        EXPECT_EQ(t.threads_per_row, kWarp);
      });
  EXPECT_GT(known, 0);
  EXPECT_GT(spread[0], 0);
  EXPECT_GT(spread[1], 0);
}

// --- Plans

Specialization known(const Call& call) { return make_plan(call, kH200.device).tile.specialization; }

// A specialized kernel has one formula, and one dtype.
TEST(CudaSpecializedPlan, GoingForward) {
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
      EXPECT_EQ(known(make(x, cols, true)), Specialization::kRms) << cols;
    for (const int64_t cols : {72, 2040, 12000, 16384, 1 << 24})
      EXPECT_EQ(known(make(x, cols, true)), Specialization::kNone) << cols;
    for (const int64_t cols : {64, 1024, 2048, 4096, 5120, 8192})
      EXPECT_EQ(known(make(x, cols, false)), Specialization::kLayer) << cols;
    for (const int64_t cols : {72, 768, 2040, 5000, 12288, 65536})
      EXPECT_EQ(known(make(x, cols, false)), Specialization::kNone) << cols;
  }
  EXPECT_EQ(known(make(Dtype::kF32, 4096, false)), Specialization::kLayer);
  EXPECT_EQ(known(make(Dtype::kF32, 64, true)), Specialization::kRms);
  EXPECT_EQ(known(make(Dtype::kF32, 512, true)), Specialization::kNone);
  EXPECT_EQ(known(make(Dtype::kF32, 4096, true)), Specialization::kRms);
  EXPECT_EQ(known(make(Dtype::kF32, 8192, true)), Specialization::kNone);
  for (const bool rms : {false, true}) {
    const auto but = [&](auto change) {
      Call call = make(Dtype::kBF16, 4096, rms);
      change(call);
      return known(call);
    };
    EXPECT_NE(but([](Call&) {}), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.weight = {}; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.weight.dtype = Dtype::kF32; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.weight.dtype = Dtype::kF16; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.y.dtype = Dtype::kF32; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.activation = EK_ACTIVATION_SILU; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.weight_offset = 1; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.x.data += 2; }), Specialization::kNone);
    EXPECT_EQ(but([&](Call& call) {
                call.bias = rms ? Vector{call.weight.data, Dtype::kBF16} : Vector{};
              }),
              Specialization::kNone);
    EXPECT_EQ(but([](Call& call) {  // rows with two strides
                call.outer = 10, call.inner = 100;
                call.x.outer_stride = 100 * call.x.row_stride + 8;
                call.y.outer_stride = 100 * call.y.row_stride;
              }),
              Specialization::kNone);
  }
}

TEST(CudaSpecializedPlan, GoingBackward) {
  const auto make = [](Dtype x, int64_t cols, bool rms) {
    Call call = make_call(Pass::kBackward, 1000, cols, x, x);
    if (rms) {
      call.op = EK_RMS_NORM;
      call.dbias = {};
    }
    return call;
  };
  for (const bool rms : {false, true}) {
    const Specialization specialization = rms ? Specialization::kRms : Specialization::kLayer;
    for (const Dtype x : {Dtype::kF16, Dtype::kBF16}) {
      for (const int64_t cols : {128, 256, 512, 768, 1024, 1536, 4096})
        EXPECT_EQ(known(make(x, cols, rms)), specialization) << cols;
      for (const int64_t cols : {64, 136, 640, 760, 5120, 8192, 12288, 65536})
        EXPECT_EQ(known(make(x, cols, rms)), Specialization::kNone) << cols;
    }
    for (const int64_t cols : {768, 1024})
      EXPECT_EQ(known(make(Dtype::kF32, cols, rms)), specialization) << cols;
    for (const int64_t cols : {512, 1536, 4096})
      EXPECT_EQ(known(make(Dtype::kF32, cols, rms)), Specialization::kNone) << cols;
    const auto but = [&](auto change) {
      Call call = make(Dtype::kBF16, 4096, rms);
      change(call);
      return known(call);
    };
    // The weight's dtype is looked up once, and what is wanted at the end.
    EXPECT_EQ(but([](Call& call) { call.weight = {}; }), specialization);
    EXPECT_EQ(but([](Call& call) { call.weight.dtype = Dtype::kBF16; }), specialization);
    EXPECT_EQ(but([](Call& call) { call.weight_offset = 1; }), specialization);
    EXPECT_EQ(but([](Call& call) { call.dx = {}; }), specialization);
    EXPECT_EQ(but([](Call& call) { call.dweight = {}; }), specialization);
    EXPECT_EQ(but([](Call& call) { call.dy.dtype = Dtype::kF32; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.activation = EK_ACTIVATION_SILU; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) { call.x.data += 2; }), Specialization::kNone);
    EXPECT_EQ(but([](Call& call) {  // rows with two strides
                call.outer = 10, call.inner = 100;
                for (Tensor* tensor : {&call.x, &call.dy, &call.dx})
                  tensor->outer_stride = 100 * tensor->row_stride;
                call.dx.outer_stride += 8;
              }),
              Specialization::kNone);
  }
  Call with_bias = make(Dtype::kBF16, 4096, true);
  with_bias.dbias = with_bias.dweight;
  EXPECT_EQ(known(with_bias), Specialization::kNone);
}

}  // namespace
}  // namespace evenkeel::cuda
