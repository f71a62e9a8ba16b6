// x, dy, weight and statistics on their way to the gradient: a thread's vectors of a row, read from a slot of the
// ring, [x | dy], or with a residual [x | dy | dsum] (dsum.cuh). The parts refer to the kernel's variables, as
// those of the forward kernel do (forward_tile.cuh).
#pragma once

#include "cuda/primitives/ring.cuh"
#include "cuda/primitives/row_access.cuh"
#include "cuda/primitives/row_group.cuh"
#include "cuda/row/gradient.cuh"

namespace evenkeel::cuda {

// Vectors of floats in shared memory, for the thread that put them there. Words of 16 bytes of neighbouring
// threads are neighbours, so that there are no bank conflicts.
template <int W>
class SharedVectors {
 public:
  __device__ SharedVectors(char* at, int thread, int threads)
      : words_(reinterpret_cast<Word*>(at) + thread), threads_(threads) {}

  __device__ void put(int v, const float (&values)[W]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words_[(v * kWords + i) * threads_] = *reinterpret_cast<const Word*>(values + i * kFloats);
  }
  __device__ void get(int v, float (&values)[W]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      *reinterpret_cast<Word*>(values + i * kFloats) = words_[(v * kWords + i) * threads_];
  }

 private:
  static constexpr int kFloats = 4, kWords = W / kFloats;
  struct alignas(kFloats * sizeof(float)) Word {
    float value[kFloats];
  };
  Word* words_;
  int threads_;
};

// A row whose turn it is.
struct BackwardRow {
  int slot;
  int x_offset, dy_offset;  // in it, of unaligned rows
  bool mine;                // not only of another row group in the warp
  float mean, rstd;
  bool wraps;
};

// The thread's columns of a block's part of a row: vectors from `first` on, `step` apart.
template <BackwardPolicy kPolicy, typename Rows>
struct BackwardColumns {
  const int &first, &step;
  const Rows& rows;

  __device__ bool inside(int v) const {
    return kPolicy.is_specialized() || first + v * step < rows.cols;
  }
};

// Loads mean and rstd of the row group's next row, one step ahead.
template <BackwardPolicy kPolicy>
struct StatisticsFetch {
  static constexpr bool kSpecialized = kPolicy.is_specialized(), kMayCenter = !kPolicy.is_rms();

  const BackwardArguments& a;
  int64_t& next_row;
  float &next_mean, &next_rstd;

  __device__ void operator()() const {
    if (next_row >= a.rows) return;
    if (kMayCenter && (kSpecialized || a.mean != nullptr))
      next_mean = reinterpret_cast<const float*>(a.mean)[next_row];
    next_rstd = reinterpret_cast<const float*>(a.rstd)[next_row];
    next_row += a.stride.step;
  }
};

// Where the unaligned row whose turn it is lies in its slot.
template <typename X, typename D, BackwardPolicy kPolicy>
struct UnalignedRows {
  const BackwardArguments& a;
  Cursor<X>& x_at;
  Cursor<D>& dy_at;

  __device__ void locate(BackwardRow& row) const {
    row.x_offset = x_at.offset16();
    row.dy_offset = dy_at.offset16();
    x_at.move(a.x_step, row.wraps);
    dy_at.move(a.dy_step, row.wraps);
  }
};

// The thread's weights: in registers, or, of rows with many elements, in shared memory.
template <typename X, typename D, BackwardPolicy kPolicy>
struct BackwardWeights {
  static constexpr int W = kPolicy.vector(), kVectors = kPolicy.vectors();
  static constexpr bool kInRegisters = kPolicy.weight_in_registers();
  static constexpr int kHeld = kInRegisters ? kVectors : 1;

  float values[kHeld][W];
  SharedVectors<W> shared;

  // They are loaded while `meanwhile` runs, if there are registers for that.
  template <typename Own, typename Meanwhile>
  __device__ void load(const Formula& formula, const Own& own, const Meanwhile& meanwhile) {
    const auto& rows = own.rows;
    if constexpr (kInRegisters) {
      WeightLoad<X, D, kPolicy.aligned, kVectors, W> load;
      load.issue(formula, rows.part, own.first, own.step, rows.cols);
      meanwhile();
      load.get(formula, values);
    } else {
      meanwhile();
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        WeightLoad<X, D, kPolicy.aligned, 1, W> load;
        load.issue(formula, rows.part, own.first + v * own.step, 0, rows.cols);
        float weight[1][W];
        load.get(formula, weight);
        shared.put(v, weight[0]);
      }
    }
  }
  __device__ void get(int v, float (&weight)[W]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int k = 0; k < W; ++k) weight[k] = values[v][k];
    } else {
      shared.get(v, weight);
    }
  }
};

// The thread's vectors of a row: in registers, or read from the slot for every use.
template <typename X, typename D, BackwardPolicy kPolicy, typename Rows>
struct BackwardTile {
  static constexpr int W = kPolicy.vector(), kVectors = kPolicy.vectors();
  static constexpr bool kAligned = kPolicy.aligned;
  static constexpr bool kInRegisters = kPolicy.row_in_registers();
  using In = Access<X, W, float>;
  using InDy = Access<D, W, float>;
  using Element = Gradient<X, W, float>;
  using XRaw = typename In::Raw[kInRegisters ? kVectors : 1];
  using DyRaw = typename InDy::Raw[kInRegisters ? kVectors : 1];

  const BackwardArguments& a;
  const Rows& rows;
  const int &first, &step;
  char* const& slots;
  const int& x_bytes;
  const BackwardColumns<kPolicy, Rows>& columns;
  const SharedFragment<W * sizeof(X)>& x_fragment;
  const SharedFragment<W * sizeof(D)>& dy_fragment;
  XRaw& x_raw;
  DyRaw& dy_raw;
  const BackwardWeights<X, D, kPolicy>& weights;

  // Vector v, to registers `to`.
  __device__ void load(const BackwardRow& row, int v, int to) const {
    if constexpr (kAligned) {
      x_raw[to] = {}, dy_raw[to] = {};
      if (!columns.inside(v)) return;
      x_fragment.get(v, x_raw[to], row.slot);
      dy_fragment.get(v, dy_raw[to], row.slot);
    } else {
      const int at = first + v * step, count = (row.mine ? rows.cols : 0) - at;
      const char* const x = slots + row.slot + row.x_offset;
      const char* const dy = slots + row.slot + x_bytes + row.dy_offset;
      x_raw[to] = In::load_unaligned_shared(x + at * static_cast<int>(sizeof(X)), count);
      dy_raw[to] = InDy::load_unaligned_shared(dy + at * static_cast<int>(sizeof(D)), count);
    }
  }
  __device__ void load_all(const BackwardRow& row) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load(row, v, v);
  }
  // Calls body(gradient of the epilogue, v) for each vector.
  template <typename Body>
  __device__ void each(const BackwardRow& row, Body body) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (!kInRegisters) load(row, v, 0);
      float x[W], dy[W], w[W];
      In::unpack(x_raw[kInRegisters ? v : 0], x);
      InDy::unpack(dy_raw[kInRegisters ? v : 0], dy);
      weights.get(v, w);
      const int64_t at = rows.part + min(first + v * step, rows.cols - W);
      body(Element::template of<kPolicy.terms>(a, a.formula, at, x, dy, w, row.mean, row.rstd), v);
    }
  }
};

}  // namespace evenkeel::cuda
