// Group norm kernels for all other types and addresses (kernels.h).
#include "cuda/groups.cuh"

namespace evenkeel::cuda {

const GroupKernelSet kGroupsAnyF32 = Groups<Any, float>::kSet;
const GroupKernelSet kGroupsAnyF64 = Groups<Any, double>::kSet;

}  // namespace evenkeel::cuda
