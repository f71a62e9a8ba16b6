// Hands out work. Every shard has a share of neighbouring items, so that a core meets the rows of
// its last call again and no two write to one cache line, and helps the others when it is done, so
// that a slow core holds nobody up.
#pragma once

#include <hwy/cache_control.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/parallel.h"

namespace evenkeel {

// Whatever the caller says, work is cut up for this many threads at most.
inline constexpr int64_t kMaxShards = 256;

// Calls body(shard, first, last) for consecutive ranges of [0, items): each starts at a multiple of
// `grain` and has that many items, but for the last one. Backwards, every share begins with what
// the same share ended with the last time.
template <bool kBackwards = false, class Body>
void for_each_range(const Parallel& parallel, int64_t shards, int64_t items, int64_t grain,
                    const Body& body) {
  struct alignas(64) Share {
    int64_t first, end;  // of the ranges
    int64_t next;
  };
  Share shares[kMaxShards];
  const int64_t ranges = (items + grain - 1) / grain;
  const int64_t count = std::max<int64_t>(1, std::min(shards, ranges));
  for (int64_t k = 0; k < count; ++k) {
    const int64_t first = ranges * k / count;
    shares[k] = {first, ranges * (k + 1) / count, first};
  }
  parallel.run(count, [&](int64_t shard) {
    for (int64_t k = 0; k < count; ++k) {
      Share& share = shares[(shard + k) % count];
      const std::atomic_ref<int64_t> next(share.next);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
        const int64_t range = kBackwards ? share.first + share.end - 1 - i : i;
        body(shard, range * grain, std::min((range + 1) * grain, items));
      }
    }
    hwy::FlushStream();  // streaming stores are seen by whoever waits for this shard
  });
}

}  // namespace evenkeel
