// A fuzzer of the C ABI: valid calls, and calls with some of their fields overwritten.
//
// An input is eight bytes that seed a random valid case, then three bytes for each field to
// overwrite. Without any the results must agree with the reference. With some the call may have
// become invalid: then it must fail with a message and leave every byte alone. If it is still
// valid, and the memory it describes is really there, it must run, keep to that memory and give the
// same bits once more when it is prepared first.
//
// LLVMFuzzerTestOneInput() is what libFuzzer looks for (build with -DEVENKEEL_LIBFUZZER); the
// main() here makes inputs of its own for a bounded time and prints the one that failed.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "mutate.h"
#include "support/compare.h"
#include "support/random_case.h"

namespace evenkeel::support {
namespace {

constexpr int64_t kMaxElements = 1500;
constexpr size_t kMaxWorkspace = size_t{1} << 24;

[[noreturn]] void fail(const Case& c, const std::string& what) {
  std::fprintf(stderr, "fuzz: %s\n  %s\n", what.c_str(), to_string(c).c_str());
  std::abort();
}

// All bytes of all buffers, to see whether a call wrote, and to undo what it wrote.
class Snapshot {
 public:
  explicit Snapshot(const Problem& problem) : buffers_(buffers_of(problem)) {
    for (Buffer* buffer : buffers_) {
      bytes_.emplace_back(buffer->data(), buffer->data() + buffer->size());
    }
  }
  bool same() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (!bytes_[i].empty() &&
          std::memcmp(bytes_[i].data(), buffers_[i]->data(), bytes_[i].size()) != 0) {
        return false;
      }
    }
    return true;
  }
  void restore() {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (!bytes_[i].empty()) std::memcpy(buffers_[i]->data(), bytes_[i].data(), bytes_[i].size());
    }
  }

 private:
  std::vector<Buffer*> buffers_;
  std::vector<std::vector<unsigned char>> bytes_;
};

void expect_guards(const Case& c, const Problem& problem) {
  for (const Buffer* buffer : buffers_of(problem)) {
    if (!buffer->guards_intact()) fail(c, "the guards around a tensor were written to");
  }
}

void expect_failure(const Case& c, const Problem& problem, const Snapshot& before, ek_status status,
                    ek_status expected) {
  if (status != expected) {
    fail(c, std::string("the run gives ") + ek_status_name(status) + " where the query gave " +
                ek_status_name(expected));
  }
  if (std::strlen(ek_last_error()) < 10) fail(c, "a failure without a message");
  if (!before.same()) fail(c, std::string("a failed call has written: ") + ek_last_error());
  expect_guards(c, problem);
}

void run_mutated(const Case& c, Problem& problem, CallStructs& call, bool backward) {
  Snapshot before(problem);
  size_t bytes = 0;
  const ek_status queried = call.query(backward, &bytes);
  char text[64];
  if (call.explain(backward, text, sizeof text) != queried)
    fail(c, "query and explanation disagree");
  ek_prepared prepared;
  if (call.prepare(backward, &prepared) != queried) fail(c, "query and preparation disagree");
  if (queried != EK_OK) {
    expect_failure(c, problem, before, ek_run(&prepared, nullptr, 0), EK_INVALID_ARGUMENT);
    return expect_failure(c, problem, before, call.run(backward), queried);
  }
  if (prepared.workspace_size != bytes) fail(c, "query and preparation want different workspaces");
  if (!before.same()) fail(c, "a query has written");
  if (bytes > kMaxWorkspace || !call.is_backed(problem, backward)) return;

  Buffer workspace(bytes, 1);
  if (bytes > 0) {
    call.execution().workspace = nullptr;
    call.execution().workspace_size = bytes;
    expect_failure(c, problem, before, call.run(backward), EK_INVALID_ARGUMENT);
    call.execution().workspace = workspace.data();
    call.execution().workspace_size = bytes - 1;
    expect_failure(c, problem, before, call.run(backward), EK_INVALID_ARGUMENT);
  }
  call.execution().workspace = workspace.data();
  call.execution().workspace_size = bytes;
  if (call.run(backward) != EK_OK) {
    fail(c, std::string("a valid call fails: ") + ek_last_error());
  }
  const Snapshot first(problem);
  before.restore();
  workspace.poison();
  if (ek_run(&prepared, workspace.data(), bytes) != EK_OK) fail(c, "a prepared call fails");
  if (!first.same()) fail(c, "the prepared call gives different bits");
  if (!workspace.guards_intact()) fail(c, "the guards around the workspace were written to");
  expect_guards(c, problem);
}

}  // namespace

void fuzz_one(const uint8_t* data, size_t size) {
  if (size < 8) return;
  uint64_t seed;
  std::memcpy(&seed, data, 8);
  Random random(seed);
  const Case c = random_case(random, kMaxElements);
  const bool backward = random.chance(2);
  const int threads = 1 + static_cast<int>(random.below(3));
  if (size < 11) {
    const std::string failure = check_case(c, {nullptr, threads, nullptr});
    if (!failure.empty()) fail(c, failure);
    return;
  }
  Problem problem(c);
  if (const std::string failure = problem.save_statistics(kReference); !failure.empty())
    fail(c, failure);
  problem.reset(backward);
  CallStructs call(problem, threads);
  for (size_t at = 8; at + 3 <= size; at += 3) {
    call.mutate(problem, data[at], data[at + 1], data[at + 2], backward);
  }
  run_mutated(c, problem, call, backward);
}

}  // namespace evenkeel::support

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  evenkeel::support::fuzz_one(data, size);
  return 0;
}

#if !defined(EVENKEEL_LIBFUZZER)

namespace {

std::vector<uint8_t> from_hex(const std::string& text) {
  std::vector<uint8_t> bytes;
  for (size_t at = 0; at + 2 <= text.size(); at += 2) {
    bytes.push_back(static_cast<uint8_t>(std::strtol(text.substr(at, 2).c_str(), nullptr, 16)));
  }
  return bytes;
}

// In hexadecimal, for whatever ends the process.
char current_input[256];

void print_input() { std::fprintf(stderr, "fuzz: repeat with --input %s\n", current_input); }

// Sanitizers report first and then call back; without them a signal is all there is.
void print_input_at_death() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(print_input);
  constexpr int kSignals[] = {SIGABRT};
#else
  constexpr int kSignals[] = {SIGABRT, SIGSEGV, SIGFPE, SIGILL, SIGBUS};
#endif
  for (const int signal : kSignals) {
    std::signal(signal, [](int number) {
      print_input();
      std::_Exit(128 + number);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  int64_t seconds = 10, iterations = INT64_MAX;
  uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--seconds") {
      seconds = std::atoll(argv[i + 1]);
    } else if (option == "--iterations") {
      iterations = std::atoll(argv[i + 1]);
    } else if (option == "--seed") {
      seed = static_cast<uint64_t>(std::atoll(argv[i + 1]));
    } else if (option == "--input") {
      const std::vector<uint8_t> input = from_hex(argv[i + 1]);
      return LLVMFuzzerTestOneInput(input.data(), input.size());
    } else {
      std::fprintf(stderr, "usage: %s [--seconds N] [--iterations N] [--seed N] [--input HEX]\n",
                   argv[0]);
      return 2;
    }
  }
  std::printf("fuzz: --seed %llu, %lld seconds\n", static_cast<unsigned long long>(seed),
              static_cast<long long>(seconds));
  std::fflush(stdout);
  print_input_at_death();
  evenkeel::support::Random random(seed);
  const std::time_t end = std::time(nullptr) + seconds;
  int64_t done = 0;
  for (; done < iterations && std::time(nullptr) < end; ++done) {
    // Half of the inputs are valid calls, the others have one to three fields overwritten.
    const int64_t fields = random.chance(2) ? 0 : 1 + random.below(3);
    std::vector<uint8_t> input(static_cast<size_t>(8 + 3 * fields));
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random.bits());
    for (size_t i = 0; i < input.size(); ++i) {
      std::snprintf(current_input + 2 * i, 3, "%02x", input[i]);
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("fuzz: %lld inputs\n", static_cast<long long>(done));
  return 0;
}

#endif
