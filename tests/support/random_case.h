// Random valid cases for the generated tests and the fuzzer: every key of the text form can take
// every value, sizes are mostly small and sometimes long.
#ifndef EVENKEEL_TESTS_SUPPORT_RANDOM_CASE_H_
#define EVENKEEL_TESTS_SUPPORT_RANDOM_CASE_H_

#include "support/cases.h"
#include "support/values.h"

namespace evenkeel::support {

// With at most about `max_elements` elements.
Case random_case(Random& random, int64_t max_elements);

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_RANDOM_CASE_H_
