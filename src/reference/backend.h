// The reference backend: the oracle, and the last resort for tensors in host memory.
#pragma once

#include "core/backend.h"

namespace evenkeel {

extern const Backend kReferenceBackend;

}  // namespace evenkeel
