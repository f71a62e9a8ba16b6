// Kernels for float16 (kernels.h).
#include "cuda/kernels.cuh"

namespace evenkeel::cuda {

const KernelSet kF16F16 = Typed<__half, __half>::kSet;

}  // namespace evenkeel::cuda
