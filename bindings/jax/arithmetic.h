// IEEE arithmetic for as long as an object of it lives. XLA lets some of its threads flush denormal
// numbers to zero; results must depend neither on the thread nor on the framework.
#pragma once

#include <cfenv>

namespace evenkeel::jax_binding {

class IeeeArithmetic {
 public:
  IeeeArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~IeeeArithmetic() { std::fesetenv(&before_); }
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace evenkeel::jax_binding
