// Group norm kernels for float16 (kernels.h).
#include "cuda/groups.cuh"

namespace evenkeel::cuda {

const GroupKernelSet kGroupsF16 = Groups<__half, float>::kSet;

}  // namespace evenkeel::cuda
