// The last step of dweight and dbias: the sum over rows of partials, in a fixed order.
#pragma once

#include "cuda/primitives/element.cuh"
#include "cuda/primitives/cluster.cuh"
#include "cuda/primitives/reduce_partials.h"

namespace evenkeel::cuda {

// A block has a.lanes neighbouring columns (a power of 2), whose rows its threads share; blockIdx.y is
// dweight or dbias.
template <typename C>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_partials(const __grid_constant__ ReducePartialsArguments a) {
  constexpr int kAtOnce = 9;  // so that an H200's 132 rows take one round
  __shared__ C parts[kReduceThreads];
  const int which = blockIdx.y, lanes = a.lanes, step = kReduceThreads / lanes;
  const int first = threadIdx.x / lanes;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * lanes + threadIdx.x % lanes;
  const C* const from = reinterpret_cast<const C*>(a.partials[which]) + column;
  const DeviceVector out = a.out[which];
  wait_for_previous_kernel();
  if (out.data == nullptr) return;
  C sum = 0;
  for (int row = first; row < a.count; row += kAtOnce * step) {
    C part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = row + i * step;
      part[i] = at < a.count && column < a.cols ? from[at * a.cols] : C{0};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += part[i];
  }
  for (int distance = lanes; distance < kWarp; distance *= 2)
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= lanes || column >= a.cols) return;
  const int pitch = max(lanes, kWarp);
#pragma unroll 8
  for (int at = threadIdx.x + pitch; at < kReduceThreads; at += pitch) sum += parts[at];
  store_runtime(out.data, out.dtype, column, sum);
}

}  // namespace evenkeel::cuda
