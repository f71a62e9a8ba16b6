// Hands out work: shards take the next few items until none is left, so that a slow core does not
// hold up the others.
#pragma once

#include <hwy/cache_control.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/parallel.h"

namespace evenkeel {

// Calls body(shard, first, last) for consecutive ranges of [0, items) of at most `grain` items
// each.
template <class Body>
void for_each_range(const Parallel& parallel, int64_t shards, int64_t items, int64_t grain,
                    const Body& body) {
  const int64_t ranges = (items + grain - 1) / grain;
  std::atomic<int64_t> next{0};
  parallel.run(std::max<int64_t>(1, std::min(shards, ranges)), [&](int64_t shard) {
    for (int64_t first; (first = next.fetch_add(grain, std::memory_order_relaxed)) < items;) {
      body(shard, first, std::min(first + grain, items));
    }
    hwy::FlushStream();  // streaming stores are seen by whoever waits for this shard
  });
}

}  // namespace evenkeel
