// Tag types for what memory holds, and the type that arithmetic on them is done in.
#pragma once

#include <cstdint>

namespace evenkeel {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

template <class Stored>
struct Stored_ {
  using Compute = float;
};
template <>
struct Stored_<double> {
  using Compute = double;
};

}  // namespace evenkeel
