// The structs of one call, with fields that can be overwritten, for the fuzzer.
//
// Each struct lies at the start of a larger block of zeros, so that a struct_size that is too large
// still names memory that exists. is_backed() decides, independently of the library's own checks,
// whether the tensors that the structs describe lie within the problem's buffers.
#ifndef EVENKEEL_TESTS_FUZZ_MUTATE_H_
#define EVENKEEL_TESTS_FUZZ_MUTATE_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "evenkeel/evenkeel.h"
#include "support/problem.h"

namespace evenkeel::support {

// All buffers that pointers of a call may point into.
std::vector<Buffer*> buffers_of(const Problem& problem);

// A struct with room for fields that do not exist.
template <typename Struct>
class Padded {
 public:
  Padded() : bytes_(std::make_unique<Block>()) {}
  Struct& operator*() { return bytes_->known; }
  Struct* get() { return &bytes_->known; }
  unsigned char& unknown(size_t index) { return bytes_->unknown[index % sizeof bytes_->unknown]; }

 private:
  struct Block {
    Struct known;
    unsigned char unknown[8192] = {};
  };
  std::unique_ptr<Block> bytes_;
};

class CallStructs {
 public:
  CallStructs(const Problem& problem, int threads);

  // Overwrites one field: `field` picks it, `kind` and `value` pick what it is overwritten with.
  void mutate(const Problem& problem, uint8_t field, uint8_t kind, uint8_t value, bool backward);

  ek_status query(bool backward, size_t* bytes);
  ek_status run(bool backward);
  ek_status prepare(bool backward, ek_prepared* prepared);
  ek_status explain(bool backward, char* text, size_t capacity);
  ek_execution& execution() { return *execution_; }

  // Whether all memory that the structs describe is there. Only asked for calls that passed the
  // query.
  bool is_backed(const Problem& problem, bool backward);

 private:
  struct Field {
    enum class Kind { kInt32, kInt64, kDouble, kPointer, kDtype, kStructSize } kind;
    void* address;
  };
  std::vector<Field> fields(bool backward);

  Padded<ek_problem> problem_;
  Padded<ek_forward_args> forward_;
  Padded<ek_backward_args> backward_;
  Padded<ek_execution> execution_;
  Padded<ek_parallel> parallel_;
};

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_FUZZ_MUTATE_H_
