// What a backend is: a name, a verdict on a call, the workspace it needs, and the run itself.
//
// Only api.cc knows which backends exist. A backend is handed validated calls only, so it checks
// nothing again.
#pragma once

#include <cstddef>
#include <cstdio>

#include "core/call.h"
#include "evenkeel/evenkeel.h"

namespace evenkeel {

// A reason or a description: a short sentence without an allocation.
struct Note {
  char text[384] = "";

  template <typename... Args>
  void set(const char* format, Args... args) {
    std::snprintf(text, sizeof text, format, args...);
  }
};

struct Backend {
  const char* name;
  // Whether it runs the call; if not, the note says why.
  bool (*accepts)(const Call&, Note&);
  // How it will run a call that it accepts. Only called when somebody asks.
  void (*describe)(const Call&, Note&);
  size_t (*workspace)(const Call&);
  // The workspace in the call is as large as workspace() said. Errors are recorded with fail().
  ek_status (*run)(const Call&);
};

}  // namespace evenkeel
