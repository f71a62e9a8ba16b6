// XLA's threads as the library takes them (ek_parallel).
//
// XLA may run what is scheduled at once, late, or in the calling thread, and the calling thread may
// itself be one of the pool. So nobody waits for a thread to start: every thread claims tasks by a
// counter, the calling one too, and at the end it waits only for tasks that others are running. A
// helper that starts late finds nothing to claim; what it looks at lives as long as it does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "arithmetic.h"
#include "evenkeel/evenkeel.h"
#include "xla/ffi/api/ffi.h"

namespace evenkeel::jax_binding {

class Pool {
 public:
  explicit Pool(xla::ffi::ThreadPool& threads) : threads_(threads) {}

  // For the time of a call.
  const ek_parallel* parallel() {
    parallel_.threads = static_cast<int32_t>(std::max<int64_t>(1, threads_.num_threads()));
    parallel_.run = run;
    parallel_.context = this;
    return &parallel_;
  }

 private:
  using Task = void (*)(void* argument, int64_t index);

  struct Job {
    const int64_t tasks;
    const Task task;
    void* const argument;
    std::atomic<int64_t> next{0}, done{0};

    void work() {
      const IeeeArithmetic arithmetic;
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        task(argument, i);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) done.notify_one();
      }
    }

    void wait() const {
      for (int64_t seen; (seen = done.load(std::memory_order_acquire)) < tasks;)
        done.wait(seen, std::memory_order_acquire);
    }
  };

  static void run(void* context, int64_t tasks, Task task, void* argument) {
    Pool& pool = *static_cast<Pool*>(context);
    const auto job = std::make_shared<Job>(tasks, task, argument);
    const int64_t helpers = std::min<int64_t>(tasks, pool.parallel_.threads) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool.threads_.Schedule([job] { job->work(); });
    job->work();
    job->wait();
  }

  xla::ffi::ThreadPool& threads_;
  ek_parallel parallel_ = EK_PARALLEL_INIT;
};

}  // namespace evenkeel::jax_binding
