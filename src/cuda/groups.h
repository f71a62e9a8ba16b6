// Group norm on a GPU.
#pragma once

#include "core/backend.h"
#include "cuda/plan.h"

namespace evenkeel::cuda {

bool accepts_groups(const Call& call, const GroupPlan& plan, Note& note);
void describe_groups(const Call& call, const GroupPlan& plan, Note& note);
ek_status run_groups(const Call& call, const GroupPlan& plan);

}  // namespace evenkeel::cuda
