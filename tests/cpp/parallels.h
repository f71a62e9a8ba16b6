// Callers' threads (ek_parallel) of several kinds, all of which must give the same bits.
#ifndef EVENKEEL_TESTS_CPP_PARALLELS_H_
#define EVENKEEL_TESTS_CPP_PARALLELS_H_

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "evenkeel/evenkeel.h"

namespace evenkeel::support {

using Task = void (*)(void* argument, int64_t index);

inline void run_in_order(void*, int64_t tasks, Task task, void* argument) {
  for (int64_t i = 0; i < tasks; ++i) task(argument, i);
}

inline void run_reversed(void*, int64_t tasks, Task task, void* argument) {
  for (int64_t i = tasks; i-- > 0;) task(argument, i);
}

inline void run_on_threads(void*, int64_t tasks, Task task, void* argument) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) task(argument, i);
  };
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < std::min<int64_t>(tasks, 4); ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

inline ek_parallel make_parallel(int threads, decltype(&run_in_order) run,
                                 void* context = nullptr) {
  return {sizeof(ek_parallel), threads, run, context};
}

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_CPP_PARALLELS_H_
