// Timing in alternating rounds: each contender once per round, so that drift of the machine hits
// all.
//
// A turn is: let the previous contender's threads come to rest, call until the own ones are awake,
// time a batch of calls. What is compared are times of the same round.
#ifndef EVENKEEL_BENCH_MEASURE_H_
#define EVENKEEL_BENCH_MEASURE_H_

#include <functional>
#include <vector>

#include "device.h"

namespace evenkeel::bench {

struct Race {
  double seconds = 0;  // median of the contender's times
  double limit_seconds = 0;
  double of_limit = 0;  // median over the rounds of the limit's time / the contender's
};

// Takes about `budget` seconds, but always a few rounds.
Race race(Device& device, const std::function<void()>& contender,
          const std::function<void()>& limit, double budget);

double median(std::vector<double> values);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_BENCH_MEASURE_H_
