// Rounds and medians (measure.h).
#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace evenkeel::bench {
namespace {

constexpr double kWakingSeconds = 0.002;
constexpr double kBatchSeconds = 0.001;
constexpr int kEstimateCalls = 10;
constexpr double kEstimateSeconds = 0.2;
constexpr int kMinRounds = 5;
constexpr int kMaxRounds = 201;

// The fastest of a few calls: the first ones still meet sleeping threads and cold memory.
double estimate(Device& device, const std::function<void()>& work) {
  double fastest = device.seconds(work, 1), spent = fastest;
  for (int i = 1; i < kEstimateCalls && spent < kEstimateSeconds; ++i) {
    const double seconds = device.seconds(work, 1);
    fastest = std::min(fastest, seconds);
    spent += seconds;
  }
  return std::max(fastest, 1e-9);
}

class Contender {
 public:
  Contender(Device& device, const std::function<void()>& work)
      : device_(device), work_(device.recorded(work)) {
    const double seconds = estimate(device, work_);
    waking_calls_ = static_cast<int>(std::lround(kWakingSeconds / seconds));
    calls_ = std::max(1, static_cast<int>(std::lround(kBatchSeconds / seconds)));
  }

  double turn() {
    device_.settle();
    device_.seconds(work_, waking_calls_);
    return device_.seconds(work_, calls_);
  }

 private:
  Device& device_;
  std::function<void()> work_;
  int waking_calls_ = 0, calls_ = 1;
};

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Race race(Device& device, const std::function<void()>& contender,
          const std::function<void()>& limit, double budget) {
  Contender ours(device, contender), ceiling(device, limit);
  std::vector<double> times, limits, ratios;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(budget);
  for (int round = 0;
       round < kMinRounds || (round < kMaxRounds && std::chrono::steady_clock::now() < end);
       ++round) {
    limits.push_back(ceiling.turn());
    times.push_back(ours.turn());
    ratios.push_back(limits.back() / times.back());
  }
  return {median(times), median(limits), median(ratios)};
}

}  // namespace evenkeel::bench
