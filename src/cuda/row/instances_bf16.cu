// Row kernels for bfloat16 (runtime/kernel.h).
#include "cuda/row/instances.cuh"

namespace evenkeel::cuda {

const KernelSet kBF16BF16 = RowInstances<__nv_bfloat16, __nv_bfloat16>::kSet;

}  // namespace evenkeel::cuda
