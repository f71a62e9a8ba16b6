// What the three shapes share: access to the call's tensors, statistics and parameters, and the
// parameter gradients' partial sums.

// NOLINTNEXTLINE(llvm-header-guard): Highway includes this file once per instruction set.
#if defined(EVENKEEL_CPU_JOB_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EVENKEEL_CPU_JOB_INL_H_
#undef EVENKEEL_CPU_JOB_INL_H_
#else
#define EVENKEEL_CPU_JOB_INL_H_
#endif

#include <cmath>

#include "core/call.h"
#include "cpu/moments.h"
#include "cpu/plan.h"
#include "cpu/schedule.h"
#include "cpu/spans-inl.h"

HWY_BEFORE_NAMESPACE();
namespace evenkeel {
namespace HWY_NAMESPACE {

template <class In>
struct Job {
  using Compute = typename In::Compute;
  using Tag = hn::ScalableTag<Compute>;
  using Scalar = Splat<Tag>;
  using Array = Typed<Compute>;

  const Call& call;
  const Plan& plan;
  Tag d;

  Job(const Call& c, const Plan& p)
      : call(c), plan(p), base_(c.workspace + (-reinterpret_cast<uintptr_t>(c.workspace) & 63)) {
    if (!plan.reads_arrays(call)) return;
    weight_ = prepare(call.weight, call.weight_offset, 1, plan.weight);
    bias_ = prepare(call.bias, 0, 0, plan.bias);
  }

  // ---- the call's tensors ----

  In in(const Tensor& tensor) const { return In(tensor.data, tensor.dtype); }
  bool activates() const { return call.activation != EK_ACTIVATION_NONE; }
  bool wants_parameters() const { return call.sums_columns(); }
  double mean(int64_t unit) const { return call.centers() ? statistic(call.mean, unit) : 0; }
  double rstd(int64_t unit) const { return statistic(call.rstd, unit); }

  // Weight and bias in the compute type, with ones and zeros where there are none: all (where
  // plan.reads_arrays()), or a channel's.
  Array weight() const { return Array(weight_, Dtype::kF32); }
  Array bias() const { return Array(bias_, Dtype::kF32); }
  double weight(int64_t channel) const {
    return call.weight
               ? load_scalar(call.weight.data, call.weight.dtype, channel) + call.weight_offset
               : 1;
  }
  double bias(int64_t channel) const {
    return call.bias ? load_scalar(call.bias.data, call.bias.dtype, channel) : 0;
  }

  template <class T>
  T* pieces() const {
    return reinterpret_cast<T*>(base_ + plan.pieces);
  }
  char* scratch(int64_t shard) const {
    return base_ + plan.scratch + static_cast<size_t>(shard) * plan.scratch_stride;
  }

  // Rows, or planes and the like, that are taken at a time: enough to be worth the trip to the
  // counter.
  static int64_t grain(int64_t length) { return std::max<int64_t>(1, 8192 / length); }

  // ---- statistics ----

  // From the moments of `count` neighbouring units to how they are normalized. Writes mean and rstd
  // where they are wanted.
  void finish(int64_t unit, int64_t count, const MomentsBatch& found, NormalizerBatch& result,
              bool write = true) const {
    const hn::ScalableTag<double> d64;
    const auto one = hn::Set(d64, 1), share = hn::Set(d64, 1 / found.count);
    Compute shift[kBatch];
    std::copy_n(found.mean, kBatch, shift);
    std::copy_n(shift, kBatch, result.shift);
    for (int64_t i = 0; i < kBatch; i += static_cast<int64_t>(hn::Lanes(d64))) {
      const auto variance = hn::Mul(hn::LoadU(d64, found.deviations + i), share);
      const auto rstd = hn::Div(one, hn::Sqrt(hn::Add(variance, hn::Set(d64, call.eps))));
      const auto rounding =
          hn::Sub(hn::LoadU(d64, result.shift + i), hn::LoadU(d64, found.mean + i));
      hn::StoreU(rstd, d64, result.scale + i);
      hn::StoreU(hn::Mul(rounding, rstd), d64, result.offset + i);
    }
    if (write && call.mean != nullptr) set_statistics(call.mean, unit, count, found.mean);
    if (write && call.rstd != nullptr) set_statistics(call.rstd, unit, count, result.scale);
  }
  Normalizer finish(int64_t unit, const Moments& found, bool write = true) const {
    MomentsBatch batch{};
    NormalizerBatch result;
    batch.set(0, found);
    finish(unit, 1, batch, result, write);
    return {result.shift[0], result.scale[0], result.offset[0]};
  }

  // ---- from run-time flags to template arguments ----

  // run(activation)
  template <class Run>
  void with_activation(const Run& run) const {
    if (!activates()) return run(NoActivation());
    HWY_NAMESPACE::with_activation(call.activation, run);
  }

  // run.operator()<kStream>(activation). With an activation the processor is the limit, not the
  // memory.
  template <class Run>
  void with_activation_and_stream(const Run& run) const {
    if (activates())
      return with_activation([&](auto act) EK_LAMBDA { run.template operator()<false>(act); });
    plan.stream ? run.template operator()<true>(NoActivation())
                : run.template operator()<false>(NoActivation());
  }

  // ---- parameter gradients ----

  // The chunk's sums for dweight (0) or dbias (1).
  Array partial(int64_t chunk, int64_t which) const {
    return Array(base_ + plan.partials, Dtype::kF32) + (2 * chunk + which) * plan.partial_width;
  }

  void clear_partials(int64_t chunk, int64_t start, int64_t n) const {
    if (!wants_parameters()) return;
    for (int64_t which = 0; which < 2; ++which) {
      std::memset(static_cast<void*>((partial(chunk, which) + start).data), 0,
                  static_cast<size_t>(n) * sizeof(Compute));
    }
  }

  // The partner of a last, odd row: a row of zeros, which adds nothing to any sum. At most kSlice
  // elements of it exist.
  template <class Stat>
  GradientRow<In, Stat> no_row(Stat mean, Stat rstd) const {
    alignas(64) static char zeros[kSlice * sizeof(double)];
    return {In(zeros, call.x.dtype), In(zeros, call.dy.dtype), mean, rstd};
  }

  // Sums the chunks in their order, then the repetitions of each parameter, and stores the
  // gradients.
  void fold_partials() const {
    for (int64_t which = 0; which < 2; ++which) {
      const Vector& target = which == 0 ? call.dweight : call.dbias;
      if (!target) continue;
      if (plan.chunks == 0) {
        for (int64_t c = 0; c < call.channels; ++c) store_scalar(target.data, target.dtype, c, 0);
        continue;
      }
      for_each_range(
          call.parallel, plan.shards, plan.partial_width, kFoldGrain,
          [&](int64_t, int64_t first, int64_t last) { fold_range(which, target, first, last); });
      if (!plan.plain_order()) fold_repetitions(which, target);
    }
  }

 private:
  static constexpr int64_t kFoldGrain = 4096;

  // load_scalar() of the two types that statistics have: short rows ask for theirs often.
  double statistic(const char* from, int64_t unit) const {
    double wide;
    float narrow;
    if (call.stats == Dtype::kF64) return std::memcpy(&wide, from + 8 * unit, 8), wide;
    return std::memcpy(&narrow, from + 4 * unit, 4), narrow;
  }
  void set_statistics(char* to, int64_t unit, int64_t count, const double* values) const {
    float narrow[kBatch];
    std::copy_n(values, kBatch, narrow);
    const auto bytes = static_cast<size_t>(count * size_of(call.stats));
    const void* from = values;
    if (call.stats == Dtype::kF32) from = narrow;
    std::memcpy(to + unit * size_of(call.stats), from, bytes);
  }

  // The parameter as the kernels want it: the caller's own array where that will do, a converted
  // copy otherwise.
  char* prepare(const Vector& given, double offset, double absent, size_t where) const {
    if (plan.reads_as_given(call, given, offset)) return given.data;
    auto* array = reinterpret_cast<Compute*>(base_ + where);
    const int64_t padded = plan.parameter_groups * plan.parameter_stride;
    if (!given) {
      std::fill_n(array, padded, static_cast<Compute>(absent));
      return base_ + where;
    }
    // What lies in the padding is multiplied by zeros, and must not be a NaN.
    std::fill_n(array, padded, Compute{0});
    const Any<Compute> from(given.data, given.dtype);
    const auto plus = hn::Set(d, static_cast<Compute>(offset));
    for_each_vector<Array>(d, call.channels, [&](int64_t i, auto access) EK_LAMBDA {
      access.store(d, hn::Add(access.load(d, from, i), plus), Array(array, Dtype::kF32), i);
    });
    spread(array);
    to_lane_order<In>(array, padded);
    return base_ + where;
  }

  // From one entry for each channel to the repeated and padded array.
  void spread(Compute* array) const {
    if (plan.kind == Plan::Kind::kPixels) {
      for (int64_t i = call.channels; i < plan.parameters; ++i) array[i] = array[i - call.channels];
    } else if (!plan.plain_order()) {
      for (int64_t i = plan.parameters - 1; i >= 0; --i)
        array[plan.slot(i)] = array[i / plan.repeat];
    }
  }

  void fold_range(int64_t which, const Vector& target, int64_t first, int64_t last) const {
    // Of samples with a scale or a shift, sums are in the first of their chunks, in memory order.
    const int64_t step = call.modulates() ? plan.sample_chunks : 1;
    add_chunks(which, 0, plan.chunks, step, first, last);
    const Array sums = partial(0, which);
    if (plan.kind == Plan::Kind::kRows && !call.modulates())
      to_memory_order<In>(sums.data + first, last - first);
    if (plan.plain_order()) store_gradient(sums, target, first, std::min(last, call.channels));
  }

 protected:
  // Adds every step-th chunk from `from` to `end` to the first of them, carrying along what each addition rounds off.
  void add_chunks(int64_t which, int64_t from, int64_t end, int64_t step, int64_t first,
                  int64_t last) const {
    const Array sums = partial(from, which);
    for_each_vector<Array>(d, last - first, [&](int64_t j, auto access) EK_LAMBDA {
      auto sum = access.load(d, sums, first + j);
      auto lost = hn::Zero(d);
      for (int64_t chunk = from + step; chunk < end; chunk += step) {
        const auto next = access.load(d, partial(chunk, which), first + j);
        const auto total = hn::Add(sum, next);
        const auto added = hn::Sub(total, sum);
        lost = hn::Add(lost, hn::Add(hn::Sub(sum, hn::Sub(total, added)), hn::Sub(next, added)));
        sum = total;
      }
      // An infinite sum has lost an infinity and its opposite.
      access.store(d, hn::IfThenElse(hn::IsFinite(sum), hn::Add(sum, lost), sum), sums, first + j);
    });
  }

  void store_gradient(Array sums, const Vector& target, int64_t first, int64_t last) const {
    if (size_of(target.dtype) > static_cast<int64_t>(sizeof(Compute))) {
      for (int64_t c = first; c < last; ++c)
        store_scalar(target.data, target.dtype, c, sums.data[c]);
      return;
    }
    const Any<Compute> result(target.data, target.dtype);
    for_each_vector<Array>(d, last - first, [&](int64_t j, auto access) EK_LAMBDA {
      access.store(d, access.load(d, sums, first + j), result, first + j);
    });
  }

 private:
  // Adds up the repetitions of each parameter.
  void fold_repetitions(int64_t which, const Vector& target) const {
    const Compute* sums = partial(0, which).data;
    for (int64_t c = 0; c < call.channels; ++c) {
      double total = 0;
      for (int64_t r = 0; r < plan.repeat; ++r)
        total += static_cast<double>(sums[plan.slot(c * plan.repeat + r)]);
      store_scalar(target.data, target.dtype, c, total);
    }
  }

  char* base_;
  char* weight_ = nullptr;
  char* bias_ = nullptr;
};

}  // namespace HWY_NAMESPACE
}  // namespace evenkeel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
