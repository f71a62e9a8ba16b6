// The processor as a device (device.h).
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <thread>
#include <unordered_map>

#include "device.h"
#include "host_ceiling.h"
#include "host_threads.h"

namespace evenkeel::bench {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLine = 64;
constexpr size_t kWordsPerLine = kLine / sizeof(uint32_t);
// Shares of the ceiling: few enough to cost nothing, enough for a thread that is held up to lose
// little.
constexpr size_t kSharesPerThread = 8;
constexpr size_t kLeastShare = 32 << 10;
// Tensors that begin at equal places within their pages make loads wait for unrelated stores, as
// much in the ceiling as in a norm. So each allocation begins at another place.
constexpr size_t kStagger = 17 * kLine;
// Longer than the library's threads and ours spin before they sleep.
constexpr std::chrono::microseconds kRest{1500};

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

class HostDevice : public Device {
 public:
  explicit HostDevice(int threads) : threads_(threads) {}

  std::string name() const override { return processor_name(); }
  int threads() const override { return threads_.count(); }

  std::string target() const override {
    const char* forced = std::getenv("EVENKEEL_CPU_TARGET");
    if (forced && *forced) return forced;
    const char* best = ek_cpu_target_name(0);
    return best ? best : "none";
  }

  void* allocate(size_t bytes) override {
    auto* block = static_cast<char*>(::operator new (bytes + kPage, std::align_val_t{kPage}));
    char* data = block + next_place_;
    next_place_ = (next_place_ + kStagger) % kPage;
    blocks_[data] = block;
    return data;
  }

  void release(void* memory) override {
    const auto found = blocks_.find(memory);
    ::operator delete (found->second, std::align_val_t{kPage});
    blocks_.erase(found);
  }

  void upload(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

  void direct(ek_execution* execution) const override {
    execution->device = EK_CPU;
    execution->threads = threads();
  }

  void copy(void* out, const void* a, size_t bytes) override {
    share_words(bytes, [=](size_t begin, size_t words) {
      copy_words(static_cast<uint32_t*>(out) + begin, static_cast<const uint32_t*>(a) + begin,
                 words);
    });
  }

  void add(void* out, const void* a, const void* b, size_t bytes) override {
    share_words(bytes, [=](size_t begin, size_t words) {
      add_words(static_cast<uint32_t*>(out) + begin, static_cast<const uint32_t*>(a) + begin,
                static_cast<const uint32_t*>(b) + begin, words);
    });
  }

  double seconds(const std::function<void()>& work, int count) override {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) work();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    return elapsed.count() / std::max(count, 1);
  }

  void settle() override { std::this_thread::sleep_for(kRest); }

 private:
  // Calls part(first word, number of words) for pieces that the threads take one after the other.
  template <class Part>
  void share_words(size_t bytes, const Part& part) {
    const size_t words = bytes / sizeof(uint32_t);
    const size_t most = kSharesPerThread * static_cast<size_t>(threads());
    const size_t shares = std::clamp<size_t>(bytes / kLeastShare, 1, most);
    const size_t step = (words / shares + kWordsPerLine - 1) / kWordsPerLine * kWordsPerLine;
    threads_.run(static_cast<uint32_t>(shares), [&](uint32_t share) {
      const size_t begin = std::min(words, share * step);
      part(begin, share + 1 == shares ? words - begin : std::min(step, words - begin));
    });
  }

  HostThreads threads_;
  size_t next_place_ = 0;
  std::unordered_map<void*, void*> blocks_;
};

}  // namespace

std::unique_ptr<Device> make_host_device(int threads) {
  const int processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return std::make_unique<HostDevice>(threads > 0 ? threads : processors);
}

}  // namespace evenkeel::bench
