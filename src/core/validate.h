// Every check of the C ABI and every message, once. Turns the caller's structs into a Call.
#pragma once

#include <cstddef>

#include "core/call.h"
#include "evenkeel/evenkeel.h"

namespace evenkeel {

// Checks everything but the workspace, which is only known to suffice once a backend is picked.
ek_status validate(const ek_problem*, const ek_forward_args*, const ek_execution*, Call&);
ek_status validate(const ek_problem*, const ek_backward_args*, const ek_execution*, Call&);

// name: what the caller knows the workspace by; its size is <name>_size.
ek_status validate_workspace(const Call&, size_t needed, const char* name);

}  // namespace evenkeel
