// The last step of dweight and dbias.
#pragma once

#include "cuda/element.cuh"
#include "cuda/team.cuh"

namespace evenkeel::cuda {

// Adds up the rows of partial sums: a warp's lanes are neighbouring columns, its block's warps share
// the rows, blockIdx.y is dweight or dbias.
template <typename C>
__global__ void __launch_bounds__(kFoldThreads)
    fold_partials(const __grid_constant__ FoldArguments a) {
  constexpr int kWarps = kFoldThreads / kWarp;
  constexpr int kAtOnce = 9;  // so that an H200's 132 rows take one round
  __shared__ C parts[kWarps][kWarp];
  wait_for_previous_kernel();
  const int which = blockIdx.y, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  if (a.out[which].data == nullptr) return;
  const C* from = reinterpret_cast<const C*>(a.partials[which]) + column;
  C sum = 0;
  for (int first = warp; first < a.count; first += kAtOnce * kWarps) {
    C part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * kWarps;
      part[i] = row < a.count && column < a.cols ? from[row * a.cols] : C{0};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += part[i];
  }
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= a.cols) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += parts[w][lane];
  store_any(a.out[which].data, a.out[which].dtype, column, sum);
}

}  // namespace evenkeel::cuda
