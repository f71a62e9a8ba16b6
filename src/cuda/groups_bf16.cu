// Group norm kernels for bfloat16 (kernels.h).
#include "cuda/groups.cuh"

namespace evenkeel::cuda {

const GroupKernelSet kGroupsBF16 = Groups<__nv_bfloat16, float>::kSet;

}  // namespace evenkeel::cuda
