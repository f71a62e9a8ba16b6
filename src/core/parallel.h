// Threads: the caller's own (ek_parallel) or the built-in pool, behind one type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "evenkeel/evenkeel.h"

namespace evenkeel {

class Parallel {
 public:
  // The built-in pool with `threads` threads (the caller's included); 0 means one per processor.
  Parallel() : Parallel(0) {}
  explicit Parallel(int32_t threads);
  explicit Parallel(const ek_parallel& callers) : parallel_(callers) {}

  int32_t threads() const { return parallel_.threads; }

  // Calls body(i) for every i in [0, tasks), at most threads() at once. body must be safe to call
  // concurrently.
  template <typename Body>
  void run(int64_t tasks, Body&& body) const {
    if (tasks == 1) return body(int64_t{0});
    using Plain = std::remove_reference_t<Body>;
    parallel_.run(
        parallel_.context, tasks,
        [](void* argument, int64_t index) { (*static_cast<Plain*>(argument))(index); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  ek_parallel parallel_;
};

}  // namespace evenkeel
