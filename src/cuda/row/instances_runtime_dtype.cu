// Row kernels for all other mixes of dtypes, float64 among them, and any alignment (runtime/kernel.h).
#include "cuda/row/instances.cuh"

namespace evenkeel::cuda {

const KernelSet kRuntimeDtypeF32 = RuntimeDtypeInstances<float>::kSet;
const KernelSet kRuntimeDtypeF64 = RuntimeDtypeInstances<double>::kSet;
const KernelSet kModulatedRuntimeDtypeF32 = RuntimeDtypeInstances<float, true>::kSet;
const KernelSet kModulatedRuntimeDtypeF64 = RuntimeDtypeInstances<double, true>::kSet;

Kernel& sample_parameters_kernel(Dtype arithmetic) {
  return arithmetic == Dtype::kF64 ? kernel<sample_parameters<double>>("sample_parameters")
                                   : kernel<sample_parameters<float>>("sample_parameters");
}

Kernel& reduce_samples_kernel(Dtype arithmetic) {
  return arithmetic == Dtype::kF64
             ? kernel<reduce_samples<double>>("reduce_samples", SharedMemory::kAfterRing)
             : kernel<reduce_samples<float>>("reduce_samples", SharedMemory::kAfterRing);
}

Kernel& add_residual_kernel(Dtype arithmetic) {
  return arithmetic == Dtype::kF64 ? kernel<add_residual<double>>("add_residual")
                                   : kernel<add_residual<float>>("add_residual");
}

Kernel& quantize_kernel() { return kernel<quantize_rows>("quantize_rows"); }

}  // namespace evenkeel::cuda
