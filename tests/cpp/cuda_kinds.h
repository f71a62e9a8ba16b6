// The kinds of row norms whose tiles and plans are tested, what kernels there are for them, and calls that
// get them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "core/call.h"
#include "cuda/row/tuning.h"
#include "cuda_devices.h"

namespace evenkeel::cuda {

// What a tile depends on beside the row's length and the device.
struct Kind {
  Pass pass;
  Dtype x, other;  // other: y or dy
  bool aligned;

  int x_size() const { return static_cast<int>(size_of(x)); }
  int other_size() const { return static_cast<int>(size_of(other)); }
  // What an aligned row's length is a multiple of: 16 bytes of the smaller type.
  int vector() const { return aligned ? 16 / std::min(x_size(), other_size()) : 1; }
  // Whether its dtypes have kernels.
  bool typed() const { return aligned || x_size() >= other_size(); }
};

// A kernel in words.
inline std::string kernel_name(Pass pass, Dtype x, Dtype other, int policy) {
  return std::string(pass == Pass::kForward ? "forward " : "backward ") + name_of(x) + " " +
         name_of(other) + " " + std::to_string(policy);
}

inline std::vector<Kind> all_kinds() {
  constexpr Dtype kPairs[][2] = {{Dtype::kBF16, Dtype::kBF16},
                                 {Dtype::kF32, Dtype::kF32},
                                 {Dtype::kF16, Dtype::kF32},
                                 {Dtype::kF32, Dtype::kBF16}};
  std::vector<Kind> kinds;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (const auto& [x, other] : kPairs) {
      for (const bool aligned : {true, false}) kinds.push_back({pass, x, other, aligned});
    }
  }
  return kinds;
}

inline Tile tile_of(const Kind& kind, int64_t cols, const DeviceProperties& device) {
  return kind.pass == Pass::kForward
             ? forward_tile(cols, kind.x_size(), device)
             : backward_tile(cols, kind.x_size(), kind.other_size(), kind.aligned, device);
}

inline int64_t shared_of(const Kind& kind, int64_t cols, const Tile& tile) {
  if (tile.multi_pass()) return 0;
  if (kind.pass == Pass::kForward) return forward_shared(cols, kind.x_size(), kind.aligned, tile);
  return backward_shared(cols, kind.x_size(), kind.other_size(), kind.aligned, tile);
}

// What the general entries of the table of policies can hold.
struct Offer {
  std::vector<Tile> warps;  // row groups within a warp, smallest first
  int elements = 0;         // of a thread in larger row groups
  int other_elements = 0;   // in some blocks
  int most_elements = 0;    // in a cluster
  int block_threads = 0;
};

// The most threads of a block whose row groups are within a warp; forward it has just as many.
inline int warp_threads(const Kind& kind, int elements) {
  return kind.pass == Pass::kForward ? forward_warp_threads(kind.x_size(), elements) : kRingThreads;
}

inline Offer offer_of(const Kind& kind) {
  Offer offer;
  const auto read = [&](const auto& table) {
    for (const auto& policy : table) {
      if (policy.is_specialized() || policy.multi_pass() || !policy.aligned || policy.residual)
        continue;
      if (policy.terms.activation) continue;
      switch (policy.scope) {
        case Scope::kWarp:
          offer.warps.push_back({.threads_per_row = policy.lanes, .elements = policy.elements});
          break;
        case Scope::kBlock:
          if (offer.elements == 0) offer.elements = policy.elements;
          offer.other_elements = std::max(offer.other_elements, policy.elements);
          break;
        case Scope::kCluster:
          offer.most_elements = std::max(offer.most_elements, policy.elements);
          break;
      }
    }
  };
  if (kind.pass == Pass::kForward) {
    offer.block_threads = kForwardBlockThreads;
    read(forward_policies_of(kind.x_size(), kind.other_size()));
  } else {
    offer.block_threads = kRingThreads;
    read(backward_policies_of(kind.x_size(), kind.other_size()));
  }
  return offer;
}

struct Choice {
  const NamedDevice& on;
  const Kind& kind;
  const Offer& offer;
  int64_t cols;
  Tile tile;

  const DeviceProperties& device() const { return on.device; }
};

inline std::string describe(const Choice& c) {
  std::ostringstream text;
  text << c.on.name << (c.kind.pass == Pass::kForward ? " forward " : " backward ")
       << name_of(c.kind.x) << " " << name_of(c.kind.other) << (c.kind.aligned ? "" : " not")
       << " aligned, cols " << c.cols << ": threads per row " << c.tile.threads_per_row
       << ", elements " << c.tile.elements << ", cluster " << c.tile.cluster << ", threads "
       << c.tile.block_threads << ", stages " << c.tile.stages;
  return text.str();
}

// Bytes of shared memory that a kernel touches, counted without padding.
inline int64_t bytes_touched(const Choice& c) {
  const Tile& tile = c.tile;
  const int64_t share = part_cols(c.cols, tile);
  // A row that is not aligned keeps its place within 16 bytes.
  const int64_t before = c.kind.aligned ? 0 : 15;
  if (c.kind.pass == Pass::kForward) {
    const int64_t sums =
        tile.scope == Scope::kWarp
            ? 0
            : exchange_bytes(false, forward_exchange_slot_bytes(tile.scope, tile.threads_per_row,
                                                                tile.cluster));
    if (c.kind.aligned && tile.scope != Scope::kCluster) return sums;
    // A thread that has no elements there still has a place for them.
    if (c.kind.aligned)
      return sums + int64_t{tile.threads_per_row} * tile.elements * c.kind.x_size();
    return sums + tile.row_groups() * (share * c.kind.x_size() + before);
  }
  const int64_t slot = share * (c.kind.x_size() + c.kind.other_size()) + 2 * before;
  // At the end row groups, or warps of small ones, reduce the dweight and dbias of all their threads, if
  // they are several.
  const int64_t writers = tile.block_threads / std::max(tile.threads_per_row, kWarp);
  const int64_t held = int64_t{tile.threads_per_row} * tile.elements * int64_t{sizeof(float)};
  const int64_t sums = tile.row_groups() == 1 ? 0 : 2 * writers * held;
  // A thread of a cluster that holds many elements puts its weights behind the rings.
  const BackwardPolicy policy =
      backward_policy_of(tile, c.kind.x_size(), c.kind.other_size(), c.kind.aligned, kNoTerms);
  const int64_t weights = policy.weight_in_registers() ? 0 : held;
  return exchange_bytes(policy.pipelined()) +
         std::max(tile.row_groups() * tile.stages * slot, sums) + weights;
}

// Dense rows of one block, with everything that a pass can have.
inline Call make_call(Pass pass, int64_t rows, int64_t cols, Dtype x, Dtype other) {
  Call call{.pass = pass,
            .op = EK_LAYER_NORM,
            .layout = EK_NCHW,
            .activation = EK_ACTIVATION_NONE,
            .casting = EK_CASTING_NONE,
            .eps = 1e-5,
            .weight_offset = 0,
            .outer = 1,
            .inner = rows,
            .width = cols,
            .groups = 1,
            .channels = cols,
            .x = {nowhere(1), x, cols, rows * cols},
            .y = {},
            .dy = {},
            .dx = {},
            .weight = {nowhere(2), Dtype::kF32},
            .bias = {nowhere(3), Dtype::kF32},
            .dweight = {},
            .dbias = {},
            .mean = nowhere(4),
            .rstd = nowhere(5),
            .stats = Dtype::kF32,
            .compute = Dtype::kF32,
            .device = EK_CUDA,
            .device_index = 0,
            .stream = nullptr,
            .workspace = nullptr,
            .workspace_size = 0,
            .parallel = Parallel(ek_parallel{})};
  (pass == Pass::kForward ? call.y : call.dy) = {nowhere(6), other, cols, rows * cols};
  if (pass == Pass::kBackward) {
    call.dx = {nowhere(7), x, cols, rows * cols};
    call.dweight = {nowhere(8), Dtype::kF32};
    call.dbias = {nowhere(9), Dtype::kF32};
  }
  return call;
}

}  // namespace evenkeel::cuda
