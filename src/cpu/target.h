// The entry points of the kernels: one function for each stored type and instruction set.
//
// Each kernels_<type>.cc is compiled once per instruction set and lists its functions, best first,
// in a table that ends with the baseline. backend.cc picks the instruction set, once, for all of
// them.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cpu/plan.h"

namespace evenkeel {

using RunKernels = void (*)(const Call&, const Plan&);

enum class Target { kAvx3, kAvx2, kBaseline };
inline constexpr int kTargets = 3;

// Indexed by Target; nullptr where this build has no such code.
using KernelTable = RunKernels[kTargets];

extern const KernelTable kF32Kernels, kF64Kernels, kF16Kernels,
    kBF16Kernels;                                             // all big tensors of one type
extern const KernelTable kMixedF32Kernels, kMixedF64Kernels;  // any types, arithmetic in f32 or f64

}  // namespace evenkeel
