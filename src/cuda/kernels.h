// The compiled kernels, as backend.cc finds them: one set for each pair of element types.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/group_tuning.h"

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

struct KernelSet {
  // plain: Plan's.
  Kernel& (*forward)(bool plain, bool aligned, const Tile&);
  Kernel& (*backward)(bool plain, bool aligned, const Tile&);
  Kernel& (*column_sums)();
  Kernel& (*fold)();
};

// x's type, then that of y or dy; dx has x's. Arithmetic in float32.
extern const KernelSet kF32F32, kF32F16, kF32BF16, kF16F32, kF16F16, kBF16F32, kBF16BF16;
// Types looked up at run time; arithmetic in float32, or in float64.
extern const KernelSet kAnyF32, kAnyF64;

struct GroupKernelSet {
  Kernel& (*forward)(bool channels_last, const GroupTile&);
  Kernel& (*backward)(bool channels_last, const GroupTile&);
  Kernel& (*clear)();
  Kernel& (*fold)();
};
extern const GroupKernelSet kGroupsF32, kGroupsF16, kGroupsBF16, kGroupsAnyF32, kGroupsAnyF64;

}  // namespace evenkeel::cuda
