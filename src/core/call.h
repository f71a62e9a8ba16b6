// One validated call, as every backend sees it: defaults resolved, strides filled in, dtypes known
// to be good.
//
// All three operations share one shape: `outer` blocks of `inner` contiguous runs of `width`
// elements.
//
//             outer         inner        width      statistics per      parameter index
//   row norm  row blocks    inner_rows   cols       run                 position in the run
//   NCHW      samples       channels     spatial    (sample, group)     inner index
//   NHWC      samples       spatial      channels   (sample, group)     position in the run
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/parallel.h"
#include "evenkeel/evenkeel.h"

namespace evenkeel {

enum class Pass { kForward, kBackward };

struct Tensor {
  char* data = nullptr;
  Dtype dtype = Dtype::kF32;
  int64_t row_stride = 0;    // elements between runs
  int64_t outer_stride = 0;  // elements between blocks

  explicit operator bool() const { return data != nullptr; }
  int64_t offset(int64_t outer, int64_t inner) const {
    return outer * outer_stride + inner * row_stride;
  }
  char* at(int64_t offset_elements) const { return data + offset_elements * size_of(dtype); }
};

struct Vector {
  char* data = nullptr;
  Dtype dtype = Dtype::kF32;

  explicit operator bool() const { return data != nullptr; }
};

struct Call {
  Pass pass;
  ek_op op;
  ek_layout layout;
  ek_activation activation;
  ek_casting casting;
  double eps;
  double weight_offset;

  int64_t outer, inner, width;
  int64_t groups;       // group norm; 1 otherwise
  int64_t channels;     // parameters: cols or channels
  int64_t samples = 1;  // row norms with a scale or a shift; 1 otherwise

  Tensor x;
  Tensor y{}, residual{}, sum{};  // forward only; sum.dtype counts even where it is not stored
  Tensor dy{}, dx{}, dsum{}, dresidual{};  // backward only
  // Of a y of 8 bits: its scale, or where those of its rows go.
  const float* y_scale = nullptr;
  float* y_row_scale = nullptr;
  float y_amax_bound = 0;  // infinity: none
  Vector weight, bias, dweight, dbias;
  Tensor scale{}, shift{};    // a row for each sample, row_stride apart; so have
  Tensor dscale{}, dshift{};  // backward only
  char* mean;
  char* rstd;
  Dtype stats;    // of mean and rstd
  Dtype compute;  // of all arithmetic: kF32 or kF64

  ek_device device;
  int32_t device_index;
  void* stream;
  char* workspace;
  size_t workspace_size;
  Parallel parallel;

  bool is_group_norm() const { return op == EK_GROUP_NORM; }
  bool centers() const { return op != EK_RMS_NORM; }
  // Of what is normalized: x, or the sum. Statistics and casting orders go by it.
  Dtype normalized() const { return residual ? sum.dtype : x.dtype; }
  bool quantizes() const { return has_eight_bits(y.dtype); }
  // Parameters differ from sample to sample, or gradients are wanted for each.
  bool modulates() const { return scale || shift || dscale || dshift; }
  // Whether dx is wanted, in one dtype or another.
  bool wants_dx() const { return dx || dresidual; }
  int64_t elements() const { return outer * inner * width; }
  // Rows, or (sample, group) pairs: the number of values in mean and rstd.
  int64_t statistics() const { return is_group_norm() ? outer * groups : outer * inner; }
  // Statistics of a sample: its rows. Without a scale or a shift, all.
  int64_t sample_statistics() const { return statistics() / samples; }
  // Which column sums backward needs: of the gradient times the normalized value, and of the gradient.
  bool sums_products() const { return dweight || dscale; }
  bool sums_gradients() const { return dbias || dshift || (dscale && bias); }
  bool sums_columns() const { return sums_products() || sums_gradients(); }
};

}  // namespace evenkeel
