// Runs a kernel on the host, as slowly as that is: cluster after cluster, each with a fiber for every thread. A
// thread runs until it has to wait for others.
//
// What it finds: wrong indices, values, barriers and exchanges, reads of copies that were not waited for (they are
// made as late as possible), writes behind the shared memory that was asked for, threads that wait forever. What it
// does not: races that its one order of threads hides, and anything about speed.
#ifndef EVENKEEL_TESTS_EMULATOR_GRID_H_
#define EVENKEEL_TESTS_EMULATOR_GRID_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

namespace evenkeel::emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// How many threads have arrived, and how often all of them have.
struct Barrier {
  int arrived = 0;
  unsigned turns = 0;
};

struct Copy {
  char* to;
  const char* from;
  int bytes;
};

struct Warp {
  int threads = 0;
  Barrier barrier;
  uint64_t exchanged[32];  // what each lane shows the others
};

struct Block {
  char* shared = nullptr;
  int threads = 0;
  Barrier barrier, named[16];
  bool any = false;  // of __syncthreads_or
  std::vector<Warp> warps;
};

struct Thread {
  Index thread, block, block_size, grid_size;
  int rank = 0, cluster = 0, cluster_size = 1, lane = 0;
  Block* own = nullptr;
  Warp* warp = nullptr;
  std::vector<Copy> open{};                    // copies of no group yet
  std::vector<std::vector<Copy>> committed{};  // groups in flight
  void* stack_pointer = nullptr;
  bool done = false;
};

struct Launch {
  int64_t blocks = 1, rows = 1;  // of the grid
  int threads = 1, cluster = 1;
  size_t shared = 0;
};

// The thread that runs.
extern Thread* current;

// The shared memory of a block of the current cluster. All of it has addresses below 2^32.
char* shared_of(int rank);

void run(const Launch& launch, const std::function<void()>& kernel);

// Lets the others run.
void yield();
void wait(Barrier& barrier, int threads);
void wait_for_cluster();

// Calls use(values of all lanes), which every lane has shown.
template <typename T, typename Use>
T exchange(T value, const Use& use) {
  Warp& warp = *current->warp;
  std::memcpy(&warp.exchanged[current->lane], &value, sizeof value);
  wait(warp.barrier, warp.threads);
  const T result = use([&](int lane) {
    T other;
    std::memcpy(&other, &warp.exchanged[lane], sizeof other);
    return other;
  });
  wait(warp.barrier, warp.threads);
  return result;
}

}  // namespace evenkeel::emulator

#endif  // EVENKEEL_TESTS_EMULATOR_GRID_H_
