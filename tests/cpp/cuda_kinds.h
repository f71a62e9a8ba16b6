// The kinds of row norms whose tiles and plans are tested, and what kernels there are for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "core/call.h"
#include "cuda/tuning.h"
#include "cuda_chips.h"

namespace evenkeel::cuda {

// What a tile depends on beside the row's length and the chip.
struct Kind {
  Pass pass;
  Dtype x, other;  // other: y or dy
  bool aligned;

  int x_size() const { return static_cast<int>(size_of(x)); }
  int other_size() const { return static_cast<int>(size_of(other)); }
  // Elements in a load: 16 bytes of the smaller type.
  int vector() const { return aligned ? 16 / std::min(x_size(), other_size()) : 1; }
  // Whether it has a kernel of its own, for what is plain.
  bool typed() const { return aligned || x == other; }
};

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

inline Tile tile_of(const Kind& kind, int64_t cols, const Chip& chip) {
  return kind.pass == Pass::kForward
             ? forward_tile(cols, kind.x_size(), chip)
             : backward_tile(cols, kind.x_size(), kind.other_size(), kind.aligned, chip);
}

inline int64_t shared_of(const Kind& kind, int64_t cols, const Tile& tile) {
  if (tile.streams()) return 0;
  if (kind.pass == Pass::kForward) return forward_shared(cols, kind.x_size(), kind.aligned, tile);
  return backward_shared(cols, kind.x_size(), kind.other_size(), kind.aligned, tile);
}

// What kernels are compiled for.
struct Offer {
  std::vector<Tile> warps;  // teams within a warp, smallest first
  int elements;             // of larger teams
  int other_elements;       // of some blocks
  int most_elements;        // of a cluster
  int block_threads;
};

// Of a block with teams of a part of a warp that hold so many elements a thread: forward all of them,
// backward at most.
inline int warp_threads(const Kind& kind, int elements) {
  return kind.pass == Pass::kForward ? forward_warp_threads(kind.x_size(), elements) : kRingThreads;
}

inline Offer offer_of(const Kind& kind) {
  if (kind.pass == Pass::kForward) {
    const int elements = forward_elements(kind.x_size());
    const int most = forward_most(kind.x_size());
    Offer offer{{}, elements, kind.x_size() == 2 ? most : elements, most, kForwardBlockThreads};
    for (const ForwardShort& s : kForwardShort) {
      if (s.elements <= most) offer.warps.push_back({.team = s.team, .elements = s.elements});
    }
    return offer;
  }
  Offer offer{{}, kBackwardElements, kBackwardElements, kBackwardMostElements, kRingThreads};
  for (const int team : kBackwardTeams)
    offer.warps.push_back({.team = team, .elements = kBackwardElements});
  return offer;
}

struct Choice {
  const NamedChip& on;
  const Kind& kind;
  const Offer& offer;
  int64_t cols;
  Tile tile;

  const Chip& chip() const { return on.chip; }
};

inline std::string describe(const Choice& c) {
  std::ostringstream text;
  text << c.on.name << (c.kind.pass == Pass::kForward ? " forward " : " backward ")
       << name_of(c.kind.x) << " " << name_of(c.kind.other) << (c.kind.aligned ? "" : " not")
       << " aligned, cols " << c.cols << ": team " << c.tile.team << ", elements "
       << c.tile.elements << ", cluster " << c.tile.cluster << ", threads " << c.tile.threads
       << ", stages " << c.tile.stages;
  return text.str();
}

}  // namespace evenkeel::cuda
