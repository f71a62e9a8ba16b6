// The built-in pool: a few detached workers that spin for a moment after a job and then sleep.
//
// A job is published in one 64-bit word (generation, number of tasks, next task), and a thread
// claims a task by a compare-and-swap on it. A worker that wakes late finds nothing to claim and
// disturbs nobody, and the caller claims whatever no worker has taken: it never waits for a thread
// to start. So the pool also works, serially, when it is busy with another caller's job, when it is
// entered from one of its own tasks, and in a forked child without workers.
#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace evenkeel {
namespace {

constexpr int32_t kMaxThreads = 1024;
constexpr int kSpins =
    20000;  // up to a millisecond of pause instructions: bridges the gap between two layers' norms

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int current_processor() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Schedulers may wake a worker on the very processor that its caller keeps busy, and take
// milliseconds to notice. Moves this thread from there to another processor that it may use.
void leave_processor([[maybe_unused]] int taken) {
#ifdef __linux__
  cpu_set_t allowed;
  if (taken < 0 || sched_getcpu() != taken || sched_getaffinity(0, sizeof allowed, &allowed) != 0)
    return;
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<size_t>(taken), &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0)
    sched_setaffinity(0, sizeof allowed, &allowed);
#endif
}

class Pool {
 public:
  // Never destroyed: workers may outlive static destructors.
  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }

  void run(int64_t tasks, void (*task)(void*, int64_t), void* argument) {
    if (tasks > kMaxThreads || busy_.test_and_set(std::memory_order_acquire)) {
      for (int64_t i = 0; i < tasks; ++i) task(argument, i);
      return;
    }
    grow(static_cast<int>(tasks) - 1);
    task_ = task;
    argument_ = argument;
    callers_processor_.store(current_processor(), std::memory_order_relaxed);
    unfinished_.store(tasks, std::memory_order_relaxed);
    generation_ = (generation_ + 1) & 0xffffffff;
    job_.store(generation_ << 32 | static_cast<uint64_t>(tasks) << 16, std::memory_order_release);
    published_.fetch_add(1, std::memory_order_release);
    published_.notify_all();
    while (claim_and_run()) {
    }
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < kSpins) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
    busy_.clear(std::memory_order_release);
  }

 private:
  bool claim_and_run() {
    uint64_t job = job_.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t tasks = job >> 16 & 0xffff;
      const uint64_t next = job & 0xffff;
      if (next >= tasks) return false;
      // A successful claim keeps the job alive until its task is finished, so task_ and argument_
      // are stable.
      if (job_.compare_exchange_weak(job, job + 1, std::memory_order_acq_rel)) {
        task_(argument_, static_cast<int64_t>(next));
        unfinished_.fetch_sub(1, std::memory_order_release);
        return true;
      }
    }
  }

  void work() {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < kSpins && published_.load(std::memory_order_acquire) == seen;
           ++spins) {
        relax();
      }
      published_.wait(seen, std::memory_order_acquire);
      seen = published_.load(std::memory_order_acquire);
      leave_processor(callers_processor_.load(std::memory_order_relaxed));
      while (claim_and_run()) {
      }
    }
  }

  void grow(int wanted) {
    for (; workers_ < wanted; ++workers_) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        return;  // the system gives no more threads: the caller does the work
      }
    }
  }

  std::atomic_flag busy_;  // with one caller's job
  void (*task_)(void*, int64_t) = nullptr;
  void* argument_ = nullptr;
  std::atomic<int> callers_processor_{-1};
  uint64_t generation_ = 0;
  int workers_ = 0;
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<uint32_t> published_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
};

}  // namespace

Parallel::Parallel(int32_t threads) : parallel_ EK_PARALLEL_INIT {
  static const int32_t processors = std::max(1u, std::thread::hardware_concurrency());
  parallel_.threads = std::min(threads > 0 ? threads : processors, kMaxThreads);
  parallel_.run = [](void*, int64_t tasks, void (*task)(void*, int64_t), void* argument) {
    Pool::instance().run(tasks, task, argument);
  };
}

}  // namespace evenkeel
