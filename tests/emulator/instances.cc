// Kernels that g++ 12 does not instantiate where the library names them.
#include "cuda/group/pipeline.cuh"
#include "cuda/group/policy.h"

namespace evenkeel::cuda {

template void clear_counters<kClearThreads>(ClearArguments);

}  // namespace evenkeel::cuda
