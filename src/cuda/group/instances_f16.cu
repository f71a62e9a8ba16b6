// Group norm kernels for float16 (runtime/kernel.h).
#include "cuda/group/instances.cuh"

namespace evenkeel::cuda {

const GroupKernelSet kGroupsF16 = GroupInstances<__half, float>::kSet;

}  // namespace evenkeel::cuda
