// From a tile to the numbers that its kernels get.
#pragma once

#include <bit>

#include "cuda/arguments.h"
#include "cuda/group/tuning.h"

namespace evenkeel::cuda {

// sets: of all samples. lag: group_lag(), of sets that are read twice.
inline GroupShape group_shape(const GroupProblem& p, const GroupTile& t, int64_t sets,
                              int64_t lag) {
  const int64_t vectors_before_last = int64_t{t.vectors - 1} * t.rows * t.slices;
  return {.spatial = p.spatial,
          .channels = static_cast<int>(p.channels),
          .groups = static_cast<int>(p.channels / p.per_group),
          .sets = static_cast<int>(sets),
          .span = static_cast<int>(t.span),
          .vectors = t.vectors,
          .resident = static_cast<int>(resident_bytes(p, t)),
          .exchange = static_cast<int>(group_exchange_bytes(p, t)),
          .slice = static_cast<int>(t.slice),
          .last_slice = static_cast<int>(p.spatial - (t.slices - 1) * t.slice),
          .tile = t.tile,
          .rows = t.rows,
          .short_from = static_cast<int>(p.spatial - vectors_before_last),
          .partial_sums = t.partial_sums,
          .log_lanes = std::countr_zero(static_cast<unsigned>(std::max(t.lanes, 1))),
          .lag = static_cast<int>(lag),
          .per_group = Divisor(p.per_group),
          .spans = Divisor(ceil_div(p.channels, t.span)),
          .chunks = Divisor(t.chunks),
          .slices = Divisor(t.slices),
          .columns = Divisor(p.channels_last ? t.tile / t.vector : 1),
          .tiles = Divisor(p.channels_last ? ceil_div(t.span, t.tile) : 1)};
}

}  // namespace evenkeel::cuda
