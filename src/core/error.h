// The thread-local sentence behind ek_last_error().
#pragma once

#include "evenkeel/evenkeel.h"

namespace evenkeel {

// Records the message (printf style) and returns the status.
[[gnu::format(printf, 2, 3)]] ek_status fail(ek_status status, const char* format, ...);

void clear_error();
const char* last_error();

}  // namespace evenkeel
