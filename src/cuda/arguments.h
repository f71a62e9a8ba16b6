// What kernels are launched with: plain structs that host and device share.
#pragma once

#include <cstdint>

#include "core/dtype.h"

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

// How teams of persistent blocks move from one of their rows to the next, `step` rows further.
struct RowWalk {
  int64_t step;
  int64_t inner;        // rows of a block of rows; 0: all rows of all tensors have one stride
  int64_t step_inside;  // step % inner
};

// The same in a tensor, in bytes.
struct RowStep {
  int64_t bytes;
  int64_t wrap_bytes;  // more, where the step leads into another block than step / inner says
};

struct Formula {
  DeviceVector weight, bias;
  Number eps, weight_offset;
  Number share;  // 1 / cols
  bool centers;  // layer norm
  bool silu;
  bool rounds;  // the normalized value to x's type, before the weight (casting order llama)
};

struct ForwardArguments {
  DeviceTensor x, y;
  Formula formula;
  char *mean, *rstd;  // nullptr: not wanted
  Dtype stats;
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
  int team, stages, part_cols;
  RowWalk walk;
  RowStep x_step, dy_step, dx_step;
};

struct FoldArguments {
  const char* partials[2];  // of dweight, dbias; nullptr: not wanted
  DeviceVector out[2];
  int64_t cols;
  int count;  // rows of partials
};

}  // namespace evenkeel::cuda
