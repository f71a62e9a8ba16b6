// Fibers and their clusters (grid.h).
#include "grid.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

// Saves the registers that a call preserves, and goes on with another stack. x86-64.
extern "C" void evenkeel_switch_stack(void** from, void* to);
asm(R"(
.text
.globl evenkeel_switch_stack
.type evenkeel_switch_stack, @function
evenkeel_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size evenkeel_switch_stack, .-evenkeel_switch_stack
)");

namespace evenkeel::emulator {

Thread* current = nullptr;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 256 << 10;  // of a block, at most
constexpr int kMostBlocks = 16;             // of a cluster
constexpr unsigned char kUntouched = 0xff;  // a NaN in every type
constexpr int64_t kMostTurns = 10'000'000;

void* scheduler = nullptr;  // its stack
const std::function<void()>* kernel_of_threads = nullptr;
std::vector<Block> blocks;
Barrier cluster_barrier;
int cluster_threads = 0;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

char* map(size_t bytes, int flags) {
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (memory == MAP_FAILED) fail("no memory");
  return static_cast<char*>(memory);
}

char* shared_memory() {
  static char* const memory = map(kSharedBytes * kMostBlocks, MAP_32BIT);
  return memory;
}

void run_thread() {
  (*kernel_of_threads)();
  current->done = true;
  for (;;) yield();
}

// A stack on which run_thread() begins when it is switched to.
void* new_stack(size_t index) {
  static std::vector<char*> stacks;
  while (stacks.size() <= index) stacks.push_back(map(kStackBytes, 0));
  auto* top = reinterpret_cast<void**>(stacks[index] + kStackBytes - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&run_thread);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  return top;
}

std::vector<Thread> make_threads(const Launch& launch, int64_t first, int64_t row) {
  const auto threads = static_cast<size_t>(launch.threads);
  blocks.assign(static_cast<size_t>(launch.cluster), {});
  cluster_barrier = {};
  cluster_threads = launch.threads * launch.cluster;
  std::memset(shared_memory(), kUntouched, kSharedBytes * blocks.size());
  std::vector<Thread> all(threads * blocks.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const size_t rank = i / threads, thread = i % threads;
    Block& block = blocks[rank];
    if (thread == 0) {
      block.shared = shared_memory() + rank * kSharedBytes;
      block.threads = launch.threads;
      block.warps.resize((threads + 31) / 32);
    }
    Warp& warp = block.warps[thread / 32];
    ++warp.threads;
    all[i] = {
        .thread = {static_cast<unsigned>(thread)},
        .block = {static_cast<unsigned>(first) + static_cast<unsigned>(rank),
                  static_cast<unsigned>(row)},
        .block_size = {static_cast<unsigned>(launch.threads), 1, 1},
        .grid_size = {static_cast<unsigned>(launch.blocks), static_cast<unsigned>(launch.rows), 1},
        .rank = static_cast<int>(rank),
        .cluster = static_cast<int>(first / launch.cluster),
        .cluster_size = launch.cluster,
        .lane = static_cast<int>(thread % 32),
        .own = &block,
        .warp = &warp,
        .stack_pointer = new_stack(i)};
  }
  return all;
}

void run_threads(std::vector<Thread>& all) {
  size_t left = all.size();
  for (int64_t turn = 0; left > 0; ++turn) {
    if (turn == kMostTurns) fail("threads wait for each other forever");
    for (Thread& thread : all) {
      if (thread.done) continue;
      current = &thread;
      evenkeel_switch_stack(&scheduler, thread.stack_pointer);
      if (thread.done) --left;
    }
  }
}

void check_shared_memory(size_t bytes) {
  for (const Block& block : blocks) {
    for (size_t i = bytes; i < kSharedBytes; ++i) {
      if (static_cast<unsigned char>(block.shared[i]) != kUntouched)
        fail("a kernel wrote behind its shared memory");
    }
  }
}

}  // namespace

char* shared_of(int rank) { return blocks[static_cast<size_t>(rank)].shared; }

void yield() { evenkeel_switch_stack(&current->stack_pointer, scheduler); }

void wait(Barrier& barrier, int threads) {
  const unsigned turn = barrier.turns;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.turns;
    return;
  }
  while (barrier.turns == turn) yield();
}

void wait_for_cluster() { wait(cluster_barrier, cluster_threads); }

void run(const Launch& launch, const std::function<void()>& kernel) {
  if (launch.shared > kSharedBytes || launch.cluster > kMostBlocks) fail("the launch is too large");
  kernel_of_threads = &kernel;
  for (int64_t row = 0; row < launch.rows; ++row) {
    for (int64_t first = 0; first < launch.blocks; first += launch.cluster) {
      std::vector<Thread> all = make_threads(launch, first, row);
      run_threads(all);
      check_shared_memory(launch.shared);
    }
  }
}

}  // namespace evenkeel::emulator
