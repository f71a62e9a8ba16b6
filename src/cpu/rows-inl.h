// Rows: layer norm, RMS norm, and group norms over short planes. See plan.h for the shape.
//
// Forward: a row is read for its moments and again, out of the cache, to be normalized. Backward:
// two rows are read for their sums and the parameter sums, and again for dx.
//
// A y of 8 bits is quantized by an epilogue: what is normalized goes to scratch in float32, batch by batch.
//
// With a scale or a shift, the rows of a sample have a weight and a bias of their own, which are made in scratch:
// (1 + scale) * weight and (1 + scale) * bias + shift. All the rest is the plain norm's.
//
// With a residual, a prologue adds a batch of rows, and their sum takes the place of x. dsum is added
// where dx is computed, if all types are one. If not, or if there is a dresidual, an epilogue adds it
// to the gradient of a piece of a row, in L1, and stores it as dx, as dresidual, or both.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_ROWS_INL_H_
#undef EVENKEEL_CPU_ROWS_INL_H_
#else
#define EVENKEEL_CPU_ROWS_INL_H_
#endif

#include "cpu/job-inl.h"
#include "cpu/quantize-inl.h"
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

  static constexpr int64_t kRange = 32768;  // elements that a thread takes at a time, about

  explicit Rows(const Call& c, const Plan& p)
      : Job<In>(c, p), even_(call.is_group_norm() || call.outer == 1) {}

  int64_t slices() const { return (plan.length + kSlice - 1) / kSlice; }
  int64_t slice_length(int64_t slice) const {
    return std::min(kSlice, plan.length - slice * kSlice);
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

  int64_t stride(const Tensor& tensor) const {
    return call.is_group_norm() ? tensor.outer_stride : tensor.row_stride;
  }
  HWY_INLINE int64_t offset(const Tensor& tensor, const Place& at) const {
    const int64_t start =
        HWY_LIKELY(even_) ? at.block * stride(tensor) : uneven_start(tensor, at.block);
    return start + at.group * plan.length;
  }

  // The spans of a batch in a tensor, and where their parameters start: anywhere, or at equal
  // distances, which saves short rows the way to each of them. Blocks from `end` on do not exist.
  struct Scattered {
    const Rows& rows;
    const Place* at;
    int64_t end;

    HWY_INLINE auto of(const Tensor& tensor, int64_t skipped = 0) const {
      return [this, &tensor, skipped](int64_t i)
                 EK_LAMBDA { return rows.in(tensor) + (rows.offset(tensor, at[i]) - skipped); };
    }
    HWY_INLINE int64_t parameters(int64_t i) const {
      return at[i].group * rows.plan.parameter_stride;
    }
    HWY_INLINE bool exists(int64_t i) const { return at[i].block < end; }
  };
  struct Even {
    const Rows& rows;
    const Place& first;

    HWY_INLINE auto of(const Tensor& tensor, int64_t skipped = 0) const {
      return [at = rows.in(tensor) + (rows.offset(tensor, first) - skipped),
              step = rows.stride(tensor)](int64_t i) EK_LAMBDA { return at + i * step; };
    }
    HWY_INLINE int64_t parameters(int64_t) const { return 0; }
    HWY_INLINE bool exists(int64_t) const { return true; }
  };

  // Calls run(spans, count, n) so that the compiler sees constants where rows have 64 elements: what
  // surrounds the work on their few vectors counts. kOften: such calls are common enough for it.
  template <bool kOften, class Run>
  HWY_INLINE void with_spans(const Place* at, int64_t end, int64_t count, int64_t n,
                             const Run& run) const {
    // Where types are looked up for every vector it does not count, and float64 is rare.
    constexpr bool kTyped = sizeof(Compute) == sizeof(float) && requires { typename In::Stored; };
    constexpr int64_t kLength = 64;
    if constexpr (kOften && kTyped && HWY_TARGET != HWY_SCALAR) {
      if (n == kLength && count == kBatch && even_ && plan.groups == 1 &&
          at[kBatch - 1].block < end)
        return run(Even{*this, *at}, kBatch, kLength);
    }
    run(Scattered{*this, at, end}, count, n);
  }

  // ---- weight and bias ----

  struct Parameters {
    typename Job<In>::Array weight, bias;
  };
  Parameters parameters() const { return {this->weight(), this->bias()}; }

  // Those of n elements of a sample, from `start` on, where those of other elements are not read.
  HWY_NOINLINE Parameters parameters_of(int64_t shard, int64_t sample, int64_t start,
                                        int64_t n) const {
    const Parameters made = sample_arrays(shard);
    const typename Job<In>::Array weight = made.weight + start, bias = made.bias + start;
    const Any<Compute> scale = of_sample(call.scale, sample, start),
                       shift = of_sample(call.shift, sample, start),
                       own_weight = from(call.weight, start), own_bias = from(call.bias, start);
    const auto one = hn::Set(d, Compute{1}),
               offset = hn::Set(d, static_cast<Compute>(call.weight_offset));
    for_each_vector<typename Job<In>::Array>(d, n, [&](int64_t i, auto access) EK_LAMBDA {
      auto w = one, b = hn::Zero(d);
      if (call.weight) w = hn::Add(access.load(d, own_weight, i), offset);
      if (call.bias) b = access.load(d, own_bias, i);
      if (call.scale) {
        const auto factor = hn::Add(one, access.load(d, scale, i));
        w = hn::Mul(w, factor);
        b = hn::Mul(b, factor);
      }
      if (call.shift) b = hn::Add(b, access.load(d, shift, i));
      access.store(d, w, weight, i);
      access.store(d, b, bias, i);
    });
    // What lies in the padding is multiplied by zeros, and must not be a NaN.
    const int64_t padded = start + n == plan.length ? plan.parameter_stride - start : n;
    for (Compute* array : {weight.data, bias.data}) {
      std::fill(array + n, array + padded, Compute{0});
      to_lane_order<In>(array, padded);
    }
    return made;
  }
  Parameters sample_arrays(int64_t shard) const {
    auto* const at = reinterpret_cast<Compute*>(this->scratch(shard) + plan.sample_parameters);
    return {typename Job<In>::Array(at, Dtype::kF32),
            typename Job<In>::Array(at + plan.parameter_stride, Dtype::kF32)};
  }
  // Of any type, from an element on; what is absent is never read.
  template <class Operand>
  static Any<Compute> from(const Operand& operand, int64_t element) {
    return Any<Compute>(operand.data, operand.dtype) + (operand ? element : 0);
  }
  static Any<Compute> of_sample(const Tensor& tensor, int64_t sample, int64_t start) {
    return from(tensor, sample * tensor.row_stride + start);
  }

  // The same for a unit.
  HWY_INLINE Parameters parameters_of_unit(int64_t shard, int64_t unit, int64_t start,
                                           int64_t n) const {
    if (HWY_LIKELY(!call.modulates())) return parameters();
    return parameters_of(shard, unit / plan.sample_blocks, start, n);
  }

  // ---- from run-time flags to template arguments ----

  // Neither a casting order nor an activation: with one, with_map and with_reduce give a CastTo.
  template <class Cast>
  static constexpr bool kUsual = std::is_same_v<Cast, NoCast>;
  CastTo cast() const { return {call.normalized(), call.casting == EK_CASTING_LLAMA}; }

  // run.operator()<kStream, kCenter>(cast, activation)
  template <class Run>
  void with_map(const Run& run) const {
    const NoActivation none;
    if (this->activates()) {
      return HWY_NAMESPACE::with_activation(call.activation, [&](auto act) EK_LAMBDA {
        run.template operator()<false, true>(cast(), act);
      });
    }
    if (cast().on) return run.template operator()<false, true>(cast(), none);
    if (call.centers() || call.bias || call.shift) {
      return plan.stream ? run.template operator()<true, true>(NoCast(), none)
                         : run.template operator()<false, true>(NoCast(), none);
    }
    plan.stream ? run.template operator()<true, false>(NoCast(), none)
                : run.template operator()<false, false>(NoCast(), none);
  }

  // run.operator()<kDweight, kDbias, kCenter>(cast, activation)
  template <class Run>
  void with_reduce(const Run& run) const {
    const NoActivation none;
    if (this->activates()) {
      return HWY_NAMESPACE::with_activation(call.activation, [&](auto act) EK_LAMBDA {
        this->wants_parameters() ? run.template operator()<true, true, true>(cast(), act)
                                 : run.template operator()<false, false, true>(cast(), act);
      });
    }
    if (cast().on) {
      return this->wants_parameters() ? run.template operator()<true, true, true>(cast(), none)
                                      : run.template operator()<false, false, true>(cast(), none);
    }
    if (!call.centers() && !call.sums_gradients()) {
      return call.sums_products() ? run.template operator()<true, false, false>(NoCast(), none)
                                  : run.template operator()<false, false, false>(NoCast(), none);
    }
    // Who wants dbias alone gets dweight's sums made, too.
    if (call.sums_gradients()) return run.template operator()<true, true, true>(NoCast(), none);
    return call.sums_products() ? run.template operator()<true, false, true>(NoCast(), none)
                                : run.template operator()<false, false, true>(NoCast(), none);
  }

  // ---- forward ----

  // The next batch of short rows, sixteen of which fill a page of memory, is fetched while this one
  // is written, forward and backward: what the processor fetches by itself ends with the page. Where results go past the
  // caches, rows of any length gain by it (65536x128 f32 on a Xeon: 1.3 to 1.7 of a copy's speed).
  static constexpr int64_t kShortRow = 128;

  // What is normalized: x,
  struct Input {
    static constexpr int64_t skipped = 0;
    static constexpr bool scratch = false;
    static HWY_INLINE const Tensor& tensor(const Call& call) { return call.x; }
  };
  // or the sum, of which scratch may hold the part that is worked on: as many elements as lie before
  // it are skipped.
  struct Sum {
    Tensor stored;
    int64_t skipped = 0;
    bool scratch = false;
    HWY_INLINE const Tensor& tensor(const Call&) const { return stored; }
  };

  // Where the normalized part goes: y, or scratch, if it is to be quantized.
  struct Output {
    const Tensor& tensor;
    int64_t skipped;
    bool scratch;
  };
  Tensor before_quantization(int64_t shard) const {
    const int64_t length = plan.length;
    char* const at = this->scratch(shard) + plan.quantized;
    return {at, Dtype::kF32, length, length * call.inner};
  }

  // Kernels of other types never have a y that is to be quantized, which is float32 first.
  static constexpr bool kStoresF32 = !requires { typename In::Stored; }
  || std::is_same_v<In, Typed<float>>;

  // Normalizes a part as below and quantizes it.
  template <class Source>
  HWY_NOINLINE void quantize_parts(const Source& from, const Parameters& with, int64_t shard,
                                   int64_t unit, const Place* at, int64_t count,
                                   const NormalizerBatch& by, int64_t start, int64_t n) const {
    const Tensor kept = before_quantization(shard);
    normalize_parts(from, with, {kept, unit * plan.length + start, true}, at, count, by, start, n);
    for (int64_t i = 0; i < count; ++i) {
      const Typed<float> y = Typed<float>(kept.data, Dtype::kF32) + i * plan.length;
      float scale;
      if (call.y_row_scale != nullptr) {
        const float largest =
            with_eight_bits(call.y.dtype, [](auto format) { return decltype(format)::kLargest; });
        scale = row_scale_of(amax_bits_of(y, n), call.y_amax_bound, largest);
        store_scalar(call.y_row_scale, Dtype::kF32, unit + i, scale);
      } else {
        std::memcpy(&scale, call.y_scale, sizeof scale);
      }
      quantize(y, scale, call.y.dtype, call.y.at(offset(call.y, at[i]) + start), n);
    }
  }

  // Adds the same part of `count` rows of x and residual, from `unit` on.
  HWY_NOINLINE Sum sum_of(int64_t shard, int64_t unit, const Place* at, int64_t count,
                          int64_t start, int64_t n) const {
    Sum sum{call.sum};
    if (plan.keeps_sum(call)) {
      const int64_t length = plan.length;
      sum = {{this->scratch(shard), call.sum.dtype, length, length * call.inner},
             unit * length + start,
             true};
    }
    add_rows(at, count, start, n, sum);
    return sum;
  }

  void add_rows(const Place* at, int64_t count, int64_t start, int64_t n, const Sum& to) const {
    const Dtype dtype = call.sum.dtype;
    if constexpr (requires { typename In::Stored; }) {
      if (call.x.dtype == dtype && call.residual.dtype == dtype)
        return add_rows_as<In>(at, count, start, n, to);
    }
    // Never in more than f32 where the sum is not f64: y does not depend on whether it is stored.
    if constexpr (sizeof(Compute) == sizeof(double)) {
      if (dtype == Dtype::kF64) return add_rows_as<Any<double>>(at, count, start, n, to);
    }
    add_rows_as<Any<float>>(at, count, start, n, to);
  }

  template <class Type>
  HWY_NOINLINE void add_rows_as(const Place* at, int64_t count, int64_t start, int64_t n,
                                const Sum& to) const {
    const bool ahead = plan.fetch && even_ && n == plan.length && (plan.stream || n <= kShortRow);
    for (int64_t i = 0; i < count; ++i) {
      const auto span = [&](const Tensor& tensor, int64_t skipped) EK_LAMBDA {
        return Type(tensor.data, tensor.dtype) + (offset(tensor, at[i]) + start - skipped);
      };
      const Type x = span(call.x, 0), residual = span(call.residual, 0);
      const Type sum = span(to.stored, to.skipped);
      if (ahead) fetch(x + count * stride(call.x), n);
      if (ahead) fetch(residual + count * stride(call.residual), n);
      add(x, residual, sum, n);
      if (plan.stream_sum) {
        stream_copy(reinterpret_cast<const char*>(sum.data),
                    call.sum.at(offset(call.sum, at[i]) + start), n * sum.element());
      }
    }
  }

  // Normalizes the same part of `count` statistics.
  template <class Source>
  void normalize_parts(const Source& from, const Parameters& with, const Output& to,
                       const Place* at, int64_t count, const NormalizerBatch& by, int64_t start,
                       int64_t n) const {
    Compute shift[kBatch], scale[kBatch], offset[kBatch];
    std::copy_n(by.shift, kBatch, shift);
    std::copy_n(by.scale, kBatch, scale);
    std::copy_n(by.offset, kBatch, offset);
    with_map([&]<bool kStream, bool kCenter>(auto cast, auto act) EK_LAMBDA {
      const bool ahead =
          plan.fetch && even_ && n == plan.length && (kStream || n <= kShortRow) && !from.scratch;
      with_spans<kUsual<decltype(cast)>>(
          at, plan.blocks, count, n, [&](auto spans, int64_t rows, int64_t length) EK_LAMBDA {
            const auto x = spans.of(from.tensor(call), from.skipped);
            const auto y = spans.of(to.tensor, to.skipped);
            const auto weight = with.weight + start, bias = with.bias + start;
            for (int64_t i = 0; i < rows; ++i) {
              if (ahead) fetch(x(i) + rows * stride(from.tensor(call)), length);
              if (ahead && !kStream && !to.scratch)
                fetch<true>(y(i) + rows * stride(call.y), length);
              normalize<kStream, kCenter>(x(i) + start, y(i) + start, length, Scalar(d, shift[i]),
                                          Scalar(d, scale[i]), Scalar(d, offset[i]),
                                          weight + spans.parameters(i), bias + spans.parameters(i),
                                          cast, act);
            }
          });
    });
  }

  // Moments of the same part of `count` statistics.
  template <class Source>
  void moments_of(const Source& from, const Place* at, int64_t count, int64_t start, int64_t n,
                  MomentsBatch& result) const {
    with_spans<true>(at, plan.blocks, count, n,
                     [&](auto spans, int64_t rows, int64_t length) EK_LAMBDA {
                       const auto x = spans.of(from.tensor(call), from.skipped);
                       const auto span_at = [&](int64_t i) EK_LAMBDA { return x(i) + start; };
                       call.centers() ? moments<true>(span_at, rows, length, call.eps, result)
                                      : moments<false>(span_at, rows, length, call.eps, result);
                     });
  }

  void forward() const {
    const int64_t units = plan.blocks * plan.groups;
    if (plan.split) return forward_split(units);
    const int64_t step = plan.batch, steps = std::max<int64_t>(1, kRange / (step * plan.length));
    for_each_range(call.parallel, plan.shards, units, step * steps,
                   [&](int64_t shard, int64_t first, int64_t last) {
                     // The end of what has the same parameters: the sample's, or that of all.
                     const int64_t same = plan.sample_blocks * plan.groups;
                     for (int64_t unit = first; unit < last;) {
                       const int64_t end = std::min(last, (unit / same + 1) * same);
                       const Parameters with = parameters_of_unit(shard, unit, 0, plan.length);
                       for (; unit < end; unit += step)
                         forward_batch(with, shard, unit, std::min(step, end - unit));
                       unit = end;
                     }
                   });
  }

  void forward_batch(const Parameters& with, int64_t shard, int64_t unit, int64_t count) const {
    Place places[kBatch];
    locate(unit, count, places);
    if (HWY_UNLIKELY(call.residual)) {
      const Sum sum = sum_of(shard, unit, places, count, 0, plan.length);
      return normalize_batch(sum, with, shard, unit, places, count);
    }
    normalize_batch(Input(), with, shard, unit, places, count);
  }

  // A few rows at a time, step by step: the long latency of turning sums into factors then overlaps
  // between rows.
  template <class Source>
  void normalize_batch(const Source& from, const Parameters& with, int64_t shard, int64_t unit,
                       const Place* places, int64_t count) const {
    MomentsBatch found;
    NormalizerBatch by;
    moments_of(from, places, count, 0, plan.length, found);
    this->finish(unit, count, found, by);
    finish_parts(from, with, shard, unit, places, count, by, 0, plan.length);
  }

  // From factors to y.
  template <class Source>
  HWY_INLINE void finish_parts(const Source& from, const Parameters& with, int64_t shard,
                               int64_t unit, const Place* at, int64_t count,
                               const NormalizerBatch& by, int64_t start, int64_t n) const {
    if constexpr (kStoresF32) {
      if (HWY_UNLIKELY(call.quantizes()))
        return quantize_parts(from, with, shard, unit, at, count, by, start, n);
    }
    normalize_parts(from, with, {call.y, 0, false}, at, count, by, start, n);
  }

  void forward_split(int64_t units) const {
    auto* pieces = this->template pieces<Moments>();
    for_each_range(
        call.parallel, plan.shards, units * slices(), 1, [&](int64_t shard, int64_t item, int64_t) {
          const int64_t unit = item / slices(), slice = item % slices();
          const int64_t start = slice * kSlice, n = slice_length(slice);
          const Place at = place(unit);
          MomentsBatch found = {};
          call.residual ? moments_of(sum_of(shard, unit, &at, 1, start, n), &at, 1, start, n, found)
                        : moments_of(Input(), &at, 1, start, n, found);
          pieces[item] = found[0];
        });
    for (int64_t unit = 0; unit < units; ++unit) {
      Moments& total = pieces[unit * slices()];
      for (int64_t slice = 1; slice < slices(); ++slice) total = merge(total, (&total)[slice]);
    }
    for_each_range(
        call.parallel, plan.shards, units * slices(), 1, [&](int64_t shard, int64_t item, int64_t) {
          const int64_t unit = item / slices(), slice = item % slices();
          const int64_t start = slice * kSlice, n = slice_length(slice);
          MomentsBatch found = {};
          NormalizerBatch by;
          found.set(0, pieces[unit * slices()]);
          this->finish(unit, 1, found, by, slice == 0);
          const Place at = place(unit);
          const Parameters with = parameters_of_unit(shard, unit, start, n);
          if (!call.residual) return finish_parts(Input(), with, shard, unit, &at, 1, by, start, n);
          // A sum that is stored is not added again: it may lie over x.
          const Sum sum = call.sum ? Sum{call.sum} : sum_of(shard, unit, &at, 1, start, n);
          finish_parts(sum, with, shard, unit, &at, 1, by, start, n);
        });
  }

  // ---- backward ----

  // Rows of a chunk, two at a time: the same group of two neighbouring blocks. The second may be
  // that of the chunk's end, and not exist.
  struct Batch {
    Parameters with;
    int64_t end;
    Place at[kBatch];
    Compute mean[kBatch] = {}, rstd[kBatch] = {};  // nought where there is no row

    Batch(const Parameters& parameters, int64_t blocks) : with(parameters), end(blocks) {}
  };

  void add_pair(const Place& first, int64_t i, Batch& batch) const {
    for (int64_t k = 0; k < 2; ++k) {
      const Place at = batch.at[i + k] = {first.block + k, first.group};
      const bool exists = at.block < batch.end;
      batch.mean[i + k] = static_cast<Compute>(exists ? this->mean(at.unit(plan)) : 0);
      batch.rstd[i + k] = static_cast<Compute>(exists ? this->rstd(at.unit(plan)) : 0);
    }
  }

  // Adds a slice of `rows` rows to the chunk's parameter sums, and finds their own sums.
  template <bool kDweight, bool kDbias, bool kCenter, class Cast, class Act>
  HWY_NOINLINE void reduce_slice(int64_t chunk, const Batch& batch, int64_t rows, int64_t slice,
                                 Cast cast, Act act, GradientSumsBatch& result) const {
    using Tag = typename Job<In>::Tag;
    if (!kCenter || rows < kBatch) result = {};  // what is not summed is nought
    with_spans<kUsual<Cast> && kDweight>(
        batch.at, batch.end, rows, slice_length(slice),
        [&](auto spans, int64_t count, int64_t n) EK_LAMBDA {
          const auto x = spans.of(call.x), dy = spans.of(call.dy);
          const int64_t block = block_length(d);
          LaneSums<Tag> sum, product;
          for (int64_t done = 0; done < n; done += block) {
            const int64_t start = slice * kSlice + done;
            const auto row = [&](int64_t i) EK_LAMBDA -> GradientRow<In, Scalar> {
              const Scalar mean(d, batch.mean[i]), rstd(d, batch.rstd[i]);
              if (!spans.exists(i)) return this->no_row(mean, rstd);
              return {x(i) + start, dy(i) + start, mean, rstd};
            };
            for (int64_t i = 0; i < count; i += 2) {
              const int64_t at = spans.parameters(i) + start;
              const GradientRow<In, Scalar> pair[2] = {row(i), row(i + 1)};
              TwoSums<Tag> part[2];
              reduce_rows<kDweight, kDbias, true, kCenter>(
                  pair, std::min(block, n - done), batch.with.weight + at, batch.with.bias + at,
                  this->partial(chunk, 0) + at, this->partial(chunk, 1) + at, cast, act, part);
              for (int k = 0; k < 2; ++k) {
                if constexpr (kCenter) sum.put(d, i + k, part[k].first);
                product.put(d, i + k, part[k].second);
              }
            }
            if constexpr (kCenter) sum.add_to(d, count, done == 0, result.sum);
            product.add_to(d, count, done == 0, result.product);
          }
        });
  }

  // The shares of input_gradient().
  struct Shares {
    Compute gradient[kBatch], product[kBatch];
  };

  // dx of the same part of a batch.
  void input_gradients(const Batch& batch, int64_t rows, const GradientSumsBatch& sums,
                       int64_t start, int64_t n) const {
    Shares share;
    const double per_element = 1 / static_cast<double>(plan.length);
    for (int64_t i = 0; i < kBatch; ++i) {
      const double factor = static_cast<double>(batch.rstd[i]) * per_element;
      share.gradient[i] = static_cast<Compute>(call.centers() ? sums.sum[i] * factor : 0);
      share.product[i] = static_cast<Compute>(sums.product[i] * factor);
    }
    const bool adds = static_cast<bool>(call.dsum);
    if (call.dresidual || (adds && !adds_directly()))
      return summed_gradients(batch, rows, share, start, n);
    with_map([&]<bool kStream, bool kCenter>(auto cast, auto act) EK_LAMBDA {
      if constexpr (kAddsDirectly && !kActivates<decltype(act)> && kUsual<decltype(cast)>) {
        if (HWY_UNLIKELY(adds))
          return gradients_of<kStream, kCenter, true>(batch, rows, share, start, n, cast, act);
      }
      gradients_of<kStream, kCenter, false>(batch, rows, share, start, n, cast, act);
    });
  }

  // Whether dsum is added in the loop that computes dx: for others it is not worth the instances.
  static constexpr bool kAddsDirectly = requires { typename In::Stored; };
  bool adds_directly() const {
    return kAddsDirectly && call.dsum.dtype == call.x.dtype && !this->activates() && !cast().on;
  }

  template <bool kStream, bool kCenter, bool kAdds, class Cast, class Act>
  HWY_INLINE void gradients_of(const Batch& batch, int64_t rows, const Shares& share, int64_t start,
                               int64_t n, Cast cast, Act act) const {
    const bool ahead =
        plan.fetch && even_ && n == plan.length &&
        (n <= kShortRow ||
         (kStream && 2 * n * In(call.x.data, call.x.dtype).element() <= kBatchBytes));
    with_spans<kUsual<Cast>>(
        batch.at, batch.end, rows, n, [&](auto spans, int64_t count, int64_t length) EK_LAMBDA {
          const auto x = spans.of(call.x), dy = spans.of(call.dy), dx = spans.of(call.dx);
          const auto dsum = spans.of(kAdds ? call.dsum : call.dx);
          const auto more = [&](int64_t i) EK_LAMBDA {
            if constexpr (kAdds) {
              return Another<In>{dsum(i) + start};
            } else {
              return Nothing();
            }
          };
          for (int64_t i = 0; i < count; ++i) {
            if (!spans.exists(i)) continue;
            const int64_t parameter = spans.parameters(i) + start;
            if (ahead) fetch(x(i) + count * stride(call.x), length);
            if (ahead) fetch(dy(i) + count * stride(call.dy), length);
            if constexpr (kAdds) {
              // Nobody has read this before, and a row is too short for the processor to notice.
              const int64_t next = stride(call.dsum) * (ahead ? count : 1);
              fetch(dsum(i) + start + next, std::min(length, kSlice));
            }
            input_gradient<kStream, kCenter>(
                x(i) + start, dy(i) + start, dx(i) + start, length, Scalar(d, batch.mean[i]),
                Scalar(d, batch.rstd[i]), Scalar(d, share.gradient[i]), Scalar(d, share.product[i]),
                batch.with.weight + parameter, batch.with.bias + parameter, cast, act, more(i));
          }
        });
  }

  // Elements whose gradient lies in L1 until it is stored.
  static constexpr int64_t kPiece = 1024;

  // The same in two steps, for a dresidual, several types, or what else a dsum may meet.
  HWY_NOINLINE void summed_gradients(const Batch& batch, int64_t rows, const Shares& share,
                                     int64_t start, int64_t length) const {
    HWY_ALIGN Compute piece[kPiece];
    const typename Job<In>::Array gradient(piece, Dtype::kF32);
    with_map([&]<bool kStream, bool kCenter>(auto cast, auto act) EK_LAMBDA {
      const Scattered spans{*this, batch.at, batch.end};
      const auto x = spans.of(call.x), dy = spans.of(call.dy);
      const auto dsum = [&](int64_t i) EK_LAMBDA {
        return Any<Compute>(call.dsum.data, call.dsum.dtype) + offset(call.dsum, batch.at[i]);
      };
      const bool ahead = plan.fetch && even_ && length == plan.length && length <= kShortRow;
      for (int64_t i = 0; i < rows; ++i) {
        if (!spans.exists(i)) continue;
        if (ahead) fetch(x(i) + rows * stride(call.x), length);
        if (ahead) fetch(dy(i) + rows * stride(call.dy), length);
        if (ahead && call.dsum) fetch(dsum(i) + rows * stride(call.dsum), length);
        for (int64_t done = 0; done < length; done += kPiece) {
          const int64_t at = start + done, n = std::min(kPiece, length - done);
          if (!ahead && call.dsum) fetch(dsum(i) + at + stride(call.dsum), n);
          input_gradient<false, kCenter>(x(i) + at, dy(i) + at, LaneOrder<In>{gradient}, n,
                                         Scalar(d, batch.mean[i]), Scalar(d, batch.rstd[i]),
                                         Scalar(d, share.gradient[i]), Scalar(d, share.product[i]),
                                         batch.with.weight + at, batch.with.bias + at, cast, act);
          put_sum<kStream>(gradient, batch.at[i], at, n);
        }
      }
    });
  }

  // Adds dsum to a piece of a row's gradient and stores it.
  template <bool kStream>
  HWY_NOINLINE void put_sum(typename Job<In>::Array gradient, const Place& at, int64_t start,
                            int64_t n) const {
    if constexpr (requires { typename In::Stored; }) {
      const auto matches = [this](const Tensor& tensor) {
        return !tensor || tensor.dtype == call.x.dtype;
      };
      if (matches(call.dsum) && matches(call.dx) && matches(call.dresidual))
        return put_sum_as<kStream, In>(gradient, at, start, n);
      const int64_t step = 2 * static_cast<int64_t>(hn::Lanes(d));
      to_memory_order<In>(gradient.data, (n + step - 1) / step * step);
    }
    put_sum_as<kStream, Any<Compute>>(gradient, at, start, n);
  }

  template <bool kStream, class Type>
  HWY_INLINE void put_sum_as(typename Job<In>::Array gradient, const Place& at, int64_t start,
                             int64_t n) const {
    const auto span = [&](const Tensor& tensor) EK_LAMBDA {
      return Type(tensor.data, tensor.dtype) + (offset(tensor, at) + start);
    };
    if (call.dsum) add_to(gradient, span(call.dsum), n);
    if (call.dx) put_gradient<kStream>(gradient, span(call.dx), n);
    if (call.dresidual) put_gradient<kStream>(gradient, span(call.dresidual), n);
  }

  void backward() const {
    plan.split ? backward_split() : backward_chunks();
    if (call.modulates() && this->wants_parameters()) fold_samples();
    this->fold_partials();
  }

  // The blocks of a chunk.
  struct Chunk {
    int64_t first, end;
  };
  Chunk chunk_at(int64_t chunk) const {
    const int64_t sample = chunk / plan.sample_chunks;
    const int64_t first =
        sample * plan.sample_blocks + chunk % plan.sample_chunks * plan.chunk_blocks;
    return {first, std::min(first + plan.chunk_blocks, (sample + 1) * plan.sample_blocks)};
  }

  void backward_chunks() const {
    for_each_range(call.parallel, plan.shards, plan.chunks, 1,
                   [&](int64_t shard, int64_t chunk, int64_t) {
                     this->clear_partials(chunk, 0, plan.partial_width);
                     const auto [first, end] = chunk_at(chunk);
                     const Parameters with = parameters_of_unit(shard, first, 0, plan.length);
                     const int64_t pairs = (end - first + 1) / 2 * plan.groups;
                     const int64_t step = std::max<int64_t>(1, plan.batch / 2);
                     for (int64_t pair = 0; pair < pairs; pair += step)
                       backward_batch(with, chunk, first, end, pair, std::min(step, pairs - pair));
                   });
  }

  // Pairs of rows of the blocks from first to end, numbered by block, then by group.
  void backward_batch(const Parameters& with, int64_t chunk, int64_t first, int64_t end,
                      int64_t pair, int64_t count) const {
    Batch batch(with, end);
    Place next = place(pair);
    for (int64_t i = 0; i < count; ++i) {
      add_pair({first + 2 * next.block, next.group}, 2 * i, batch);
      if (++next.group == plan.groups) next = {next.block + 1, 0};
    }
    GradientSumsBatch total;
    with_reduce([&]<bool kDweight, bool kDbias, bool kCenter>(auto cast, auto act) EK_LAMBDA {
      const auto reduce = [&](int64_t slice, GradientSumsBatch& result) EK_LAMBDA {
        reduce_slice<kDweight, kDbias, kCenter>(chunk, batch, 2 * count, slice, cast, act, result);
      };
      reduce(0, total);
      for (int64_t slice = 1; slice < slices(); ++slice) {
        GradientSumsBatch part;
        reduce(slice, part);
        for (int64_t i = 0; i < kBatch; ++i) total.set(i, total[i] + part[i]);
      }
    });
    if (call.wants_dx()) input_gradients(batch, 2 * count, total, 0, plan.length);
  }

  void backward_split() const {
    auto* pieces = this->template pieces<GradientSums>();
    const int64_t per_chunk = plan.groups * slices();
    for_each_range(
        call.parallel, plan.shards, plan.chunks * per_chunk, 1,
        [&](int64_t shard, int64_t item, int64_t) {
          const int64_t chunk = item / per_chunk, group = item % per_chunk / slices(),
                        slice = item % slices();
          this->clear_partials(chunk, group * plan.parameter_stride + slice * kSlice,
                               std::min(kSlice, plan.parameter_stride - slice * kSlice));
          const auto [first, end] = chunk_at(chunk);
          Batch pair(parameters_of_unit(shard, first, slice * kSlice, slice_length(slice)), end);
          with_reduce([&]<bool kDweight, bool kDbias, bool kCenter>(auto cast, auto act) EK_LAMBDA {
            for (int64_t block = first; block < pair.end; block += 2) {
              add_pair({block, group}, 0, pair);
              GradientSumsBatch part;
              reduce_slice<kDweight, kDbias, kCenter>(chunk, pair, 2, slice, cast, act, part);
              for (int64_t k = 0; k < std::min<int64_t>(2, pair.end - block); ++k)
                pieces[pair.at[k].unit(plan) * slices() + slice] = part[k];
            }
          });
        });
    if (!call.wants_dx()) return;
    const int64_t units = plan.blocks * plan.groups;
    for (int64_t unit = 0; unit < units; ++unit) {
      GradientSums& total = pieces[unit * slices()];
      for (int64_t slice = 1; slice < slices(); ++slice) total = total + (&total)[slice];
    }
    for_each_range(call.parallel, plan.shards, units * slices(), 1,
                   [&](int64_t shard, int64_t item, int64_t) {
                     const int64_t unit = item / slices(), slice = item % slices();
                     Batch row(parameters_of_unit(shard, unit, slice * kSlice, slice_length(slice)),
                               plan.blocks);
                     add_pair(place(unit), 0, row);
                     GradientSumsBatch sums = {};
                     sums.set(0, pieces[unit * slices()]);
                     input_gradients(row, 1, sums, slice * kSlice, slice_length(slice));
                   });
  }

  // dscale and dshift, out of the sums of the samples' chunks. What stays in the first chunk of a sample is its share
  // of dweight and dbias.
  void fold_samples() const {
    for_each_range(call.parallel, plan.shards, call.samples, this->grain(plan.length),
                   [&](int64_t shard, int64_t first, int64_t last) {
                     for (int64_t sample = first; sample < last; ++sample)
                       fold_sample(shard, sample);
                   });
  }

  HWY_NOINLINE void fold_sample(int64_t shard, int64_t sample) const {
    const Parameters result = sample_arrays(shard);  // dscale, dshift
    if (plan.sample_chunks == 0) {
      for (const auto& array : {result.weight, result.bias})
        std::fill_n(array.data, plan.parameter_stride, Compute{0});
      return store_sample(result, sample);
    }
    const int64_t chunk = sample * plan.sample_chunks;
    const typename Job<In>::Array products = this->partial(chunk, 0),
                                  gradients = this->partial(chunk, 1);
    for (int64_t which = 0; which < 2; ++which) {
      this->add_chunks(which, chunk, chunk + plan.sample_chunks, 1, 0, plan.partial_width);
      to_memory_order<In>(this->partial(chunk, which).data, plan.partial_width);
    }
    const Any<Compute> scale = of_sample(call.scale, sample, 0), weight = from(call.weight, 0),
                       bias = from(call.bias, 0);
    const auto one = hn::Set(d, Compute{1}),
               offset = hn::Set(d, static_cast<Compute>(call.weight_offset));
    for_each_vector<typename Job<In>::Array>(d, plan.length, [&](int64_t i, auto access) EK_LAMBDA {
      const auto product = access.load(d, products, i), gradient = access.load(d, gradients, i);
      auto dscale = product;
      if (call.weight) dscale = hn::Mul(product, hn::Add(access.load(d, weight, i), offset));
      if (call.bias) dscale = hn::MulAdd(gradient, access.load(d, bias, i), dscale);
      access.store(d, dscale, result.weight, i);
      access.store(d, gradient, result.bias, i);
      if (!call.scale) return;
      const auto factor = hn::Add(one, access.load(d, scale, i));
      access.store(d, hn::Mul(product, factor), products, i);
      access.store(d, hn::Mul(gradient, factor), gradients, i);
    });
    store_sample(result, sample);
  }

  void store_sample(const Parameters& gradients, int64_t sample) const {
    const auto store = [&](const typename Job<In>::Array& from, const Tensor& to) {
      const Vector target{to.at(sample * to.row_stride), to.dtype};
      if (to) this->store_gradient(from, target, 0, plan.length);
    };
    store(gradients.weight, call.dscale);
    store(gradients.bias, call.dshift);
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
