// The multi-pass fallback, for what the other kernels do not take: rows of any length and dtype, a block for
// each row, which is read anew in every pass.
#pragma once

#include "cuda/primitives/row_group.cuh"
#include "cuda/row/epilogue.cuh"
#include "cuda/row/gradient.cuh"
#include "cuda/row/quantize.cuh"
#include "cuda/row/statistics.cuh"
#include "cuda/row/tile.h"

namespace evenkeel::cuda {

// 0 where there is none.
template <typename X, typename C>
__device__ inline C statistic_if_any(const char* from, Dtype stats, int64_t row) {
  if (from == nullptr) return 0;
  LoadedScalar<X, C> loaded;
  loaded.statistic(from, stats, row);
  return loaded.statistic();
}

inline constexpr RowGroupPolicy kMultiPassGroup{.scope = Scope::kBlock,
                                                .lanes = kWarp,
                                                .sole = true,
                                                .forward = false,
                                                .overlapped = false,
                                                .max_warps = kMaxThreads / kWarp,
                                                .block_first = false};
using MultiPassGroup = RowGroup<kMultiPassGroup>;

// Calls body(row, group) for the block's rows.
template <typename Body>
__device__ inline void each_row(int64_t rows, const Body& body) {
  __shared__ __align__(16) char scratch[exchange_bytes(false)];
  MultiPassGroup group(scratch, blockDim.x);
  wait_for_previous_kernel();
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) body(row, group);
}

template <typename X, typename Y, typename C, int W, bool kModulated>
__device__ inline void forward_row(const ForwardArguments& a, int64_t row, MultiPassGroup& group) {
  using In = Access<X, W, C>;
  const int64_t x_offset = a.x.offset(row), y_offset = a.y.offset(row);
  const C inv_n = a.formula.inv_n;
  C mean = 0;
  const auto each = [&](auto body) {
    for (int64_t column = group.thread() * W; column < a.cols; column += group.size() * W) {
      C x[W];
      In::unpack(In::load(a.x, x_offset + column), x);
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] -= mean;
      body(x, column);
    }
  };
  const auto mean_inv_n = [&] {
    C sum[1] = {};
    each([&](const C(&x)[W], int64_t) { sum[0] += sum_of(x); });
    group.sum(sum);
    return sum[0] * inv_n;
  };
  if (a.formula.centers) mean = mean_inv_n();
  C square[1] = {};
  each([&](const C(&x)[W], int64_t) { square[0] += sum_of_squares(x); });
  group.sum(square);
  C variance = square[0] * inv_n;
  const C rest = needs_correction(mean, variance) ? mean_inv_n() : C{0};
  variance -= rest * rest;
  if (variance < 0) variance = 0;
  const C rstd = reciprocal_root(variance + static_cast<C>(a.formula.eps));
  if (threadIdx.x == 0) {
    if (a.mean != nullptr) store_runtime(a.mean, a.stats, row, mean + rest);
    if (a.rstd != nullptr) store_runtime(a.rstd, a.stats, row, rstd);
  }
  decltype(auto) formula = formula_of<kModulated>(a, row);
  each([&](const C(&x)[W], int64_t column) {
    C weight[W], bias[W], y[W];
    weights_at<X>(formula, column, weight);
    parameters_at<X>(formula.bias, column, C{0}, bias);
    evaluate_epilogue<X, kAllTerms>(a, x, rstd, -rest * rstd, weight, bias, y);
    Access<Y, W, C>::store(a.y, y_offset + column, y);
  });
}

template <typename X, typename Y, typename C, int W, bool kModulated = false>
__global__ void __launch_bounds__(kMaxThreads)
    rows_forward_multi_pass(const __grid_constant__ ForwardArguments a) {
  each_row(a.rows, [&](int64_t row, MultiPassGroup& group) {
    forward_row<X, Y, C, W, kModulated>(a, row, group);
  });
}

template <typename X, typename D, typename C, int W, bool kModulated>
__device__ inline void backward_row(const BackwardArguments& a, int64_t row,
                                    MultiPassGroup& group) {
  using In = Access<X, W, C>;
  using InDy = Access<D, W, C>;
  const int64_t x_offset = a.x.offset(row), dy_offset = a.dy.offset(row);
  const C rstd = statistic_if_any<X, C>(a.rstd, a.stats, row);
  const C mean = statistic_if_any<X, C>(a.mean, a.stats, row);
  decltype(auto) formula = formula_of<kModulated>(a, row);
  const auto each = [&](auto body) {
    for (int64_t column = group.thread() * W; column < a.cols; column += group.size() * W) {
      C x[W], dy[W], weight[W];
      In::unpack(In::load(a.x, x_offset + column), x);
      InDy::unpack(InDy::load(a.dy, dy_offset + column), dy);
      weights_at<X>(formula, column, weight);
      body(Gradient<X, W, C>::template of<kAllTerms>(a, formula, column, x, dy, weight, mean, rstd),
           column);
    }
  };
  C sums[2] = {};
  each([&](const Gradient<X, W, C>& e, int64_t) {
    C gradient = 0, product = 0;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      gradient += e.g[k];
      product += e.g[k] * e.normalized[k];
    }
    sums[0] += gradient;
    sums[1] += product;
  });
  group.sum(sums);
  const C inv_n = a.formula.inv_n;
  const C mean_g = a.formula.centers ? sums[0] * inv_n : C{0}, mean_product = sums[1] * inv_n;
  const int64_t dx_offset = a.dx.offset(row);
  each([&](const Gradient<X, W, C>& e, int64_t column) {
    C dx[W];
#pragma unroll
    for (int k = 0; k < W; ++k) dx[k] = rstd * (e.g[k] - mean_g - e.normalized[k] * mean_product);
    if constexpr (std::is_same_v<X, RuntimeDtype>) {  // takes a residual, too
      if (a.dsum.data != nullptr) dx[0] += In::load(a.dsum, a.dsum.offset(row) + column);
      if (a.second_dx.data != nullptr) In::store(a.second_dx, a.second_dx.offset(row) + column, dx);
      if (a.dx.data == nullptr) return;
    }
    In::store(a.dx, dx_offset + column, dx);
  });
}

template <typename X, typename D, typename C, int W, bool kModulated = false>
__global__ void __launch_bounds__(kMaxThreads)
    rows_backward_multi_pass(const __grid_constant__ BackwardArguments a) {
  each_row(a.rows, [&](int64_t row, MultiPassGroup& group) {
    backward_row<X, D, C, W, kModulated>(a, row, group);
  });
}

// sum = x + residual, for norms that no kernel with a residual takes.
template <typename C>
__global__ void __launch_bounds__(kMaxThreads)
    add_residual(const __grid_constant__ AddArguments a) {
  using Any = Access<RuntimeDtype, 1, C>;
  wait_for_previous_kernel();
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    for (int64_t column = threadIdx.x; column < a.cols; column += blockDim.x) {
      C x[1], residual[1];
      Any::unpack(Any::load(a.x, a.x.offset(row) + column), x);
      Any::unpack(Any::load(a.residual, a.residual.offset(row) + column), residual);
      x[0] += residual[0];
      Any::store(a.sum, a.sum.offset(row) + column, x);
    }
  }
}

// y in 8 bits of a y in float32, for norms that no kernel quantizes.
inline __global__ void __launch_bounds__(kMaxThreads)
    quantize_rows(const __grid_constant__ QuantizeArguments a) {
  each_row(a.rows, [&](int64_t row, MultiPassGroup& group) {
    const auto* const from = reinterpret_cast<const float*>(a.from.data) + a.from.offset(row);
    const auto each = [&](auto body) {
      for (int64_t column = group.thread(); column < a.cols; column += group.size()) {
        const float y[1] = {from[column]};
        body(y, column);
      }
    };
    uint32_t most = 0;
    if (a.quantization.scale == nullptr) {
      each([&](const float(&y)[1], int64_t) { most = largest_magnitude(most, y); });
      most = group.max(most);
    }
    const float inverse = inverse_scale<false>(a.quantization, most, row, threadIdx.x == 0);
    char* const to = a.y.data + a.y.offset(row);
    each([&](const float(&y)[1], int64_t column) {
      store_codes(a.y.dtype, to + column, inverse, y);
    });
  });
}

// A thread for each column, blockIdx.y for each chunk of rows: partial sums of dweight and dbias. Of samples, each has
// chunks of its own, of which blocks take several.
template <typename X, typename D, typename C, bool kModulated = false>
__global__ void __launch_bounds__(kColumnThreads)
    column_sums(const __grid_constant__ BackwardArguments a) {
  wait_for_previous_kernel();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x;
  if (column >= a.cols) return;
  const auto sum = [&](const Formula& formula, auto chunk, int64_t begin, int64_t rows) {
    C weight[1], dweight = 0, dbias = 0;
    weights_at<X>(formula, column, weight);
#pragma unroll 4
    for (int64_t row = begin; row < min(begin + rows, a.rows); ++row) {
      using In = Access<X, 1, C>;
      using InDy = Access<D, 1, C>;
      C x[1], dy[1];
      In::unpack(In::load(a.x, a.x.offset(row) + column), x);
      InDy::unpack(InDy::load(a.dy, a.dy.offset(row) + column), dy);
      const C rstd = statistic_if_any<X, C>(a.rstd, a.stats, row);
      const C mean = statistic_if_any<X, C>(a.mean, a.stats, row);
      const auto e =
          Gradient<X, 1, C>::template of<kAllTerms>(a, formula, column, x, dy, weight, mean, rstd);
      dweight += e.dz[0] * e.scaled[0];
      dbias += e.dz[0];
    }
    const int64_t at = chunk * a.cols + column;
    if (a.dweight_partials != nullptr) reinterpret_cast<C*>(a.dweight_partials)[at] = dweight;
    if (a.dbias_partials != nullptr) reinterpret_cast<C*>(a.dbias_partials)[at] = dbias;
  };
  if constexpr (kModulated) {
    const int64_t rows = ceil_div(a.samples.rows, a.samples.blocks);
    for (int64_t chunk = blockIdx.y; chunk < a.samples.count * a.samples.blocks;
         chunk += gridDim.y) {
      const int64_t sample = chunk / a.samples.blocks, first = sample * a.samples.rows;
      const int64_t before = chunk % a.samples.blocks * rows;
      sum(formula_of_sample(a.formula, a.samples, sample), chunk, first + before,
          min(rows, a.samples.rows - before));
    }
  } else {
    const int64_t rows = ceil_div(a.rows, gridDim.y), begin = blockIdx.y * rows;
    sum(a.formula, blockIdx.y, begin, rows);
  }
}

}  // namespace evenkeel::cuda
