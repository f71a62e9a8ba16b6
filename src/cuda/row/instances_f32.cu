// Row kernels for float32 (runtime/kernel.h).
#include "cuda/row/instances.cuh"

namespace evenkeel::cuda {

const KernelSet kF32F32 = RowInstances<float, float>::kSet;

}  // namespace evenkeel::cuda
