// Rows: layer norm, RMS norm, and group norms over short planes. See plan.h for the shape.
//
// Forward: a row is read for its moments and again, out of the cache, to be normalized. Backward:
// two rows are read for their sums and the parameter sums, and again for dx.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_ROWS_INL_H_
#undef EVENKEEL_CPU_ROWS_INL_H_
#else
#define EVENKEEL_CPU_ROWS_INL_H_
#endif

#include "cpu/job-inl.h"
#include "cpu/schedule.h"
#include "cpu/spans-inl.h"

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

template <class In>
struct Rows : Job<In> {
  using Job<In>::call;
  using Job<In>::plan;
  using Job<In>::d;
  using typename Job<In>::Compute;
  using typename Job<In>::Scalar;
  using Array = Typed<Compute>;

  static constexpr int64_t kBatchBytes = 24 << 10;

  explicit Rows(const Call& c, const Plan& p) : Job<In>(c, p) {}

  int64_t slices() const { return (plan.length + kSlice - 1) / kSlice; }
  int64_t slice_length(int64_t slice) const {
    return std::min(kSlice, plan.length - slice * kSlice);
  }

  // Rows in a batch: as many as stay in the first-level cache.
  static constexpr int64_t kMaxBatch = 16;
  int64_t batch() const {
    return std::clamp<int64_t>(kBatchBytes / (plan.length * size_of(call.x.dtype)), 1, kMaxBatch);
  }

  // Statistic `unit` is group unit % groups of block unit / groups. Divisions are slow enough to
  // count on short rows.
  In span(const Tensor& tensor, int64_t unit) const {
    const int64_t block = plan.groups == 1 ? unit : unit / plan.groups;
    const int64_t group = unit - block * plan.groups;
    int64_t start = block * tensor.outer_stride;
    if (!call.is_group_norm()) {
      start = call.outer == 1 ? block * tensor.row_stride
                              : tensor.offset(block / call.inner, block % call.inner);
    }
    return this->in(tensor) + (start + group * plan.length);
  }
  int64_t parameter_start(int64_t unit) const {
    return plan.groups == 1 ? 0 : unit % plan.groups * plan.parameter_stride;
  }

  // ---- from run-time flags to template arguments ----

  CastTo cast() const { return {call.x.dtype, call.casting == EK_CASTING_LLAMA}; }

  // run.operator()<kSilu, kStream>(cast)
  template <class Run>
  void with_map(const Run& run) const {
    if (call.activation == EK_ACTIVATION_SILU) return run.template operator()<true, false>(cast());
    if (cast().on) return run.template operator()<false, false>(cast());
    plan.stream ? run.template operator()<false, true>(NoCast())
                : run.template operator()<false, false>(NoCast());
  }

  // run.operator()<kSilu, kDweight, kDbias>(cast)
  template <class Run>
  void with_reduce(const Run& run) const {
    if (call.activation == EK_ACTIVATION_SILU) {
      return this->wants_parameters() ? run.template operator()<true, true, true>(cast())
                                      : run.template operator()<true, false, false>(cast());
    }
    if (cast().on) {
      return this->wants_parameters() ? run.template operator()<false, true, true>(cast())
                                      : run.template operator()<false, false, false>(cast());
    }
    if (call.dweight) {
      return call.dbias ? run.template operator()<false, true, true>(NoCast())
                        : run.template operator()<false, true, false>(NoCast());
    }
    return call.dbias ? run.template operator()<false, false, true>(NoCast())
                      : run.template operator()<false, false, false>(NoCast());
  }

  // ---- forward ----

  // Normalizes the same part of `count` neighbouring units.
  void normalize_parts(int64_t unit, int64_t count, const Normalizer* by, int64_t start,
                       int64_t n) const {
    with_map([&]<bool kSilu, bool kStream>(auto cast) EK_LAMBDA {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = parameter_start(unit + i) + start;
        normalize<kSilu, kStream>(span(call.x, unit + i) + start, span(call.y, unit + i) + start, n,
                                  Scalar(d, by[i].shift), Scalar(d, by[i].scale),
                                  Scalar(d, by[i].offset), this->weight() + at, this->bias() + at,
                                  cast);
      }
    });
  }

  Moments moments_of(In x, int64_t n) const {
    return call.centers() ? moments<true>(x, n, call.eps) : moments<false>(x, n, call.eps);
  }

  void forward() const {
    const int64_t units = plan.blocks * plan.groups;
    if (plan.split) return forward_split(units);
    for_each_range(call.parallel, plan.shards, units, this->grain(plan.length),
                   [&](int64_t, int64_t first, int64_t last) {
                     for (int64_t unit = first; unit < last; unit += batch())
                       forward_batch(unit, std::min(batch(), last - unit));
                   });
  }

  // A few rows at a time, step by step: the long latency of turning sums into factors then overlaps
  // between rows.
  void forward_batch(int64_t unit, int64_t count) const {
    Moments found[kMaxBatch];
    Normalizer by[kMaxBatch];
    for (int64_t i = 0; i < count; ++i) found[i] = moments_of(span(call.x, unit + i), plan.length);
    for (int64_t i = 0; i < count; ++i) by[i] = this->finish(unit + i, found[i]);
    normalize_parts(unit, count, by, 0, plan.length);
  }

  void forward_split(int64_t units) const {
    auto* pieces = this->template pieces<Moments>();
    for_each_range(
        call.parallel, plan.shards, units * slices(), 1, [&](int64_t, int64_t item, int64_t) {
          const int64_t unit = item / slices(), slice = item % slices();
          pieces[item] = moments_of(span(call.x, unit) + slice * kSlice, slice_length(slice));
        });
    for (int64_t unit = 0; unit < units; ++unit) {
      Moments& total = pieces[unit * slices()];
      for (int64_t slice = 1; slice < slices(); ++slice) total = merge(total, (&total)[slice]);
    }
    for_each_range(call.parallel, plan.shards, units * slices(), 1,
                   [&](int64_t, int64_t item, int64_t) {
                     const int64_t unit = item / slices(), slice = item % slices();
                     const Normalizer by = this->finish(unit, pieces[unit * slices()], slice == 0);
                     normalize_parts(unit, 1, &by, slice * kSlice, slice_length(slice));
                   });
  }

  // ---- backward ----

  GradientRow<In, Scalar> gradient_row(int64_t unit, int64_t start) const {
    return {span(call.x, unit) + start, span(call.dy, unit) + start, Scalar(d, this->mean(unit)),
            Scalar(d, this->rstd(unit))};
  }

  // Adds a slice of a pair of units, `unit` and, if there is one, its partner in the next block, to
  // the chunk's parameter sums, and returns the rows' sums.
  template <bool kSilu, bool kDweight, bool kDbias, class Cast>
  HWY_INLINE void reduce_slice(int64_t chunk, int64_t unit, bool partner, int64_t slice, Cast cast,
                               GradientSums (&result)[2]) const {
    const int64_t block = block_length(d), n = slice_length(slice);
    result[0] = result[1] = {};
    for (int64_t done = 0; done < n; done += block) {
      const int64_t start = slice * kSlice + done, at = parameter_start(unit) + start;
      const GradientRow<In, Scalar> rows[2] = {gradient_row(unit, start),
                                               partner ? gradient_row(unit + plan.groups, start)
                                                       : this->no_row(Scalar(d, 0), Scalar(d, 0))};
      GradientSums part[2];
      reduce_rows<kSilu, kDweight, kDbias, true>(
          rows, std::min(block, n - done), this->weight() + at, this->bias() + at,
          this->partial(chunk, 0) + at, this->partial(chunk, 1) + at, cast, part);
      for (int i = 0; i < 2; ++i) result[i] = result[i] + part[i];
    }
  }

  template <bool kSilu, bool kStream, class Cast>
  HWY_INLINE void input_gradient_part(int64_t unit, const GradientSums& sums, int64_t start,
                                      int64_t n, Cast cast) const {
    const int64_t at = parameter_start(unit) + start;
    const double rstd = this->rstd(unit), share = rstd / static_cast<double>(plan.length);
    input_gradient<kSilu, kStream>(
        span(call.x, unit) + start, span(call.dy, unit) + start, span(call.dx, unit) + start, n,
        Scalar(d, this->mean(unit)), Scalar(d, rstd),
        Scalar(d, call.centers() ? sums.sum * share : 0), Scalar(d, sums.product * share),
        this->weight() + at, this->bias() + at, cast);
  }

  void backward() const {
    plan.split ? backward_split() : backward_chunks();
    this->fold_partials();
  }

  void backward_chunks() const {
    for_each_range(call.parallel, plan.shards, plan.chunks, 1,
                   [&](int64_t, int64_t chunk, int64_t) {
                     this->clear_partials(chunk, 0, plan.partial_width);
                     const int64_t first = chunk * plan.chunk_blocks,
                                   end = std::min(first + plan.chunk_blocks, plan.blocks);
                     const int64_t pairs = (end - first + 1) / 2 * plan.groups;
                     const int64_t step = std::max<int64_t>(1, batch() / 4);
                     for (int64_t pair = 0; pair < pairs; pair += step)
                       backward_batch(chunk, first, end, pair, std::min(step, pairs - pair));
                   });
  }

  // Pairs of rows of the blocks from first to end, numbered by block, then by group.
  void backward_batch(int64_t chunk, int64_t first, int64_t end, int64_t pair,
                      int64_t count) const {
    GradientSums total[kMaxBatch][2] = {};
    const auto block = [&](int64_t i) {
      return first + (plan.groups == 1 ? pair + i : (pair + i) / plan.groups) * 2;
    };
    const auto unit = [&](int64_t i) {
      return block(i) * plan.groups + (plan.groups == 1 ? 0 : (pair + i) % plan.groups);
    };
    with_reduce([&]<bool kSilu, bool kDweight, bool kDbias>(auto cast) EK_LAMBDA {
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t slice = 0; slice < slices(); ++slice) {
          GradientSums part[2];
          reduce_slice<kSilu, kDweight, kDbias>(chunk, unit(i), block(i) + 1 < end, slice, cast,
                                                part);
          for (int k = 0; k < 2; ++k) total[i][k] = total[i][k] + part[k];
        }
      }
    });
    if (!call.dx) return;
    with_map([&]<bool kSilu, bool kStream>(auto cast) EK_LAMBDA {
      for (int64_t i = 0; i < 2 * count; ++i) {
        if (block(i / 2) + i % 2 == end) continue;
        input_gradient_part<kSilu, kStream>(unit(i / 2) + i % 2 * plan.groups, total[i / 2][i % 2],
                                            0, plan.length, cast);
      }
    });
  }

  void backward_split() const {
    auto* pieces = this->template pieces<GradientSums>();
    const int64_t per_chunk = plan.groups * slices();
    for_each_range(call.parallel, plan.shards, plan.chunks * per_chunk, 1,
                   [&](int64_t, int64_t item, int64_t) {
                     const int64_t chunk = item / per_chunk, group = item % per_chunk / slices(),
                                   slice = item % slices();
                     this->clear_partials(chunk, group * plan.parameter_stride + slice * kSlice,
                                          std::min(kSlice, plan.parameter_stride - slice * kSlice));
                     const int64_t end = std::min((chunk + 1) * plan.chunk_blocks, plan.blocks);
                     with_reduce([&]<bool kSilu, bool kDweight, bool kDbias>(auto cast) EK_LAMBDA {
                       for (int64_t block = chunk * plan.chunk_blocks; block < end; block += 2) {
                         const int64_t unit = block * plan.groups + group;
                         GradientSums part[2];
                         reduce_slice<kSilu, kDweight, kDbias>(chunk, unit, block + 1 < end, slice,
                                                               cast, part);
                         pieces[unit * slices() + slice] = part[0];
                         if (block + 1 < end)
                           pieces[(unit + plan.groups) * slices() + slice] = part[1];
                       }
                     });
                   });
    if (!call.dx) return;
    const int64_t units = plan.blocks * plan.groups;
    for (int64_t unit = 0; unit < units; ++unit) {
      GradientSums& total = pieces[unit * slices()];
      for (int64_t slice = 1; slice < slices(); ++slice) total = total + (&total)[slice];
    }
    for_each_range(
        call.parallel, plan.shards, units * slices(), 1, [&](int64_t, int64_t item, int64_t) {
          const int64_t unit = item / slices(), slice = item % slices();
          with_map([&]<bool kSilu, bool kStream>(auto cast) EK_LAMBDA {
            input_gradient_part<kSilu, kStream>(unit, pieces[unit * slices()], slice * kSlice,
                                                slice_length(slice), cast);
          });
        });
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
