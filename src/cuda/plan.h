// How a call will run: dtypes, tile, policy and sizes, from the call and the device's properties alone.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cuda/group/tuning.h"
#include "cuda/row/tuning.h"

namespace evenkeel::cuda {

// The workspace is used from its first multiple of this on.
inline constexpr int64_t kWorkspaceAlignment = 16;

struct Plan {
  // Why the dtypes are looked up at run time; nullptr: kernels are compiled for them.
  const char* runtime_dtype = nullptr;
  // Why no entry of the table of policies serves the call, so that a multi-pass kernel does; or nullptr.
  const char* fallback = nullptr;
  bool aligned = false;   // loads and stores of 16 bytes
  EpilogueTerms terms;    // that the call has
  bool residual = false;  // the kernel adds it; backward: adds dsum, or stores dx twice
  // Rows have the weight and bias of their sample. Why these are made by a kernel before, in the workspace; or nullptr:
  // they are the scale and the shift, or what all samples share.
  bool modulated = false;
  const char* parameters_made = nullptr;
  // Forward: why the residual is added by a kernel of its own, whose sum is normalized by a second one; or
  // nullptr. The sum is in the workspace if it is not wanted.
  const char* added_first = nullptr;
  bool quantizes = false;  // the kernel quantizes y
  // Why y is quantized by a kernel of its own behind the others, which leave it in the workspace in float32; or nullptr.
  const char* quantized_last = nullptr;

  Tile tile;
  int policy = 0;             // the kernel: an index of the table (row/policies.h)
  int64_t groups = 0;         // blocks of the main kernel, or clusters
  int64_t shared = 0;         // its dynamic shared memory in bytes
  int64_t prefetch_rows = 0;  // forward: from a block's rows to those it prefetches; 0: none
  bool products = false, gradients = false;  // backward: which sums of columns are wanted
  int64_t partials = 0;                      // backward: rows of partials for each of them
  int64_t dweight_at = 0, dbias_at = 0;      // where they begin in the workspace
  int64_t y_at = 0;    // where y begins in the workspace, if it is quantized last
  int64_t sum_at = 0;  // where the sum does, if it is added first and not wanted
  // Modulated: where weight and bias of the samples do, and their shares of dweight and dbias; and the blocks, clusters
  // or chunks of a sample, each of which has a row of partials.
  int64_t weights_at = 0, biases_at = 0, dweight_shares_at = 0, dbias_shares_at = 0;
  int64_t sample_blocks = 0;
  int64_t workspace = 0;
};

Plan make_plan(const Call& call, const DeviceProperties& properties);

struct GroupPlan {
  const char* runtime_dtype = nullptr;  // as above
  // Why no entry of the table serves the call's tile, so that single elements are read twice; or nullptr.
  const char* fallback = nullptr;
  bool aligned = false;
  GroupProblem problem;
  GroupTile tile;
  int policy = 0;      // the kernel: an index of the table (group/policies.h); -1: there is none
  int64_t sets = 0;    // of groups, of all samples
  int64_t lag = 0;     // group_lag()
  int64_t shared = 0;  // dynamic shared memory in bytes
  int64_t parts_at = 0, results_at = 0, partials_at = 0;  // in the workspace
  int64_t partials_bytes = 0;                             // of dweight; as many for dbias
  int64_t workspace = 0;
};

GroupPlan make_group_plan(const Call& call, const DeviceProperties& properties);

}  // namespace evenkeel::cuda
