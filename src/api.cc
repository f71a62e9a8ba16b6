// extern "C": validate a call, have the first backend that can plan it, run it. The only place that
// knows which backends exist.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>

#include "core/backend.h"
#include "core/error.h"
#include "core/validate.h"
#include "cpu/backend.h"
#if defined(EVENKEEL_HAS_CUDA)
#include "cuda/backend.h"
#endif
#include "evenkeel/evenkeel.h"
#include "reference/backend.h"

namespace evenkeel {
namespace {

const Backend* const kBackends[] = {
#if defined(EVENKEEL_HAS_CUDA)
    &kCudaBackend,
#endif
    &kCpuBackend, &kReferenceBackend};

// Best first: one line for each backend, as far as there is room.
class Report {
 public:
  Report() : Report(nullptr, 0) {}
  Report(char* text, size_t capacity) : text_(text), left_(text == nullptr ? 0 : capacity) {
    if (left_ > 0) *text_ = '\0';
  }

  bool wanted() const { return left_ > 0; }

  void add(const char* backend, const char* verdict, const Note& why) {
    if (!wanted()) return;
    const int written = std::snprintf(text_, left_, "%s: %s: %s\n", backend, verdict, why.text);
    const size_t taken = written < 0 ? 0 : static_cast<size_t>(written);
    text_ += taken < left_ ? taken : left_ - 1;
    left_ = taken < left_ ? left_ - taken : 0;
  }

 private:
  char* text_;
  size_t left_;
};

// A call that is validated and planned. It lies in the caller's ek_prepared and is copied with it.
struct Prepared {
  const Backend* backend = nullptr;  // nullptr: none runs it
  Call call;
  AnyPlan plan;
};
static_assert(sizeof(ek_prepared) == 2048, "callers have made room for that much");
static_assert(sizeof(Prepared) <= sizeof ek_prepared::opaque &&
              offsetof(ek_prepared, opaque) % alignof(Prepared) == 0 &&
              std::is_trivially_copyable_v<Prepared>);

// Asks the backends in order, or only the one that is wanted. Words, and a look at those that come
// after the first one that runs the call, are for a report only.
void ask_backends(const char* wanted, Report& report, Prepared& prepared) {
  prepared.backend = nullptr;
  for (const Backend* backend : kBackends) {
    Note note(report.wanted());
    if (wanted != nullptr && std::strcmp(wanted, backend->name) != 0) {
      note.set("execution.backend asks for %s", wanted);
      report.add(backend->name, "not needed", note);
    } else if (prepared.backend != nullptr) {
      note.set("%s comes first", prepared.backend->name);
      report.add(backend->name, "not needed", note);
    } else if (!backend->plan(prepared.call, prepared.plan, note)) {
      report.add(backend->name, "declined", note);
    } else {
      prepared.backend = backend;
      if (!report.wanted()) return;
      backend->describe(prepared.call, prepared.plan, note);
      report.add(backend->name, "runs", note);
    }
  }
}

// No backend runs the call: says why.
[[gnu::cold]] ek_status refuse(const char* wanted, Prepared& prepared) {
  const auto is_wanted = [wanted](const Backend* backend) {
    return wanted == nullptr || std::strcmp(wanted, backend->name) == 0;
  };
  if (std::none_of(std::begin(kBackends), std::end(kBackends), is_wanted)) {
    char names[128];
    size_t length = 0;
    for (const Backend* backend : kBackends) {
      length += static_cast<size_t>(std::snprintf(names + length, sizeof names - length, "%s%s",
                                                  length == 0 ? "" : ", ", backend->name));
    }
    return fail(EK_INVALID_ARGUMENT, "execution.backend is \"%s\", but must be NULL or one of %s",
                wanted, names);
  }
  char refusals[768];
  Report report(refusals, sizeof refusals);
  ask_backends(wanted, report, prepared);
  return fail(EK_UNSUPPORTED, "no backend can run this call:\n%s", refusals);
}

template <typename Args>
ek_status prepare(const ek_problem* problem, const Args* args, const ek_execution* execution,
                  Report report, Prepared& prepared) {
  clear_error();
  const ek_status status = validate(problem, args, execution, prepared.call);
  if (status != EK_OK) return status;
  ask_backends(execution->backend, report, prepared);
  return prepared.backend == nullptr ? refuse(execution->backend, prepared) : EK_OK;
}

template <typename Args>
ek_status workspace(const ek_problem* problem, const Args* args, const ek_execution* execution,
                    size_t* bytes) {
  Prepared prepared;
  const ek_status status = prepare(problem, args, execution, {}, prepared);
  if (status != EK_OK) return status;
  if (bytes == nullptr) return fail(EK_INVALID_ARGUMENT, "bytes is NULL, but is required");
  *bytes = prepared.plan.workspace;
  return EK_OK;
}

template <typename Args>
ek_status run(const ek_problem* problem, const Args* args, const ek_execution* execution) {
  Prepared prepared;
  ek_status status = prepare(problem, args, execution, {}, prepared);
  if (status != EK_OK) return status;
  status = validate_workspace(prepared.call, prepared.plan.workspace, "execution.workspace");
  return status == EK_OK ? prepared.backend->run(prepared.call, prepared.plan) : status;
}

template <typename Args>
ek_status prepare_for_caller(const ek_problem* problem, const Args* args,
                             const ek_execution* execution, ek_prepared* result) {
  if (result == nullptr) return fail(EK_INVALID_ARGUMENT, "prepared is NULL, but is required");
  Prepared& prepared = *::new (result->opaque) Prepared;
  const ek_status status = prepare(problem, args, execution, {}, prepared);
  result->workspace_size = status == EK_OK ? prepared.plan.workspace : 0;
  return status;
}

ek_status run_prepared(const ek_prepared* given, void* workspace, size_t workspace_size) {
  clear_error();
  if (given == nullptr) return fail(EK_INVALID_ARGUMENT, "prepared is NULL, but is required");
  const auto& prepared = *std::launder(reinterpret_cast<const Prepared*>(given->opaque));
  if (std::find(std::begin(kBackends), std::end(kBackends), prepared.backend) ==
      std::end(kBackends)) {
    return fail(EK_INVALID_ARGUMENT,
                "prepared holds no call, but must be one for which ek_prepare_forward() or "
                "ek_prepare_backward() gave EK_OK");
  }
  Call call = prepared.call;
  call.workspace = static_cast<char*>(workspace);
  call.workspace_size = workspace_size;
  const ek_status status = validate_workspace(call, prepared.plan.workspace, "workspace");
  return status == EK_OK ? prepared.backend->run(call, prepared.plan) : status;
}

template <typename Args>
ek_status explain(const ek_problem* problem, const Args* args, const ek_execution* execution,
                  const char** name, char* text, size_t capacity) {
  Prepared prepared;
  const ek_status status = prepare(problem, args, execution, {text, capacity}, prepared);
  if (status == EK_OK && name != nullptr) *name = prepared.backend->name;
  return status;
}

}  // namespace
}  // namespace evenkeel

#define EK_STRINGIZE_(value) #value
#define EK_STRINGIZE(value) EK_STRINGIZE_(value)

extern "C" {

ek_status ek_forward_workspace(const ek_problem* problem, const ek_forward_args* args,
                               const ek_execution* execution, size_t* bytes) {
  return evenkeel::workspace(problem, args, execution, bytes);
}

ek_status ek_backward_workspace(const ek_problem* problem, const ek_backward_args* args,
                                const ek_execution* execution, size_t* bytes) {
  return evenkeel::workspace(problem, args, execution, bytes);
}

ek_status ek_forward(const ek_problem* problem, const ek_forward_args* args,
                     const ek_execution* execution) {
  return evenkeel::run(problem, args, execution);
}

ek_status ek_backward(const ek_problem* problem, const ek_backward_args* args,
                      const ek_execution* execution) {
  return evenkeel::run(problem, args, execution);
}

ek_status ek_prepare_forward(const ek_problem* problem, const ek_forward_args* args,
                             const ek_execution* execution, ek_prepared* prepared) {
  return evenkeel::prepare_for_caller(problem, args, execution, prepared);
}

ek_status ek_prepare_backward(const ek_problem* problem, const ek_backward_args* args,
                              const ek_execution* execution, ek_prepared* prepared) {
  return evenkeel::prepare_for_caller(problem, args, execution, prepared);
}

ek_status ek_run(const ek_prepared* prepared, void* workspace, size_t workspace_size) {
  return evenkeel::run_prepared(prepared, workspace, workspace_size);
}

ek_status ek_explain_forward(const ek_problem* problem, const ek_forward_args* args,
                             const ek_execution* execution, const char** backend, char* text,
                             size_t capacity) {
  return evenkeel::explain(problem, args, execution, backend, text, capacity);
}

ek_status ek_explain_backward(const ek_problem* problem, const ek_backward_args* args,
                              const ek_execution* execution, const char** backend, char* text,
                              size_t capacity) {
  return evenkeel::explain(problem, args, execution, backend, text, capacity);
}

const char* ek_last_error(void) { return evenkeel::last_error(); }

const char* ek_status_name(ek_status status) {
  switch (status) {
    case EK_OK:
      return "EK_OK";
    case EK_INVALID_ARGUMENT:
      return "EK_INVALID_ARGUMENT";
    case EK_UNSUPPORTED:
      return "EK_UNSUPPORTED";
    case EK_DEVICE_ERROR:
      return "EK_DEVICE_ERROR";
    case EK_INTERNAL_ERROR:
      return "EK_INTERNAL_ERROR";
  }
  return "unknown status";
}

const char* ek_backend_name(int32_t index) {
  const auto count = static_cast<int32_t>(std::size(evenkeel::kBackends));
  return index >= 0 && index < count ? evenkeel::kBackends[index]->name : nullptr;
}

const char* ek_cpu_target_name(int32_t index) { return evenkeel::cpu_target_name(index); }

const char* ek_version(void) {
  return EK_STRINGIZE(EK_VERSION_MAJOR) "." EK_STRINGIZE(EK_VERSION_MINOR) "." EK_STRINGIZE(
      EK_VERSION_PATCH);
}

}  // extern "C"
