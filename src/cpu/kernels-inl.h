// From a plan to its shape's kernels: what every kernels_<type>.cc compiles.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_KERNELS_INL_H_
#undef EVENKEEL_CPU_KERNELS_INL_H_
#else
#define EVENKEEL_CPU_KERNELS_INL_H_
#endif

#include "cpu/pixels-inl.h"
#include "cpu/planes-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/target.h"

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

template <class Shape>
void run_shape(const Call& call, const Plan& plan) {
  const Shape shape(call, plan);
  call.pass == Pass::kForward ? shape.forward() : shape.backward();
}

template <class In>
void run_kernels(const Call& call, const Plan& plan) {
  switch (plan.kind) {
    case Plan::Kind::kRows:
      return run_shape<Rows<In>>(call, plan);
    case Plan::Kind::kPlanes:
      return run_shape<Planes<In>>(call, plan);
    case Plan::Kind::kPixels:
      return run_shape<Pixels<In>>(call, plan);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

// Defines `table` with In's functions for every instruction set; to be used once, after all have
// been compiled.
#if (HWY_TARGETS & HWY_AVX3) && HWY_STATIC_TARGET != HWY_AVX3
#define EK_AVX3_KERNELS(In) &N_AVX3::run_kernels<N_AVX3::In>
#else
#define EK_AVX3_KERNELS(In) nullptr
#endif
#if (HWY_TARGETS & HWY_AVX2) && HWY_STATIC_TARGET != HWY_AVX2
#define EK_AVX2_KERNELS(In) &N_AVX2::run_kernels<N_AVX2::In>
#else
#define EK_AVX2_KERNELS(In) nullptr
#endif
#define EK_KERNEL_TABLE(table, In)                                     \
  const KernelTable table = {EK_AVX3_KERNELS(In), EK_AVX2_KERNELS(In), \
                             &HWY_STATIC_DISPATCH(run_kernels<HWY_STATIC_DISPATCH(In)>)}
