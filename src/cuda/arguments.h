// What kernels are launched with: plain structs that host and device share.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "evenkeel/evenkeel.h"

#if defined(__CUDACC__)
#define EVENKEEL_DEVICE __device__
#else
#define EVENKEEL_DEVICE
#endif

namespace evenkeel::cuda {

// A big tensor: rows of neighbouring elements. inner == 0: all rows have one stride.
struct DeviceTensor {
  char* data;
  const char* end;  // of the last row
  int64_t row_stride, outer_stride, inner;
  Dtype dtype;

  EVENKEEL_DEVICE int64_t offset(int64_t row) const {
    if (inner == 0) return row * row_stride;
    return row / inner * outer_stride + row % inner * row_stride;
  }
};

// A vector of parameters; data == nullptr: absent.
struct DeviceVector {
  char* data;
  Dtype dtype;
};

// A number for arithmetic in either type, without a conversion in every thread.
struct Number {
  double wide;
  float narrow;

  Number(double value) : wide(value), narrow(static_cast<float>(value)) {}
  EVENKEEL_DEVICE operator double() const { return wide; }
  EVENKEEL_DEVICE operator float() const { return narrow; }
};

// How row groups of persistent blocks move from one of their rows to the next, `step` rows further.
struct RowStride {
  int64_t step;
  int64_t inner;        // rows of a run; 0: all rows of all tensors have one stride
  int64_t step_inside;  // step % inner
};

// The same in a tensor, in bytes.
struct RowStep {
  int64_t bytes;
  int64_t wrap_bytes;  // more, where the step leads into another run than step / inner says
};

struct Formula {
  DeviceVector weight, bias;
  Number eps, weight_offset;
  Number inv_n;        // 1 / values that share a mean and rstd
  bool centers;        // layer norm
  uint8_t activation;  // ek_activation
  bool rounds;         // the normalized value to x's type, before the weight (casting order llama)
};

// Of kernels whose rows have the weight and bias of their sample: `rows` neighbouring rows share them, and those of the
// next sample are so many bytes further on. The formula has the first one's.
struct Samples {
  int64_t count;
  int64_t rows;
  int64_t weight_bytes, bias_bytes;
  int64_t
      blocks;  // backward: of a sample (or clusters, or chunks of rows), each with one row of partials
};

// How y is quantized to 8 bits: by one scale, or (scale == nullptr) by one of each row, which is stored.
struct Quantization {
  const float* scale;
  float* row_scale;
  float amax_bound, largest;  // largest: number of y's dtype
};

// x: what is normalized, or with a residual the summand that has y's dtype (X's, where y has 8 bits).
struct ForwardArguments {
  DeviceTensor x, y;
  Formula formula;
  char *mean, *rstd;  // nullptr: not wanted
  Dtype stats;
  int64_t rows, cols;
  int part_cols;           // of a block; not of multi-pass kernels
  int64_t prefetch_bytes;  // from a block's rows to those that it prefetches into L2; 0: none
  // Of policies with a residual. sum.data == nullptr: not wanted.
  DeviceTensor residual, sum;
  int64_t residual_prefetch_bytes;
  Quantization quantization;  // of policies that quantize
  Samples samples;            // of policies that are modulated
};

// sum = x + residual, for norms that no kernel with a residual takes.
struct AddArguments {
  DeviceTensor x, residual, sum;
  int64_t rows, cols;
};

// y in 8 bits, for norms that no kernel quantizes.
struct QuantizeArguments {
  DeviceTensor from, y;
  Quantization quantization;
  int64_t rows, cols;
};

struct BackwardArguments {
  DeviceTensor x, dy, dx;  // dx.data == nullptr: not wanted
  Formula formula;
  const char *mean, *rstd;  // mean == nullptr: RMS norm
  Dtype stats;
  int64_t rows, cols;
  char *dweight_partials, *dbias_partials;  // one row of cols per block or cluster; or nullptr
  // Of the tile, for the kernels with rings.
  int threads_per_row, stages, part_cols;
  RowStride stride;
  RowStep x_step, dy_step, dx_step;
  // Of policies with a residual. dsum: nullptr: there is none. second_dx: dx in the dtype of dy, or nullptr.
  DeviceTensor dsum, second_dx;
  RowStep dsum_step, second_dx_step;
  Samples samples;  // of policies that are modulated
};

// Division of numbers below 2^31 by one that the host knows.
struct Divisor {
  uint32_t value = 1, multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t divisor) : value(static_cast<uint32_t>(divisor)) {
    while (uint64_t{1} << shift < value) ++shift;
    const uint64_t rest = (uint64_t{1} << shift) - value;
    multiplier = static_cast<uint32_t>((rest << 32) / value + 1);
  }
  EVENKEEL_DEVICE uint32_t quotient(uint32_t n) const {
#if defined(__CUDA_ARCH__)
    const uint32_t high = __umulhi(n, multiplier);
#else
    const auto high = static_cast<uint32_t>(uint64_t{n} * multiplier >> 32);
#endif
    return (high + n) >> shift;
  }
};

// How a group norm is split, as its kernels know it (group/tuning.h says what the words mean).
struct GroupShape {
  int64_t spatial;
  int channels;
  int groups;   // of a sample
  int sets;     // of groups, of all samples
  int span;     // channels of a set
  int vectors;  // of a thread
  int resident,
      exchange;    // bytes of shared memory for vectors, and for what blocks send each other
  int slice;       // pixels of a slice, at most
  int last_slice;  // of the last one of a plane
  // Channels last. From the pixel short_from on, among those of first vectors, threads have one fewer.
  int tile, rows, short_from, partial_sums;
  int log_lanes;      // channels first
  int lag;            // chunks
  Divisor per_group;  // channels of a group
  Divisor spans;      // sets of a sample
  Divisor chunks;     // of a set
  Divisor slices;     // of a plane
  Divisor columns;    // channels last: neighbouring vectors of a chunk
  Divisor tiles;      // channels last: neighbouring chunks of a set
};

// Of sets that are read twice: how far their chunks are. Zero before the kernel starts.
struct GroupCounters {
  unsigned arrived;  // chunks whose sums are stored
  unsigned ready;    // the set's results are
};

struct GroupScratch {
  // Of sets that are read twice.
  GroupCounters* counters;  // of each set
  char* parts;              // of each group and chunk of its set
  char* results;            // of each group
  // Backward: sums of each sample, slice and channel, or nullptr.
  char *dweight_partials, *dbias_partials;
};

struct GroupForwardArguments {
  DeviceTensor x, y;
  Formula formula;
  char *mean, *rstd;  // nullptr: not wanted
  Dtype stats;
  GroupShape shape;
  GroupScratch scratch;
};

struct GroupBackwardArguments {
  DeviceTensor x, dy, dx;  // dx.data == nullptr: not wanted
  Formula formula;
  const char *mean, *rstd;
  Dtype stats;
  GroupShape shape;
  GroupScratch scratch;
};

struct ClearArguments {
  GroupCounters* counters;
  int64_t count;
};

// A row for each sample, `stride` elements apart; data == nullptr: absent.
struct DeviceSamples {
  char* data;
  Dtype dtype;
  int64_t stride;
};

// Weight and bias of each sample, where no kernel reads what the caller has: (1 + scale) * (weight_offset + weight) and
// (1 + scale) * bias + shift, in the arithmetic's type, dense. biases == nullptr: not wanted.
struct SampleParametersArguments {
  DeviceVector weight, bias;
  Number weight_offset;
  DeviceSamples scale, shift;
  char *weights, *biases;
  int64_t samples, cols;
};

// Sums over the rows of each sample, of partials for its blocks, and what becomes of them: dscale, dshift, and its shares
// of dweight and dbias, one row for each sample.
struct ReduceSamplesArguments {
  const char *products, *gradients;  // partials; nullptr: not wanted
  DeviceVector weight, bias;
  Number weight_offset;
  DeviceSamples scale, dscale, dshift;
  char *dweight_shares, *dbias_shares;  // nullptr: not wanted
  int64_t samples, cols;
  int64_t count;  // partials of a sample
};

struct ReducePartialsArguments {
  const char* partials[2];  // of dweight, dbias
  DeviceVector out[2];      // data == nullptr: not wanted
  int64_t cols;
  int count;  // rows of partials
  int lanes;  // columns of a block
};

}  // namespace evenkeel::cuda
