// Buffers and calls of a case (problem.h).
#include "support/problem.h"

#include <algorithm>
#include <utility>

#include "support/half.h"
#include "support/quantized.h"
#include "support/values.h"

namespace evenkeel::support {
namespace {

ek_dtype statistics_dtype(const Case& c) { return normalized(c).dtype == EK_F64 ? EK_F64 : EK_F32; }

Buffer make_tensor(const Case& c, const TensorSpec& spec) {
  if (!spec.present) return Buffer();
  const auto elements = static_cast<size_t>(Placement(c, spec).extent());
  return Buffer(elements * size_of(spec.dtype), static_cast<size_t>(c.misalign));
}

Buffer make_vector(const Case& c, ek_dtype dtype, bool present, int64_t count) {
  if (!present) return Buffer();
  return Buffer(static_cast<size_t>(count) * size_of(dtype), static_cast<size_t>(c.misalign));
}

int64_t sample_stride(const Case& c, const SampleSpec& spec) {
  return spec.stride == 0 ? c.cols : spec.stride;
}

Buffer make_sample_tensor(const Case& c, const SampleSpec& spec) {
  if (!spec.present) return Buffer();
  const int64_t elements = (c.samples - 1) * sample_stride(c, spec) + c.cols;
  return Buffer(static_cast<size_t>(elements) * size_of(spec.dtype),
                static_cast<size_t>(c.misalign));
}

std::shared_ptr<const Inputs> make_inputs(const Case& c) {
  auto inputs = std::make_shared<Inputs>();
  inputs->x = make_tensor(c, c.x);
  inputs->dy = make_tensor(c, c.dy);
  inputs->weight = make_vector(c, c.weight.dtype, c.weight.present, parameter_count(c));
  inputs->bias = make_vector(c, c.bias.dtype, c.bias.present, parameter_count(c));
  inputs->scale = make_sample_tensor(c, c.scale);
  inputs->shift = make_sample_tensor(c, c.shift);
  inputs->residual = make_tensor(c, c.residual);
  if (c.residual.present) inputs->sum = make_tensor(c, normalized(c));
  inputs->dsum = make_tensor(c, c.dsum);
  fill_inputs(c, *inputs);
  return inputs;
}

// The structs have no pointers to const; the library only reads inputs.
void* address(const Buffer& buffer) { return const_cast<unsigned char*>(buffer.data()); }

ek_tensor tensor_of(const TensorSpec& spec, const Buffer& buffer) {
  return {address(buffer), spec.row_stride, spec.outer_stride, spec.dtype, 0};
}

ek_vector vector_of(const VectorSpec& spec, const Buffer& buffer) {
  return {address(buffer), spec.dtype, 0};
}

ek_tensor tensor_of(const SampleSpec& spec, const Buffer& buffer) {
  return {address(buffer), spec.stride, 0, spec.dtype, 0};
}

std::string failure(const char* call, ek_status status) {
  return std::string(call) + ": " + ek_status_name(status) + ": " + ek_last_error();
}

// Whether every byte between the rows of an output is still poison.
bool gaps_intact(const Case& c, const TensorSpec& spec, const Buffer& buffer) {
  const Placement placement(c, spec);
  if (!buffer || placement.extent() == element_count(c)) return true;
  std::vector<std::pair<int64_t, int64_t>> used;
  for (int64_t unit = 0; unit < unit_count(c); ++unit) {
    for (int64_t run = 0; run < placement.runs(); ++run) {
      const int64_t start = placement.offset(unit, run);
      used.emplace_back(start, start + placement.length());
    }
  }
  std::sort(used.begin(), used.end());
  const auto bytes = static_cast<int64_t>(size_of(spec.dtype));
  int64_t end = 0;
  for (const auto& [start, stop] : used) {
    if (!std::all_of(buffer.data() + end * bytes, buffer.data() + start * bytes,
                     [](unsigned char byte) { return byte == Buffer::kPoison; })) {
      return false;
    }
    end = stop;
  }
  return true;
}

bool gaps_intact(const Case& c, const SampleSpec& spec, const Buffer& buffer) {
  if (!buffer) return true;
  const auto bytes = static_cast<int64_t>(size_of(spec.dtype));
  const int64_t stride = sample_stride(c, spec);
  for (int64_t sample = 0; sample + 1 < c.samples; ++sample) {
    const unsigned char* const gap = buffer.data() + (sample * stride + c.cols) * bytes;
    if (!std::all_of(gap, gap + (stride - c.cols) * bytes,
                     [](unsigned char byte) { return byte == Buffer::kPoison; })) {
      return false;
    }
  }
  return true;
}

}  // namespace

Placement::Placement(const Case& c, const TensorSpec& spec)
    : group_(c.op == EK_GROUP_NORM),
      nhwc_(group_ && c.layout == EK_NHWC),
      units_(unit_count(c)),
      groups_(c.groups),
      group_channels_(group_ ? c.channels / c.groups : 0),
      spatial_(c.spatial) {
  const int64_t row = !group_ ? c.cols : nhwc_ ? c.channels : c.spatial;
  inner_ = !group_ ? (c.inner_rows ? c.inner_rows : std::max<int64_t>(c.rows, 1))
           : nhwc_ ? c.spatial
                   : c.channels;
  row_stride_ = spec.row_stride ? spec.row_stride : row;
  outer_stride_ = spec.outer_stride ? spec.outer_stride : inner_ * row_stride_;
  const bool packed = group_ && !nhwc_ && row_stride_ == spatial_;
  runs_ = !group_ || packed ? 1 : nhwc_ ? spatial_ : group_channels_;
  length_ = unit_size(c) / std::max<int64_t>(runs_, 1);
  extent_ = 0;
  // The last element is in the last block, or in the last full one where that is shorter.
  const int64_t rows = group_ ? c.samples * inner_ : c.rows;
  if (rows > 0 && row > 0) {
    const int64_t last_block = (rows - 1) / inner_;
    extent_ = last_block * outer_stride_ + ((rows - 1) % inner_) * row_stride_ + row;
    if (last_block > 0) {
      extent_ =
          std::max(extent_, (last_block - 1) * outer_stride_ + (inner_ - 1) * row_stride_ + row);
    }
  }
}

int64_t Placement::offset(int64_t unit, int64_t run) const {
  if (!group_) return unit / inner_ * outer_stride_ + unit % inner_ * row_stride_;
  const int64_t channel = unit % groups_ * group_channels_;
  const int64_t sample = unit / groups_ * outer_stride_;
  return nhwc_ ? sample + run * row_stride_ + channel : sample + (channel + run) * row_stride_;
}

int64_t Placement::element(int64_t unit, int64_t index) const {
  if (runs_ == 1 && !nhwc_) return offset(unit, 0) + index;
  const int64_t channel = index / spatial_, pixel = index % spatial_;
  return nhwc_ ? offset(unit, pixel) + channel : offset(unit, channel) + pixel;
}

Problem::Problem(const Case& c) : Problem(c, make_inputs(c)) {}

Problem::Problem(const Case& c, std::shared_ptr<const Inputs> inputs)
    : case_(c), inputs_(std::move(inputs)), problem_(problem_of(c)) {
  allocate();
  bind();
}

void Problem::allocate() {
  const Case& c = case_;
  const ek_dtype statistics = statistics_dtype(c);
  const int64_t units = unit_count(c), parameters = parameter_count(c);
  const bool has_mean = c.op != EK_RMS_NORM;
  y_ = make_tensor(c, c.y);
  sum_ = make_tensor(c, c.sum);
  mean_ = make_vector(c, statistics, c.mean, units);
  rstd_ = make_vector(c, statistics, c.rstd, units);
  saved_mean_ = make_vector(c, statistics, has_mean, units);
  saved_rstd_ = make_vector(c, statistics, true, units);
  if (quantizes(c)) {
    y_scale_ = make_vector(c, EK_F32, c.y_scale == YScale::kTensor, 1);
    row_scale_ = make_vector(c, EK_F32, c.y_scale == YScale::kRows, units);
    if (y_scale_) store(EK_F32, y_scale_.data(), static_cast<double>(tensor_scale(c.y.dtype)));
  }
  if (!c.backward) return;
  dx_ = make_tensor(c, c.dx);
  dresidual_ = make_tensor(c, c.dresidual);
  dweight_ = make_vector(c, c.dweight.dtype, c.dweight.present, parameters);
  dbias_ = make_vector(c, c.dbias.dtype, c.dbias.present, parameters);
  dscale_ = make_sample_tensor(c, c.dscale);
  dshift_ = make_sample_tensor(c, c.dshift);
}

void Problem::bind() {
  const Case& c = case_;
  // Where an output is in the place of an input, that input is the output's buffer.
  const auto input = [&](const Buffer& own, InPlace in_place,
                         const Buffer& output) -> const Buffer& {
    return c.in_place == in_place && output ? output : own;
  };
  const bool y_over_x = c.in_place == InPlace::kDy || c.in_place == InPlace::kX;
  forward_args_ = EK_FORWARD_ARGS_INIT;
  forward_args_.x = tensor_of(c.x, y_over_x ? y_ : input(inputs_->x, InPlace::kSum, sum_));
  forward_args_.y = tensor_of(c.y, y_);
  forward_args_.residual =
      tensor_of(c.residual, input(inputs_->residual, InPlace::kResidual, sum_));
  forward_args_.sum = tensor_of(c.sum, sum_);
  forward_args_.weight = vector_of(c.weight, inputs_->weight);
  forward_args_.bias = vector_of(c.bias, inputs_->bias);
  forward_args_.scale = tensor_of(c.scale, inputs_->scale);
  forward_args_.shift = tensor_of(c.shift, inputs_->shift);
  forward_args_.mean = mean_.data();
  forward_args_.rstd = rstd_.data();
  forward_args_.y_scale = reinterpret_cast<const float*>(y_scale_.data());
  forward_args_.y_row_scale = reinterpret_cast<float*>(row_scale_.data());
  forward_args_.y_amax_bound = c.amax_bound;
  backward_args_ = EK_BACKWARD_ARGS_INIT;
  const Buffer& x = c.residual.present ? inputs_->sum : inputs_->x;
  backward_args_.dy = tensor_of(c.dy, input(inputs_->dy, InPlace::kDy, dx_));
  backward_args_.x = tensor_of(normalized(c), input(x, InPlace::kX, dx_));
  backward_args_.dsum = tensor_of(
      c.dsum, c.in_place == InPlace::kSum ? input(inputs_->dsum, InPlace::kSum, dx_)
                                          : input(inputs_->dsum, InPlace::kResidual, dresidual_));
  backward_args_.dresidual = tensor_of(c.dresidual, dresidual_);
  backward_args_.weight = vector_of(c.weight, inputs_->weight);
  backward_args_.bias = vector_of(c.bias, inputs_->bias);
  backward_args_.mean = saved_mean_.data();
  backward_args_.rstd = saved_rstd_.data();
  backward_args_.dx = tensor_of(c.dx, dx_);
  backward_args_.dweight = vector_of(c.dweight, dweight_);
  backward_args_.dbias = vector_of(c.dbias, dbias_);
  backward_args_.scale = tensor_of(c.scale, inputs_->scale);
  backward_args_.shift = tensor_of(c.shift, inputs_->shift);
  backward_args_.dscale = tensor_of(c.dscale, dscale_);
  backward_args_.dshift = tensor_of(c.dshift, dshift_);
}

void Problem::reset(bool backward) {
  if (backward) {
    for (Buffer* output : {&dx_, &dresidual_, &dweight_, &dbias_, &dscale_, &dshift_})
      output->poison();
  } else {
    for (Buffer* output : {&y_, &sum_, &mean_, &rstd_, &row_scale_}) output->poison();
  }
  const Buffer& x = case_.residual.present ? inputs_->sum : inputs_->x;
  switch (case_.in_place) {
    case InPlace::kNone:
      break;
    case InPlace::kDy:
      backward ? dx_.copy_from(inputs_->dy) : y_.copy_from(inputs_->x);
      break;
    case InPlace::kX:
      backward ? dx_.copy_from(x) : y_.copy_from(inputs_->x);
      break;
    case InPlace::kResidual:
      backward ? dresidual_.copy_from(inputs_->dsum) : sum_.copy_from(inputs_->residual);
      break;
    case InPlace::kSum:
      backward ? dx_.copy_from(inputs_->dsum) : sum_.copy_from(inputs_->x);
      break;
  }
  workspace_.poison();
}

std::string Problem::prepare(const Runner& runner, bool backward, ek_execution* execution) {
  *execution = EK_EXECUTION_INIT;
  execution->backend = runner.backend;
  execution->device = runner.device;
  execution->threads = runner.threads;
  execution->parallel = runner.parallel;
  size_t bytes = 0;
  const ek_status status =
      backward ? ek_backward_workspace(&problem_, &backward_args_, execution, &bytes)
               : ek_forward_workspace(&problem_, &forward_args_, execution, &bytes);
  if (status != EK_OK) return failure("workspace query", status);
  workspace_ = Buffer(bytes, static_cast<size_t>(case_.misalign));
  execution->workspace = workspace_.data();
  execution->workspace_size = bytes;
  return "";
}

std::string Problem::forward(const Runner& runner) {
  ek_execution execution;
  if (std::string error = prepare(runner, false, &execution); !error.empty()) return error;
  reset(false);
  const ek_status status = ek_forward(&problem_, &forward_args_, &execution);
  if (status != EK_OK) return failure("forward", status);
  return check_memory(false);
}

std::string Problem::save_statistics(const Runner& runner) {
  const ek_forward_args saved = forward_args_;
  // In place outputs hold inputs only during forward().
  forward_args_.x.data = address(inputs_->x);
  forward_args_.residual.data = address(inputs_->residual);
  forward_args_.mean = saved_mean_.data();
  forward_args_.rstd = saved_rstd_.data();
  ek_execution execution;
  std::string error = prepare(runner, false, &execution);
  if (error.empty()) {
    const ek_status status = ek_forward(&problem_, &forward_args_, &execution);
    if (status != EK_OK) error = failure("forward", status);
  }
  forward_args_ = saved;
  return error;
}

void Problem::take_statistics(const Problem& other) {
  saved_mean_.copy_from(other.saved_mean_);
  saved_rstd_.copy_from(other.saved_rstd_);
}

std::string Problem::backward(const Runner& runner) {
  ek_execution execution;
  if (std::string error = prepare(runner, true, &execution); !error.empty()) return error;
  reset(true);
  const ek_status status = ek_backward(&problem_, &backward_args_, &execution);
  if (status != EK_OK) return failure("backward", status);
  return check_memory(true);
}

std::string Problem::check_memory(bool backward) const {
  const std::pair<const char*, const Buffer*> buffers[] = {{"x", &inputs_->x},
                                                           {"dy", &inputs_->dy},
                                                           {"weight", &inputs_->weight},
                                                           {"bias", &inputs_->bias},
                                                           {"scale", &inputs_->scale},
                                                           {"shift", &inputs_->shift},
                                                           {"residual", &inputs_->residual},
                                                           {"dsum", &inputs_->dsum},
                                                           {"y", &y_},
                                                           {"sum", &sum_},
                                                           {"mean", &mean_},
                                                           {"rstd", &rstd_},
                                                           {"y_scale", &y_scale_},
                                                           {"y_row_scale", &row_scale_},
                                                           {"saved mean", &saved_mean_},
                                                           {"saved rstd", &saved_rstd_},
                                                           {"dx", &dx_},
                                                           {"dresidual", &dresidual_},
                                                           {"dweight", &dweight_},
                                                           {"dbias", &dbias_},
                                                           {"dscale", &dscale_},
                                                           {"dshift", &dshift_},
                                                           {"workspace", &workspace_}};
  for (const auto& [name, buffer] : buffers) {
    if (!buffer->guards_intact())
      return std::string("the guards around ") + name + " were written to";
  }
  const auto gaps = [&](const char* name, const TensorSpec& spec, const Buffer& buffer) {
    return gaps_intact(case_, spec, buffer)
               ? ""
               : std::string("the gaps of ") + name + " were written to";
  };
  const std::string first = backward ? gaps("dx", case_.dx, dx_) : gaps("y", case_.y, y_);
  if (!first.empty()) return first;
  if (!backward) return gaps("sum", case_.sum, sum_);
  if (!gaps_intact(case_, case_.dscale, dscale_)) return "the gaps of dscale were written to";
  if (!gaps_intact(case_, case_.dshift, dshift_)) return "the gaps of dshift were written to";
  return gaps("dresidual", case_.dresidual, dresidual_);
}

const Buffer& Problem::buffer(Tensor tensor) const {
  switch (tensor) {
    case Tensor::kX:
      return inputs_->x;
    case Tensor::kY:
      return y_;
    case Tensor::kDy:
      return inputs_->dy;
    case Tensor::kDx:
      return dx_;
    case Tensor::kResidual:
      return inputs_->residual;
    case Tensor::kSum:
      return sum_;
    case Tensor::kDsum:
      return inputs_->dsum;
    case Tensor::kDresidual:
      return dresidual_;
    case Tensor::kNormalized:
      break;
  }
  return case_.residual.present ? inputs_->sum : inputs_->x;
}

const Buffer& Problem::buffer(Vector vector) const {
  switch (vector) {
    case Vector::kWeight:
      return inputs_->weight;
    case Vector::kBias:
      return inputs_->bias;
    case Vector::kDweight:
      return dweight_;
    case Vector::kDbias:
      return dbias_;
    case Vector::kMean:
      return mean_;
    case Vector::kRstd:
      return rstd_;
    case Vector::kSavedMean:
      return saved_mean_;
    case Vector::kYScale:
      return y_scale_;
    case Vector::kRowScale:
      return row_scale_;
    case Vector::kScale:
      return inputs_->scale;
    case Vector::kShift:
      return inputs_->shift;
    case Vector::kDscale:
      return dscale_;
    case Vector::kDshift:
      return dshift_;
    case Vector::kSavedRstd:
      break;
  }
  return saved_rstd_;
}

namespace {

TensorSpec spec_of(const Case& c, Tensor tensor) {
  switch (tensor) {
    case Tensor::kX:
      return c.x;
    case Tensor::kY:
      return c.y;
    case Tensor::kDy:
      return c.dy;
    case Tensor::kDx:
      return c.dx;
    case Tensor::kResidual:
      return c.residual;
    case Tensor::kSum:
      return c.sum;
    case Tensor::kDsum:
      return c.dsum;
    case Tensor::kDresidual:
      return c.dresidual;
    case Tensor::kNormalized:
      break;
  }
  return normalized(c);
}

SampleSpec spec_of(const Case& c, Vector vector) {
  switch (vector) {
    case Vector::kScale:
      return c.scale;
    case Vector::kShift:
      return c.shift;
    case Vector::kDscale:
      return c.dscale;
    case Vector::kDshift:
      return c.dshift;
    default:
      return {};  // not of samples
  }
}

}  // namespace

ek_dtype Problem::dtype(Tensor tensor) const { return spec_of(case_, tensor).dtype; }

ek_dtype Problem::dtype(Vector vector) const {
  switch (vector) {
    case Vector::kWeight:
      return case_.weight.dtype;
    case Vector::kBias:
      return case_.bias.dtype;
    case Vector::kDweight:
      return case_.dweight.dtype;
    case Vector::kDbias:
      return case_.dbias.dtype;
    case Vector::kYScale:
    case Vector::kRowScale:
      return EK_F32;
    case Vector::kScale:
    case Vector::kShift:
    case Vector::kDscale:
    case Vector::kDshift:
      return spec_of(case_, vector).dtype;
    default:
      return statistics_dtype(case_);
  }
}

void Problem::read(Tensor tensor, int64_t unit, std::vector<double>& out) const {
  const Placement placement(case_, spec_of(case_, tensor));
  const ek_dtype type = dtype(tensor);
  const auto bytes = static_cast<int64_t>(size_of(type));
  const unsigned char* data = buffer(tensor).data();
  const int64_t size = unit_size(case_);
  out.resize(static_cast<size_t>(size));
  if (case_.op == EK_GROUP_NORM && case_.layout == EK_NHWC) {
    for (int64_t i = 0; i < size; ++i) {
      out[static_cast<size_t>(i)] = load(type, data + placement.element(unit, i) * bytes);
    }
    return;
  }
  for (int64_t run = 0; run < placement.runs(); ++run) {
    load_span(type, data + placement.offset(unit, run) * bytes, placement.length(),
              out.data() + run * placement.length());
  }
}

std::vector<double> Problem::read(Vector vector) const {
  const Buffer& source = buffer(vector);
  const ek_dtype type = dtype(vector);
  if (const SampleSpec spec = spec_of(case_, vector); spec.present) {
    const auto cols = static_cast<size_t>(case_.cols);
    std::vector<double> out(static_cast<size_t>(case_.samples) * cols);
    for (size_t sample = 0; sample * cols < out.size(); ++sample) {
      const size_t at = sample * static_cast<size_t>(sample_stride(case_, spec)) * size_of(type);
      load_span(type, source.data() + at, case_.cols, out.data() + sample * cols);
    }
    return out;
  }
  std::vector<double> out(source.size() / size_of(type));
  load_span(type, source.data(), static_cast<int64_t>(out.size()), out.data());
  return out;
}

std::vector<unsigned char> Problem::bytes(Tensor tensor, int64_t unit) const {
  const Placement placement(case_, spec_of(case_, tensor));
  const size_t element = size_of(dtype(tensor));
  const size_t length = static_cast<size_t>(placement.length()) * element;
  std::vector<unsigned char> out;
  for (int64_t run = 0; run < placement.runs(); ++run) {
    const unsigned char* start =
        buffer(tensor).data() + static_cast<size_t>(placement.offset(unit, run)) * element;
    out.insert(out.end(), start, start + length);
  }
  return out;
}

}  // namespace evenkeel::support
