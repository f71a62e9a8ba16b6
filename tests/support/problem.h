// A Case brought to life: its buffers, filled, and its calls through the C ABI.
//
// Inputs are made once and never written again (a call in place gets a copy), so that several
// problems may share them. Before every run outputs and workspace are poisoned; after it the guards
// around all buffers and the gaps between strided rows are checked. The workspace is exactly as
// large as queried.
#ifndef EVENKEEL_TESTS_SUPPORT_PROBLEM_H_
#define EVENKEEL_TESTS_SUPPORT_PROBLEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "evenkeel/evenkeel.h"
#include "support/buffer.h"
#include "support/cases.h"

namespace evenkeel::support {

// Who runs a call.
struct Runner {
  const char* backend = nullptr;  // nullptr: the best
  int threads = 1;
  const ek_parallel* parallel = nullptr;
  ek_device device = EK_CPU;
};

inline constexpr Runner kCpu{"cpu", 1, nullptr};
inline constexpr Runner kReference{"reference", 1, nullptr};

// kNormalized: x, or where there is a residual, the sum as the tests find it.
enum class Tensor { kX, kY, kDy, kDx, kResidual, kSum, kDsum, kDresidual, kNormalized };
enum class Vector {
  kWeight,
  kBias,
  kDweight,
  kDbias,
  kMean,
  kRstd,
  kSavedMean,
  kSavedRstd,
  kYScale,
  kRowScale,
  // A vector for each sample, one behind the other.
  kScale,
  kShift,
  kDscale,
  kDshift
};

struct Inputs {
  Buffer x, dy, weight, bias;
  Buffer scale, shift;
  Buffer residual, sum, dsum;  // sum: x of the backward call, where there is a residual
};

class Problem {
 public:
  explicit Problem(const Case& c);
  // With the inputs of another problem, which must agree in sizes, strides and types of the inputs.
  Problem(const Case& c, std::shared_ptr<const Inputs> inputs);

  const Case& spec() const { return case_; }
  std::shared_ptr<const Inputs> inputs() const { return inputs_; }

  // Run, and say what went wrong: a status with its message, a damaged guard or gap. "" is success.
  // backward() uses the saved statistics: fill them by save_statistics() (a forward call by that
  // runner: the backend's own, or the reference's rounded to the type they are stored in), or take
  // over another problem's.
  [[nodiscard]] std::string forward(const Runner& runner);
  [[nodiscard]] std::string save_statistics(const Runner& runner);
  void take_statistics(const Problem& other);
  [[nodiscard]] std::string backward(const Runner& runner);

  // The structs of the calls, for callers that change them or time them. The execution has the
  // workspace of the queried size. `reset` gives in-place calls their inputs again.
  const ek_problem& problem() const { return problem_; }
  const ek_forward_args& forward_args() const { return forward_args_; }
  const ek_backward_args& backward_args() const { return backward_args_; }
  [[nodiscard]] std::string prepare(const Runner& runner, bool backward, ek_execution* execution);
  void reset(bool backward);
  size_t workspace_size() const { return workspace_.size(); }

  // Values in the order (unit, element), channels before pixels, whatever layout and strides are.
  void read(Tensor tensor, int64_t unit, std::vector<double>& out) const;
  std::vector<double> read(Vector vector) const;
  ek_dtype dtype(Tensor tensor) const;
  ek_dtype dtype(Vector vector) const;

  // The bytes of one unit, for bitwise comparison.
  std::vector<unsigned char> bytes(Tensor tensor, int64_t unit) const;
  const Buffer& buffer(Tensor tensor) const;
  const Buffer& buffer(Vector vector) const;

  // "" if the guards of all buffers and the gaps of the outputs of that pass are intact.
  std::string check_memory(bool backward) const;

 private:
  void allocate();
  void bind();

  Case case_;
  std::shared_ptr<const Inputs> inputs_;
  // In place y_ also holds x, dx_ holds dy or x, and so on.
  Buffer y_, dx_, dweight_, dbias_, mean_, rstd_, saved_mean_, saved_rstd_, workspace_;
  Buffer sum_, dresidual_, y_scale_, row_scale_, dscale_, dshift_;
  ek_problem problem_;
  ek_forward_args forward_args_;
  ek_backward_args backward_args_;
};

// Where the units of a big tensor lie: each is `runs` pieces of `length` neighbouring elements.
class Placement {
 public:
  Placement(const Case& c, const TensorSpec& spec);

  int64_t runs() const { return runs_; }
  int64_t length() const { return length_; }
  // Offset in elements of piece `run` of `unit`.
  int64_t offset(int64_t unit, int64_t run) const;
  // Element `index` of the unit in (channel, pixel) order.
  int64_t element(int64_t unit, int64_t index) const;
  // Elements from the first to the last, gaps included.
  int64_t extent() const { return extent_; }

 private:
  bool group_, nhwc_;
  int64_t units_, row_stride_, outer_stride_, inner_, groups_, group_channels_, spatial_;
  int64_t runs_, length_, extent_;
};

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_PROBLEM_H_
