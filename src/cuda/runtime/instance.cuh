// Kernels as objects that the host can launch (kernel.h).
#pragma once

#include "cuda/runtime/kernel.h"

namespace evenkeel::cuda {

// One object for each instance.
template <auto* kFunction>
Kernel& kernel(const char* name, SharedMemory shared = SharedMemory::kLittle) {
  static Kernel entry{reinterpret_cast<const void*>(kFunction), name, shared};
  return entry;
}

}  // namespace evenkeel::cuda
