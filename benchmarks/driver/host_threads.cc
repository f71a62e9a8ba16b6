// Threads that wait on a generation counter (host_threads.h).
#include "host_threads.h"

namespace evenkeel::bench {
namespace {

constexpr int kSpins = 20000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

HostThreads::HostThreads(int count) {
  for (int i = 1; i < count; ++i) helpers_.emplace_back([this] { help(); });
}

HostThreads::~HostThreads() {
  stop_ = true;
  ++generation_;
  generation_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void HostThreads::run(uint32_t shares, const std::function<void(uint32_t)>& share) {
  share_ = &share;
  unfinished_ = shares;
  job_ = uint64_t{generation_ + 1} << 32 | shares;
  ++generation_;
  generation_.notify_all();
  while (claim_and_run()) {
  }
  for (int spins = 0; unfinished_ != 0; ++spins) {
    if (spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

bool HostThreads::claim_and_run() {
  uint64_t job = job_;
  do {
    if (static_cast<uint32_t>(job) == 0) return false;
  } while (!job_.compare_exchange_weak(job, job - 1));
  // The job cannot end before this share has, so share_ stays.
  (*share_)(static_cast<uint32_t>(job) - 1);
  --unfinished_;
  return true;
}

void HostThreads::help() {
  for (uint32_t seen = 0; !stop_;) {
    for (int spins = 0; spins < kSpins && generation_ == seen; ++spins) relax();
    generation_.wait(seen);
    seen = generation_;
    while (claim_and_run()) {
    }
  }
}

}  // namespace evenkeel::bench
