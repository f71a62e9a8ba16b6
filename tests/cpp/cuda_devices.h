// GPUs that need not be there: how a call is split depends on these numbers alone.
#ifndef EVENKEEL_TESTS_CPP_CUDA_DEVICES_H_
#define EVENKEEL_TESTS_CPP_CUDA_DEVICES_H_

#include <cstdint>

#include "cuda/row/tuning.h"

namespace evenkeel::cuda {

struct NamedDevice {
  const char* name;
  DeviceProperties device;
};

inline constexpr NamedDevice kH200 = {"H200",
                                      {.major = 9,
                                       .minor = 0,
                                       .sms = 132,
                                       .shared_bytes = 232448,
                                       .cluster_limit = 16,
                                       .clusters = {132, 66, 32, 16, 8}}};
inline constexpr NamedDevice kDevices[] = {
    kH200,
    {"A100", {.major = 8, .minor = 0, .sms = 108, .shared_bytes = 166912, .clusters = {108}}},
    {"RTX 4090", {.major = 8, .minor = 9, .sms = 128, .shared_bytes = 101376, .clusters = {128}}},
    {"RTX 5090",
     {.major = 12,
      .minor = 0,
      .sms = 170,
      .shared_bytes = 101376,
      .cluster_limit = 8,
      .clusters = {170, 85, 42, 20, 0}}}};

// Addresses far from each other that nothing lies at: a plan reads no memory.
inline char* nowhere(uintptr_t index) { return reinterpret_cast<char*>(index << 44); }

}  // namespace evenkeel::cuda

#endif  // EVENKEEL_TESTS_CPP_CUDA_DEVICES_H_
