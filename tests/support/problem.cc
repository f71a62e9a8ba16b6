// Buffers and calls of a case (problem.h).
#include "support/problem.h"

#include <algorithm>
#include <utility>

#include "support/half.h"
#include "support/values.h"

namespace evenkeel::support {
namespace {

ek_dtype statistics_dtype(const Case& c) { return c.x.dtype == EK_F64 ? EK_F64 : EK_F32; }

Buffer make_tensor(const Case& c, const TensorSpec& spec) {
  if (!spec.present) return Buffer();
  const auto elements = static_cast<size_t>(Placement(c, spec).extent());
  return Buffer(elements * size_of(spec.dtype), static_cast<size_t>(c.misalign));
}

Buffer make_vector(const Case& c, ek_dtype dtype, bool present, int64_t count) {
  if (!present) return Buffer();
  return Buffer(static_cast<size_t>(count) * size_of(dtype), static_cast<size_t>(c.misalign));
}

std::shared_ptr<const Inputs> make_inputs(const Case& c) {
  auto inputs = std::make_shared<Inputs>();
  inputs->x = make_tensor(c, c.x);
  inputs->dy = make_tensor(c, c.dy);
  inputs->weight = make_vector(c, c.weight.dtype, c.weight.present, parameter_count(c));
  inputs->bias = make_vector(c, c.bias.dtype, c.bias.present, parameter_count(c));
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
  mean_ = make_vector(c, statistics, c.mean, units);
  rstd_ = make_vector(c, statistics, c.rstd, units);
  saved_mean_ = make_vector(c, statistics, has_mean, units);
  saved_rstd_ = make_vector(c, statistics, true, units);
  if (!c.backward) return;
  dx_ = make_tensor(c, c.dx);
  dweight_ = make_vector(c, c.dweight.dtype, c.dweight.present, parameters);
  dbias_ = make_vector(c, c.dbias.dtype, c.dbias.present, parameters);
}

void Problem::bind() {
  const Case& c = case_;
  forward_args_ = EK_FORWARD_ARGS_INIT;
  forward_args_.x = tensor_of(c.x, c.in_place == InPlace::kNone ? inputs_->x : y_);
  forward_args_.y = tensor_of(c.y, y_);
  forward_args_.weight = vector_of(c.weight, inputs_->weight);
  forward_args_.bias = vector_of(c.bias, inputs_->bias);
  forward_args_.mean = mean_.data();
  forward_args_.rstd = rstd_.data();
  backward_args_ = EK_BACKWARD_ARGS_INIT;
  backward_args_.dy = tensor_of(c.dy, c.in_place == InPlace::kDy && dx_ ? dx_ : inputs_->dy);
  backward_args_.x = tensor_of(c.x, c.in_place == InPlace::kX && dx_ ? dx_ : inputs_->x);
  backward_args_.weight = vector_of(c.weight, inputs_->weight);
  backward_args_.bias = vector_of(c.bias, inputs_->bias);
  backward_args_.mean = saved_mean_.data();
  backward_args_.rstd = saved_rstd_.data();
  backward_args_.dx = tensor_of(c.dx, dx_);
  backward_args_.dweight = vector_of(c.dweight, dweight_);
  backward_args_.dbias = vector_of(c.dbias, dbias_);
}

void Problem::reset(bool backward) {
  if (backward) {
    for (Buffer* output : {&dx_, &dweight_, &dbias_}) output->poison();
    if (case_.in_place == InPlace::kDy && dx_) dx_.copy_from(inputs_->dy);
    if (case_.in_place == InPlace::kX && dx_) dx_.copy_from(inputs_->x);
  } else {
    for (Buffer* output : {&y_, &mean_, &rstd_}) output->poison();
    if (case_.in_place != InPlace::kNone) y_.copy_from(inputs_->x);
  }
  workspace_.poison();
}

std::string Problem::prepare(const Runner& runner, bool backward, ek_execution* execution) {
  *execution = EK_EXECUTION_INIT;
  execution->backend = runner.backend;
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
  forward_args_.x.data = address(inputs_->x);
  // In place y's place holds x's only during forward().
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
                                                           {"y", &y_},
                                                           {"mean", &mean_},
                                                           {"rstd", &rstd_},
                                                           {"saved mean", &saved_mean_},
                                                           {"saved rstd", &saved_rstd_},
                                                           {"dx", &dx_},
                                                           {"dweight", &dweight_},
                                                           {"dbias", &dbias_},
                                                           {"workspace", &workspace_}};
  for (const auto& [name, buffer] : buffers) {
    if (!buffer->guards_intact())
      return std::string("the guards around ") + name + " were written to";
  }
  if (!backward && !gaps_intact(case_, case_.y, y_)) return "the gaps of y were written to";
  if (backward && !gaps_intact(case_, case_.dx, dx_)) return "the gaps of dx were written to";
  return "";
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
      break;
  }
  return dx_;
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
    case Vector::kSavedRstd:
      break;
  }
  return saved_rstd_;
}

namespace {

const TensorSpec& spec_of(const Case& c, Tensor tensor) {
  switch (tensor) {
    case Tensor::kX:
      return c.x;
    case Tensor::kY:
      return c.y;
    case Tensor::kDy:
      return c.dy;
    case Tensor::kDx:
      break;
  }
  return c.dx;
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
