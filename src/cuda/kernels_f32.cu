// Kernels for float32 (kernels.h).
#include "cuda/kernels.cuh"

namespace evenkeel::cuda {

const KernelSet kF32F32 = Typed<float, float>::kSet;

}  // namespace evenkeel::cuda
