// Row kernels for x of half types whose y is quantized (runtime/kernel.h).
#include "cuda/row/instances.cuh"

namespace evenkeel::cuda {

const KernelSet kF16EightBits = {RowInstances<__half, EightBits>::find_forward};
const KernelSet kBF16EightBits = {RowInstances<__nv_bfloat16, EightBits>::find_forward};

}  // namespace evenkeel::cuda
