// Checks and times the passes of a case (run_case.h).
#include "run_case.h"

#include <algorithm>
#include <array>
#include <memory>
#include <sstream>
#include <utility>

#include "device_problem.h"
#include "support/compare.h"
#include "support/half.h"
#include "support/quantized.h"

namespace evenkeel::bench {
namespace {

using support::Accuracy;
using support::Case;
using support::Problem;

// Of a tensor or vector; 0 where it is absent.
template <class Spec>
double bytes_of(const Spec& spec, int64_t elements) {
  const auto size = static_cast<double>(support::size_of(spec.dtype));
  return spec.present ? static_cast<double>(elements) * size : 0;
}

// Of the big tensors: what the ceiling moves as well.
double tensor_bytes(const Case& c, bool backward) {
  const int64_t elements = element_count(c);
  double bytes = 0;
  const auto add = [&](const support::TensorSpec& spec) { bytes += bytes_of(spec, elements); };
  if (backward) {
    for (const auto& spec : {c.dy, normalized(c), c.dsum, c.dx, c.dresidual}) add(spec);
  } else {
    for (const auto& spec : {c.x, c.residual, c.sum, c.y}) add(spec);
  }
  return bytes;
}

double moved_bytes(const Case& c, bool backward) {
  const int64_t parameters = parameter_count(c);
  const double statistic = normalized(c).dtype == EK_F64 ? 8 : 4;
  double bytes = tensor_bytes(c, backward) + bytes_of(c.weight, parameters);
  if (backward) {
    bytes += bytes_of(c.dweight, parameters) + bytes_of(c.dbias, parameters);
  } else {
    bytes += bytes_of(c.bias, parameters);
  }
  const bool mean = backward ? c.op != EK_RMS_NORM : c.mean;
  const bool rstd = backward || c.rstd;
  return bytes + statistic * static_cast<double>(unit_count(c)) * (int{mean} + int{rstd});
}

void judge(Problem& problem, bool backward, Line& line) {
  Problem oracle = make_oracle(problem);
  if (backward) oracle.take_statistics(problem);
  line.failure =
      backward ? oracle.backward(support::kReference) : oracle.forward(support::kReference);
  if (!line.failure.empty()) return;
  const Accuracy accuracy =
      backward ? compare_backward(problem, oracle) : compare_forward(problem, oracle);
  line.failure = accuracy.failure;
  double share = 0;
  for (const support::OutputError& output : accuracy.outputs) {
    if (output.name == "y" || output.name == "dx") line.error = output.max_absolute;
    share = std::max(share, output.max_share);
  }
  line.share = share;
}

// y of 8 bits is compared with what the device's own norm in float32 gives, quantized.
void judge_quantized(Problem& problem, Device& device, const Plan& plan, Line& line) {
  Problem norm = support::make_unquantized(problem);
  DeviceProblem on_device(norm, device, plan.backend);
  if (line.failure = on_device.prepare(false); !line.failure.empty()) return;
  if (line.failure = on_device.run(false); !line.failure.empty()) return;
  on_device.download(false);
  if (line.failure = norm.check_memory(false); !line.failure.empty()) return;
  judge(norm, false, line);
  line.failure = line.failure.empty() ? support::compare_quantized(problem, norm)
                                      : "before quantization: " + line.failure;
}

// Tensors of the ceiling: out = a, or out = a + b.
class Ceiling {
 public:
  Ceiling(Device& device, size_t bytes, bool backward)
      : device_(device),
        bytes_(bytes),
        backward_(backward),
        out_(device, bytes),
        a_(device, bytes),
        b_(device, backward ? bytes : 0) {
    const std::vector<char> zeros(bytes);
    device.upload(out_.data(), zeros.data(), bytes);
    device.upload(a_.data(), zeros.data(), bytes);
    if (backward) device.upload(b_.data(), zeros.data(), bytes);
  }

  void run() {
    if (backward_) return device_.add(out_.data(), a_.data(), b_.data(), bytes_);
    device_.copy(out_.data(), a_.data(), bytes_);
  }

 private:
  Device& device_;
  size_t bytes_;
  bool backward_;
  DeviceMemory out_, a_, b_;
};

// Times of a single call, though several sets of tensors are used in turn.
Race time_pass(Problem& host, DeviceProblem& problem, Device& device, const Plan& plan,
               bool backward) {
  const Case& c = host.spec();
  const int copies = device.copies(tensor_bytes(c, backward));
  const auto bytes = static_cast<size_t>(tensor_bytes(c, backward) / (backward ? 3 : 2));
  std::vector<std::unique_ptr<DeviceProblem>> others;
  std::vector<std::unique_ptr<Ceiling>> ceilings;
  for (int i = 0; i < copies; ++i) {
    ceilings.push_back(std::make_unique<Ceiling>(device, bytes, backward));
    if (i == 0) continue;
    others.push_back(std::make_unique<DeviceProblem>(host, device, plan.backend));
    static_cast<void>(others.back()->prepare(backward));
  }
  Race result = race(
      device,
      [&] {
        static_cast<void>(problem.run(backward));
        for (const auto& other : others) static_cast<void>(other->run(backward));
      },
      [&] {
        for (const auto& ceiling : ceilings) ceiling->run();
      },
      plan.seconds);
  result.seconds /= copies;
  result.limit_seconds /= copies;
  return result;
}

Line run_pass(Problem& problem, DeviceProblem& on_device, Device& device, const Plan& plan,
              bool backward, const std::function<void(const std::string&)>& progress) {
  const Case& c = problem.spec();
  Line line;
  line.spec = c;
  line.spec.forward = !backward;
  line.spec.backward = backward;
  line.backward = backward;
  line.bytes = moved_bytes(c, backward);
  if (line.failure = on_device.prepare(backward); !line.failure.empty()) {
    if (on_device.unsupported()) std::swap(line.failure, line.skipped);
    return line;
  }
  line.backend = on_device.backend();
  if (line.failure = on_device.run(backward); !line.failure.empty()) return line;
  if (plan.check) {
    progress("checking");
    on_device.download(backward);
    line.failure = problem.check_memory(backward);
    if (line.failure.empty()) {
      !backward&& quantizes(c) ? judge_quantized(problem, device, plan, line)
                               : judge(problem, backward, line);
    }
  }
  // A call in place changes its own input, so that repeated calls would meet ever stranger values.
  const bool repeatable = c.in_place == support::InPlace::kNone && element_count(c) > 0;
  if (plan.time && repeatable && line.failure.empty()) {
    progress("timing");
    line.race = time_pass(problem, on_device, device, plan, backward);
  }
  return line;
}

}  // namespace

std::string label(const Case& c) {
  std::ostringstream out;
  std::istringstream words(to_string(c));
  std::string word;
  words >> word;
  out << word << ' ';
  if (c.op == EK_GROUP_NORM) {
    out << c.samples << 'x' << c.channels << 'x' << c.spatial << '/' << c.groups << ' '
        << (c.layout == EK_NHWC ? "nhwc " : "nchw ");
  } else {
    out << c.rows << 'x' << c.cols << ' ';
  }
  out << support::name_of(c.x.dtype);
  constexpr std::array kSaid = {
      "rows=", "cols=", "samples=", "channels=", "spatial=", "groups=", "layout=", "x=", "pass="};
  while (words >> word) {
    const auto said = [&](const char* key) { return word.starts_with(key); };
    if (std::none_of(kSaid.begin(), kSaid.end(), said)) out << ' ' << word;
  }
  return out.str();
}

std::vector<Line> run_case(const Case& c, Device& device, const Plan& plan,
                           const std::function<bool(bool backward)>& wanted,
                           const std::function<void(const std::string&)>& progress) {
  std::vector<Line> lines;
  const bool forward = c.forward && wanted(false), backward = c.backward && wanted(true);
  if (!forward && !backward) return lines;
  progress("making inputs");
  Problem problem(c);
  DeviceProblem on_device(problem, device, plan.backend);
  if (forward) {
    lines.push_back(run_pass(problem, on_device, device, plan, false, progress));
  }
  if (backward) {
    // Statistics come from the reference: those of the forward pass were judged there.
    std::string failure = problem.save_statistics(support::kReference);
    lines.push_back(run_pass(problem, on_device, device, plan, true, progress));
    if (!failure.empty()) lines.back().failure = failure;
  }
  return lines;
}

}  // namespace evenkeel::bench
