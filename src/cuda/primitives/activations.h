// Which activations a kernel has code for, besides none.
#pragma once

#include "evenkeel/evenkeel.h"

namespace evenkeel::cuda {

// kCheap: SiLU, which takes few registers. A kernel that is bound by these has another instance for kAll.
enum class Activations { kCheap, kAll };

constexpr Activations activations_with(int32_t activation) {
  const bool few = activation == EK_ACTIVATION_NONE || activation == EK_ACTIVATION_SILU;
  return few ? Activations::kCheap : Activations::kAll;
}

}  // namespace evenkeel::cuda
