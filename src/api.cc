// extern "C": validate, pick the first backend that accepts, run it. The only place that knows
// which backends exist.
#include <cstdio>
#include <cstring>
#include <iterator>

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
  Report(char* text, size_t capacity) : text_(text), left_(text == nullptr ? 0 : capacity) {
    if (left_ > 0) *text_ = '\0';
  }

  void add(const char* backend, const char* verdict, const char* why) {
    if (left_ == 0) return;
    const int written = std::snprintf(text_, left_, "%s: %s: %s\n", backend, verdict, why);
    const size_t taken = written < 0 ? 0 : static_cast<size_t>(written);
    text_ += taken < left_ ? taken : left_ - 1;
    left_ = taken < left_ ? left_ - taken : 0;
  }

 private:
  char* text_;
  size_t left_;
};

// The first backend that accepts, or the one that was asked for. Only a wanted report costs the
// look at the others.
ek_status pick(const Call& call, const char* wanted, Report* report, const Backend*& picked) {
  picked = nullptr;
  bool known = wanted == nullptr;
  char refusals[768];
  Report refused(refusals, sizeof refusals);
  for (const Backend* backend : kBackends) {
    const bool eligible = wanted == nullptr || std::strcmp(wanted, backend->name) == 0;
    known = known || eligible;
    Note note;
    if (!eligible) {
      note.set("execution.backend asks for %s", wanted);
    } else if (picked != nullptr) {
      note.set("%s comes first", picked->name);
    } else if (backend->accepts(call, note)) {
      picked = backend;
      if (report == nullptr) return EK_OK;
      backend->describe(call, note);
      report->add(backend->name, "runs", note.text);
      continue;
    } else {
      refused.add(backend->name, "declined", note.text);
      if (report != nullptr) report->add(backend->name, "declined", note.text);
      continue;
    }
    if (report != nullptr) report->add(backend->name, "not needed", note.text);
  }
  if (picked != nullptr) return EK_OK;
  if (!known) {
    char names[128];
    size_t length = 0;
    for (const Backend* backend : kBackends) {
      length += static_cast<size_t>(std::snprintf(names + length, sizeof names - length, "%s%s",
                                                  length == 0 ? "" : ", ", backend->name));
    }
    return fail(EK_INVALID_ARGUMENT, "execution.backend is \"%s\", but must be NULL or one of %s",
                wanted, names);
  }
  return fail(EK_UNSUPPORTED, "no backend can run this call:\n%s", refusals);
}

template <typename Args>
ek_status prepare(const ek_problem* problem, const Args* args, const ek_execution* execution,
                  Report* report, Call& call, const Backend*& backend) {
  clear_error();
  const ek_status status = validate(problem, args, execution, call);
  return status == EK_OK ? pick(call, execution->backend, report, backend) : status;
}

template <typename Args>
ek_status workspace(const ek_problem* problem, const Args* args, const ek_execution* execution,
                    size_t* bytes) {
  Call call;
  const Backend* backend;
  const ek_status status = prepare(problem, args, execution, nullptr, call, backend);
  if (status != EK_OK) return status;
  if (bytes == nullptr) return fail(EK_INVALID_ARGUMENT, "bytes is NULL, but is required");
  *bytes = backend->workspace(call);
  return EK_OK;
}

template <typename Args>
ek_status run(const ek_problem* problem, const Args* args, const ek_execution* execution) {
  Call call;
  const Backend* backend;
  ek_status status = prepare(problem, args, execution, nullptr, call, backend);
  if (status == EK_OK) status = validate_workspace(call, backend->workspace(call));
  return status == EK_OK ? backend->run(call) : status;
}

template <typename Args>
ek_status explain(const ek_problem* problem, const Args* args, const ek_execution* execution,
                  const char** name, char* text, size_t capacity) {
  Call call;
  const Backend* backend;
  Report report(text, capacity);
  const ek_status status = prepare(problem, args, execution, &report, call, backend);
  if (status == EK_OK && name != nullptr) *name = backend->name;
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
