// The prologue of a forward kernel that adds a residual: s = x + residual, rounded to the sum's dtype, comes
// into the tile as a loaded x would (loader.cuh), and is stored. x has the dtype of y (Summand); residual and sum have X.
#pragma once

#include "cuda/row/loader.cuh"

namespace evenkeel::cuda {

template <typename X, typename Y, ForwardPolicy kPolicy>
class AddResidual {
  using Tile = ForwardTile<X, kPolicy>;
  using Position = ForwardPosition<kPolicy>;
  using In = typename Tile::In;
  using B = Summand<X, Y>;
  using Branch = Access<B, kPolicy.vector(), float>;
  using Raw = typename Tile::Raw;
  using Fragment = typename Tile::Fragment;
  static constexpr int W = kPolicy.vector(), kVectors = kPolicy.vectors(), kSize = sizeof(X);
  static constexpr bool kAligned = kPolicy.aligned, kEvictFirst = kPolicy.evict_first();
  // Vectors that are loaded at once: as many bytes of the residual as there are registers for beside the row.
  static constexpr int kMost = (kPolicy.bytes() > 64 ? 32 : 64) / (W * kSize);
  static constexpr int kBatch = kVectors < kMost ? kVectors : kMost;
  static_assert(!kAligned || kVectors % kBatch == 0);

 public:
  __device__ AddResidual(const ForwardArguments& a, const Position& at) : a_(a), at_(at) {}

  // Unaligned rows go through the slot: [x | residual].
  template <typename Group>
  __device__ void issue(const Group& group, const Fragment&, char* slot, Raw&) {
    if constexpr (kAligned) {
      load(0);
    } else {
      const int cols = at_.end - at_.part;
      copy_row(Cursor<B>(a_.x, at_.row, at_.part), a_.x, cols, slot, group.thread(), group.size());
      copy_row(Cursor<X>(a_.residual, at_.row, at_.part), a_.residual, cols, slot + residual_slot(),
               group.thread(), group.size());
      commit_copies();
    }
  }

  template <typename Group>
  __device__ void finish(Group& group, const Fragment& fragment, char* slot, Raw& raw) {
    if constexpr (kAligned) {
#pragma unroll
      for (int begin = 0; begin < kVectors; begin += kBatch) {
        if (begin > 0) load(begin);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) add(begin + i, i, fragment, raw);
      }
    } else {
      wait_for_copies(0);
      group.sync();
      add_unaligned(slot, raw);
      if (a_.sum.data == nullptr) return;
      group.sync();  // all have read x
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (at_.inside(v)) In::store_raw(slot + (at_.own + v * at_.step) * kSize, raw[v]);
      }
      group.sync();
      if (at_.stores) {
        write_row(Cursor<X>(a_.sum, at_.row, at_.part), at_.end - at_.part, slot, group.thread(),
                  group.size());
      }
    }
  }

 private:
  __device__ int residual_slot() const {
    return static_cast<int>(slot_part_bytes(a_.part_cols, sizeof(B), kAligned));
  }

  __device__ void load(int begin) {
    const char* const x = at_.address(a_.x, sizeof(B));
    const char* const residual = at_.address(a_.residual, kSize);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int v = begin + i;
      x_[i] = Branch::template load_if<kEvictFirst>(at_.inside(v),
                                                    x + at_.distance(a_.x, v, sizeof(B)));
      residual_[i] = In::template load_if<kEvictFirst>(
          at_.inside(v), residual + at_.distance(a_.residual, v, kSize));
    }
  }

  static __device__ typename In::Raw sum_of(const typename Branch::Raw& x,
                                            const typename In::Raw& residual) {
    float sum[W], more[W];
    Branch::unpack(x, sum);
    In::unpack(residual, more);
#pragma unroll
    for (int k = 0; k < W; ++k) sum[k] += more[k];
    return In::pack(sum);
  }

  // Vector v, which is the i-th of its batch.
  __device__ void add(int v, int i, const Fragment& fragment, Raw& raw) {
    const typename In::Raw sum = sum_of(x_[i], residual_[i]);
    if (a_.sum.data != nullptr && at_.stores && at_.inside(v)) {
      In::template store_raw<kEvictFirst>(
          at_.address(a_.sum, kSize) + at_.distance(a_.sum, v, kSize), sum);
    }
    if constexpr (kPolicy.resident_in_shared()) {
      fragment.put(v, sum);
    } else {
      raw[v] = sum;
    }
  }

  __device__ void add_unaligned(const char* slot, Raw& raw) {
    const char* const x = slot + Cursor<B>(a_.x, at_.row, at_.part).offset16();
    const char* const residual =
        slot + residual_slot() + Cursor<X>(a_.residual, at_.row, at_.part).offset16();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = at_.own + v * at_.step;
      raw[v] = sum_of(
          Branch::load_unaligned_shared(x + column * static_cast<int>(sizeof(B)), at_.valid(v)),
          In::load_unaligned_shared(residual + column * kSize, at_.valid(v)));
    }
  }

  const ForwardArguments& a_;
  const Position& at_;
  typename Branch::Raw x_[kBatch];
  typename In::Raw residual_[kBatch];
};

}  // namespace evenkeel::cuda
