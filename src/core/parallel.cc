// The built-in pool: a few detached workers that spin for a moment after a job and then sleep.
//
// A job is published in one 64-bit word (generation, number of tasks, next task), and a thread
// claims a task by a compare-and-swap on it. A worker that wakes late finds nothing to claim and
// disturbs nobody, and the caller claims whatever no worker has taken: it never waits for a thread
// to start. So the pool also works, serially, when it is busy with another caller's job, when it is
// entered from one of its own tasks, and where the system gives it no threads.
//
// The pool outlives everything: it is ready before the first call, and workers may run until the
// process is gone, so nothing here is constructed late, allocated or destroyed, and the library is
// never unloaded (CMakeLists.txt). A forked child starts with an idle pool that has no workers.
#include "core/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <csignal>
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

// Threads that are made meanwhile never get the process's signals: a program may block one in its
// own threads, to wait for it, long after the pool has started. Faults of a thread itself still
// reach their handlers, and so do the ticks of profilers.
class SignalsHeldBack {
 public:
  SignalsHeldBack() {
    sigset_t signals;
    sigfillset(&signals);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGPROF})
      sigdelset(&signals, own);
    pthread_sigmask(SIG_SETMASK, &signals, &before_);
  }
  ~SignalsHeldBack() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeldBack(const SignalsHeldBack&) = delete;
  SignalsHeldBack& operator=(const SignalsHeldBack&) = delete;

 private:
  sigset_t before_;
};

class Pool {
 public:
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

  // In a forked child: the workers are gone, and so is the caller who may have kept them busy.
  void start_over() {
    workers_ = 0;
    job_.store(0, std::memory_order_relaxed);
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

  [[noreturn]] void work() {
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

  // As far as the system gives threads: the caller does what nobody else does.
  void grow(int wanted) {
    if (workers_ >= wanted) return;
    const SignalsHeldBack signals;
    for (; workers_ < wanted; ++workers_) {
      pthread_t worker;
      const auto work = [](void* pool) -> void* { static_cast<Pool*>(pool)->work(); };
      if (pthread_create(&worker, nullptr, work, this) != 0) return;
      pthread_detach(worker);
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

constinit Pool pool;

// Found out when the library is loaded. A child that is forked while another thread is inside a
// call must not find the lock of a half-made local static.
const int32_t kProcessors = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
[[maybe_unused]] const int kForkHandler =
    pthread_atfork(nullptr, nullptr, [] { pool.start_over(); });

}  // namespace

Parallel::Parallel(int32_t threads) : parallel_ EK_PARALLEL_INIT {
  parallel_.threads = std::min(threads > 0 ? threads : kProcessors, kMaxThreads);
  parallel_.run = [](void*, int64_t tasks, void (*task)(void*, int64_t), void* argument) {
    pool.run(tasks, task, argument);
  };
}

}  // namespace evenkeel
