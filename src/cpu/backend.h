// The CPU backend: SIMD kernels, compiled for several instruction sets and picked at run time.
#pragma once

#include <cstdint>

#include "core/backend.h"

namespace evenkeel {

extern const Backend kCpuBackend;

// The instruction sets that this machine can run, best first; nullptr past the last.
const char* cpu_target_name(int32_t index);

}  // namespace evenkeel
