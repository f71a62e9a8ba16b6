// The CUDA backend, as api.cc lists it.
#pragma once

#include "core/backend.h"

namespace evenkeel {

extern const Backend kCudaBackend;

}  // namespace evenkeel
