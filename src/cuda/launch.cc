#include "cuda/launch.h"

#include <algorithm>
#include <mutex>

#include "core/error.h"
#include "cuda/arguments.h"

namespace evenkeel::cuda {
namespace {

// Once for each kernel and device: lets it have clusters of any size, and as much shared memory as
// there is for its ring. The kernel that comes after such a one takes the same split between shared
// memory and first-level cache, because a multiprocessor has to be idle to change it.
cudaError_t prepare(Kernel& kernel, int device, const Chip& chip) {
  const uint64_t bit = uint64_t{1} << device;
  if (kernel.prepared.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const auto set = [&](cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(kernel.function, attribute, value);
  };
  cudaError_t error = cudaSuccess;
  if (kernel.shared != SharedMemory::kLittle)
    error = set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess && kernel.shared == SharedMemory::kRing)
    error = set(cudaFuncAttributeMaxDynamicSharedMemorySize, chip.shared_bytes);
  if (error == cudaSuccess && chip.has_clusters())
    error = set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess) kernel.prepared.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Clusters are laid out within parts of the chip, so only the driver knows how many there can be.
cudaError_t count_clusters(int device, Chip& chip) {
  chip.clusters[0] = chip.multiprocessors;
  for (int log = 1; 1 << log <= chip.cluster_limit; ++log) {
    const int size = 1 << log;
    const Tile tile{.scope = Scope::kCluster,
                    .team = kRingThreads,
                    .elements = kBackwardElements,
                    .cluster = size,
                    .threads = kRingThreads};
    Kernel& kernel = kBF16BF16.backward(true, true, tile);
    cudaError_t error = prepare(kernel, device, chip);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(size));
    config.blockDim = dim3(kRingThreads);
    config.dynamicSmemBytes = static_cast<size_t>(chip.shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&chip.clusters[log], kernel.function, &config);
    if (error != cudaSuccess) return error;
    if (chip.clusters[log] == 0) {
      chip.cluster_limit = size / 2;
      break;
    }
  }
  return cudaSuccess;
}

cudaError_t look_at(int index, Chip& chip) {
  const auto read = [&](cudaDeviceAttr attribute, int& value) {
    return cudaDeviceGetAttribute(&value, attribute, index);
  };
  cudaError_t error = read(cudaDevAttrComputeCapabilityMajor, chip.major);
  if (error == cudaSuccess) error = read(cudaDevAttrComputeCapabilityMinor, chip.minor);
  if (error == cudaSuccess) error = read(cudaDevAttrMultiProcessorCount, chip.multiprocessors);
  if (error == cudaSuccess)
    error = read(cudaDevAttrMaxSharedMemoryPerBlockOptin, chip.shared_bytes);
  if (error != cudaSuccess || chip.major < 8) return error;
  chip.cluster_limit = chip.major < 9 ? 1 : chip.major < 12 ? kMaxCluster : 8;
  const Current current(index);
  return current.error() == cudaSuccess ? count_clusters(index, chip) : current.error();
}

}  // namespace

const Device& device_at(int index) {
  static Device devices[kMaxDevices];
  static std::once_flag looked[kMaxDevices];
  Device& device = devices[index];
  std::call_once(looked[index], [&] { device.error = look_at(index, device.chip); });
  return device;
}

ek_status launch(const Call& call, const Launch& l, void* arguments) {
  const Chip& chip = device_at(call.device_index).chip;
  cudaError_t error = prepare(l.kernel, call.device_index, chip);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(l.blocks), static_cast<unsigned>(l.rows));
    config.blockDim = dim3(static_cast<unsigned>(l.threads));
    config.dynamicSmemBytes = static_cast<size_t>(l.shared);
    config.stream = static_cast<cudaStream_t>(call.stream);
    config.attrs = attributes;
    if (chip.major >= 9) {
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

ek_status launch_fold(const Call& call, Kernel& fold, const char* dweight_partials,
                      const char* dbias_partials, int64_t count) {
  FoldArguments arguments{
      .partials = {dweight_partials, dbias_partials},
      .out = {{call.dweight.data, call.dweight.dtype}, {call.dbias.data, call.dbias.dtype}},
      .cols = call.channels,
      .count = static_cast<int>(count),
      .lanes = fold_lanes(call.channels, count)};
  return launch(call,
                {.kernel = fold,
                 .blocks = ceil_div(call.channels, arguments.lanes),
                 .rows = 2,
                 .threads = kFoldThreads},
                &arguments);
}

}  // namespace evenkeel::cuda
