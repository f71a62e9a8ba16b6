// Group norm on a GPU.
#pragma once

#include "core/backend.h"

namespace evenkeel::cuda {

bool accepts_groups(const Call& call, Note& note);
void describe_groups(const Call& call, Note& note);
size_t groups_workspace(const Call& call);
ek_status run_groups(const Call& call);

}  // namespace evenkeel::cuda
