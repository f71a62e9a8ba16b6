// The threads of the host's ceiling.
//
// Apart from the library's pool, which is what is measured. A job is a number of shares; the
// remaining ones are counted down in one word together with the job's generation, and whoever
// lowers it owns a share. So the caller, who takes part, waits for no thread that has yet to wake
// up. The others spin for about a millisecond after a job, so that jobs in a row find them awake,
// and then sleep.
#ifndef EVENKEEL_BENCH_HOST_THREADS_H_
#define EVENKEEL_BENCH_HOST_THREADS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace evenkeel::bench {

class HostThreads {
 public:
  explicit HostThreads(int count);
  ~HostThreads();
  HostThreads(const HostThreads&) = delete;
  HostThreads& operator=(const HostThreads&) = delete;

  int count() const { return static_cast<int>(helpers_.size()) + 1; }

  // Calls share(i) for every i in [0, shares) and waits for all.
  void run(uint32_t shares, const std::function<void(uint32_t)>& share);

 private:
  void help();
  bool claim_and_run();

  std::vector<std::thread> helpers_;
  const std::function<void(uint32_t)>* share_ = nullptr;
  std::atomic<uint64_t> job_{0};  // generation << 32 | shares that nobody has taken yet
  std::atomic<uint32_t> unfinished_{0};
  std::atomic<uint32_t> generation_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_BENCH_HOST_THREADS_H_
