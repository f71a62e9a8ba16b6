// A block of memory between guard bytes, at an address that is off alignment by as much as asked.
//
// Guards catch what AddressSanitizer cannot: masked and overlapping vector stores that write back
// what they read are seen as soon as they change a byte. Poison is 0xff in every byte, a NaN in all
// four types, so that whatever was not written, or was read without having been written, shows up.
#ifndef EVENKEEL_TESTS_SUPPORT_BUFFER_H_
#define EVENKEEL_TESTS_SUPPORT_BUFFER_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace evenkeel::support {

class Buffer {
 public:
  static constexpr size_t kGuard = 192;
  static constexpr unsigned char kGuardByte = 0xa5;
  static constexpr unsigned char kPoison = 0xff;

  Buffer() = default;
  explicit Buffer(size_t size, size_t misalign = 0)
      : size_(size),
        before_(kGuard + misalign),
        memory_(static_cast<unsigned char*>(
            ::operator new (before_ + size + kGuard, std::align_val_t{kAlignment}))) {
    std::memset(memory_.get(), kGuardByte, before_);
    std::memset(memory_.get() + before_ + size_, kGuardByte, kGuard);
    poison();
  }

  unsigned char* data() { return memory_ ? memory_.get() + before_ : nullptr; }
  const unsigned char* data() const { return memory_ ? memory_.get() + before_ : nullptr; }
  size_t size() const { return size_; }
  explicit operator bool() const { return memory_ != nullptr; }

  void poison() {
    if (size_ > 0) std::memset(data(), kPoison, size_);
  }
  void copy_from(const Buffer& other) {
    if (size_ > 0) std::memcpy(data(), other.data(), size_);
  }

  bool guards_intact() const {
    if (!memory_) return true;
    const auto intact = [](unsigned char byte) { return byte == kGuardByte; };
    const unsigned char* after = memory_.get() + before_ + size_;
    return std::all_of(memory_.get(), memory_.get() + before_, intact) &&
           std::all_of(after, after + kGuard, intact);
  }

  friend bool operator==(const Buffer& a, const Buffer& b) {
    return a.size_ == b.size_ && (a.size_ == 0 || std::memcmp(a.data(), b.data(), a.size_) == 0);
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(unsigned char* memory) const {
      ::operator delete (memory, std::align_val_t{kAlignment});
    }
  };

  size_t size_ = 0;
  size_t before_ = 0;
  std::unique_ptr<unsigned char, Free> memory_;
};

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_BUFFER_H_
