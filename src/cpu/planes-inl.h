// Planes: group norm NCHW. A statistic spans the neighbouring planes of a group; each plane has one
// weight and bias, which are folded into the scale and offset of the plane.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_PLANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_PLANES_INL_H_
#undef EVENKEEL_CPU_PLANES_INL_H_
#else
#define EVENKEEL_CPU_PLANES_INL_H_
#endif

#include "cpu/job-inl.h"

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

template <class In>
struct Planes : Job<In> {
  using Job<In>::call;
  using Job<In>::plan;
  using Job<In>::d;
  using typename Job<In>::Scalar;

  explicit Planes(const Call& c, const Plan& p) : Job<In>(c, p) {}

  int64_t channels_per_group() const { return call.channels / plan.groups; }

  In plane(const Tensor& tensor, int64_t sample, int64_t channel) const {
    return this->in(tensor) + tensor.offset(sample, channel);
  }

  // ---- forward ----

  // The statistic's elements as contiguous runs: all planes at once where they are adjacent.
  int64_t runs() const { return call.x.row_stride == plan.length ? 1 : channels_per_group(); }
  int64_t run_length() const { return plan.length * channels_per_group() / runs(); }
  int64_t slices() const { return (run_length() + kSlice - 1) / kSlice; }
  int64_t pieces_per_unit() const { return runs() * slices(); }

  Moments piece_moments(int64_t unit, int64_t piece) const {
    const int64_t first_channel = unit % plan.groups * channels_per_group();
    const int64_t run = piece / slices(), start = piece % slices() * kSlice;
    const auto span_at = [&](int64_t) EK_LAMBDA {
      return plane(call.x, unit / plan.groups, first_channel + run) + start;
    };
    MomentsBatch result = {};
    slice_moments<true>(span_at, 1, std::min(kSlice, run_length() - start), call.eps, result);
    return result[0];
  }

  void normalize_plane(int64_t unit, const Normalizer& by, int64_t channel) const {
    const int64_t sample = unit / plan.groups;
    const double scale = by.scale * this->weight(channel);
    const double offset = by.offset * this->weight(channel) + this->bias(channel);
    const auto run = [&]<bool kStream>(auto act) EK_LAMBDA {
      scale_and_shift<kStream>(plane(call.x, sample, channel), plane(call.y, sample, channel),
                               plan.length, Scalar(d, by.shift), Scalar(d, scale),
                               Scalar(d, offset), act);
    };
    this->with_activation_and_stream(run);
  }

  void forward() const {
    const int64_t units = plan.blocks * plan.groups;
    if (plan.split) return forward_split(units);
    for_each_range(call.parallel, plan.shards, units,
                   this->grain(plan.length * channels_per_group()),
                   [&](int64_t, int64_t first, int64_t last) {
                     for (int64_t unit = first; unit < last; ++unit) forward_unit(unit);
                   });
  }

  void forward_unit(int64_t unit) const {
    Moments total = piece_moments(unit, 0);
    for (int64_t piece = 1; piece < pieces_per_unit(); ++piece)
      total = merge(total, piece_moments(unit, piece));
    const Normalizer by = this->finish(unit, total);
    for (int64_t i = 0; i < channels_per_group(); ++i) {
      normalize_plane(unit, by, unit % plan.groups * channels_per_group() + i);
    }
  }

  void forward_split(int64_t units) const {
    auto* pieces = this->template pieces<Moments>();
    const int64_t count = pieces_per_unit();
    for_each_range(call.parallel, plan.shards, units * count, 1,
                   [&](int64_t, int64_t item, int64_t) {
                     pieces[item] = piece_moments(item / count, item % count);
                   });
    for (int64_t unit = 0; unit < units; ++unit) {
      Moments& total = pieces[unit * count];
      for (int64_t piece = 1; piece < count; ++piece) total = merge(total, (&total)[piece]);
      this->finish(unit, total);
    }
    for_each_range(call.parallel, plan.shards, plan.blocks * call.channels,
                   this->grain(plan.length), [&](int64_t, int64_t first, int64_t last) {
                     for (int64_t i = first; i < last; ++i) {
                       const int64_t unit = i / channels_per_group();
                       normalize_plane(unit, this->finish(unit, pieces[unit * count], false),
                                       i % call.channels);
                     }
                   });
  }

  // ---- backward ----

  // sum(dz), sum(dz * normalized) of `count` neighbouring planes, at most kBatch.
  void plane_sums(int64_t sample, int64_t channel, int64_t count, GradientSums* result) const {
    LaneSums<typename Job<In>::Tag> sum, product;
    const int64_t block = block_length(d);
    for (int64_t start = 0; start < plan.length; start += block) {
      this->with_activation([&](auto act) EK_LAMBDA {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t c = channel + i, unit = sample * plan.groups + c / channels_per_group();
          const auto found =
              reduce_plane(plane(call.x, sample, c) + start, plane(call.dy, sample, c) + start,
                           std::min(block, plan.length - start), this->mean(unit), this->rstd(unit),
                           this->weight(c), this->bias(c), act);
          sum.put(d, i, found.first);
          product.put(d, i, found.second);
        }
      });
      sum.add_up(d, count);
      product.add_up(d, count);
      for (int64_t i = 0; i < count; ++i) {
        const GradientSums part{sum[i], product[i]};
        result[i] = start == 0 ? part : result[i] + part;
      }
    }
  }

  // Adds a sample's plane to its chunk's parameter sums and to its group's sums.
  void gather(int64_t sample, int64_t channel, const GradientSums& plane,
              GradientSums& group) const {
    const double weight = this->weight(channel);
    group = group + GradientSums{plane.sum * weight, plane.product * weight};
    if (!this->wants_parameters()) return;
    const int64_t chunk = sample / plan.chunk_blocks;
    this->partial(chunk, 0).data[channel] += static_cast<typename In::Compute>(plane.product);
    this->partial(chunk, 1).data[channel] += static_cast<typename In::Compute>(plane.sum);
  }

  void input_gradient_plane(int64_t sample, int64_t channel, const GradientSums& group) const {
    const int64_t unit = sample * plan.groups + channel / channels_per_group();
    const double rstd = this->rstd(unit),
                 share = rstd / static_cast<double>(plan.length * channels_per_group());
    const auto run = [&]<bool kStream>(auto act) EK_LAMBDA {
      input_gradient<kStream, true>(
          plane(call.x, sample, channel), plane(call.dy, sample, channel),
          plane(call.dx, sample, channel), plan.length, Scalar(d, this->mean(unit)),
          Scalar(d, rstd), Scalar(d, group.sum * share), Scalar(d, group.product * share),
          Scalar(d, this->weight(channel)), Scalar(d, this->bias(channel)), NoCast(), act);
    };
    this->with_activation_and_stream(run);
  }

  void backward() const {
    plan.split ? backward_split() : backward_groups();
    this->fold_partials();
  }

  // An item is one group of all samples of a chunk, so that parameter sums are formed in the
  // samples' order.
  void backward_groups() const {
    for_each_range(call.parallel, plan.shards, plan.chunks * plan.groups, 1,
                   [&](int64_t, int64_t item, int64_t) {
                     const int64_t chunk = item / plan.groups,
                                   first = item % plan.groups * channels_per_group();
                     const int64_t last = first + channels_per_group();
                     this->clear_partials(chunk, first, channels_per_group());
                     const int64_t end = std::min((chunk + 1) * plan.chunk_blocks, plan.blocks);
                     for (int64_t sample = chunk * plan.chunk_blocks; sample < end; ++sample) {
                       GradientSums group{};
                       for (int64_t c = first; c < last; c += kBatch) {
                         const int64_t count = std::min(kBatch, last - c);
                         GradientSums sums[kBatch];
                         plane_sums(sample, c, count, sums);
                         for (int64_t i = 0; i < count; ++i) gather(sample, c + i, sums[i], group);
                       }
                       for (int64_t c = first; call.dx && c < last; ++c)
                         input_gradient_plane(sample, c, group);
                     }
                   });
  }

  void backward_split() const {
    auto* planes = this->template pieces<GradientSums>();  // [samples][channels]
    GradientSums* groups = planes + plan.blocks * call.channels;
    const int64_t grain = this->grain(plan.length);
    for_each_range(call.parallel, plan.shards, plan.blocks * call.channels, grain,
                   [&](int64_t, int64_t first, int64_t last) {
                     for (int64_t i = first; i < last; ++i)
                       plane_sums(i / call.channels, i % call.channels, 1, &planes[i]);
                   });
    for (int64_t chunk = 0; chunk < plan.chunks; ++chunk)
      this->clear_partials(chunk, 0, plan.partial_width);
    for (int64_t i = 0; i < plan.blocks * call.channels; ++i) {
      GradientSums& group = groups[i / channels_per_group()];
      if (i % channels_per_group() == 0) group = {};
      gather(i / call.channels, i % call.channels, planes[i], group);
    }
    if (!call.dx) return;
    for_each_range(call.parallel, plan.shards, plan.blocks * call.channels, grain,
                   [&](int64_t, int64_t first, int64_t last) {
                     for (int64_t i = first; i < last; ++i) {
                       input_gradient_plane(i / call.channels, i % call.channels,
                                            groups[i / channels_per_group()]);
                     }
                   });
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
