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

// Compares a problem that has been run with what its norm gives in float32, quantized; both by the same runner. ""
// or what differs.
std::string check_quantized(const Problem& problem, const Runner& runner);

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_QUANTIZED_H_
