// How a call is cut up on the CPU. See plan.h.
#include "cpu/plan.h"

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <numeric>

#include "cpu/moments.h"
#include "cpu/schedule.h"

namespace evenkeel {
namespace {

// Planes shorter than this are cheaper as parts of one long row with repeated weights.
constexpr int64_t kShortPlane = 64;

// Below this many elements a second thread costs more than it brings.
constexpr int64_t kSerialElements = 16384;

// The last-level cache of a processor's cores, in bytes; 0 where nobody tells.
int64_t last_level_cache() {
  std::FILE* const file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
  if (file == nullptr) return 0;
  long long kilobytes = 0;
  const bool told = std::fscanf(file, "%lldK", &kilobytes) == 1;
  std::fclose(file);
  return told ? kilobytes * 1024 : 0;
}

// Made when the library is loaded: see core/parallel.cc.
const int64_t kLastLevelCache = last_level_cache();

// Results from this size on go past the caches: a plain store would first read what it is about to
// overwrite. Measured on a Xeon with a last-level cache of more than 100 MB: at 32 MB streaming takes two
// thirds of the time, at 16 MB and below the same or more; and on an EPYC that has 32 MB: at 12 MB
// it takes two thirds, too. Forward, what several threads read and write stays in the cache for longer:
// a group norm of 10 MB takes 300 us past it and 180 with plain stores; its backward pass 380 and 580.
int64_t stream_bytes(const Call& call, const Plan& plan) {
  constexpr int64_t kMost = int64_t{24} << 20;
  const int64_t share = call.pass == Pass::kForward && plan.shards > 1 ? 2 : 4;
  return kLastLevelCache == 0 ? kMost : std::min(kMost, kLastLevelCache / share);
}

// A row of this many bytes is still in L2 when it is read again.
constexpr int64_t kRowInL2 = 256 << 10;

// Rows of pixels are filled up to about this many elements, and strips of them to that many, in not
// too many rows: a column is summed in f32 down the strip.
constexpr int64_t kPixelRow = 256;
constexpr int64_t kStrip = 131072;
constexpr int64_t kStripRows = 1024;

// Chunks of rows at most, but that many partial sums of either kind are always fine. A chunk's sums are
// cleared first and added up behind, which counts where it is short: it has that many elements, in a number
// of rows between these.
constexpr int64_t kChunks = 64;
constexpr int64_t kPartials = 131072;
constexpr int64_t kChunkElements = 8192;
constexpr int64_t kLeastChunkRows = 8, kMostChunkRows = 32;

// Calls that read and write fewer bytes find them in the caches: nothing is prefetched.
constexpr int64_t kCachedBytes = 2 << 20;

// Arrays that go with a row are padded to this many elements: twice the longest vector.
constexpr int64_t kPadding = 64;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool dense_rows(const Call& call) {
  const auto dense = [&call](const Tensor& tensor) {
    return !tensor || tensor.row_stride == call.width;
  };
  return dense(call.x) && dense(call.y) && dense(call.dy) && dense(call.dx);
}

// How many adjacent pixels make a row of pixels: enough to be long, and a whole number of vectors.
int64_t pixels_per_row(const Call& call) {
  if (!dense_rows(call)) return 1;
  const int64_t step = 16 / std::gcd(call.channels, int64_t{16});
  return std::min(call.inner, step * divide_up(kPixelRow, call.channels * step));
}

void set_shape(const Call& call, Plan& plan) {
  plan.groups = call.groups;
  plan.repeat = 1;
  if (!call.is_group_norm()) {
    plan.kind = Plan::Kind::kRows;
    plan.blocks = call.outer * call.inner;
    plan.length = call.width;
  } else {
    const int64_t spatial = call.layout == EK_NCHW ? call.width : call.inner;
    plan.blocks = call.outer;
    if (spatial == 1 || (call.layout == EK_NCHW && spatial < kShortPlane)) {
      // A single pixel's channels are adjacent in both layouts, but in NCHW only if its planes are.
      plan.kind =
          call.layout == EK_NHWC || dense_rows(call) ? Plan::Kind::kRows : Plan::Kind::kPlanes;
    } else {
      plan.kind = call.layout == EK_NCHW ? Plan::Kind::kPlanes : Plan::Kind::kPixels;
    }
    if (plan.kind == Plan::Kind::kRows) {
      plan.repeat = spatial;
      plan.length = call.channels / call.groups * spatial;
    } else if (plan.kind == Plan::Kind::kPlanes) {
      plan.length = spatial;
    } else {
      plan.repeat = pixels_per_row(call);
      plan.length = call.channels * plan.repeat;
      plan.strip = std::min(divide_up(kStrip, plan.length), kStripRows);
    }
  }
  plan.parameters = call.channels * plan.repeat;
  plan.parameter_groups = plan.kind == Plan::Kind::kRows ? plan.groups : 1;
  plan.parameter_stride = divide_up(plan.parameters / plan.parameter_groups, kPadding) * kPadding;
  plan.partial_width = plan.kind == Plan::Kind::kRows
                           ? plan.parameter_groups * plan.parameter_stride
                           : call.channels;
}

// By what the norm itself reads and writes: a residual before or behind it does not move a bit of the
// norm's sums. A y that is to be quantized is float32 first.
Storage storage_of(const Call& call) {
  const auto all = [&call](Dtype dtype) {
    const auto matches = [dtype](const Tensor& tensor) { return !tensor || tensor.dtype == dtype; };
    const bool y = call.quantizes() ? dtype == Dtype::kF32 : matches(call.y);
    return call.normalized() == dtype && y && matches(call.dy) && matches(call.dx);
  };
  if (call.compute == Dtype::kF64) return all(Dtype::kF64) ? Storage::kF64 : Storage::kMixedF64;
  if (all(Dtype::kF32)) return Storage::kF32;
  if (all(Dtype::kF16)) return Storage::kF16;
  return all(Dtype::kBF16) ? Storage::kBF16 : Storage::kMixedF32;
}

// A chunk of rows costs two rows of partial sums, and a chunk of samples hardly anything. Within a
// chunk, sums are plain f32: where rows are narrow, more chunks keep them short.
//
// Each sample with a scale or a shift has chunks of its own, whose size depends on its rows alone. Of many samples
// there are many, so they are long.
void set_chunks(const Call& call, Plan& plan) {
  plan.sample_blocks = call.samples == 0 ? 0 : plan.blocks / call.samples;
  int64_t wanted = 128;
  if (plan.kind == Plan::Kind::kRows) {
    const int64_t least = call.modulates() ? kMostChunkRows : kLeastChunkRows;
    const int64_t rows =
        std::clamp(kChunkElements / (plan.groups * plan.length), least, kMostChunkRows);
    wanted = std::clamp<int64_t>(plan.sample_blocks / rows, 1,
                                 std::max(kChunks, kPartials / plan.partial_width));
  }
  plan.chunk_blocks = std::max<int64_t>(1, divide_up(plan.sample_blocks, wanted));
  if (plan.kind == Plan::Kind::kRows)
    plan.chunk_blocks += plan.chunk_blocks % 2;  // whole pairs of rows
  plan.sample_chunks = divide_up(plan.sample_blocks, plan.chunk_blocks);
  plan.chunks = call.samples * plan.sample_chunks;
}

void set_threads(const Call& call, Plan& plan) {
  const int64_t threads = call.elements() < kSerialElements
                              ? 1
                              : std::min<int64_t>(call.parallel.threads(), kMaxShards);
  plan.shards = threads;
  // What can run side by side without cutting a statistic up.
  const bool by_chunk = call.pass == Pass::kBackward && plan.kind != Plan::Kind::kPlanes;
  const int64_t items = by_chunk                           ? plan.chunks
                        : plan.kind == Plan::Kind::kPixels ? plan.blocks
                                                           : plan.blocks * plan.groups;
  const int64_t elements_each = items == 0 ? 0 : call.elements() / items;
  // A row whose scale is to be found is not cut up: it would have to be normalized twice.
  plan.split = threads > 1 && items < 2 * threads && elements_each > 2 * kSlice &&
               call.y_row_scale == nullptr;
}

// Streaming stores want whole vectors: every span of the output must start at a multiple of the
// widest.
void set_stream(const Call& call, Plan& plan) {
  const auto bytes = [&call](const Tensor& output) {
    return output ? call.elements() * size_of(output.dtype) : 0;
  };
  const auto aligned = [&plan](const Tensor& output) {
    const auto whole = [&output](int64_t elements) {
      return elements * size_of(output.dtype) % 64 == 0;
    };
    return !output ||
           (reinterpret_cast<uintptr_t>(output.data) % 64 == 0 &&
            whole(output.row_stride * (plan.kind == Plan::Kind::kPixels ? plan.repeat : 1)) &&
            whole(output.outer_stride) && whole(plan.length));
  };
  plan.stream =
      call.activation == EK_ACTIVATION_NONE && call.casting != EK_CASTING_LLAMA &&
      !call.quantizes() &&
      bytes(call.y) + bytes(call.dx) + bytes(call.dresidual) >= stream_bytes(call, plan) &&
      aligned(call.y) && aligned(call.dx) && aligned(call.dresidual);
  // A sum over x or the residual is in the cache already.
  plan.stream_sum = call.sum && call.sum.data != call.x.data &&
                    call.sum.data != call.residual.data && !plan.split &&
                    bytes(call.sum) >= stream_bytes(call, plan) && aligned(call.sum) &&
                    plan.length * size_of(call.sum.dtype) <= kRowInL2;
}

void set_batch(const Call& call, Plan& plan) {
  if (plan.kind != Plan::Kind::kRows) return;
  const int64_t element = call.pass == Pass::kForward ? size_of(call.normalized())
                                                      : size_of(call.x.dtype) * 2;  // x and dy
  plan.batch = std::clamp<int64_t>(kBatchBytes / (plan.length * element), 1, kBatch);
  plan.fetch = call.elements() * (element + size_of(call.normalized())) > kCachedBytes;
}

size_t pieces_bytes(const Call& call, const Plan& plan) {
  if (!plan.split) return 0;
  const bool forward = call.pass == Pass::kForward;
  const int64_t piece = static_cast<int64_t>(forward ? sizeof(Moments) : sizeof(GradientSums));
  const int64_t units = plan.blocks * plan.groups;
  switch (plan.kind) {
    case Plan::Kind::kRows:
      return static_cast<size_t>(units * divide_up(plan.length, kSlice) * piece);
    case Plan::Kind::kPlanes:
      return static_cast<size_t>((forward
                                      ? plan.blocks * call.channels * divide_up(plan.length, kSlice)
                                      : plan.blocks * call.channels + units) *
                                 piece);
    case Plan::Kind::kPixels: {
      const int64_t strips = divide_up(divide_up(call.inner, plan.repeat), plan.strip);
      return static_cast<size_t>(strips * (forward ? plan.groups : call.channels) * piece);
    }
  }
  return 0;
}

void set_workspace(const Call& call, Plan& plan) {
  const int64_t element = size_of(call.compute);
  size_t at = 0;
  const auto reserve = [&at](size_t bytes) {
    const size_t start = at;
    at += (bytes + 63) / 64 * 64;
    return start;
  };
  const auto parameter = [&](const Vector& given, double offset) {
    const bool copied = plan.reads_arrays(call) && !plan.reads_as_given(call, given, offset);
    return reserve(
        copied ? static_cast<size_t>(plan.parameter_groups * plan.parameter_stride * element) : 0);
  };
  plan.weight = parameter(call.weight, call.weight_offset);
  plan.bias = parameter(call.bias, 0);
  const bool parameters = call.sums_columns();
  plan.partials =
      reserve(parameters ? static_cast<size_t>(2 * plan.chunks * plan.partial_width * element) : 0);
  plan.pieces = reserve(pieces_bytes(call, plan));
  plan.scratch = at;
  if (plan.kind == Plan::Kind::kPixels) {
    const bool forward = call.pass == Pass::kForward;
    plan.arrays = static_cast<size_t>((forward ? 3 : 4) * plan.parameter_stride * element);
    const size_t behind = forward ? static_cast<size_t>(3 * plan.groups) * sizeof(Moments)
                                  : static_cast<size_t>(2 * call.channels) * sizeof(GradientSums);
    plan.scratch_stride = plan.arrays + (behind + 63) / 64 * 64;
    reserve(static_cast<size_t>(plan.shards) * plan.scratch_stride);
  } else if (plan.kind == Plan::Kind::kRows) {
    const int64_t kept = plan.split ? kSlice : plan.batch * plan.length;
    const auto rows_of = [kept](Dtype dtype, bool wanted) {
      return wanted ? static_cast<size_t>(divide_up(kept * size_of(dtype), 64) * 64) : 0;
    };
    plan.quantized = rows_of(call.sum.dtype, plan.keeps_sum(call));
    plan.sample_parameters = plan.quantized + rows_of(Dtype::kF32, call.quantizes());
    plan.scratch_stride =
        plan.sample_parameters +
        (call.modulates() ? static_cast<size_t>(2 * plan.parameter_stride * element) : 0);
    reserve(static_cast<size_t>(plan.shards) * plan.scratch_stride);
  }
  plan.total = at == 0 ? 0 : at + 63;
}

}  // namespace

Plan make_plan(const Call& call) {
  Plan plan{};
  plan.storage = storage_of(call);
  set_shape(call, plan);
  set_chunks(call, plan);
  set_threads(call, plan);
  set_stream(call, plan);
  set_batch(call, plan);
  set_workspace(call, plan);
  return plan;
}

}  // namespace evenkeel
