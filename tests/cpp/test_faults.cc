// What goes wrong around a call: forks, exits, no threads to be had, no memory, too many callers,
// signals. Every test happens in a process of its own that has not used the pool before, and that
// is ended if it hangs.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "support/problem.h"

namespace {

std::atomic<int> threads_to_be_had{INT_MAX};
std::atomic<bool> memory_to_be_had{true};

}  // namespace

// The library finds these functions of the program before those of the system.

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) noexcept {
  using Create = decltype(&pthread_create);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_to_be_had.fetch_sub(1) <= 0) return EAGAIN;
  return create(thread, attributes, start, argument);
}

[[gnu::noinline]] void* operator new(size_t size) {
  void* const memory = memory_to_be_had ? std::malloc(size == 0 ? 1 : size) : nullptr;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace evenkeel::support {
namespace {

constexpr unsigned kSeconds = 60;  // for one process

void expect_success(pid_t process) {
  int status = 0;
  ASSERT_EQ(waitpid(process, &status, 0), process);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
    ADD_FAILURE() << "hangs: ended after " << kSeconds << " seconds";
  } else if (WIFSIGNALED(status)) {
    ADD_FAILURE() << "died: " << strsignal(WTERMSIG(status));
  } else {
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
}

int failures() {
  return testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
}

template <class Body>
pid_t start_process(const Body& body) {
  std::fflush(nullptr);
  const pid_t process = fork();
  if (process == 0) {
    alarm(kSeconds);
    const int before = failures();
    body();
    std::fflush(nullptr);
    _exit(failures() == before ? 0 : 1);
  }
  return process;
}

template <class Body>
void in_a_process(const Body& body) {
  expect_success(start_process(body));
}

int64_t threads_now() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// A backward call with threads of the pool, whose results are known.
class Call {
 public:
  explicit Call(int threads)
      : expected_(parse_case("layer_norm rows=300 cols=257 x=f32")),
        problem_(expected_.spec(), expected_.inputs()) {
    EXPECT_EQ(expected_.save_statistics(kCpu), "");
    EXPECT_EQ(expected_.backward(kCpu), "");
    problem_.take_statistics(expected_);
    EXPECT_EQ(problem_.prepare({"cpu", threads, nullptr}, true, &execution_), "");
  }

  // Allocates nothing itself.
  bool gives_the_same_bits() {
    problem_.reset(true);
    return ek_backward(&problem_.problem(), &problem_.backward_args(), &execution_) == EK_OK &&
           problem_.buffer(Tensor::kDx) == expected_.buffer(Tensor::kDx) &&
           problem_.buffer(Vector::kDweight) == expected_.buffer(Vector::kDweight) &&
           problem_.buffer(Vector::kDbias) == expected_.buffer(Vector::kDbias);
  }

 private:
  Problem expected_, problem_;
  ek_execution execution_;
};

// Threads that make calls until the process is gone; returns when all are at work.
void keep_calling(int callers, int threads) {
  static std::atomic<int> at_work{0};
  for (int i = 0; i < callers; ++i) {
    std::thread([threads] {
      Call call(threads);
      EXPECT_TRUE(call.gives_the_same_bits());
      at_work.fetch_add(1);
      for (;;) call.gives_the_same_bits();
    }).detach();
  }
  while (at_work < callers) std::this_thread::yield();
}

// --- Forks

// Both in the child and in the child's child, which have the call's memory but none of its threads.
TEST(Fork, ChildGetsWorkersOfItsOwn) {
  in_a_process([] {
    Call call(4);
    EXPECT_TRUE(call.gives_the_same_bits());
    EXPECT_EQ(threads_now(), 4);
    in_a_process([&] {
      EXPECT_EQ(threads_now(), 1);
      EXPECT_TRUE(call.gives_the_same_bits());
      EXPECT_EQ(threads_now(), 4);
      in_a_process([&] {
        EXPECT_TRUE(call.gives_the_same_bits());
        EXPECT_EQ(threads_now(), 4);
      });
    });
    EXPECT_TRUE(call.gives_the_same_bits());
    EXPECT_EQ(threads_now(), 4);
  });
}

TEST(Fork, WhileOthersAreInsideCalls) {
  in_a_process([] {
    keep_calling(3, 3);
    for (int i = 0; i < 40; ++i) {
      in_a_process([] {
        Call call(4);
        for (int turn = 0; turn < 3; ++turn) EXPECT_TRUE(call.gives_the_same_bits());
        EXPECT_EQ(threads_now(), 4);
      });
    }
  });
}

// At all moments of it, one microsecond after the other.
TEST(Fork, DuringTheFirstCall) {
  for (int i = 0; i < 60; ++i) {
    in_a_process([i] {
      std::atomic<bool> ready{false};
      std::thread first([&ready] {
        Problem problem(parse_case("rms_norm rows=700 cols=64 x=bf16"));
        ready = true;
        EXPECT_EQ(problem.forward({"cpu", 3, nullptr}), "");
      });
      while (!ready) {
      }
      const auto moment = std::chrono::steady_clock::now() + std::chrono::microseconds(i);
      while (std::chrono::steady_clock::now() < moment) {
      }
      in_a_process([] { EXPECT_TRUE(Call(3).gives_the_same_bits()); });
      first.join();
    });
  }
}

// --- The end of a process

TEST(Exit, WhileOthersAreInsideCalls) {
  for (int i = 0; i < 20; ++i) {
    in_a_process([i] {
      keep_calling(3, 3);
      std::this_thread::sleep_for(std::chrono::microseconds(100 * i));
      std::exit(0);
    });
  }
}

// --- Nothing to be had

TEST(Threads, AsManyAsTheSystemGives) {
  for (const int given : {0, 1, 2, 5}) {
    in_a_process([given] {
      Call call(8);
      threads_to_be_had = given;
      for (int turn = 0; turn < 3; ++turn) EXPECT_TRUE(call.gives_the_same_bits());
      EXPECT_EQ(threads_now(), 1 + given);
      threads_to_be_had = INT_MAX;
      EXPECT_TRUE(call.gives_the_same_bits());
      EXPECT_EQ(threads_now(), 8);
    });
  }
}

// Neither for the pool nor for the message of a call that fails.
TEST(Memory, IsNotNeeded) {
  in_a_process([] {
    Call call(4);
    memory_to_be_had = false;
    const bool same = call.gives_the_same_bits();
    const ek_status failed = ek_backward(nullptr, nullptr, nullptr);
    memory_to_be_had = true;
    EXPECT_TRUE(same);
    EXPECT_EQ(threads_now(), 4);
    EXPECT_EQ(failed, EK_INVALID_ARGUMENT);
    EXPECT_STREQ(ek_last_error(), "problem is NULL, but is required");
  });
}

// --- Too many callers

TEST(Load, ManyProcessesWithManyCallersEach) {
  std::vector<pid_t> processes;
  for (int process = 0; process < 8; ++process) {
    processes.push_back(start_process([] {
      std::vector<std::thread> callers;
      for (int caller = 0; caller < 8; ++caller) {
        callers.emplace_back([] {
          Call call(64);
          for (int turn = 0; turn < 10; ++turn) EXPECT_TRUE(call.gives_the_same_bits());
        });
      }
      for (std::thread& caller : callers) caller.join();
    }));
  }
  for (const pid_t process : processes) expect_success(process);
}

// --- Signals

// A program that waits for a signal blocks it in all of its threads: those of the pool must not be
// the ones to receive it.
TEST(Signals, AreNotForWorkers) {
  in_a_process([] {
    EXPECT_TRUE(Call(4).gives_the_same_bits());
    EXPECT_EQ(threads_now(), 4);
    sigset_t signals, pending;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    kill(getpid(), SIGUSR1);
    sigpending(&pending);
    EXPECT_TRUE(sigismember(&pending, SIGUSR1));
  });
}

}  // namespace
}  // namespace evenkeel::support
