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
  using typename Job<In>::Scalar;

  static constexpr int64_t kBatchBytes = 24 << 10;
  static constexpr int64_t kRange = 32768;  // elements that a thread takes at a time, about

  explicit Rows(const Call& c, const Plan& p)
      : Job<In>(c, p), even_(call.is_group_norm() || call.outer == 1) {}

  int64_t slices() const { return (plan.length + kSlice - 1) / kSlice; }
  int64_t slice_length(int64_t slice) const {
    return std::min(kSlice, plan.length - slice * kSlice);
  }

  // Rows in a batch: as many as stay in the first-level cache, of `tensors` that are read twice.
  int64_t batch(int64_t tensors) const {
    const int64_t row_bytes = plan.length * size_of(call.x.dtype);
    return std::clamp<int64_t>(kBatchBytes / (row_bytes * tensors), 1, kBatch);
  }

  // Where a statistic's elements are: a group of a block.
  struct Place {
    int64_t block, group;

    int64_t unit(const Plan& plan) const { return block * plan.groups + group; }
  };
  Place place(int64_t unit) const { return {unit / plan.groups, unit % plan.groups}; }
  // The places of `count` neighbouring units: divisions are slow enough to count on short rows.
  void locate(int64_t unit, int64_t count, Place* places) const {
    Place next = place(unit);
    for (int64_t i = 0; i < count; ++i) {
      places[i] = next;
      if (++next.group == plan.groups) next = {next.block + 1, 0};
    }
  }

  HWY_INLINE In span(const Tensor& tensor, const Place& at) const {
    const int64_t stride = call.is_group_norm() ? tensor.outer_stride : tensor.row_stride;
    const int64_t start = HWY_LIKELY(even_) ? at.block * stride : uneven_start(tensor, at.block);
    return this->in(tensor) + (start + at.group * plan.length);
  }
  int64_t parameter_start(const Place& at) const { return at.group * plan.parameter_stride; }

  // ---- from run-time flags to template arguments ----

  CastTo cast() const { return {call.x.dtype, call.casting == EK_CASTING_LLAMA}; }

  // run.operator()<kSilu, kStream, kCenter>(cast)
  template <class Run>
  void with_map(const Run& run) const {
    if (call.activation == EK_ACTIVATION_SILU)
      return run.template operator()<true, false, true>(cast());
    if (cast().on) return run.template operator()<false, false, true>(cast());
    if (call.centers() || call.bias) {
      return plan.stream ? run.template operator()<false, true, true>(NoCast())
                         : run.template operator()<false, false, true>(NoCast());
    }
    plan.stream ? run.template operator()<false, true, false>(NoCast())
                : run.template operator()<false, false, false>(NoCast());
  }

  // run.operator()<kSilu, kDweight, kDbias, kCenter>(cast)
  template <class Run>
  void with_reduce(const Run& run) const {
    if (call.activation == EK_ACTIVATION_SILU) {
      return this->wants_parameters() ? run.template operator()<true, true, true, true>(cast())
                                      : run.template operator()<true, false, false, true>(cast());
    }
    if (cast().on) {
      return this->wants_parameters() ? run.template operator()<false, true, true, true>(cast())
                                      : run.template operator()<false, false, false, true>(cast());
    }
    if (!call.centers() && !call.dbias) {
      return call.dweight ? run.template operator()<false, true, false, false>(NoCast())
                          : run.template operator()<false, false, false, false>(NoCast());
    }
    if (call.dweight) {
      return call.dbias ? run.template operator()<false, true, true, true>(NoCast())
                        : run.template operator()<false, true, false, true>(NoCast());
    }
    return call.dbias ? run.template operator()<false, false, true, true>(NoCast())
                      : run.template operator()<false, false, false, true>(NoCast());
  }

  // ---- forward ----

  // The next batch of short rows, sixteen of which fill a page of memory, is fetched while this one
  // is written: what the processor fetches by itself ends with the page. Where results go past the
  // caches, rows of any length gain by it (65536x128 f32 on a Xeon: 1.3 to 1.7 of a copy's speed).
  static constexpr int64_t kShortRow = 128;

  // Normalizes the same part of `count` statistics.
  void normalize_parts(const Place* at, int64_t count, const NormalizerBatch& by, int64_t start,
                       int64_t n) const {
    with_map([&]<bool kSilu, bool kStream, bool kCenter>(auto cast) EK_LAMBDA {
      const bool ahead = even_ && n == plan.length && (kStream || n <= kShortRow);
      with_constants(d, count, n, [&](int64_t spans, int64_t length) EK_LAMBDA {
        for (int64_t i = 0; i < spans; ++i) {
          const int64_t parameter = parameter_start(at[i]) + start;
          const Place next = {at[i].block + spans, at[i].group};
          if (ahead) fetch(span(call.x, next), length);
          if (ahead && !kStream) fetch<true>(span(call.y, next), length);
          normalize<kSilu, kStream, kCenter>(
              span(call.x, at[i]) + start, span(call.y, at[i]) + start, length,
              Scalar(d, by.shift[i]), Scalar(d, by.scale[i]), Scalar(d, by.offset[i]),
              this->weight() + parameter, this->bias() + parameter, cast);
        }
      });
    });
  }

  // Moments of the same part of `count` statistics.
  void moments_of(const Place* at, int64_t count, int64_t start, int64_t n,
                  MomentsBatch& result) const {
    const auto span_at = [&](int64_t i) EK_LAMBDA { return span(call.x, at[i]) + start; };
    with_constants(d, count, n, [&](int64_t spans, int64_t length) EK_LAMBDA {
      call.centers() ? moments<true>(span_at, spans, length, call.eps, result)
                     : moments<false>(span_at, spans, length, call.eps, result);
    });
  }

  void forward() const {
    const int64_t units = plan.blocks * plan.groups;
    if (plan.split) return forward_split(units);
    const int64_t step = batch(1), steps = std::max<int64_t>(1, kRange / (step * plan.length));
    for_each_range(call.parallel, plan.shards, units, step * steps,
                   [&](int64_t, int64_t first, int64_t last) {
                     for (int64_t unit = first; unit < last; unit += step)
                       forward_batch(unit, std::min(step, last - unit));
                   });
  }

  // A few rows at a time, step by step: the long latency of turning sums into factors then overlaps
  // between rows.
  void forward_batch(int64_t unit, int64_t count) const {
    Place places[kBatch] = {};
    MomentsBatch found = {};
    NormalizerBatch by;
    locate(unit, count, places);
    moments_of(places, count, 0, plan.length, found);
    this->finish(unit, count, found, by);
    normalize_parts(places, count, by, 0, plan.length);
  }

  void forward_split(int64_t units) const {
    auto* pieces = this->template pieces<Moments>();
    for_each_range(call.parallel, plan.shards, units * slices(), 1,
                   [&](int64_t, int64_t item, int64_t) {
                     const int64_t unit = item / slices(), slice = item % slices();
                     const Place at = place(unit);
                     MomentsBatch found = {};
                     moments_of(&at, 1, slice * kSlice, slice_length(slice), found);
                     pieces[item] = found[0];
                   });
    for (int64_t unit = 0; unit < units; ++unit) {
      Moments& total = pieces[unit * slices()];
      for (int64_t slice = 1; slice < slices(); ++slice) total = merge(total, (&total)[slice]);
    }
    for_each_range(call.parallel, plan.shards, units * slices(), 1,
                   [&](int64_t, int64_t item, int64_t) {
                     const int64_t unit = item / slices(), slice = item % slices();
                     MomentsBatch found = {};
                     NormalizerBatch by;
                     found.set(0, pieces[unit * slices()]);
                     this->finish(unit, 1, found, by, slice == 0);
                     const Place at = place(unit);
                     normalize_parts(&at, 1, by, slice * kSlice, slice_length(slice));
                   });
  }

  // ---- backward ----

  // The same group of two neighbouring blocks, if there is a second.
  struct Pair : Place {
    bool partner;

    Place second() const { return {this->block + 1, this->group}; }
  };

  HWY_INLINE GradientRow<In, Scalar> gradient_row(const Place& at, int64_t start) const {
    return {span(call.x, at) + start, span(call.dy, at) + start,
            Scalar(d, this->mean(at.unit(plan))), Scalar(d, this->rstd(at.unit(plan)))};
  }

  // Adds a slice of `count` pairs to the chunk's parameter sums, and to their own sums.
  template <bool kSilu, bool kDweight, bool kDbias, bool kCenter, class Cast>
  HWY_INLINE void reduce_slice(int64_t chunk, const Pair* pairs, int64_t count, int64_t slice,
                               Cast cast, GradientSums (*result)[2]) const {
    const int64_t block = block_length(d), n = slice_length(slice);
    LaneSums<typename Job<In>::Tag> sum, product;
    for (int64_t done = 0; done < n; done += block) {
      const int64_t start = slice * kSlice + done;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = parameter_start(pairs[i]) + start;
        const GradientRow<In, Scalar> rows[2] = {gradient_row(pairs[i], start),
                                                 pairs[i].partner
                                                     ? gradient_row(pairs[i].second(), start)
                                                     : this->no_row(Scalar(d, 0), Scalar(d, 0))};
        TwoSums<typename Job<In>::Tag> part[2];
        reduce_rows<kSilu, kDweight, kDbias, true, kCenter>(
            rows, std::min(block, n - done), this->weight() + at, this->bias() + at,
            this->partial(chunk, 0) + at, this->partial(chunk, 1) + at, cast, part);
        for (int k = 0; k < 2; ++k) {
          sum.put(d, 2 * i + k, part[k].first);
          product.put(d, 2 * i + k, part[k].second);
        }
      }
      sum.add_up(d, 2 * count);
      product.add_up(d, 2 * count);
      for (int64_t i = 0; i < 2 * count; ++i)
        result[i / 2][i % 2] = result[i / 2][i % 2] + GradientSums{sum[i], product[i]};
    }
  }

  template <bool kSilu, bool kStream, bool kCenter, class Cast>
  HWY_INLINE void input_gradient_part(const Place& at, const GradientSums& sums, int64_t start,
                                      int64_t n, Cast cast) const {
    const int64_t parameter = parameter_start(at) + start;
    const double rstd = this->rstd(at.unit(plan));
    const double share = rstd * (1 / static_cast<double>(plan.length));
    input_gradient<kSilu, kStream, kCenter>(
        span(call.x, at) + start, span(call.dy, at) + start, span(call.dx, at) + start, n,
        Scalar(d, this->mean(at.unit(plan))), Scalar(d, rstd),
        Scalar(d, call.centers() ? sums.sum * share : 0), Scalar(d, sums.product * share),
        this->weight() + parameter, this->bias() + parameter, cast);
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
                     const int64_t step = std::max<int64_t>(1, batch(2) / 2);
                     for (int64_t pair = 0; pair < pairs; pair += step)
                       backward_batch(chunk, first, end, pair, std::min(step, pairs - pair));
                   });
  }

  // Pairs of rows of the blocks from first to end, numbered by block, then by group.
  void backward_batch(int64_t chunk, int64_t first, int64_t end, int64_t pair,
                      int64_t count) const {
    GradientSums total[kBatch / 2][2] = {};
    Pair pairs[kBatch / 2];
    Place next = place(pair);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = first + 2 * next.block;
      pairs[i] = {{block, next.group}, block + 1 < end};
      if (++next.group == plan.groups) next = {next.block + 1, 0};
    }
    with_reduce([&]<bool kSilu, bool kDweight, bool kDbias, bool kCenter>(auto cast) EK_LAMBDA {
      for (int64_t slice = 0; slice < slices(); ++slice) {
        GradientSums part[kBatch / 2][2] = {};
        reduce_slice<kSilu, kDweight, kDbias, kCenter>(chunk, pairs, count, slice, cast, part);
        for (int64_t i = 0; i < 2 * count; ++i)
          total[i / 2][i % 2] = total[i / 2][i % 2] + part[i / 2][i % 2];
      }
    });
    if (!call.dx) return;
    with_map([&]<bool kSilu, bool kStream, bool kCenter>(auto cast) EK_LAMBDA {
      for (int64_t i = 0; i < 2 * count; ++i) {
        if (i % 2 == 1 && !pairs[i / 2].partner) continue;
        const Place at = i % 2 == 0 ? pairs[i / 2] : pairs[i / 2].second();
        input_gradient_part<kSilu, kStream, kCenter>(at, total[i / 2][i % 2], 0, plan.length, cast);
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
                     with_reduce([&]<bool kSilu, bool kDweight, bool kDbias, bool kCenter>(
                                     auto cast) EK_LAMBDA {
                       for (int64_t block = chunk * plan.chunk_blocks; block < end; block += 2) {
                         const Pair pair{{block, group}, block + 1 < end};
                         const int64_t unit = pair.unit(plan);
                         GradientSums part[1][2] = {};
                         reduce_slice<kSilu, kDweight, kDbias, kCenter>(chunk, &pair, 1, slice,
                                                                        cast, part);
                         pieces[unit * slices() + slice] = part[0][0];
                         if (pair.partner)
                           pieces[(unit + plan.groups) * slices() + slice] = part[0][1];
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
          with_map([&]<bool kSilu, bool kStream, bool kCenter>(auto cast) EK_LAMBDA {
            input_gradient_part<kSilu, kStream, kCenter>(place(unit), pieces[unit * slices()],
                                                         slice * kSlice, slice_length(slice), cast);
          });
        });
  }

 private:
  HWY_NOINLINE int64_t uneven_start(const Tensor& tensor, int64_t block) const {
    return tensor.offset(block / call.inner, block % call.inner);
  }

  bool even_;  // blocks lie at equal distances
};

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
