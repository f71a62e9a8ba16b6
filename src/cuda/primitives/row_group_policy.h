// Row groups as host and device know them: how far they extend, and the layout of the shared memory in
// which rows wait and warps exchange what they have reduced.
#pragma once

#include "cuda/runtime/device_properties.h"

namespace evenkeel::cuda {

// How far a row group extends, and with it how it reduces.
enum class Scope {
  kWarp,     // some or all lanes of a warp: shuffles
  kBlock,    // warps of a block: shared memory
  kCluster,  // blocks of a cluster: distributed shared memory
};

// What a row group's code depends on (row_group.cuh).
struct RowGroupPolicy {
  Scope scope;
  int lanes;         // scope kWarp: threads per row
  bool sole;         // the block has one row group
  bool forward;      // exchange slots of the size that is needed, L1 is not invalidated
  bool overlapped;   // another sum may begin before the one before it is finished
  int max_warps;     // of a block
  bool block_first;  // cluster: each block reduces its own values before it sends them
};

// Persistent blocks with rings of rows (ring.cuh).
inline constexpr int kRingThreads = 512;  // of 128 registers: all that an SM has
inline constexpr int kMaxStages = 4;
inline constexpr int kMinStages = 2;  // one row at work, one in flight

// Copies into slots that are not aligned so take up to a third longer.
inline constexpr int kSlotAlignment = 128;

// Bytes of a part of a row in shared memory. An unaligned row keeps its offset within 16 bytes.
constexpr int64_t slot_part_bytes(int64_t cols, int size, bool aligned) {
  return round_up(cols * size + (aligned ? 0 : 15), kSlotAlignment);
}

// Shared memory for the exchange of a row group: one mbarrier for each slot, then the slots, which take
// turns. A slot has three floats for each warp of a cluster (or two doubles for each warp of a block).
inline constexpr int kExchangeBarrierBytes = 128;
inline constexpr int kMostExchangeSlotBytes = 3 * 4 * kMaxCluster * (kRingThreads / kWarp);

// overlapped: a sum begins before the one before it is finished.
constexpr int exchange_slots(bool overlapped) { return overlapped ? 4 : 2; }

constexpr int exchange_bytes(bool overlapped, int slot_bytes = kMostExchangeSlotBytes) {
  return static_cast<int>(
      round_up(kExchangeBarrierBytes + exchange_slots(overlapped) * slot_bytes, kSlotAlignment));
}

// Forward slots are no larger than needed: what is left of shared memory is L1.
constexpr int forward_exchange_slot_bytes(Scope scope, int threads_per_row, int cluster) {
  return 3 * 4 * (scope == Scope::kCluster ? threads_per_row * cluster : kRingThreads) / kWarp;
}

}  // namespace evenkeel::cuda
