// The CUDA backend: layer norm and RMS norm. Looks at the device once, makes a plan for each call and
// launches its kernels on the caller's stream; never allocates or waits.
#include "cuda/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>

#include "core/error.h"
#include "cuda/arguments.h"
#include "cuda/kernels.h"
#include "cuda/plan.h"

namespace evenkeel {
namespace cuda {
namespace {

constexpr int kMaxDevices = 64;  // bits of Kernel::prepared

struct Device {
  std::once_flag once;
  Chip chip;
  cudaError_t error = cudaSuccess;
};

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

const Device& device_at(int index) {
  static Device devices[kMaxDevices];
  Device& device = devices[index];
  std::call_once(device.once, [&] { device.error = look_at(index, device.chip); });
  return device;
}

bool accepts(const Call& call, Note& note) {
  if (call.device != EK_CUDA) {
    note.set("tensors are in host memory, and this backend reads a GPU's");
    return false;
  }
  if (call.is_group_norm()) {
    note.set("group norm has no CUDA kernels yet");
    return false;
  }
  if (call.device_index < 0 || call.device_index >= kMaxDevices) {
    note.set("execution.device_index is %d, but must be from 0 to %d", call.device_index,
             kMaxDevices - 1);
    return false;
  }
  const Device& device = device_at(call.device_index);
  if (device.error != cudaSuccess) {
    note.set("device %d cannot be used: %s", call.device_index, cudaGetErrorString(device.error));
    return false;
  }
  if (device.chip.major < 8) {
    note.set("device %d has compute capability %d.%d, but 8.0 is the least", call.device_index,
             device.chip.major, device.chip.minor);
    return false;
  }
  return true;
}

Plan plan_of(const Call& call) { return make_plan(call, device_at(call.device_index).chip); }

void describe(const Call& call, Note& note) {
  const Plan plan = plan_of(call);
  const Tile& tile = plan.tile;
  char team[64];
  if (tile.cluster > 1) {
    std::snprintf(team, sizeof team, "a cluster of %d x %d threads a row", tile.cluster, tile.team);
  } else {
    std::snprintf(team, sizeof team, "%d threads a row", tile.team);
  }
  char held[96];
  if (tile.streams()) {
    std::snprintf(held, sizeof held, "rows read again in every pass%s%s",
                  plan.untyped ? ", types looked up at run time: " : "",
                  plan.untyped ? plan.untyped : "");
  } else {
    std::snprintf(held, sizeof held, "%d elements a thread", tile.elements);
  }
  char ring[64] = "";
  if (tile.stages > 0) {
    std::snprintf(ring, sizeof ring, ", ring of %d rows, %lld partial sums", tile.stages,
                  static_cast<long long>(plan.partials));
  }
  note.set("%s, %s, %s loads, blocks of %d threads%s, arithmetic in %s", team, held,
           plan.aligned ? "16-byte" : "single", tile.threads, ring, name_of(call.compute));
}

size_t workspace(const Call& call) {
  return call.pass == Pass::kForward ? 0 : static_cast<size_t>(plan_of(call).workspace);
}

const KernelSet& kernels_for(const Call& call, const Plan& plan) {
  if (plan.untyped) return call.compute == Dtype::kF64 ? kAnyF64 : kAnyF32;
  const Dtype y = call.pass == Pass::kForward ? call.y.dtype : call.dy.dtype;
  switch (call.x.dtype) {
    case Dtype::kF16:
      return y == Dtype::kF32 ? kF16F32 : kF16F16;
    case Dtype::kBF16:
      return y == Dtype::kF32 ? kBF16F32 : kBF16BF16;
    default:
      return y == Dtype::kF32 ? kF32F32 : y == Dtype::kF16 ? kF32F16 : kF32BF16;
  }
}

struct Launch {
  Kernel& kernel;
  int64_t blocks;
  int rows = 1;  // of the grid
  int threads;
  int cluster = 1;
  int64_t shared = 0;
};

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

bool is_even(const Call& call, const Tensor& tensor) {
  return !tensor || call.outer == 1 || tensor.outer_stride == call.inner * tensor.row_stride;
}

DeviceTensor device_tensor(const Call& call, const Tensor& tensor) {
  const int64_t inner = is_even(call, tensor) ? 0 : call.inner;
  const int64_t last =
      (call.outer - 1) * tensor.outer_stride + (call.inner - 1) * tensor.row_stride;
  return {tensor.data,
          tensor ? tensor.at(last + call.width) : nullptr,
          tensor.row_stride,
          tensor.outer_stride,
          inner,
          tensor.dtype};
}

RowWalk walk_of(const Call& call, const Plan& plan) {
  const int64_t step = plan.groups * plan.tile.teams();
  const bool even = is_even(call, call.x) && is_even(call, call.y) && is_even(call, call.dy) &&
                    is_even(call, call.dx);
  return {step, even ? 0 : call.inner, even ? 0 : step % call.inner};
}

RowStep step_of(const RowWalk& walk, const Tensor& tensor) {
  const int64_t size = size_of(tensor.dtype);
  if (walk.inner == 0) return {walk.step * tensor.row_stride * size, 0};
  return {
      (walk.step / walk.inner * tensor.outer_stride + walk.step_inside * tensor.row_stride) * size,
      (tensor.outer_stride - walk.inner * tensor.row_stride) * size};
}

Formula formula_of(const Call& call) {
  return {.weight = {call.weight.data, call.weight.dtype},
          .bias = {call.bias.data, call.bias.dtype},
          .eps = call.eps,
          .weight_offset = call.weight_offset,
          .share = 1 / static_cast<double>(call.width),
          .centers = call.centers(),
          .silu = call.activation == EK_ACTIVATION_SILU,
          .rounds = call.casting == EK_CASTING_LLAMA};
}

int part_of(const Call& call, const Tile& tile) {
  return tile.streams() ? 0 : static_cast<int>(part_cols(call.width, tile));
}

ek_status forward(const Call& call, const Plan& plan) {
  ForwardArguments arguments{.x = device_tensor(call, call.x),
                             .y = device_tensor(call, call.y),
                             .formula = formula_of(call),
                             .mean = call.mean,
                             .rstd = call.rstd,
                             .stats = call.stats,
                             .rows = call.statistics(),
                             .cols = call.width};
  if (arguments.rows == 0) return EK_OK;
  Kernel& kernel = kernels_for(call, plan).forward(plan.plain, plan.aligned, plan.tile);
  return launch(call,
                {.kernel = kernel,
                 .blocks = plan.groups * plan.tile.cluster,
                 .threads = plan.tile.threads,
                 .cluster = plan.tile.cluster},
                &arguments);
}

ek_status backward(const Call& call, const Plan& plan) {
  const KernelSet& kernels = kernels_for(call, plan);
  const Tile& tile = plan.tile;
  const RowWalk walk = walk_of(call, plan);
  char* const workspace =
      call.workspace + -reinterpret_cast<uintptr_t>(call.workspace) % kWorkspaceAlignment;
  BackwardArguments arguments{.x = device_tensor(call, call.x),
                              .dy = device_tensor(call, call.dy),
                              .dx = device_tensor(call, call.dx),
                              .formula = formula_of(call),
                              .mean = call.centers() ? call.mean : nullptr,
                              .rstd = call.rstd,
                              .stats = call.stats,
                              .rows = call.statistics(),
                              .cols = call.width,
                              .dweight_partials = call.dweight ? workspace : nullptr,
                              .dbias_partials = call.dbias ? workspace + plan.dbias_at : nullptr,
                              .team = tile.team,
                              .stages = tile.stages,
                              .part_cols = part_of(call, tile),
                              .walk = walk,
                              .x_step = step_of(walk, call.x),
                              .dy_step = step_of(walk, call.dy),
                              .dx_step = step_of(walk, call.dx)};
  const bool parameters = call.dweight || call.dbias;
  ek_status status = EK_OK;
  // Before dx, which may overwrite dy or x.
  if (arguments.rows > 0 && parameters && tile.streams()) {
    status = launch(call,
                    {.kernel = kernels.column_sums(),
                     .blocks = ceil_div(call.width, kColumnThreads),
                     .rows = static_cast<int>(plan.partials),
                     .threads = kColumnThreads},
                    &arguments);
  }
  if (status == EK_OK && arguments.rows > 0 && (call.dx || !tile.streams())) {
    status = launch(call,
                    {.kernel = kernels.backward(plan.plain, plan.aligned, tile),
                     .blocks = plan.groups * tile.cluster,
                     .threads = tile.threads,
                     .cluster = tile.cluster,
                     .shared = plan.shared},
                    &arguments);
  }
  if (status != EK_OK || !parameters) return status;
  FoldArguments fold{
      .partials = {arguments.dweight_partials, arguments.dbias_partials},
      .out = {{call.dweight.data, call.dweight.dtype}, {call.dbias.data, call.dbias.dtype}},
      .cols = call.width,
      .count = static_cast<int>(plan.partials)};
  return launch(call,
                {.kernel = kernels.fold(),
                 .blocks = ceil_div(call.width, kWarp),
                 .rows = 2,
                 .threads = kFoldThreads},
                &fold);
}

ek_status run(const Call& call) {
  const Current current(call.device_index);
  if (current.error() != cudaSuccess) {
    return fail(EK_DEVICE_ERROR, "cuda: device %d cannot be made current: %s", call.device_index,
                cudaGetErrorString(current.error()));
  }
  const Plan plan = plan_of(call);
  return call.pass == Pass::kForward ? forward(call, plan) : backward(call, plan);
}

}  // namespace
}  // namespace cuda

const Backend kCudaBackend = {"cuda", cuda::accepts, cuda::describe, cuda::workspace, cuda::run};

}  // namespace evenkeel
