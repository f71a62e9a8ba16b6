// src/cuda/primitives/ptx.cuh for a host: in front of it in the emulator's include path.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EVENKEEL_DYNAMIC_SHARED(type, name, alignment) \
  type* const name = reinterpret_cast<type*>(evenkeel::emulator::current->own->shared)

namespace evenkeel::cuda {

inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at));
}

namespace ptx {

inline char* shared_pointer(uint32_t at) { return reinterpret_cast<char*>(uintptr_t{at}); }

// Copies are made when the thread waits for them.
inline void copy_async(uint32_t to, const void* from, int bytes = 16) {
  if (to % 16 != 0 || (bytes > 0 && reinterpret_cast<uintptr_t>(from) % 16 != 0)) {
    std::fprintf(stderr, "emulator: a copy of 16 bytes is not aligned\n");
    std::abort();
  }
  emulator::current->open.push_back({shared_pointer(to), static_cast<const char*>(from), bytes});
}
inline void commit_group() {
  emulator::Thread& thread = *emulator::current;
  thread.committed.push_back(std::move(thread.open));
  thread.open.clear();
}
template <int kPending>
void wait_group() {
  auto& groups = emulator::current->committed;
  while (static_cast<int>(groups.size()) > kPending) {
    for (const emulator::Copy& copy : groups.front()) {
      std::memset(copy.to, 0, 16);
      std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    }
    groups.erase(groups.begin());
  }
}

inline void load_shared(uint32_t at, uint4& word) {
  std::memcpy(&word, shared_pointer(at), sizeof word);
}
inline void store_shared(uint32_t at, const uint4& word) {
  std::memcpy(shared_pointer(at), &word, sizeof word);
}

inline void prefetch_line(const char*) {}
inline void prefetch_range(const char*, int) {}

inline void barrier(int id, int threads) {
  emulator::wait(emulator::current->own->named[id], threads);
}
inline void cluster_arrive() {}
inline void cluster_wait() { emulator::wait_for_cluster(); }

inline int cluster_index() { return emulator::current->cluster; }
inline void read_cluster_rank(int& rank) { rank = emulator::current->rank; }
inline uint32_t remote(uint32_t address, int block) {
  const auto own = shared_address(emulator::current->own->shared);
  return address - own + shared_address(emulator::shared_of(block));
}

// A phase ends when the one arrival and all bytes have come.
struct Mbarrier {
  int32_t bytes;
  int16_t arrived, phase;

  void update() {
    if (arrived != 1 || bytes != 0) return;
    arrived = 0;
    phase ^= 1;
  }
  static Mbarrier& at(uint32_t address) {
    return *reinterpret_cast<Mbarrier*>(shared_pointer(address));
  }
};

inline void mbarrier_init(uint32_t barrier) { Mbarrier::at(barrier) = {0, 0, 0}; }
inline void fence_mbarrier_init() {}
inline void mbarrier_expect(uint32_t barrier, int bytes) {
  Mbarrier& own = Mbarrier::at(barrier);
  own.bytes += bytes;
  ++own.arrived;
  own.update();
}
inline void store_remote(uint32_t to, float value, uint32_t barrier) {
  std::memcpy(shared_pointer(to), &value, sizeof value);
  Mbarrier& there = Mbarrier::at(barrier);
  there.bytes -= static_cast<int32_t>(sizeof value);
  there.update();
}
template <bool kKeepsL1>
void mbarrier_wait(uint32_t barrier, int parity) {
  while (Mbarrier::at(barrier).phase == parity) emulator::yield();
}

}  // namespace ptx
}  // namespace evenkeel::cuda
