// A case's tensors in a device's memory, and its calls there.
//
// The tests' support library builds, fills and judges a case in host memory (support/problem.h).
// This is its twin on the device: inputs and poisoned outputs go up, results come down to where the
// support library reads them. Two arguments that share memory on the host (in-place calls) share it
// here.
#ifndef EVENKEEL_BENCH_DEVICE_PROBLEM_H_
#define EVENKEEL_BENCH_DEVICE_PROBLEM_H_

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "device.h"
#include "support/problem.h"

namespace evenkeel::bench {

class DeviceProblem {
 public:
  // `backend` as in ek_execution.
  DeviceProblem(support::Problem& host, Device& device, const char* backend);

  // Makes a pass ready to run: workspace, inputs, poisoned outputs. "" or why it cannot run.
  [[nodiscard]] std::string prepare(bool backward);
  // Runs the prepared pass; "" or what the library said.
  [[nodiscard]] std::string run(bool backward);
  // Brings the outputs of the pass to the host problem.
  void download(bool backward);

  // Why prepare() failed: the device has no kernel for it.
  bool unsupported() const { return unsupported_; }
  // The backend that runs the pass, once prepared.
  const std::string& backend() const { return backend_; }

 private:
  struct Twin {
    DeviceMemory memory;
    size_t bytes;
    void* data;
  };

  void mirror(const support::Buffer& buffer);
  void* twin(const void* host) const;
  void fetch(void* host);

  support::Problem& host_;
  Device& device_;
  std::map<const void*, Twin> twins_;  // by the host's address
  std::optional<DeviceMemory> workspace_;
  std::string backend_;
  bool unsupported_ = false;
  ek_forward_args forward_args_;
  ek_backward_args backward_args_;
  ek_execution execution_ = EK_EXECUTION_INIT;
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_BENCH_DEVICE_PROBLEM_H_
