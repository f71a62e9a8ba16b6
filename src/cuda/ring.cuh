// Rows on their way: asynchronous copies into a ring of slots in shared memory, one ring for each
// team.
//
// In step i a team works on row i while the rows after it arrive. Where rows are aligned, a thread
// copies just the pieces of 16 bytes that it will read itself, so that it waits for its own copies
// only; otherwise the team meets before it reads. Row i + stages - 1 goes into the slot of row
// i - 1 as soon as row i has been read.
#pragma once

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/team.cuh"

namespace evenkeel::cuda {

__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Zeros unless `valid`.
__device__ inline void copy_async_if(bool valid, uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// A thread brings them into the second cache, unless they end behind `end`.
__device__ inline void fetch_ahead(const char* from, int bytes, const char* end) {
#if __CUDA_ARCH__ >= 900
  const int place = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
  from -= place;
  bytes = (place + bytes + 15) / 16 * 16;
  if (from + bytes <= end)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// Until at most `pending` of this thread's committed groups are left.
__device__ inline void wait_for_copies(int pending) {
  static_assert(kMaxStages == 4);
  if (pending == 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (pending == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}

// A thread's own vectors of kBytes in shared memory, from `first` on, `pitch` bytes apart; those of
// neighbouring threads lie side by side.
template <int kBytes>
class Drawer {
 public:
  __device__ Drawer(const char* first, int pitch) : at_(shared_address(first)), pitch_(pitch) {
    asm volatile("" : "+r"(at_));  // or the compiler would look it up for every use
  }
  // Asynchronously. slot: so many bytes behind. kMayFill: zeros unless `valid`.
  template <bool kMayFill>
  __device__ void copy(int v, const char* from, int slot, bool valid) const {
    const uint32_t to = at_ + slot + v * pitch_;
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) {
      if constexpr (kMayFill) {
        copy_async_if(valid, to + i, from + i);
      } else {
        copy_async(to + i, from + i);
      }
    }
  }
  template <typename Raw>
  __device__ void get(int v, Raw& raw, int slot = 0) const {
    uint32_t at = at_ + slot;
    asm volatile("" : "+r"(at));  // or the compiler would hold the addresses of all vectors
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) {
      uint4& word = reinterpret_cast<uint4*>(&raw)[i / 16];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                   : "r"(at + v * pitch_ + i));
    }
  }

 private:
  uint32_t at_;
  int pitch_;
};

// The part of a tensor's row that a block works on, moving from row to row. No division is needed
// on the way: the distance to the team's next row is the same every time, but for a correction
// where rows come in blocks and the next one lies in another block (Walk).
template <typename T>
struct Cursor {
  char* at;

  // The first row, whose number is `row`, from column `part` on.
  __device__ Cursor(const DeviceTensor& tensor, int64_t row, int64_t part)
      : at(tensor.data + (tensor.offset(row) + part) * static_cast<int64_t>(sizeof(T))) {}

  __device__ void move(const RowStep& step, bool wraps) {
    at += step.bytes;
    if (wraps) at += step.wrap_bytes;
  }
  // Of the row's first byte within 16 bytes.
  __device__ int place() const { return static_cast<int>(reinterpret_cast<uintptr_t>(at) % 16); }
};

// Where a row lies in its block.
struct Walk {
  int64_t inside;

  __device__ bool move(const RowWalk& walk) {
    if (walk.inner == 0) return false;
    inside += walk.step_inside;
    const bool wraps = inside >= walk.inner;
    if (wraps) inside -= walk.inner;
    return wraps;
  }
};

// The elements of 16 bytes that are not before `begin` nor behind `end`, one by one.
template <typename T>
__device__ inline void copy_some(char* to, const char* from, int at, int begin, int end) {
  for (int i = max(at, begin); i < min(at + 16, end); i += sizeof(T))
    *reinterpret_cast<T*>(to + i) = *reinterpret_cast<const T*>(from + i);
}

// Copies `cols` elements from the cursor, which need not be aligned. The row keeps its place within 16
// bytes, and is copied with what lies around it in these; only before the first and after the last row of
// a tensor there may be nothing to read.
template <typename T>
__device__ inline void copy_row(const Cursor<T>& row, const DeviceTensor& tensor, int cols,
                                char* to, int thread, int threads) {
  const int place = row.place();
  const int bytes = place + cols * static_cast<int>(sizeof(T));
  const char* from = row.at - place;
  const int begin = from < tensor.data ? 16 : 0;
  const auto end = static_cast<int>(min(tensor.end - from, int64_t{bytes} + 16));
  for (int at = thread * 16; at < bytes; at += threads * 16) {
    if (at >= begin && at + 16 <= end) {
      copy_async(shared_address(to + at), from + at);
    } else {
      copy_some<T>(to, from, at, place, bytes);
    }
  }
}

// The other way: a row that need not be aligned, from the beginning of 16 bytes in shared memory.
template <typename T>
__device__ inline void write_row(const Cursor<T>& row, int cols, const char* from, int thread,
                                 int threads) {
  using Vector = Access<T, 16 / static_cast<int>(sizeof(T)), float>;
  const int bytes = cols * static_cast<int>(sizeof(T));
  for (int at = thread * 16 - row.place(); at < bytes; at += threads * 16) {
    if (at >= 0 && at + 16 <= bytes) {
      *reinterpret_cast<typename Vector::Raw*>(row.at + at) = Vector::load_loose(from + at);
    } else {
      copy_some<T>(row.at, from, at, 0, bytes);
    }
  }
}

// Slots are told by their distance from the first one.
class Ring {
 public:
  __device__ Ring(int slot_bytes, int stages) : slot_bytes_(slot_bytes), stages_(stages) {}

  // Calls fetch(slot) for the first rows.
  template <typename Fetch>
  __device__ void fill(Fetch fetch) {
    for (int i = 0; i < stages_ - 1; ++i) {
      fetch(i * slot_bytes_);
      commit_copies();
    }
  }
  // The slot of the row whose turn it is; its own copies are waited for.
  __device__ int arrived() const {
    wait_for_copies(stages_ - 2);
    return stage_ * slot_bytes_;
  }
  // The row has been read: fetches another one into the slot before, and moves on.
  template <typename Fetch>
  __device__ void advance(Fetch fetch) {
    fetch((stage_ == 0 ? stages_ - 1 : stage_ - 1) * slot_bytes_);
    commit_copies();
    stage_ = stage_ + 1 == stages_ ? 0 : stage_ + 1;
  }

 private:
  int slot_bytes_, stages_, stage_ = 0;
};

// Which rows and columns a team works on in a grid of persistent blocks: row, row + walk.step, ...
template <Scope kScope, int kLanes>
struct Share {
  static constexpr int kTeamsOfWarp = kLanes < kWarp ? kWarp / kLanes : 1;

  int block;  // or cluster
  int teams;  // of a block
  int64_t row;
  int steps;        // rows of this team
  int warp_steps;   // the most of the warp's teams
  int block_steps;  // the most of the block's teams
  int64_t part;     // the block's first column
  int cols;         // and how many it has

  template <typename AnyTeam>
  __device__ Share(const AnyTeam& team, const RowWalk& walk, int64_t rows, int64_t all_cols,
                   int part_cols)
      : block(static_cast<int>(blockIdx.x) / team.cluster()),
        teams(static_cast<int>(blockDim.x) / team.size()),
        part(static_cast<int64_t>(team.block()) * part_cols),
        cols(static_cast<int>(min(static_cast<int64_t>(part_cols), all_cols - part))) {
    // Neighbouring rows in a warp; otherwise all blocks before the second team of one.
    const int64_t blocks = gridDim.x / team.cluster();
    row = kTeamsOfWarp > 1 ? static_cast<int64_t>(block) * teams + team.index()
                           : team.index() * blocks + block;
    const auto steps_from = [&](int64_t first) {
      return first < rows ? static_cast<int>((rows - first + walk.step - 1) / walk.step) : 0;
    };
    steps = steps_from(row);
    warp_steps = kTeamsOfWarp > 1 ? steps_from(row - team.index() % kTeamsOfWarp) : steps;
    block_steps = steps_from(block);
  }
};

}  // namespace evenkeel::cuda
