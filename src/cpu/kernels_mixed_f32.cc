// Kernels for calls whose tensors differ in type, with arithmetic in f32, for every instruction
// set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels_mixed_f32.cc"
#include <hwy/foreach_target.h>
// Highway's list of targets has to come first.
#include "cpu/kernels-inl.h"

#if HWY_ONCE
namespace evenkeel {

EK_KERNEL_TABLE(kMixedF32Kernels, Any<float>);

}  // namespace evenkeel
#endif
