// Group norm kernels for all other types and addresses (runtime/kernel.h).
#include "cuda/group/instances.cuh"

namespace evenkeel::cuda {

const GroupKernelSet kGroupsRuntimeDtypeF32 = GroupInstances<RuntimeDtype, float>::kSet;
const GroupKernelSet kGroupsRuntimeDtypeF64 = GroupInstances<RuntimeDtype, double>::kSet;

}  // namespace evenkeel::cuda
