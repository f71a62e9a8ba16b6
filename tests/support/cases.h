// Cases: one problem each, in a text form that the tests, the fuzzer and the benchmark driver
// share.
//
//   layer_norm rows=4096 cols=1024 x=bf16 activation=silu values=normal   # one case per line
//   rms_norm rows=1,2,3 cols=768 x=f32,bf16 casting=llama                 # lists: the product, 6
//   cases group_norm samples=2 channels=320 spatial=4096 groups=32 layout=nhwc
//
// key             values                         default
// rows cols       row norms: integers            required
// inner_rows      rows per block                 0: one block
// samples channels spatial groups                required for group_norm; samples of row norms, with a
//                                                scale or shift: 1
// layout          nchw nhwc                      nchw
// x               f32 f64 f16 bf16               f32
// y, dx           a type; dx also none           x's
// dy              a type                         y's
//                 y also e4m3 e5m2 i8: quantized; row norms, forward only
// y_scale         tensor rows: of a y of 8 bits  rows
// amax_bound      number, with y_scale=rows      0: none
// residual        a type or none; row norms      none
// sum             a type or none: not stored     residual's
// dsum dresidual  a type or none; row norms      none
// weight bias     a type or none                 f32; bias of rms_norm: none
// dweight dbias   a type or none                 weight's, bias's; none where that is absent
// scale shift     a type or none; row norms      none
// dscale dshift   a type or none                 scale's, shift's; none where that is absent
// mean rstd       yes no: asked of the forward   yes; mean of rms_norm: no
// eps offset      numbers                        1e-5, 0
// casting         none llama gemma               none
// activation      none silu relu gelu gelu_tanh  none
// {x,y,dy,dx,residual,sum,dsum,dresidual}_{row,outer}_stride   0: dense
// {scale,shift,dscale,dshift}_stride             0: dense
// in_place        none dy x residual sum         none. dy: y is x, dx is dy; x: y is x, dx is x;
//                                                residual: sum is residual, dresidual is dsum;
//                                                sum: sum is x, dx is dsum
// misalign        bytes, added to every address  0
// values          see Values below               normal
// seed            of the values                  1
// pass            both forward backward          both
#ifndef EVENKEEL_TESTS_SUPPORT_CASES_H_
#define EVENKEEL_TESTS_SUPPORT_CASES_H_

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "evenkeel/evenkeel.h"

namespace evenkeel::support {

// What the tensors are filled with. Unless said otherwise x has mean 0.25 and spread 1, dy
// spread 1.
enum class Values {
  kNormal,
  kMean1e4,       // x: mean 1e4, spread 1
  kOutlierFirst,  // x: the first element of every row or group is 1e4
  kConstant,      // x: one value per row or group
  kZero,          // x: all zero
  kNan,           // x: a NaN in every third row or group
  kInf,           // x: an infinity in every third row or group
  kNanDy,         // dy: a NaN in every third row or group
  kDenormal,      // x: subnormal numbers of its type
  kZeroWeight,    // weight and bias: all zero
  kHuge,          // x: about 1e15; f16: 2e4
};

// Of a y of 8 bits: one for all of it, or one of each row, which the call computes.
enum class YScale { kRows, kTensor };

enum class InPlace { kNone, kDy, kX, kResidual, kSum };

struct TensorSpec {
  ek_dtype dtype = EK_F32;
  bool present = true;
  int64_t row_stride = 0;
  int64_t outer_stride = 0;
};

struct VectorSpec {
  ek_dtype dtype = EK_F32;
  bool present = true;
};

// A vector for each sample.
struct SampleSpec {
  ek_dtype dtype = EK_F32;
  bool present = false;
  int64_t stride = 0;
};

inline constexpr TensorSpec kAbsent{EK_F32, false, 0, 0};

struct Case {
  ek_op op = EK_LAYER_NORM;
  int64_t rows = 0, cols = 0, inner_rows = 0;
  int64_t samples = 0, channels = 0, spatial = 0, groups = 0;
  ek_layout layout = EK_NCHW;
  double eps = 1e-5;
  double offset = 0;
  ek_casting casting = EK_CASTING_NONE;
  ek_activation activation = EK_ACTIVATION_NONE;
  TensorSpec x, y, dy, dx;
  YScale y_scale = YScale::kRows;
  double amax_bound = 0;
  TensorSpec residual = kAbsent, sum = kAbsent, dsum = kAbsent, dresidual = kAbsent;
  VectorSpec weight, bias, dweight, dbias;
  SampleSpec scale, shift, dscale, dshift;
  bool mean = true, rstd = true;
  InPlace in_place = InPlace::kNone;
  int64_t misalign = 0;
  Values values = Values::kNormal;
  uint64_t seed = 1;
  bool forward = true, backward = true;
};

// The message reads "file:line: word: what is wrong with it".
class CaseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `name` stands for the file in messages.
std::vector<Case> parse_cases(std::string_view text, const std::string& name);
std::vector<Case> read_cases(const std::string& path);
Case parse_case(std::string_view line);

// One line that parse_case() turns into the same case again; only what differs from the defaults.
std::string to_string(const Case& c);

// What is normalized together: a row, or a sample's group.
int64_t unit_count(const Case& c);
int64_t unit_size(const Case& c);
// Length of the weight and bias.
int64_t parameter_count(const Case& c);
// Whether there is a scale, a shift or a gradient of one; then the samples that each have theirs, otherwise 1.
bool modulates(const Case& c);
int64_t sample_count(const Case& c);
// Elements of x.
int64_t element_count(const Case& c);

// What is normalized, and x of the backward call: x, or the sum.
TensorSpec normalized(const Case& c);

// Whether the arithmetic is in float64 (ek_problem), going forward or backward.
bool computes_in_f64(const Case& c, bool backward);

// Whether y has 8 bits.
bool quantizes(const Case& c);

ek_problem problem_of(const Case& c);

}  // namespace evenkeel::support

#endif  // EVENKEEL_TESTS_SUPPORT_CASES_H_
