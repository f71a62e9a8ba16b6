// Compiled kernels as the host finds them: one set for each pair of dtypes.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/dtype.h"

namespace evenkeel::cuda {

enum class SharedMemory {
  kLittle,
  kRing,       // as much as there is, for rows
  kAfterRing,  // little, but launched right after a kernel with a ring
};

struct Kernel {
  const void* function;
  const char* name;
  SharedMemory shared;
  std::atomic<uint64_t> prepared{0};  // a bit for each device on which it is ready to be launched
};

// policy: its index in the table of its element sizes (row/policies.h).
struct KernelSet {
  Kernel& (*forward)(int policy);
  Kernel& (*backward)(int policy);
  Kernel& (*column_sums)();
  Kernel& (*reduce_partials)();
};

// x's dtype, then that of y or dy; dx has x's. Arithmetic in float32.
extern const KernelSet kF32F32, kF32F16, kF32BF16, kF16F32, kF16F16, kBF16F32, kBF16BF16;
// y quantized, forward only.
extern const KernelSet kF16EightBits, kBF16EightBits;
// Dtypes looked up at run time: one multi-pass kernel for each pass. Arithmetic in float32, or in float64.
extern const KernelSet kRuntimeDtypeF32, kRuntimeDtypeF64;
// The same where each sample has a weight and a bias of its own.
extern const KernelSet kModulatedRuntimeDtypeF32, kModulatedRuntimeDtypeF64;
// Before and after kernels that are modulated (row/samples.cuh), in float32 or in float64.
Kernel& sample_parameters_kernel(Dtype arithmetic);
Kernel& reduce_samples_kernel(Dtype arithmetic);
// The addition of a residual alone, dtypes looked up at run time, in float32 or in float64.
Kernel& add_residual_kernel(Dtype arithmetic);
// The quantization of a float32 y alone.
Kernel& quantize_kernel();

// policy: its index in the table of its element size (group/policies.h), which says which pass it is of.
struct GroupKernelSet {
  Kernel& (*main)(int policy);
  Kernel& (*clear)();
  Kernel& (*reduce_partials)();
};
extern const GroupKernelSet kGroupsF32, kGroupsF16, kGroupsBF16, kGroupsRuntimeDtypeF32,
    kGroupsRuntimeDtypeF64;

}  // namespace evenkeel::cuda
