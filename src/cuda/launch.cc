#include "cuda/launch.h"

#include <algorithm>
#include <mutex>

#include "core/error.h"
#include "cuda/arguments.h"
#include "cuda/row/backward_tuning.h"

namespace evenkeel::cuda {
namespace {

// Once for each kernel and device: lets it have clusters of any size, and as much shared memory as
// there is for its ring. The kernel that comes after such a one takes the same split between shared
// memory and L1, because an SM has to be idle to change it.
cudaError_t prepare(Kernel& kernel, int device, const DeviceProperties& properties) {
  const uint64_t bit = uint64_t{1} << device;
  if (kernel.prepared.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const auto set = [&](cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(kernel.function, attribute, value);
  };
  cudaError_t error = cudaSuccess;
  if (kernel.shared != SharedMemory::kLittle)
    error = set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess && kernel.shared == SharedMemory::kRing)
    error = set(cudaFuncAttributeMaxDynamicSharedMemorySize, properties.shared_bytes);
  if (error == cudaSuccess && properties.has_clusters())
    error = set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess) kernel.prepared.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Clusters are laid out within parts of the properties, so only the driver knows how many there can be.
cudaError_t count_clusters(int device, DeviceProperties& properties) {
  properties.clusters[0] = properties.sms;
  for (int log = 1; 1 << log <= properties.cluster_limit; ++log) {
    const int size = 1 << log;
    const Tile tile{.scope = Scope::kCluster,
                    .threads_per_row = kRingThreads,
                    .elements = kBackwardElements,
                    .cluster = size,
                    .block_threads = kRingThreads};
    Kernel& kernel = kBF16BF16.backward(
        backward_policies_of(2, 2).find(backward_policy_of(tile, 2, 2, true, kNoTerms)));
    cudaError_t error = prepare(kernel, device, properties);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(size));
    config.blockDim = dim3(kRingThreads);
    config.dynamicSmemBytes = static_cast<size_t>(properties.shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&properties.clusters[log], kernel.function, &config);
    if (error != cudaSuccess) return error;
    if (properties.clusters[log] == 0) {
      properties.cluster_limit = size / 2;
      break;
    }
  }
  return cudaSuccess;
}

cudaError_t look_at(int index, DeviceProperties& properties) {
  const auto read = [&](cudaDeviceAttr attribute, int& value) {
    return cudaDeviceGetAttribute(&value, attribute, index);
  };
  cudaError_t error = read(cudaDevAttrComputeCapabilityMajor, properties.major);
  if (error == cudaSuccess) error = read(cudaDevAttrComputeCapabilityMinor, properties.minor);
  if (error == cudaSuccess) error = read(cudaDevAttrMultiProcessorCount, properties.sms);
  if (error == cudaSuccess)
    error = read(cudaDevAttrMaxSharedMemoryPerBlockOptin, properties.shared_bytes);
  if (error != cudaSuccess || properties.major < 8) return error;
  properties.cluster_limit = properties.major < 9 ? 1 : properties.major < 12 ? kMaxCluster : 8;
  const Current current(index);
  return current.error() == cudaSuccess ? count_clusters(index, properties) : current.error();
}

}  // namespace

const Device& device_at(int index) {
  static Device devices[kMaxDevices];
  static std::once_flag looked[kMaxDevices];
  Device& device = devices[index];
  std::call_once(looked[index], [&] { device.error = look_at(index, device.properties); });
  return device;
}

ek_status launch(const Call& call, const Launch& l, void* arguments) {
  const DeviceProperties& properties = device_at(call.device_index).properties;
  cudaError_t error = prepare(l.kernel, call.device_index, properties);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(l.blocks), static_cast<unsigned>(l.rows));
    config.blockDim = dim3(static_cast<unsigned>(l.threads));
    config.dynamicSmemBytes = static_cast<size_t>(l.shared);
    config.stream = static_cast<cudaStream_t>(call.stream);
    config.attrs = attributes;
    if (properties.major >= 9) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (l.cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(l.cluster), 1, 1};
    }
    error = cudaLaunchKernelExC(&config, l.kernel.function, &arguments);
  }
  if (error == cudaSuccess) return EK_OK;
  cudaGetLastError();  // it is reported here, and must not come up again in the caller's next call
  return fail(
      EK_DEVICE_ERROR,
      "cuda: launching %s on device %d failed: %s (%lld x %d blocks of %d threads, clusters "
      "of %d, %lld bytes of shared memory)",
      l.kernel.name, call.device_index, cudaGetErrorString(error), static_cast<long long>(l.blocks),
      l.rows, l.threads, l.cluster, static_cast<long long>(l.shared));
}

}  // namespace evenkeel::cuda
