// Group norm kernels for float32 (kernels.h).
#include "cuda/groups.cuh"

namespace evenkeel::cuda {

const GroupKernelSet kGroupsF32 = Groups<float, float>::kSet;

}  // namespace evenkeel::cuda
