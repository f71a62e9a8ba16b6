// The gradient that arrives at the sum of a residual norm: it is added to dx before the one rounding. Its rows
// wait in the ring behind those of dy. And the second dx, which has the dtype of dy.
#pragma once

#include <type_traits>

#include "cuda/row/backward_load.cuh"

namespace evenkeel::cuda {

// Without a residual there is neither, and no code for them.
template <typename X, typename D, BackwardPolicy kPolicy, typename Rows>
struct Dsum {
  __device__ Dsum(const BackwardArguments&, const Rows&, const BackwardColumns<kPolicy, Rows>&,
                  const int64_t&, char* const&, const int&) {}

  static __device__ constexpr int bytes(int) { return 0; }
  template <typename Group>
  __device__ void fetch(const Group&, int, bool) {}
  __device__ void prefetch() {}
  __device__ void advance_fetch(bool) {}
  __device__ void advance_row(bool) {}
  static __device__ bool wants_dx(const BackwardArguments& a) { return a.dx.data != nullptr; }
};

template <typename X, typename D, BackwardPolicy kPolicy, typename Rows>
requires(kPolicy.residual) struct Dsum<X, D, kPolicy, Rows> {
  static constexpr int W = kPolicy.vector(), kSize = sizeof(X);
  static constexpr bool kAligned = kPolicy.aligned, kSharesWarp = kPolicy.groups_per_warp() > 1;
  using In = Access<X, W, float>;

  const BackwardArguments& a;
  const Rows& rows;
  const BackwardColumns<kPolicy, Rows>& columns;
  char* const part;  // of the first slot
  const SharedFragment<W * kSize> fragment;
  Cursor<X> next;                     // to be fetched
  Cursor<X> at;                       // of the row whose turn it is, unaligned
  Cursor<D> second_at;                // where its second dx goes
  int offset = 0, offset_before = 0;  // of an unaligned row in its slot, and of the row before it

  // column: from which cursors go. slots: the row group's.
  __device__ Dsum(const BackwardArguments& arguments, const Rows& partition,
                  const BackwardColumns<kPolicy, Rows>& own, int64_t column, char* slots,
                  int slot_bytes)
      : a(arguments),
        rows(partition),
        columns(own),
        part(slots + slot_bytes - bytes(kPolicy.is_specialized() ? rows.cols : a.part_cols)),
        fragment(part + own.first * kSize, own.step * kSize),
        next(a.dsum, rows.row, column),
        at(next),
        second_at(a.second_dx, rows.row, column) {}

  static __device__ int bytes(int part_cols) {
    return static_cast<int>(slot_part_bytes(part_cols, kSize, kAligned));
  }
  static __device__ bool wants_dx(const BackwardArguments& a) {
    return a.dx.data != nullptr || a.second_dx.data != nullptr;
  }

  template <typename Group>
  __device__ void fetch(const Group& group, int slot, bool mine) {
    if (a.dsum.data == nullptr) return;
    if constexpr (kAligned) {
#pragma unroll
      for (int v = 0; v < kPolicy.vectors(); ++v) {
        if (columns.inside(v))
          fragment.template copy<kSharesWarp>(v, next.at + v * columns.step * kSize, slot, mine);
      }
    } else if (mine) {
      copy_row(next, a.dsum, rows.cols, part + slot, group.thread(), group.size());
    }
  }
  __device__ void prefetch() {
    if (a.dsum.data != nullptr)
      prefetch_range(next.at + a.dsum_step.bytes, rows.cols * kSize, a.dsum.end);
  }
  __device__ void advance_fetch(bool wraps) { next.move(a.dsum_step, wraps); }
  // The turn of the next row; pipelined, dx of the row before it is computed then.
  __device__ void advance_row(bool wraps) {
    offset_before = offset;
    offset = at.offset16();
    at.move(a.dsum_step, wraps);
  }

  // Adds vector v to dx.
  __device__ void add(const BackwardRow& row, int v, float (&dx)[W]) const {
    if (a.dsum.data == nullptr) return;
    typename In::Raw raw{};
    if constexpr (kAligned) {
      if (columns.inside(v)) fragment.get(v, raw, row.slot);
    } else {
      const int row_offset = kPolicy.pipelined() ? offset_before : offset;
      const int column = columns.first + v * columns.step;
      raw = In::load_unaligned_shared(part + row.slot + row_offset + column * kSize,
                                      (row.mine ? rows.cols : 0) - column);
    }
    float more[W];
    In::unpack(raw, more);
#pragma unroll
    for (int k = 0; k < W; ++k) dx[k] += more[k];
  }

  // One vector of the second dx, `column` columns behind the cursor; or a row out of its slot, where it is
  // aligned and rounded to X, which is the dtype of both or float32.
  __device__ void store_second(int column, const float (&dx)[W]) const {
    if (a.second_dx.data == nullptr) return;
    char* const to = second_at.at + column * static_cast<int>(sizeof(D));
    if constexpr (kAligned) {
      Access<D, W, float>::store(to, dx);
    } else {
      Access<D, W, float>::store_elements(to, dx, rows.cols - column);
    }
  }
  template <typename Group>
  __device__ void write_second(const BackwardRow& row, const char* slot, const Group& group) const {
    if (!row.mine || a.second_dx.data == nullptr) return;
    if constexpr (std::is_same_v<X, D>) {
      write_row(second_at, rows.cols, slot, group.thread(), group.size());
    } else {
      static_assert(std::is_same_v<X, float>);
      write_converted_row<X>(second_at, rows.cols, slot, group.thread(), group.size());
    }
  }
};

}  // namespace evenkeel::cuda
