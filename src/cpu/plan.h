// How a call is cut up on the CPU: which of three shapes it has, into which pieces it falls, and
// where scratch lies.
//
// Pieces that decide the order of a sum (slices of a long span, chunks of rows) depend on the
// problem alone, so that results do not depend on the number of threads. What only decides who does
// what (splitting one long row over threads, the number of shards) may depend on them.
//
//   kRows    one statistic per contiguous span, one weight per position: row norms, and group norms whose planes are
//            so small that repeating each weight over its plane is cheaper than restarting at every channel
//   kPlanes  group norm NCHW: a statistic spans several planes, each with one weight
//   kPixels  group norm NHWC: a statistic is a column band of many short rows
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/call.h"

namespace evenkeel {

// Sums are kept in vectors over at most this many elements, then carried on in double.
inline constexpr int64_t kSlice = 16384;

// Rows of a batch stay in L1: that many bytes of what is read twice.
inline constexpr int64_t kBatchBytes = 24 << 10;

// What the kernels are compiled for: calls whose big tensors are all of one type, or any mix with
// f32 or f64 arithmetic.
enum class Storage { kF32, kF64, kF16, kBF16, kMixedF32, kMixedF64 };

struct Plan {
  enum class Kind { kRows, kPlanes, kPixels };

  Kind kind;
  Storage storage;
  int64_t blocks;  // rows, or samples
  int64_t groups;  // statistics in each block
  int64_t
      length;  // kRows: elements of a statistic; kPlanes: of a plane; kPixels: of a row of pixels
  int64_t repeat;  // how often parameters are repeated: each one (kRows), or all of them (kPixels)
  int64_t parameters;        // weights, including repetitions
  int64_t parameter_groups;  // parts of the parameters that are padded for themselves,
  int64_t parameter_stride;  // and their padded length
  int64_t
      partial_width;  // parameter sums of a chunk: as the parameters (kRows), or one per channel
  int64_t chunks;     // of blocks; parameter gradients are summed for each, then over them
  int64_t chunk_blocks;
  int64_t
      sample_blocks;  // of a sample, whose parameters they share; all, without a scale or a shift
  int64_t sample_chunks;  // a chunk's blocks are of one sample
  int64_t strip;          // kPixels: rows of pixels that are summed in vectors
  bool split;             // too few statistics to occupy the threads: cut them up
  bool stream;            // results go past the caches
  bool stream_sum;  // so does the sum of x and the residual; what is read again is a copy of it
  int64_t batch;    // kRows: rows that are worked on at a time
  bool fetch;       // kRows: short rows are prefetched

  int64_t shards;  // pieces of scratch, at most one per thread

  // Offsets into the workspace, in bytes from its first 64-byte boundary.
  size_t weight, bias;  // [parameter_groups][parameter_stride], compute type, in lane order
  size_t partials;      // [chunks][2][partial_width]: dweight, dbias
  size_t pieces;        // split: moments or gradient sums of each piece
  size_t scratch;       // [shards][scratch_stride]
  size_t scratch_stride;
  size_t arrays;     // kPixels: bytes of the arrays at the start of a shard's scratch
  size_t quantized;  // in a shard's scratch: y that is to be quantized, in float32
  size_t
      sample_parameters;  // in a shard's scratch: weight and bias of a sample, as above; or its gradients
  size_t total;

  // The sum of x and the residual is kept in scratch while it is normalized.
  bool keeps_sum(const Call& call) const { return call.residual && (!call.sum || stream_sum); }
  // Parameters and their sums lie as the caller's do, but for the padding at the end.
  bool plain_order() const { return kind != Kind::kRows || (groups == 1 && repeat == 1); }
  // Kernels read weight and bias as arrays, not channel by channel.
  bool reads_arrays(const Call& call) const {
    if (call.modulates()) return false;  // but those of a sample
    return kind == Kind::kRows || (kind == Kind::kPixels && call.pass == Pass::kBackward);
  }
  // They can read the caller's own array: it has the right type and order, and nothing is added to it.
  bool reads_as_given(const Call& call, const Vector& given, double offset) const {
    return given && given.dtype == call.compute && offset == 0 && kind == Kind::kRows &&
           plain_order() && storage != Storage::kBF16;
  }
  // Where the i-th of the repeated parameters lies, in memory order.
  int64_t slot(int64_t i) const {
    return kind == Kind::kRows ? i / length * parameter_stride + i % length : i;
  }
};

Plan make_plan(const Call& call);

}  // namespace evenkeel
