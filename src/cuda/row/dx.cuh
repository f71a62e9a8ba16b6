// dx of a row, from its sums and the gradient of its epilogue, on its way to memory; once more in the dtype of dy
// where a residual wants it (dsum.cuh).
#pragma once

#include "cuda/row/dsum.cuh"

namespace evenkeel::cuda {

// The last vector of an unaligned row may be cut off. Its dx goes through the slot of x, so that it is written 16
// bytes at a time, unless x is read once more meanwhile.
template <typename X, typename D, BackwardPolicy kPolicy, typename Rows, typename Group>
__device__ inline void store_dx(const BackwardArguments& a, const Group& group, const Rows& rows,
                                const int& first, const int& step,
                                const BackwardColumns<kPolicy, Rows>& columns, char* const& slots,
                                const BackwardTile<X, D, kPolicy, Rows>& tile,
                                Dsum<X, D, kPolicy, Rows>& dsum, const float& inv_n,
                                Cursor<X>& dx_at, const BackwardRow& row,
                                const float (&sums)[kPolicy.sums()]) {
  constexpr int W = kPolicy.vector(), kSums = kPolicy.sums(), kSize = sizeof(X);
  constexpr bool kAligned = kPolicy.aligned, kResidual = kPolicy.residual;
  constexpr bool kMayCenter = !kPolicy.is_rms();
  constexpr bool kThroughSlot = !kAligned && kPolicy.row_in_registers();
  using Element = Gradient<X, W, float>;
  using In = Access<X, W, float>;
  if (!dsum.wants_dx(a)) return;
  const float from_rstd = -sums[0] * inv_n * row.rstd;
  const float from_mean = kMayCenter && (kPolicy.is_specialized() || a.formula.centers)
                              ? -sums[kSums - 1] * inv_n * row.rstd
                              : 0;
  if constexpr (kThroughSlot && kPolicy.scope == Scope::kWarp) group.sync();  // all have read x
  tile.each(row, [&](const Element& e, int v) {
    float dx[W];
#pragma unroll
    for (int k = 0; k < W; ++k)
      dx[k] = e.g[k] * row.rstd +
              (kMayCenter ? e.normalized[k] * from_rstd + from_mean : e.normalized[k] * from_rstd);
    if constexpr (kResidual) dsum.add(row, v, dx);
    if (!row.mine || !columns.inside(v)) return;
    const int at = v * step + (kAligned ? 0 : first);
    char* const to = (kThroughSlot ? slots + row.slot : dx_at.at) + at * kSize;
    if constexpr (kResidual && !kThroughSlot) dsum.store_second(at, dx);
    if (kResidual && !kThroughSlot && a.dx.data == nullptr) return;
    if constexpr (kAligned || kThroughSlot) {
      In::store(to, dx);
    } else {
      In::store_elements(to, dx, rows.cols - at);
    }
  });
  if constexpr (kThroughSlot) {
    group.sync();
    if constexpr (kResidual) dsum.write_second(row, slots + row.slot, group);
    if (row.mine && (!kResidual || a.dx.data != nullptr))
      write_row(dx_at, rows.cols, slots + row.slot, group.thread(), group.size());
  }
  dx_at.move(a.dx_step, row.wraps);
  if constexpr (kResidual) dsum.second_at.move(a.second_dx_step, row.wraps);
}

}  // namespace evenkeel::cuda
