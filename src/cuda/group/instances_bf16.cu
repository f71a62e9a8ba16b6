// Group norm kernels for bfloat16 (runtime/kernel.h).
#include "cuda/group/instances.cuh"

namespace evenkeel::cuda {

const GroupKernelSet kGroupsBF16 = GroupInstances<__nv_bfloat16, float>::kSet;

}  // namespace evenkeel::cuda
