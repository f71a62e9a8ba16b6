// Kernels for all other mixes of types, float64 among them, and any alignment (kernels.h).
#include "cuda/kernels.cuh"

namespace evenkeel::cuda {

const KernelSet kAnyF32 = Untyped<float>::kSet;
const KernelSet kAnyF64 = Untyped<double>::kSet;

}  // namespace evenkeel::cuda
