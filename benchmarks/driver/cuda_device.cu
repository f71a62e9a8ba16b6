// An NVIDIA GPU as a device (device.h).
//
// Work is recorded once into a CUDA graph and replayed, so that launches cost nothing, and timed by
// events. Everything runs on one stream of its own.
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "device.h"

namespace evenkeel::bench {
namespace {

// Inputs and outputs of one measurement together: far beyond the L2 cache.
constexpr size_t kRotatedBytes = size_t{600} << 20;
constexpr int kMaxCopies = 256;
constexpr int kBlock = 512;

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

__global__ void copy_vectors(uint4* out, const uint4* a, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i < count) out[i] = a[i];
}

__global__ void add_vectors(uint4* out, const uint4* a, const uint4* b, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= count) return;
  const uint4 p = a[i], q = b[i];
  out[i] = make_uint4(p.x + q.x, p.y + q.y, p.z + q.z, p.w + q.w);
}

class CudaDevice : public Device {
 public:
  CudaDevice() {
    require(cudaSetDevice(0), "cudaSetDevice");
    require(cudaGetDeviceProperties(&properties_, 0), "cudaGetDeviceProperties");
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    require(cudaEventCreate(&begin_), "cudaEventCreate");
    require(cudaEventCreate(&end_), "cudaEventCreate");
  }

  std::string name() const override { return properties_.name; }
  int threads() const override { return properties_.multiProcessorCount; }
  std::string size() const override { return std::to_string(threads()) + " SMs"; }
  std::string target() const override {
    return "sm_" + std::to_string(properties_.major * 10 + properties_.minor);
  }

  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    require(cudaMalloc(&memory, std::max<size_t>(bytes, 1)), "cudaMalloc");
    return memory;
  }
  void release(void* memory) override {
    require(cudaDeviceSynchronize(), "before cudaFree");
    require(cudaFree(memory), "cudaFree");
  }
  void upload(void* to, const void* from, size_t bytes) override {
    require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "upload");
    // It may return before the last bytes have arrived, and our stream does not wait for it.
    require(cudaStreamSynchronize(nullptr), "upload");
  }
  void download(void* to, const void* from, size_t bytes) override {
    require(cudaStreamSynchronize(stream_), "run");
    require(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "download");
  }

  void direct(ek_execution* execution) const override {
    execution->device = EK_CUDA;
    execution->device_index = 0;
    execution->stream = stream_;
  }

  int copies(double bytes) const override {
    return static_cast<int>(std::clamp(static_cast<double>(kRotatedBytes) / bytes + 1, 2.0,
                                       static_cast<double>(kMaxCopies)));
  }

  void copy(void* out, const void* a, size_t bytes) override {
    const size_t count = bytes / sizeof(uint4);
    copy_vectors<<<blocks(count), kBlock, 0, stream_>>>(static_cast<uint4*>(out),
                                                        static_cast<const uint4*>(a), count);
  }
  void add(void* out, const void* a, const void* b, size_t bytes) override {
    const size_t count = bytes / sizeof(uint4);
    add_vectors<<<blocks(count), kBlock, 0, stream_>>>(static_cast<uint4*>(out),
                                                       static_cast<const uint4*>(a),
                                                       static_cast<const uint4*>(b), count);
  }

  std::function<void()> recorded(const std::function<void()>& work) override {
    cudaGraph_t graph;
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin of capture");
    work();
    require(cudaStreamEndCapture(stream_, &graph), "end of capture");
    cudaGraphExec_t instance;
    require(cudaGraphInstantiate(&instance, graph, 0), "cudaGraphInstantiate");
    require(cudaGraphDestroy(graph), "cudaGraphDestroy");
    const std::shared_ptr<CUgraphExec_st> owner(
        instance, [](cudaGraphExec_t exec) { cudaGraphExecDestroy(exec); });
    return [this, owner] { require(cudaGraphLaunch(owner.get(), stream_), "cudaGraphLaunch"); };
  }

  double seconds(const std::function<void()>& work, int count) override {
    require(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    for (int i = 0; i < count; ++i) work();
    require(cudaEventRecord(end_, stream_), "cudaEventRecord");
    require(cudaEventSynchronize(end_), "run");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return milliseconds * 1e-3 / std::max(count, 1);
  }

  void settle() override {}

 private:
  static unsigned blocks(size_t count) {
    return static_cast<unsigned>(std::max<size_t>((count + kBlock - 1) / kBlock, 1));
  }

  cudaDeviceProp properties_{};
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device() { return std::make_unique<CudaDevice>(); }

}  // namespace evenkeel::bench
