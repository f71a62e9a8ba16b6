// Both passes' tuning of row norms.
#pragma once

#include "cuda/row/backward_tuning.h"
#include "cuda/row/forward_tuning.h"
