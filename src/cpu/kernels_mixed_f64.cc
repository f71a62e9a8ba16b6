// Kernels for calls whose tensors differ in type, with arithmetic in f64, for every instruction
// set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels_mixed_f64.cc"
#include <hwy/foreach_target.h>
// Highway's list of targets has to come first.
#include "cpu/kernels-inl.h"

#if HWY_ONCE
namespace evenkeel {

EK_KERNEL_TABLE(kMixedF64Kernels, Any<double>);

}  // namespace evenkeel
#endif
