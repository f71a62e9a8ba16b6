// Pixels: group norm NHWC. Each pixel is a short row of channels, and a group is a band of its
// columns.
//
// Everything is done along the rows, with arrays of statistics and parameters that have an entry
// for each column. Where pixels are adjacent, several form one row (plan.repeat), so that rows are
// long and a whole number of vectors. Rows are summed in strips; a strip's sums are folded into its
// groups' moments, or its channels' gradient sums, in double.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_PIXELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_PIXELS_INL_H_
#undef EVENKEEL_CPU_PIXELS_INL_H_
#else
#define EVENKEEL_CPU_PIXELS_INL_H_
#endif

#include <algorithm>

#include "cpu/job-inl.h"

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

template <class In>
struct Pixels : Job<In> {
  using Job<In>::call;
  using Job<In>::plan;
  using Job<In>::d;
  using typename Job<In>::Compute;
  using typename Job<In>::Array;

  explicit Pixels(const Call& c, const Plan& p) : Job<In>(c, p) {}

  int64_t channels_per_group() const { return call.channels / plan.groups; }
  int64_t rows() const { return (call.inner + plan.repeat - 1) / plan.repeat; }
  int64_t full_rows() const { return call.inner / plan.repeat; }
  int64_t row_width(int64_t row) const {
    return std::min(plan.repeat, call.inner - row * plan.repeat) * call.channels;
  }
  int64_t strips() const { return (rows() + plan.strip - 1) / plan.strip; }
  int64_t strip_end(int64_t strip) const { return std::min((strip + 1) * plan.strip, rows()); }

  int64_t row_step(const Tensor& tensor) const { return tensor.row_stride * plan.repeat; }
  In row(const Tensor& tensor, int64_t sample, int64_t index) const {
    return this->in(tensor) + (tensor.offset(sample, 0) + index * row_step(tensor));
  }

  // The index-th array with an entry for each column, and what lies behind the arrays, in the
  // shard's scratch.
  Array array(int64_t shard, int64_t index) const {
    return Array(this->scratch(shard), Dtype::kF32) + index * plan.parameter_stride;
  }
  template <class T>
  T* behind_arrays(int64_t shard) const {
    return reinterpret_cast<T*>(this->scratch(shard) + plan.arrays);
  }

  // Repeats the first `channels` entries of the arrays over the whole row, and brings them into
  // lane order.
  template <size_t kArrays>
  void repeat(const Array (&arrays)[kArrays]) const {
    for (const Array& array : arrays) {
      for (int64_t i = call.channels; i < plan.parameters; ++i)
        array.data[i] = array.data[i - call.channels];
      to_lane_order<In>(array.data, plan.parameter_stride);
    }
  }

  // Sets each column of the array to value(its group).
  template <class Value>
  void fill_by_group(Array array, const Value& value) const {
    for (int64_t g = 0; g < plan.groups; ++g) {
      std::fill_n(array.data + g * channels_per_group(), channels_per_group(),
                  static_cast<Compute>(value(g)));
    }
    repeat({array});
  }

  void clear(const Array (&arrays)[2]) const {
    for (const Array& array : arrays) std::fill_n(array.data, plan.parameter_stride, Compute{0});
  }

  // ---- forward ----

  // Adds up the columns of each group. Leaves them in memory order.
  void fold_groups(const Array (&columns)[2], Sums* groups) const {
    for (const Array& column : columns) to_memory_order<In>(column.data, plan.parameter_stride);
    for (int64_t g = 0; g < plan.groups; ++g) {
      groups[g] = {};
      for (int64_t r = 0; r < plan.repeat; ++r) {
        const int64_t start = r * call.channels + g * channels_per_group();
        for (int64_t i = start; i < start + channels_per_group(); ++i) {
          groups[g].sum += static_cast<double>(columns[0].data[i]);
          groups[g].squares += static_cast<double>(columns[1].data[i]);
        }
      }
    }
  }

  // Sums of (x - shift) and (x - shift)^2 for each group over the rows from first to last.
  void group_sums(int64_t sample, int64_t first, int64_t last, Array shift,
                  const Array (&columns)[2], Sums* groups) const {
    clear(columns);
    const int64_t full = std::min(last, full_rows());
    column_sums(row(call.x, sample, first), row_step(call.x), full - first, plan.parameters, shift,
                columns[0], columns[1]);
    if (last > full)
      column_sums(row(call.x, sample, full), 0, 1, row_width(full), shift, columns[0], columns[1]);
    fold_groups(columns, groups);
  }

  // The same in double, element by element, where vectors over- or underflow.
  void wide_group_sums(int64_t sample, int64_t first, int64_t last, const Moments* shift,
                       Sums* groups) const {
    std::fill_n(groups, plan.groups, Sums{});
    for (int64_t index = first; index < last; ++index) {
      const In x = row(call.x, sample, index);
      for (int64_t start = 0; start < row_width(index); start += channels_per_group()) {
        const int64_t g = start / channels_per_group() % plan.groups;
        const Sums part =
            wide_sums(x + start, channels_per_group(), shift == nullptr ? 0 : shift[g].mean);
        groups[g] = {groups[g].sum + part.sum, groups[g].squares + part.squares};
      }
    }
  }

  // Moments of each group over one strip. As for rows: one pass with a guessed shift, a second one
  // if that was bad.
  void strip_moments(int64_t shard, int64_t sample, int64_t strip, Moments* result) const {
    const Array shift = array(shard, 0), columns[2] = {array(shard, 1), array(shard, 2)};
    auto* groups = behind_arrays<Sums>(shard);
    const int64_t first = strip * plan.strip, last = strip_end(strip);
    int64_t pixels = 0;
    for (int64_t index = first; index < last; ++index) pixels += row_width(index) / call.channels;
    const int64_t count = pixels * channels_per_group();

    // The guess: the mean of the strip's first, middle and last rows.
    fill_by_group(shift, [](int64_t) { return 0; });
    clear(columns);
    int64_t probed = 0;
    for (const int64_t index : {first, (first + last) / 2, last - 1}) {
      column_sums(row(call.x, sample, index), 0, 1, row_width(index), shift, columns[0],
                  columns[1]);
      probed += row_width(index) / plan.groups;
    }
    fold_groups(columns, groups);
    for (int64_t g = 0; g < plan.groups; ++g)
      result[g].mean = groups[g].sum / static_cast<double>(probed);

    // Shifts by the means in `result`, and replaces it by what that gives.
    const auto measure = [&] {
      fill_by_group(shift, [&](int64_t g) { return result[g].mean; });
      group_sums(sample, first, last, shift, columns, groups);
      bool good = true;
      for (int64_t g = 0; g < plan.groups; ++g) {
        result[g] =
            from_sums(groups[g], count, static_cast<double>(static_cast<Compute>(result[g].mean)));
        good = good && shift_was_good(groups[g], count);
      }
      return good;
    };
    if (!measure()) measure();
    const auto safe = [&](const Sums& sums) {
      return in_safe_range<Compute>(sums.squares, call.eps * static_cast<double>(count));
    };
    if (std::all_of(groups, groups + plan.groups, safe)) return;
    wide_group_sums(sample, first, last, nullptr, groups);
    for (int64_t g = 0; g < plan.groups; ++g)
      result[g].mean = groups[g].sum / static_cast<double>(count);
    wide_group_sums(sample, first, last, result, groups);
    for (int64_t g = 0; g < plan.groups; ++g)
      result[g] = from_sums(groups[g], count, result[g].mean);
  }

  // Turns a sample's moments into the arrays shift, scale and offset of a shard.
  void fill_normalizers(int64_t shard, int64_t sample, const Moments* groups) const {
    const Array arrays[3] = {array(shard, 0), array(shard, 1), array(shard, 2)};
    for (int64_t g = 0; g < plan.groups; ++g) {
      const Normalizer by = this->finish(sample * plan.groups + g, groups[g]);
      for (int64_t c = g * channels_per_group(); c < (g + 1) * channels_per_group(); ++c) {
        arrays[0].data[c] = static_cast<Compute>(by.shift);
        arrays[1].data[c] = static_cast<Compute>(by.scale * this->weight(c));
        arrays[2].data[c] = static_cast<Compute>(by.offset * this->weight(c) + this->bias(c));
      }
    }
    repeat(arrays);
  }

  void normalize_rows(int64_t arrays_of, int64_t sample, int64_t strip) const {
    this->with_activation_and_stream([&]<bool kStream>(auto act) EK_LAMBDA {
      for (int64_t index = strip * plan.strip; index < strip_end(strip); ++index) {
        scale_and_shift<kStream>(row(call.x, sample, index), row(call.y, sample, index),
                                 row_width(index), array(arrays_of, 0), array(arrays_of, 1),
                                 array(arrays_of, 2), act);
      }
    });
  }

  void forward() const {
    if (plan.split) return forward_split();
    for_each_range(call.parallel, plan.shards, plan.blocks, 1,
                   [&](int64_t shard, int64_t sample, int64_t) {
                     auto* total = behind_arrays<Moments>(shard) + plan.groups;
                     auto* part = total + plan.groups;
                     strip_moments(shard, sample, 0, total);
                     for (int64_t strip = 1; strip < strips(); ++strip) {
                       strip_moments(shard, sample, strip, part);
                       for (int64_t g = 0; g < plan.groups; ++g)
                         total[g] = merge(total[g], part[g]);
                     }
                     fill_normalizers(shard, sample, total);
                     for (int64_t strip = strips(); strip-- > 0;)
                       normalize_rows(shard, sample, strip);
                   });
  }

  // Sample by sample, each by all threads: a sample is then normalized while much of it is still in
  // the caches, beginning with what was summed last.
  void forward_split() const {
    auto* pieces = this->template pieces<Moments>();  // [strips][groups]
    for (int64_t sample = 0; sample < plan.blocks; ++sample) {
      for_each_range(call.parallel, plan.shards, strips(), 1,
                     [&](int64_t shard, int64_t strip, int64_t) {
                       strip_moments(shard, sample, strip, pieces + strip * plan.groups);
                     });
      for (int64_t strip = 1; strip < strips(); ++strip) {
        for (int64_t g = 0; g < plan.groups; ++g)
          pieces[g] = merge(pieces[g], pieces[strip * plan.groups + g]);
      }
      fill_normalizers(0, sample, pieces);
      for_each_range<true>(
          call.parallel, plan.shards, strips(), 1,
          [&](int64_t, int64_t strip, int64_t) { normalize_rows(0, sample, strip); });
    }
  }

  // ---- backward ----

  void fill_statistics(int64_t shard, int64_t sample) const {
    fill_by_group(array(shard, 0), [&](int64_t g) { return this->mean(sample * plan.groups + g); });
    fill_by_group(array(shard, 1), [&](int64_t g) { return this->rstd(sample * plan.groups + g); });
  }

  // sum(dz), sum(dz * normalized) of each channel over a strip. `statistics_of` is the shard that
  // holds mean and rstd.
  void strip_sums(int64_t shard, int64_t statistics_of, int64_t sample, int64_t strip,
                  GradientSums* channels) const {
    const Array mean = array(statistics_of, 0), rstd = array(statistics_of, 1);
    const Array columns[2] = {array(shard, 2), array(shard, 3)};
    clear(columns);
    const int64_t last = strip_end(strip);
    this->with_activation([&](auto act) EK_LAMBDA {
      for (int64_t index = strip * plan.strip; index < last; index += 2) {
        // A short last row goes without a partner.
        const bool pair = index + 1 < std::min(last, full_rows());
        reduce_pair(sample, index, pair, mean, rstd, columns, act);
        if (!pair && index + 1 < last)
          reduce_pair(sample, index + 1, false, mean, rstd, columns, act);
      }
    });
    for (const Array& column : columns) to_memory_order<In>(column.data, plan.parameter_stride);
    std::fill_n(channels, call.channels, GradientSums{});
    for (int64_t start = 0; start < plan.parameters; start += call.channels) {
      for (int64_t c = 0; c < call.channels; ++c) {
        channels[c].sum += static_cast<double>(columns[1].data[start + c]);
        channels[c].product += static_cast<double>(columns[0].data[start + c]);
      }
    }
  }

  template <class Act>
  void reduce_pair(int64_t sample, int64_t index, bool pair, Array mean, Array rstd,
                   const Array (&columns)[2], Act act) const {
    const int64_t width = row_width(index);
    for (int64_t start = 0; start < width; start += kSlice) {
      const auto at = [&](int64_t r) -> GradientRow<In, Array> {
        return {row(call.x, sample, r) + start, row(call.dy, sample, r) + start, mean + start,
                rstd + start};
      };
      const GradientRow<In, Array> both[2] = {
          at(index), pair ? at(index + 1) : this->no_row(mean + start, rstd + start)};
      TwoSums<typename Job<In>::Tag> unused[2];
      reduce_rows<true, true, false, true>(
          both, std::min(kSlice, width - start), this->weight() + start, this->bias() + start,
          columns[0] + start, columns[1] + start, NoCast(), act, unused);
    }
  }

  // From the channels' sums to the parameters', and to the arrays of mean gradients and mean
  // products times rstd.
  void finish_sums(int64_t shard, int64_t sample, const GradientSums* channels) const {
    const Array arrays[2] = {array(shard, 2), array(shard, 3)};
    const auto count = static_cast<double>(call.inner * channels_per_group());
    const int64_t chunk = sample / plan.chunk_blocks;
    for (int64_t g = 0; g < plan.groups; ++g) {
      GradientSums group{};
      const int64_t first = g * channels_per_group(), last = first + channels_per_group();
      for (int64_t c = first; c < last; ++c) {
        group = group + GradientSums{channels[c].sum * this->weight(c),
                                     channels[c].product * this->weight(c)};
        if (!this->wants_parameters()) continue;
        this->partial(chunk, 0).data[c] += static_cast<Compute>(channels[c].product);
        this->partial(chunk, 1).data[c] += static_cast<Compute>(channels[c].sum);
      }
      const double share = this->rstd(sample * plan.groups + g) / count;
      for (int64_t c = first; c < last; ++c) {
        arrays[0].data[c] = static_cast<Compute>(group.sum * share);
        arrays[1].data[c] = static_cast<Compute>(group.product * share);
      }
    }
    repeat(arrays);
  }

  void input_gradient_rows(int64_t arrays_of, int64_t sample, int64_t first, int64_t last) const {
    this->with_activation_and_stream([&]<bool kStream>(auto act) EK_LAMBDA {
      for (int64_t index = first; index < last; ++index) {
        input_gradient<kStream, true>(
            row(call.x, sample, index), row(call.dy, sample, index), row(call.dx, sample, index),
            row_width(index), array(arrays_of, 0), array(arrays_of, 1), array(arrays_of, 2),
            array(arrays_of, 3), this->weight(), this->bias(), NoCast(), act);
      }
    });
  }

  void backward() const {
    plan.split ? backward_split() : backward_chunks();
    this->fold_partials();
  }

  void backward_chunks() const {
    for_each_range(call.parallel, plan.shards, plan.chunks, 1,
                   [&](int64_t shard, int64_t chunk, int64_t) {
                     this->clear_partials(chunk, 0, plan.partial_width);
                     auto* total = behind_arrays<GradientSums>(shard);
                     auto* part = total + call.channels;
                     const int64_t end = std::min((chunk + 1) * plan.chunk_blocks, plan.blocks);
                     for (int64_t sample = chunk * plan.chunk_blocks; sample < end; ++sample) {
                       fill_statistics(shard, sample);
                       strip_sums(shard, shard, sample, 0, total);
                       for (int64_t strip = 1; strip < strips(); ++strip) {
                         strip_sums(shard, shard, sample, strip, part);
                         for (int64_t c = 0; c < call.channels; ++c) total[c] = total[c] + part[c];
                       }
                       finish_sums(shard, sample, total);
                       if (call.dx) input_gradient_rows(shard, sample, 0, rows());
                     }
                   });
  }

  void backward_split() const {
    auto* pieces = this->template pieces<GradientSums>();  // [strips][channels]
    for (int64_t chunk = 0; chunk < plan.chunks; ++chunk)
      this->clear_partials(chunk, 0, plan.partial_width);
    for (int64_t sample = 0; sample < plan.blocks; ++sample) {
      fill_statistics(0, sample);
      for_each_range(call.parallel, plan.shards, strips(), 1,
                     [&](int64_t shard, int64_t strip, int64_t) {
                       strip_sums(shard, 0, sample, strip, pieces + strip * call.channels);
                     });
      for (int64_t strip = 1; strip < strips(); ++strip) {
        for (int64_t c = 0; c < call.channels; ++c)
          pieces[c] = pieces[c] + pieces[strip * call.channels + c];
      }
      finish_sums(0, sample, pieces);
      if (!call.dx) continue;
      for_each_range(call.parallel, plan.shards, strips(), 1, [&](int64_t, int64_t strip, int64_t) {
        input_gradient_rows(0, sample, strip * plan.strip, strip_end(strip));
      });
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
