// Layer norm and RMS norm, backward: dx, and the sums of dweight and dbias, in one pass over x and
// dy.
//
// Blocks are persistent. Each team of threads takes row after row out of its ring (ring.cuh), whose
// slots hold [x | dy]. A thread keeps the same columns all the time, so its share of dweight and
// dbias stays in registers; at the end the teams of a block add theirs up and write one row of
// partial sums, which fold_partials() (fold.cuh) finishes.
#pragma once

#include "cuda/gradient.cuh"
#include "cuda/ring.cuh"

namespace evenkeel::cuda {

// Vectors of floats in shared memory, for the thread that put them there; pieces of 16 bytes of
// neighbouring threads lie side by side.
template <int W>
class OwnVectors {
 public:
  __device__ OwnVectors(char* place, int thread, int threads)
      : place_(reinterpret_cast<Piece*>(place) + thread), threads_(threads) {}

  __device__ void put(int v, const float (&values)[W]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      place_[(v * kPieces + i) * threads_] = *reinterpret_cast<const Piece*>(values + i * kFloats);
  }
  __device__ void get(int v, float (&values)[W]) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      *reinterpret_cast<Piece*>(values + i * kFloats) = place_[(v * kPieces + i) * threads_];
  }

 private:
  static constexpr int kFloats = 4, kPieces = W / kFloats;
  struct alignas(kFloats * sizeof(float)) Piece {
    float value[kFloats];
  };
  Piece* place_;
  int threads_;
};

// At the end each team (of a warp, the first) puts its sums into shared memory, as they lie in its
// threads, and all threads of the block add them up. `memory`: the rings, whose rows have been read.
template <typename Own, int W, bool kAligned, int kElements, typename AnyTeam, typename AnyShare>
__device__ inline void write_partials(const BackwardArguments& a, const AnyTeam& team,
                                      const AnyShare& share, char* memory,
                                      float (&dweight)[kElements], float (&dbias)[kElements]) {
  if (a.dweight_partials == nullptr && a.dbias_partials == nullptr) return;
  constexpr int kTeamsOfWarp = AnyShare::kTeamsOfWarp, kFloats = 4, kPieces = kElements / kFloats;
  const auto piece_of = [](const float(&sums)[kElements], int p) {
    const float* s = sums + p * kFloats;
    return make_float4(s[0], s[1], s[2], s[3]);
  };
  // Piece p of a thread.
  const auto write = [&](const float4& piece, char* partials, int thread, int p) {
    const int e = p * kFloats, column = Own::first(thread) + e / W * Own::step(team.size()) + e % W;
    if (column >= share.cols) return;
    float* const to =
        reinterpret_cast<float*>(partials) + share.block * a.cols + share.part + column;
    if constexpr (kAligned) {
      *reinterpret_cast<float4*>(to) = piece;
    } else {
      const float values[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int k = 0; k < kFloats; ++k) {
        if (column + k < share.cols) to[k] = values[k];
      }
    }
  };
  const int writers = share.teams / kTeamsOfWarp;
  if (writers == 1 && kTeamsOfWarp == 1) {
    const auto write_all = [&](const float(&sums)[kElements], char* partials) {
      if (partials == nullptr) return;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) write(piece_of(sums, p), partials, team.thread(), p);
    };
    write_all(dweight, a.dweight_partials);
    write_all(dbias, a.dbias_partials);
    return;
  }
  const int pieces = team.size() * kPieces;
  auto* const place = reinterpret_cast<float4*>(memory);
  const auto give = [&](float(&sums)[kElements], const char* partials, float4* to) {
    if (partials == nullptr) return;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
#pragma unroll
      for (int distance = kWarp / kTeamsOfWarp; distance < kWarp; distance *= 2)
        sums[e] += __shfl_xor_sync(0xffffffff, sums[e], distance);
    }
    if (team.index() % kTeamsOfWarp != 0) return;
    to += team.index() / kTeamsOfWarp * pieces + team.thread();
#pragma unroll
    for (int p = 0; p < kPieces; ++p) to[p * team.size()] = piece_of(sums, p);
  };
  wait_for_copies(0);
  __syncthreads();
  give(dweight, a.dweight_partials, place);
  give(dbias, a.dbias_partials, place + writers * pieces);
  __syncthreads();
  for (int at = threadIdx.x; at < 2 * pieces; at += blockDim.x) {
    const bool second = at >= pieces;
    char* const partials = second ? a.dbias_partials : a.dweight_partials;
    if (partials == nullptr) continue;
    const int own = second ? at - pieces : at;
    const float4* from = place + (second ? writers * pieces : 0) + own;
    float4 sum = from[0];
#pragma unroll 4
    for (int w = 1; w < writers; ++w) {
      const float4 more = from[w * pieces];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    write(sum, partials, own % team.size(), own / team.size());
  }
}

// Rows that are not aligned: D is X, and their last vector may be cut off. Their dx goes through the
// slot of x, so that it is written in pieces of 16 bytes, unless x is read once more meanwhile.
//
// Usual problems: rows fill their teams and have one stride; of half types, the ring has kMaxStages.
// kAdds: Team's.
template <typename X, typename D, int W, Scope kScope, int kLanes, int kElements, bool kPlain,
          bool kAligned, Usual kUsual, bool kAdds>
__global__ void __launch_bounds__(backward_threads(kElements, kScope), 1)
    rows_backward(const __grid_constant__ BackwardArguments a) {
#if __CUDA_ARCH__ < 900
  if constexpr (kScope == Scope::kCluster) return;
#endif
  using In = Access<X, W, float>;
  using InDy = Access<D, W, float>;
  using Element = Gradient<X, W, float>;
  constexpr int kVectors = kElements / W;
  constexpr bool kKnown = kUsual != Usual::kNone;
  // Teams that share a warp may have one row more than others of it, which get zeros meanwhile.
  constexpr bool kShared = Share<kScope, kLanes>::kTeamsOfWarp > 1;
  constexpr bool kMayCenter = kUsual != Usual::kRms;
  constexpr int kSums = kMayCenter ? 2 : 1;
  constexpr bool kHoldsWeight = backward_holds_weight(kElements, kScope);
  constexpr bool kAhead = backward_ahead(kScope, kElements);
  // What is read twice is kept in registers if it is small enough beside the sums, and rows of a block
  // that would have to be put together twice.
  constexpr int kFew = backward_threads(kElements, kScope) == kRingThreads ? 64
                       : sizeof(X) == 4                                    ? 256
                                                                           : 96;
  constexpr bool kHolds =
      kScope != Scope::kCluster && (!kAligned || kElements * (sizeof(X) + sizeof(D)) <= kFew);
  extern __shared__ __align__(128) uint4 shared[];
  char* const scratch = reinterpret_cast<char*>(shared);
  char* const rings = scratch + reduce_bytes(kAhead);
  const Formula& formula = a.formula;
  Team<kScope, kLanes, kScope == Scope::kCluster, false, kAhead, kRingThreads / kWarp, kAdds> team(
      scratch, a.team);
  team.open();
  const Share<kScope, kLanes> share(team, a.walk, a.rows, a.cols, a.part_cols);
  using Own = Columns<kScope, kLanes, kElements, W, true>;
  const int first = Own::first(team.thread()), step = Own::step(team.size());
  const float of_row = formula.share;
  const int part_cols = kKnown ? team.size() * kElements : a.part_cols;
  const int stages = kKnown && backward_knows_stages(sizeof(X)) ? kMaxStages : a.stages;
  const auto x_bytes = static_cast<int>(ring_part(part_cols, sizeof(X), kAligned));
  const int slot_bytes = x_bytes + static_cast<int>(ring_part(part_cols, sizeof(D), kAligned));
  char* const slots = rings + team.index() * stages * slot_bytes;
  Ring ring(slot_bytes, stages);
  // What a thread has of the first slot, if rows are aligned.
  const Drawer<W * sizeof(X)> x_drawer(slots + first * sizeof(X), step * sizeof(X));
  const Drawer<W * sizeof(D)> dy_drawer(slots + x_bytes + first * sizeof(D), step * sizeof(D));
  const auto inside = [&](int v) { return kKnown || first + v * step < share.cols; };

  wait_for_previous_kernel();
  const bool even = kKnown || a.walk.inner == 0;
  const int64_t in_block = even ? 0 : share.row % a.walk.inner;
  // Of aligned rows, the thread's own columns.
  const int64_t column = share.part + (kAligned ? first : 0);
  Cursor<X> next_x(a.x, share.row, column);
  Cursor<D> next_dy(a.dy, share.row, column);
  Walk next_walk{in_block};
  int to_fetch = share.steps;
  const auto fetch = [&](int slot) {
    const bool mine = to_fetch-- > 0;
    if (!kShared && !mine) return;
    if constexpr (kAligned) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!inside(v)) continue;
        const int at = v * step;
        x_drawer.template copy<kShared>(v, next_x.at + at * static_cast<int>(sizeof(X)), slot,
                                        mine);
        dy_drawer.template copy<kShared>(v, next_dy.at + at * static_cast<int>(sizeof(D)), slot,
                                         mine);
      }
    } else if (mine) {
      copy_row(next_x, a.x, share.cols, slots + slot, team.thread(), team.size());
      copy_row(next_dy, a.dy, share.cols, slots + slot + x_bytes, team.thread(), team.size());
    }
    // The ring has room for one row on its way: the next one comes as far as the second cache.
    if (kScope == Scope::kCluster && !kAhead && even && first == 0) {
      fetch_ahead(next_x.at + a.x_step.bytes, share.cols * static_cast<int>(sizeof(X)), a.x.end);
      fetch_ahead(next_dy.at + a.dy_step.bytes, share.cols * static_cast<int>(sizeof(D)), a.dy.end);
    }
    const bool wraps = !even && next_walk.move(a.walk);
    next_x.move(a.x_step, wraps);
    next_dy.move(a.dy_step, wraps);
  };
  // Statistics are read one step ahead.
  float next_mean = 0, next_rstd = 0;
  int64_t next_row = share.row;
  const auto fetch_statistics = [&] {
    if (next_row >= a.rows) return;
    if (kMayCenter && (kKnown || a.mean != nullptr))
      next_mean = reinterpret_cast<const float*>(a.mean)[next_row];
    next_rstd = reinterpret_cast<const float*>(a.rstd)[next_row];
    next_row += a.walk.step;
  };
  fetch_statistics();

  float weight[kHoldsWeight ? kVectors : 1][W];
  OwnVectors<W> weights(rings + stages * slot_bytes, team.thread(), team.size());
  if constexpr (kHoldsWeight) {
    AskedWeights<X, D, kAligned, kVectors, W> asked;
    asked.ask(formula, share.part, first, step, share.cols);
    ring.fill(fetch);
    asked.get(formula, weight);
  } else {
    ring.fill(fetch);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      AskedWeights<X, D, kAligned, 1, W> asked;
      asked.ask(formula, share.part, first + v * step, 0, share.cols);
      asked.get(formula, weight);
      weights.put(v, weight[0]);
    }
  }
  float dweight[kElements] = {}, dbias[kElements] = {};
  team.begin();

  Cursor<X> dx_at(a.dx, share.row, column);
  Walk walk{in_block};
  Cursor<X> x_at(a.x, share.row, column);  // of unaligned rows
  Cursor<D> dy_at(a.dy, share.row, column);
  struct Row {
    int slot;
    int x_place, dy_place;  // in it, of unaligned rows
    bool mine;              // not only of another team in the warp
    float mean, rstd;
    bool wraps;
  };
  typename In::Raw x_raw[kHolds ? kVectors : 1];
  typename InDy::Raw dy_raw[kHolds ? kVectors : 1];
  const auto load = [&](const Row& row, int v, int place) {
    if constexpr (kAligned) {
      x_raw[place] = {}, dy_raw[place] = {};
      if (!inside(v)) return;
      x_drawer.get(v, x_raw[place], row.slot);
      dy_drawer.get(v, dy_raw[place], row.slot);
    } else {
      const int at = first + v * step, count = (row.mine ? share.cols : 0) - at;
      const char* const x = slots + row.slot + row.x_place;
      const char* const dy = slots + row.slot + x_bytes + row.dy_place;
      x_raw[place] = In::load_loose(x + at * static_cast<int>(sizeof(X)), count);
      dy_raw[place] = InDy::load_loose(dy + at * static_cast<int>(sizeof(D)), count);
    }
  };
  const auto each = [&](const Row& row, auto body) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (!kHolds) load(row, v, 0);
      float x[W], dy[W], w[W];
      In::unpack(x_raw[kHolds ? v : 0], x);
      InDy::unpack(dy_raw[kHolds ? v : 0], dy);
      if constexpr (kHoldsWeight) {
#pragma unroll
        for (int k = 0; k < W; ++k) w[k] = weight[v][k];
      } else {
        weights.get(v, w);
      }
      const int64_t at = share.part + min(first + v * step, share.cols - W);
      body(Element::template of<kPlain>(a, at, x, dy, w, row.mean, row.rstd), v);
    }
  };
  const auto store_dx = [&](const Row& row, const float(&sums)[kSums]) {
    if (a.dx.data == nullptr) return;
    const float from_rstd = -sums[0] * of_row * row.rstd;
    const float from_mean =
        kMayCenter && (kKnown || formula.centers) ? -sums[kSums - 1] * of_row * row.rstd : 0;
    constexpr bool kThroughSlot = !kAligned && kHolds;
    if constexpr (kThroughSlot && kScope == Scope::kWarp) team.sync();  // all have read x
    each(row, [&](const Element& e, int v) {
      float dx[W];
#pragma unroll
      for (int k = 0; k < W; ++k)
        dx[k] = e.g[k] * row.rstd + (kMayCenter ? e.normalized[k] * from_rstd + from_mean
                                                : e.normalized[k] * from_rstd);
      if (!row.mine || !inside(v)) return;
      const int at = v * step + (kAligned ? 0 : first);
      char* const to =
          (kThroughSlot ? slots + row.slot : dx_at.at) + at * static_cast<int>(sizeof(X));
      if constexpr (kAligned || kThroughSlot) {
        In::store(to, dx);
      } else {
        In::store_each(to, dx, share.cols - at);
      }
    });
    if constexpr (kThroughSlot) {
      team.sync();
      if (row.mine) write_row(dx_at, share.cols, slots + row.slot, team.thread(), team.size());
    }
    dx_at.move(a.dx_step, row.wraps);
  };

  Row last;  // whose dx is to be made (kAhead)
  for (int i = 0; i < share.warp_steps; ++i) {
    Row row{.mine = !kShared || i < share.steps, .mean = next_mean, .rstd = next_rstd};
    fetch_statistics();
    row.slot = ring.arrived();
    row.wraps = !even && walk.move(a.walk);
    if constexpr (!kAligned) {
      row.x_place = x_at.place();
      row.dy_place = dy_at.place();
      x_at.move(a.x_step, row.wraps);
      dy_at.move(a.dy_step, row.wraps);
      team.sync();
    }
    if constexpr (kHolds) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) load(row, v, v);
      ring.advance(fetch);
    }

    float sums[kSums] = {};
    each(row, [&](const Element& e, int v) {
      float plain[2] = {}, product[2] = {};
#pragma unroll
      for (int k = 0; k < W; ++k) {
        product[k % 2] += e.g[k] * e.normalized[k];
        dweight[v * W + k] += e.dz[k] * e.scaled[k];
        if constexpr (kMayCenter) {
          plain[k % 2] += e.g[k];
          dbias[v * W + k] += e.dz[k];
        }
      }
      sums[0] += product[0] + product[1];
      if constexpr (kMayCenter) sums[1] += plain[0] + plain[1];
    });
    team.begin_sum(sums);
    if (!kAhead || i > 0) {
      team.finish_sum(sums);
      store_dx(kAhead ? last : row, sums);
    }
    last = row;
    if constexpr (!kHolds) {
      if constexpr (kAhead && !kAligned) team.sync();  // all have read the slot
      ring.advance(fetch);
    }
  }
  if (kAhead && share.warp_steps > 0) {
    float sums[kSums];
    team.finish_sum(sums);
    store_dx(last, sums);
  }

  if constexpr (kScope == Scope::kBlock) {
    // compute-sanitizer tells races by how many barriers each thread has passed.
    for (int i = share.steps; i < share.block_steps; ++i) {
      if constexpr (!kAligned) team.sync();
      team.sync();
      if (!kAligned && a.dx.data != nullptr) team.sync();
    }
  }
  write_partials<Own, W, kAligned>(a, team, share, rings, dweight, dbias);
}

}  // namespace evenkeel::cuda
