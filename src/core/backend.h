// What a backend is: a name, the plan it makes of a call or its reason not to, and the run itself.
//
// Only api.cc knows which backends exist. A backend is handed validated calls only, so it checks
// nothing again, and it plans a call once: what it found out is handed back to it for the run.
#pragma once

#include <cstddef>
#include <cstdio>
#include <new>
#include <type_traits>

#include "core/call.h"
#include "evenkeel/evenkeel.h"

namespace evenkeel {

// A reason or a description: a short sentence without an allocation, written only if it is wanted.
struct Note {
  bool wanted;
  char text[768];

  explicit Note(bool is_wanted) : wanted(is_wanted) { text[0] = '\0'; }

  template <typename... Args>
  void set(const char* format, Args... args) {
    if (wanted) std::snprintf(text, sizeof text, format, args...);
  }
};

// The workspace that a call needs in bytes, and whatever else a backend has planned for it.
class AnyPlan {
 public:
  size_t workspace = 0;

  template <typename Plan>
  void set(const Plan& plan, size_t workspace_bytes) {
    static_assert(std::is_trivially_copyable_v<Plan> && sizeof(Plan) <= sizeof plan_ &&
                  alignof(Plan) <= alignof(AnyPlan));
    ::new (plan_) Plan(plan);
    workspace = workspace_bytes;
  }
  template <typename Plan>
  const Plan& get() const {
    return *std::launder(reinterpret_cast<const Plan*>(plan_));
  }

 private:
  alignas(8) unsigned char plan_[512];
};

struct Backend {
  const char* name;
  // Whether it runs the call, and then how; if not, the note says why.
  bool (*plan)(const Call&, AnyPlan&, Note&);
  // Its plan in words. Only called when somebody asks.
  void (*describe)(const Call&, const AnyPlan&, Note&);
  // The workspace in the call is as large as the plan says. Errors are recorded with fail().
  ek_status (*run)(const Call&, const AnyPlan&);
};

}  // namespace evenkeel
