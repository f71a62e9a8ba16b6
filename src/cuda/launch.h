// Devices, and launches on the caller's stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/call.h"
#include "cuda/runtime/device_properties.h"
#include "cuda/runtime/kernel.h"

namespace evenkeel::cuda {

inline constexpr int kMaxDevices = 64;  // bits of Kernel::prepared

struct Device {
  DeviceProperties properties;
  cudaError_t error = cudaSuccess;
};

// Looked at once.
const Device& device_at(int index);

// Makes a device current for a scope.
class Current {
 public:
  explicit Current(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) error_ = cudaSetDevice(device);
    changed_ = before_ != device;
  }
  ~Current() {
    if (changed_) cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

struct Launch {
  Kernel& kernel;
  int64_t blocks;
  int rows = 1;  // of the grid
  int threads;
  int cluster = 1;
  int64_t shared = 0;
};

ek_status launch(const Call& call, const Launch& l, void* arguments);

// The kernel that adds up `count` rows of partial sums of dweight and dbias.
ek_status launch_reduce_partials(const Call& call, Kernel& kernel, const char* dweight_partials,
                                 const char* dbias_partials, int64_t count);

}  // namespace evenkeel::cuda
