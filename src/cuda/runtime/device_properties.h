// What a split of work may depend on: properties of a device, and the limits that all of them share.
// Plain numbers, so that the split can be tested for GPUs that are absent.
#pragma once

#include <cstdint>

namespace evenkeel::cuda {

inline constexpr int kWarp = 32;  // lanes
inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxCluster = 16;
inline constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;  // of a grid
inline constexpr int64_t kMostGridRows = (int64_t{1} << 16) - 1;

struct DeviceProperties {
  int major = 0, minor = 0;  // compute capability
  int sms = 0;
  int shared_bytes = 0;   // that a block may have
  int cluster_limit = 1;  // the largest cluster that can be launched
  // Clusters of 1, 2, 4, 8, 16 blocks that are resident at once with one block on an SM.
  int clusters[5] = {};

  constexpr bool has_clusters() const { return cluster_limit > 1; }
  constexpr int clusters_of(int size) const {
    int log = 0;
    while (1 << log < size) ++log;
    return clusters[log];
  }
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace evenkeel::cuda
