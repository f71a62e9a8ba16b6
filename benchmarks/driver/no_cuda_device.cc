// Stands in for cuda_device.cu where there is no CUDA toolkit.
#include <stdexcept>

#include "device.h"

namespace evenkeel::bench {

std::unique_ptr<Device> make_cuda_device() {
  throw std::runtime_error("--device cuda: this build has no CUDA (EVENKEEL_CUDA)");
}

}  // namespace evenkeel::bench
