// Row kernels for float16 (runtime/kernel.h).
#include "cuda/row/instances.cuh"

namespace evenkeel::cuda {

const KernelSet kF16F16 = RowInstances<__half, __half>::kSet;

}  // namespace evenkeel::cuda
