// Kernels for float32 x with y and dy of half types (kernels.h).
#include "cuda/kernels.cuh"

namespace evenkeel::cuda {

const KernelSet kF32F16 = Typed<float, __half>::kSet;
const KernelSet kF32BF16 = Typed<float, __nv_bfloat16>::kSet;

}  // namespace evenkeel::cuda
