// Kernels for x of half types with float32 y and dy (kernels.h).
#include "cuda/kernels.cuh"

namespace evenkeel::cuda {

const KernelSet kF16F32 = Typed<__half, float>::kSet;
const KernelSet kBF16F32 = Typed<__nv_bfloat16, float>::kSet;

}  // namespace evenkeel::cuda
