// Layer norm and RMS norm on a GPU.
#pragma once

#include "core/backend.h"
#include "cuda/plan.h"

namespace evenkeel::cuda {

void describe_rows(const Call& call, const Plan& plan, Note& note);
ek_status run_rows(const Call& call, const Plan& plan);

}  // namespace evenkeel::cuda
