// Launches the last step of dweight and dbias (primitives/reduce_partials.cuh).
#include "cuda/primitives/reduce_partials.h"

#include "cuda/arguments.h"
#include "cuda/launch.h"

namespace evenkeel::cuda {

ek_status launch_reduce_partials(const Call& call, Kernel& kernel, const char* dweight_partials,
                                 const char* dbias_partials, int64_t count) {
  ReducePartialsArguments arguments{
      .partials = {dweight_partials, dbias_partials},
      .out = {{call.dweight.data, call.dweight.dtype}, {call.dbias.data, call.dbias.dtype}},
      .cols = call.channels,
      .count = static_cast<int>(count),
      .lanes = reduce_lanes(call.channels, count)};
  return launch(call,
                {.kernel = kernel,
                 .blocks = ceil_div(call.channels, arguments.lanes),
                 .rows = 2,
                 .threads = kReduceThreads},
                &arguments);
}

}  // namespace evenkeel::cuda
