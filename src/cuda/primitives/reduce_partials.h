// How the rows of partials of dweight and dbias are divided for the kernel that sums them.
#pragma once

#include "cuda/runtime/device_properties.h"

namespace evenkeel::cuda {

inline constexpr int kReduceThreads = 512;

// Neighbouring columns of a block: more blocks for few of them, but no more threads for a column than there
// are rows.
constexpr int reduce_lanes(int64_t cols, int64_t count) {
  int lanes = cols <= 1024 ? 16 : kWarp;
  while (lanes < 128 && kReduceThreads / lanes > count) lanes *= 2;
  return lanes;
}

}  // namespace evenkeel::cuda
