// The thread-local sentence behind ek_last_error(): a fixed buffer, so that failing never
// allocates.
#include "core/error.h"

#include <cstdarg>
#include <cstdio>

namespace evenkeel {
namespace {

thread_local char message[1024];

}  // namespace

ek_status fail(ek_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return status;
}

void clear_error() { message[0] = '\0'; }
const char* last_error() { return message; }

}  // namespace evenkeel
