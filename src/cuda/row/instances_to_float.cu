// Row kernels for x of half types with float32 y and dy (runtime/kernel.h).
#include "cuda/row/instances.cuh"

namespace evenkeel::cuda {

const KernelSet kF16F32 = RowInstances<__half, float>::kSet;
const KernelSet kBF16F32 = RowInstances<__nv_bfloat16, float>::kSet;

}  // namespace evenkeel::cuda
