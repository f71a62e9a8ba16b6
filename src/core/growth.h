// How the structs of the ABI grow. Fields are only ever added at the end, and struct_size says which of
// them a caller knows:
//
//   as many as the library     an up-to-date caller
//   fewer                      a caller compiled against an older header, down to version 0.1: the others
//                              have the values of the EK_..._INIT macro, which mean what happened before
//   more                       a caller compiled against a later header: they must be zero
//
// A struct has no padding at its end: what lies there in an older caller would be read as the next field.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "evenkeel/evenkeel.h"

namespace evenkeel {

// A struct's size in version 0.1: up to the end of its last field of that version.
template <typename Struct>
inline constexpr size_t kFirstSize = 0;

#define EK_GROWS(Struct, first_last, first_bytes, last)                          \
  template <>                                                                    \
  inline constexpr size_t kFirstSize<Struct> =                                   \
      offsetof(Struct, first_last) + sizeof(Struct::first_last);                 \
  static_assert(sizeof(void*) != 8 || kFirstSize<Struct> == (first_bytes),       \
                "the fields of version 0.1 keep their places");                  \
  static_assert(offsetof(Struct, last) + sizeof(Struct::last) == sizeof(Struct), \
                "name the last field here; no padding behind it")

// The struct, its last field in version 0.1, its size then (64-bit), its last field now.
EK_GROWS(ek_problem, weight_offset, 96, weight_offset);
EK_GROWS(ek_forward_args, rstd, 120, shift);
EK_GROWS(ek_backward_args, dbias, 184, dshift);
EK_GROWS(ek_parallel, context, 24, context);
EK_GROWS(ek_execution, backend, 56, backend);
#undef EK_GROWS

// Embedded by value in the structs above, so these two never grow.
static_assert(sizeof(void*) != 8 || (sizeof(ek_tensor) == 32 && sizeof(ek_vector) == 16));

enum class Taken { kYes, kTooSmall, kUnknownFields };

// Copies a caller's struct of any version whose first field is struct_size. `to` holds the values of
// the EK_..._INIT macro, and `least` is the size of version 0.1.
template <typename Struct>
Taken copy_known(const Struct* from, size_t least, Struct& to) {
  const size_t size = from->struct_size;
  if (size < least) return Taken::kTooSmall;
  const char* bytes = reinterpret_cast<const char*>(from);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + std::min<size_t>(size, 4096),
                  [](char byte) { return byte != 0; })) {
    return Taken::kUnknownFields;
  }
  std::memcpy(&to, bytes, std::min(size, sizeof(Struct)));
  return Taken::kYes;
}

}  // namespace evenkeel
