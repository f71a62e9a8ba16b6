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

// Rows that are not aligned: D is X, and their last vector may be cut off. Their dx goes through the
// slot of x, so that it is written in pieces of 16 bytes, unless x is read once more meanwhile.
template <typename X, typename D, int W, Scope kScope, int kLanes, int kElements, bool kPlain,
          bool kAligned>
__global__ void __launch_bounds__(kRingThreads, 1)
    rows_backward(const __grid_constant__ BackwardArguments a) {
#if __CUDA_ARCH__ < 900
  if constexpr (kScope == Scope::kCluster) return;
#endif
  using In = Access<X, W, float>;
  using InDy = Access<D, W, float>;
  using Element = Gradient<X, W, float>;
  constexpr int kVectors = kElements / W;
  constexpr bool kHoldsWeight = kElements <= kBackwardElements;
  constexpr bool kAhead = backward_ahead(kScope, kElements);
  // What is read twice is kept in registers if it is small enough beside the sums, and rows of a block
  // that would have to be put together twice.
  constexpr bool kHolds =
      kScope != Scope::kCluster && (!kAligned || kElements * (sizeof(X) + sizeof(D)) <= 64);
  extern __shared__ __align__(128) uint4 shared[];
  char* const scratch = reinterpret_cast<char*>(shared);
  char* const rings = scratch + reduce_bytes(kAhead);
  const Formula& formula = a.formula;
  Team<kScope, kLanes, kScope == Scope::kCluster, false, kAhead> team(scratch, a.team);
  team.open();
  const Share<kScope, kLanes> share(team, a.walk, a.rows, a.cols, a.part_cols);
  const int first = team.thread() * W, step = team.size() * W;
  const float of_row = formula.share;
  const auto x_bytes = static_cast<int>(ring_part(a.part_cols, sizeof(X), kAligned));
  const int slot_bytes = x_bytes + static_cast<int>(ring_part(a.part_cols, sizeof(D), kAligned));
  Ring ring(rings + team.index() * a.stages * slot_bytes, slot_bytes, a.stages);

  wait_for_previous_kernel();
  const int64_t inside = a.walk.inner == 0 ? 0 : share.row % a.walk.inner;
  Cursor<X> next_x(a.x, share.row, share.part);
  Cursor<D> next_dy(a.dy, share.row, share.part);
  Walk next_walk{inside};
  int to_fetch = share.steps;
  const auto fetch = [&](char* slot) {
    if (to_fetch-- <= 0) return;
    copy_row<X, W, kElements, kAligned>(next_x, a.x, share.cols, slot, team.thread(), team.size());
    copy_row<D, W, kElements, kAligned>(next_dy, a.dy, share.cols, slot + x_bytes, team.thread(),
                                        team.size());
    const bool wraps = next_walk.move(a.walk);
    next_x.move(a.x_step, wraps);
    next_dy.move(a.dy_step, wraps);
  };
  // Statistics are read one step ahead.
  float next_mean = 0, next_rstd = 0;
  int64_t next_row = share.row;
  const auto fetch_statistics = [&] {
    if (next_row >= a.rows) return;
    if (a.mean != nullptr) next_mean = reinterpret_cast<const float*>(a.mean)[next_row];
    next_rstd = reinterpret_cast<const float*>(a.rstd)[next_row];
    next_row += a.walk.step;
  };
  fetch_statistics();

  float weight[kHoldsWeight ? kVectors : 1][W];
  OwnVectors<W> weights(rings + a.stages * slot_bytes, team.thread(), team.size());
  if constexpr (kHoldsWeight) {
    load_weights<kAligned>(formula, share.part, first, step, share.cols, weight,
                           [&] { ring.fill(fetch); });
  } else {
    ring.fill(fetch);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      load_weights<kAligned>(formula, share.part, first + v * step, 0, share.cols, weight, [] {});
      weights.put(v, weight[0]);
    }
  }
  float dweight[kElements] = {}, dbias[kElements] = {};
  team.begin();

  Cursor<X> dx_at(a.dx, share.row, share.part);
  Walk walk{inside};
  Cursor<X> x_at(a.x, share.row, share.part);  // of unaligned rows
  Cursor<D> dy_at(a.dy, share.row, share.part);
  struct Row {
    const char *xs, *dys;
    int cols, place;  // of x in its slot
    float mean, rstd;
    bool wraps;
  };
  typename In::Raw x_raw[kHolds ? kVectors : 1];
  typename InDy::Raw dy_raw[kHolds ? kVectors : 1];
  const auto load = [&](const Row& row, int v, int place) {
    const int column = first + v * step;
    const char* x = row.xs + column * static_cast<int>(sizeof(X));
    const char* dy = row.dys + column * static_cast<int>(sizeof(D));
    if constexpr (kAligned) {
      x_raw[place] = In::load_if(column < row.cols, x);
      dy_raw[place] = InDy::load_if(column < row.cols, dy);
    } else {
      x_raw[place] = In::load_loose(x, row.cols - column);
      dy_raw[place] = InDy::load_loose(dy, row.cols - column);
    }
  };
  const auto each = [&](const Row& row, auto body) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (!kHolds) load(row, v, 0);
      float x[W], dy[W], w[W];
      In::unpack(x_raw[kHolds ? v : 0], x);
      InDy::unpack(dy_raw[kHolds ? v : 0], dy);
      const int64_t column = share.part + min(first + v * step, share.cols - W);
      if constexpr (kHoldsWeight) {
#pragma unroll
        for (int k = 0; k < W; ++k) w[k] = weight[v][k];
      } else {
        weights.get(v, w);
      }
      body(Element::template of<kPlain>(a, column, x, dy, w, row.mean, row.rstd), v);
    }
  };
  const auto store_dx = [&](const Row& row, const float(&sums)[2]) {
    if (a.dx.data == nullptr) return;
    const float from_mean = formula.centers ? -sums[0] * of_row * row.rstd : 0;
    const float from_rstd = -sums[1] * of_row * row.rstd;
    constexpr bool kThroughSlot = !kAligned && kHolds;
    char* const slot = const_cast<char*>(row.xs) - (kAligned ? 0 : row.place);
    if constexpr (kThroughSlot && kScope == Scope::kWarp) team.sync();  // all have read x
    each(row, [&](const Element& e, int v) {
      float dx[W];
#pragma unroll
      for (int k = 0; k < W; ++k)
        dx[k] = e.g[k] * row.rstd + (e.normalized[k] * from_rstd + from_mean);
      const int column = first + v * step;
      char* const to = (kThroughSlot ? slot : dx_at.at) + column * static_cast<int>(sizeof(X));
      if (column >= row.cols) return;
      if constexpr (kAligned || kThroughSlot) {
        In::store(to, dx);
      } else {
        In::store_each(to, dx, row.cols - column);
      }
    });
    if constexpr (kThroughSlot) {
      team.sync();
      write_row(dx_at, row.cols, slot, team.thread(), team.size());
    }
    dx_at.move(a.dx_step, row.wraps);
  };

  Row last;  // whose dx is to be made (kAhead)
  for (int i = 0; i < share.warp_steps; ++i) {
    Row row{.cols = i < share.steps ? share.cols : 0, .mean = next_mean, .rstd = next_rstd};
    fetch_statistics();
    row.xs = ring.arrived();
    row.dys = row.xs + x_bytes;
    row.wraps = walk.move(a.walk);
    if constexpr (!kAligned) {
      row.place = x_at.place();
      row.xs += row.place;
      row.dys += dy_at.place();
      x_at.move(a.x_step, row.wraps);
      dy_at.move(a.dy_step, row.wraps);
      team.sync();
    }
    if constexpr (kHolds) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) load(row, v, v);
      ring.advance(fetch);
    }

    float sums[2] = {};
    each(row, [&](const Element& e, int v) {
      float plain[2] = {}, product[2] = {};
#pragma unroll
      for (int k = 0; k < W; ++k) {
        plain[k % 2] += e.g[k];
        product[k % 2] += e.g[k] * e.normalized[k];
        dweight[v * W + k] += e.dz[k] * e.scaled[k];
        dbias[v * W + k] += e.dz[k];
      }
      sums[0] += plain[0] + plain[1];
      sums[1] += product[0] + product[1];
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
    float sums[2];
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
  if (a.dweight_partials != nullptr || a.dbias_partials != nullptr) {
    // Each writer puts its sums into the place of the rings, and all threads add them up.
    constexpr int kTeamsOfWarp = Share<kScope, kLanes>::kTeamsOfWarp;
    const int writers = share.teams / kTeamsOfWarp;
    const bool alone = writers == 1 && kTeamsOfWarp == 1;
    const auto write = [&](const float(&sums)[kElements], float* to) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = first + v * step;
        if (column >= share.cols) continue;
        if constexpr (!kAligned) {
#pragma unroll
          for (int k = 0; k < W; ++k) {
            if (column + k < share.cols) to[column + k] = sums[v * W + k];
          }
        } else {
#pragma unroll
          for (int k = 0; k < W; k += 4) {
            const float* s = sums + v * W + k;
            *reinterpret_cast<float4*>(to + column + k) = make_float4(s[0], s[1], s[2], s[3]);
          }
        }
      }
    };
    const auto finish = [&](float(&sums)[kElements], char* partials, float* place) {
      if (partials == nullptr) return;
      float* to = reinterpret_cast<float*>(partials) + share.block * a.cols + share.part;
      if (alone) return write(sums, to);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
#pragma unroll
        for (int distance = kLanes; distance < kWarp; distance *= 2)
          sums[e] += __shfl_xor_sync(0xffffffff, sums[e], distance);
      }
      if (team.index() % kTeamsOfWarp == 0)
        write(sums, place + team.index() / kTeamsOfWarp * share.cols);
      __syncthreads();
      for (int column = threadIdx.x; column < share.cols; column += blockDim.x) {
        float sum = 0;
        for (int w = 0; w < writers; ++w) sum += place[w * share.cols + column];
        to[column] = sum;
      }
    };
    if (!alone) {
      wait_for_copies(0);
      __syncthreads();
    }
    auto* const place = reinterpret_cast<float*>(rings);
    finish(dweight, a.dweight_partials, place);
    finish(dbias, a.dbias_partials, place + writers * share.cols);
  }
}

}  // namespace evenkeel::cuda
