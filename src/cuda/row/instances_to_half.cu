// Row kernels for float32 x with y and dy of half types (runtime/kernel.h).
#include "cuda/row/instances.cuh"

namespace evenkeel::cuda {

const KernelSet kF32F16 = RowInstances<float, __half>::kSet;
const KernelSet kF32BF16 = RowInstances<float, __nv_bfloat16>::kSet;

}  // namespace evenkeel::cuda
