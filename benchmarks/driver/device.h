// Where a benchmark runs: memory, transfers, the ceiling and the clock, behind one small interface.
//
// The driver knows nothing else about a device, so that a new one is a new implementation of this
// class and a line in main.cc. Work may be asynchronous; seconds() waits for what it measures, and
// upload() and download() for everything before them.
#ifndef EVENKEEL_BENCH_DEVICE_H_
#define EVENKEEL_BENCH_DEVICE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "evenkeel/evenkeel.h"

namespace evenkeel::bench {

class Device {
 public:
  virtual ~Device() = default;

  // The machine, in words.
  virtual std::string name() const = 0;
  virtual int threads() const = 0;
  // Those threads, in words.
  virtual std::string size() const {
    return std::to_string(threads()) + (threads() == 1 ? " thread" : " threads");
  }
  // The best instruction set or architecture that the library has for it.
  virtual std::string target() const = 0;

  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;

  // Sets the fields that lead a call to this device.
  virtual void direct(ek_execution* execution) const = 0;

  // The ceiling: out = a, and out = a + b in 32-bit integers. `bytes` are those of one tensor.
  virtual void copy(void* out, const void* a, size_t bytes) = 0;
  virtual void add(void* out, const void* a, const void* b, size_t bytes) = 0;

  // How many sets of a measurement's tensors are used in turn, given the bytes of one set, so that
  // no cache holds them all.
  virtual int copies(double) const { return 1; }
  // The work in its cheapest form to repeat.
  virtual std::function<void()> recorded(const std::function<void()>& work) { return work; }

  // Seconds per call of `count` calls in a row.
  virtual double seconds(const std::function<void()>& work, int count) = 0;
  // Lets whatever the last work left running come to rest.
  virtual void settle() = 0;
};

// The processor, by `threads` threads; 0 is one per processor.
std::unique_ptr<Device> make_host_device(int threads);
// The first GPU; throws where there is none.
std::unique_ptr<Device> make_cuda_device();

// Memory of a device, freed at the end of its scope.
class DeviceMemory {
 public:
  DeviceMemory(Device& device, size_t bytes)
      : memory_(device.allocate(bytes), [&device](void* memory) { device.release(memory); }) {}

  void* data() const { return memory_.get(); }

 private:
  std::unique_ptr<void, std::function<void(void*)>> memory_;
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_BENCH_DEVICE_H_
