// Layer norm and RMS norm on a GPU.
#pragma once

#include "core/backend.h"

namespace evenkeel::cuda {

void describe_rows(const Call& call, Note& note);
size_t rows_workspace(const Call& call);
ek_status run_rows(const Call& call);

}  // namespace evenkeel::cuda
