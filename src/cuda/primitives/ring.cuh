// A ring of slots in shared memory, one for each row group: rows arrive in it by asynchronous copies.
//
// In step i a row group works on row i while the rows after it arrive. Row i + stages - 1 goes into the
// slot of row i - 1 as soon as row i has been read.
#pragma once

#include "cuda/primitives/async_copy.cuh"

namespace evenkeel::cuda {

// A slot is named by its offset from the first one.
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
  // The slot of the current row; the thread's own copies of it have arrived.
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

}  // namespace evenkeel::cuda
