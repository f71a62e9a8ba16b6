// How a call will run: types, tile and sizes, from the call and the chip alone.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cuda/group_tuning.h"

namespace evenkeel::cuda {

// The workspace is used from its first multiple of this on.
inline constexpr int64_t kWorkspaceAlignment = 16;

struct Plan {
  const char* untyped =
      nullptr;           // why the element types are looked up at run time; nullptr: not so
  bool aligned = false;  // loads and stores of 16 bytes
  bool plain = false;  // neither an activation nor a casting order; forward: nor a weight's offset

  Tile tile;
  int64_t groups = 0;    // blocks of the main kernel, or clusters
  int64_t shared = 0;    // its dynamic shared memory in bytes
  int64_t ahead = 0;     // forward: rows, to those that blocks fetch for others; 0: they do not
  int64_t partials = 0;  // backward: rows of partial sums, for each of dweight and dbias
  int64_t dbias_at = 0;  // where those of dbias begin in the workspace
  int64_t workspace = 0;
};

Plan make_plan(const Call& call, const Chip& chip);

struct GroupPlan {
  const char* untyped = nullptr;
  bool aligned = false;
  GroupTile tile;
  int64_t spans = 0, units = 0;  // units of a sample, and of all
  int64_t lag = 0;
  int64_t kept = 0, mail = 0, shared = 0;  // bytes of shared memory: GroupShape's, and in all
  int64_t parts_at = 0, results_at = 0, partials_at = 0;  // in the workspace
  int64_t partials_bytes = 0;                             // of dweight; as many for dbias
  int64_t workspace = 0;
};

GroupPlan make_group_plan(const Call& call, const Chip& chip);

}  // namespace evenkeel::cuda
