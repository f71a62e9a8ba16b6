// Kernels for bfloat16 (kernels.h).
#include "cuda/kernels.cuh"

namespace evenkeel::cuda {

const KernelSet kBF16BF16 = Typed<__nv_bfloat16, __nv_bfloat16>::kSet;

}  // namespace evenkeel::cuda
