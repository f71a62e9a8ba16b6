// Quantization to 8 bits as evenkeel.h defines it, from the numbers of each format: the tests' own view, one value
// after the other, without the library's code.
#ifndef EVENKEEL_TESTS_SUPPORT_QUANTIZED_H_
#define EVENKEEL_TESTS_SUPPORT_QUANTIZED_H_

#include <string>

#include "support/problem.h"

namespace evenkeel::support {

// The largest number of the format.
float largest_of(ek_dtype dtype);

// What cases with scale=tensor are given: values beyond 3 saturate.
float tensor_scale(ek_dtype dtype);

// The code of a value that is scaled.
unsigned char code_of(ek_dtype dtype, float scaled);

// Whether two codes are the same number; all NaNs are.
bool same_code(ek_dtype dtype, unsigned char a, unsigned char b);

// The norm that a problem quantizes: the same inputs, y in float32. Not run yet.
Problem make_unquantized(const Problem& problem);

// Compares y, the scales and what else there is with those of the norm, quantized. Both have been run in the same way.
// "" or what differs.
std::string compare_quantized(const Problem& problem, const Problem& norm);

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_QUANTIZED_H_
