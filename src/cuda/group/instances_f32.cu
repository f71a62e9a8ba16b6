// Group norm kernels for float32 (runtime/kernel.h).
#include "cuda/group/instances.cuh"

namespace evenkeel::cuda {

const GroupKernelSet kGroupsF32 = GroupInstances<float, float>::kSet;

}  // namespace evenkeel::cuda
