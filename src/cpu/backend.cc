// The CPU backend: picks the instruction set once, and for each call the kernels of its element
// types.
#include "cpu/backend.h"

#include <hwy/targets.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/plan.h"
#include "cpu/target.h"

namespace evenkeel {
namespace {

const char* name_of(Target target) {
  switch (target) {
    case Target::kAvx3:
      return "AVX3";
    case Target::kAvx2:
      return "AVX2";
    case Target::kBaseline:
      return hwy::TargetName(HWY_STATIC_TARGET);
  }
  return "";
}

bool runs_here(Target target) {
  if (kF32Kernels[static_cast<int>(target)] == nullptr) return false;
#if defined(__x86_64__) || defined(__i386__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  if (target == Target::kAvx2) return avx2;
  if (target == Target::kAvx3) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd");
  }
#endif
  return true;
}

struct Choice {
  int target = -1;  // -1: the environment asks for one that this machine does not have
  const char* wanted = nullptr;
};

Choice choose() {
  Choice choice;
  choice.wanted = std::getenv("EVENKEEL_CPU_TARGET");
  for (int t = 0; t < kTargets && choice.target < 0; ++t) {
    const auto target = static_cast<Target>(t);
    if (!runs_here(target)) continue;
    if (choice.wanted == nullptr || std::strcmp(choice.wanted, name_of(target)) == 0)
      choice.target = t;
  }
  return choice;
}

// Made when the library is loaded: see core/parallel.cc.
const Choice kChoice = choose();

const KernelTable& kernels_for(Storage storage) {
  switch (storage) {
    case Storage::kF32:
      return kF32Kernels;
    case Storage::kF64:
      return kF64Kernels;
    case Storage::kF16:
      return kF16Kernels;
    case Storage::kBF16:
      return kBF16Kernels;
    case Storage::kMixedF32:
      return kMixedF32Kernels;
    case Storage::kMixedF64:
      break;
  }
  return kMixedF64Kernels;
}

const char* name_of(Plan::Kind kind) {
  switch (kind) {
    case Plan::Kind::kRows:
      return "rows";
    case Plan::Kind::kPlanes:
      return "planes";
    case Plan::Kind::kPixels:
      return "pixels";
  }
  return "";
}

bool plan(const Call& call, AnyPlan& result, Note& note) {
  if (call.device != EK_CPU) {
    note.set("tensors are on a device, and this backend reads host memory");
    return false;
  }
  if (kChoice.target < 0) {
    note.set(
        "EVENKEEL_CPU_TARGET is %s, which this build or machine does not have; "
        "ek_cpu_target_name() lists those "
        "that it has",
        kChoice.wanted);
    return false;
  }
  const Plan plan = make_plan(call);
  result.set(plan, plan.total);
  return true;
}

void describe(const Call& call, const AnyPlan& planned, Note& note) {
  const Plan& plan = planned.get<Plan>();
  const bool residual = call.residual || call.dsum || call.dresidual;
  char modulated[64] = "";
  if (call.modulates()) {
    std::snprintf(modulated, sizeof modulated, ", modulated by %lld sample%s",
                  static_cast<long long>(call.samples), call.samples == 1 ? "" : "s");
  }
  note.set(
      "%s, %s kernels%s%s%s%s, arithmetic in %s, %lld thread%s%s%s",
      name_of(static_cast<Target>(kChoice.target)), name_of(plan.kind),
      residual ? " with a residual" : "", modulated, call.quantizes() ? ", y quantized to " : "",
      call.quantizes() ? name_of(call.y.dtype) : "", name_of(call.compute),
      static_cast<long long>(plan.shards), plan.shards == 1 ? "" : "s",
      plan.split ? ", statistics split over threads" : "", plan.stream ? ", streaming stores" : "");
}

ek_status run(const Call& call, const AnyPlan& planned) {
  const Plan& plan = planned.get<Plan>();
  kernels_for(plan.storage)[kChoice.target](call, plan);
  return EK_OK;
}

}  // namespace

const Backend kCpuBackend = {"cpu", plan, describe, run};

const char* cpu_target_name(int32_t index) {
  if (index < 0) return nullptr;
  for (int t = 0; t < kTargets; ++t) {
    if (runs_here(static_cast<Target>(t)) && index-- == 0) return name_of(static_cast<Target>(t));
  }
  return nullptr;
}

}  // namespace evenkeel
