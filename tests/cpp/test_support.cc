// The tests' own tools: number formats, the case parser and its messages, guards, and the oracle's
// judge.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "support/compare.h"
#include "support/half.h"

namespace evenkeel::support {
namespace {

TEST(Half, EveryPatternSurvivesTheRoundTrip) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const double f16 = f16_to_double(bits), bf16 = bf16_to_double(bits);
    if (std::isnan(f16)) {
      EXPECT_TRUE(std::isnan(f16_to_double(double_to_f16(f16)))) << i;
    } else {
      EXPECT_EQ(double_to_f16(f16), bits);
    }
    if (std::isnan(bf16)) {
      EXPECT_TRUE(std::isnan(bf16_to_double(double_to_bf16(bf16)))) << i;
    } else {
      EXPECT_EQ(double_to_bf16(bf16), bits);
    }
  }
}

TEST(Half, RoundsToTheNearestAndTiesToEven) {
  // Between each finite number and the next: just below, at and just above the middle.
  const auto check = [](auto decode, auto encode, uint16_t last) {
    for (uint16_t bits = 0; bits < last; ++bits) {
      const double low = decode(bits), high = decode(static_cast<uint16_t>(bits + 1));
      const double middle = 0.5 * (low + high);
      EXPECT_EQ(encode(std::nextafter(middle, low)), bits);
      EXPECT_EQ(encode(middle), bits % 2 == 0 ? bits : bits + 1);
      EXPECT_EQ(encode(std::nextafter(middle, high)), bits + 1);
      EXPECT_EQ(encode(-middle), encode(middle) | 0x8000);
    }
  };
  check(f16_to_double, double_to_f16, 0x7bff);
  check(bf16_to_double, double_to_bf16, 0x7f7f);
  EXPECT_EQ(double_to_f16(65519.99), 0x7bff);
  EXPECT_EQ(double_to_f16(65520), 0x7c00);
  EXPECT_EQ(double_to_bf16(3.4e38), 0x7f80);
}

TEST(CaseText, ListsExpandToTheirProduct) {
  const auto cases =
      parse_cases("# nothing\n\nlayer_norm rows=1,2 cols=3 x=f32,bf16 # four\n", "list");
  ASSERT_EQ(cases.size(), 4u);
  EXPECT_EQ(to_string(cases[1]), "layer_norm rows=1 cols=3 x=bf16");
  EXPECT_EQ(cases[2].rows, 2);
  EXPECT_EQ(cases[1].y.dtype, EK_BF16);
  EXPECT_EQ(cases[1].weight.dtype, EK_F32);
}

TEST(CaseText, ErrorsNameFileLineAndWord) {
  const auto message = [](const char* text) {
    try {
      parse_cases(text, "list.txt");
    } catch (const CaseError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const std::pair<const char*, const char*> table[] = {
      {"\nbatch_norm rows=1", "list.txt:2: batch_norm: 'batch_norm' is not one of layer_norm"},
      {"layer_norm rows=1 cols=2 colour=3", "list.txt:1: colour=3: unknown key"},
      {"layer_norm rows=1 cols=2 x=f8", "list.txt:1: x=f8: 'f8' is not one of f32"},
      {"layer_norm rows=1 cols=2x", "list.txt:1: cols=2x: '2x' is not an integer"},
      {"layer_norm rows=-1 cols=2", "list.txt:1: rows=-1: '-1' is negative"},
      {"layer_norm rows=1 cols=2 eps=small", "list.txt:1: eps=small: 'small' is not a number"},
      {"layer_norm rows=1 cols=2 rows=3", "list.txt:1: rows=3: the key is given twice"},
      {"layer_norm rows=1 cols", "list.txt:1: cols: expected key=value"},
      {"layer_norm rows=1 cols=", "list.txt:1: cols=: expected a value"},
      {"layer_norm rows=1", "list.txt:1: layer_norm: cols: it must be given"},
      {"group_norm rows=1", "list.txt:1: group_norm: rows: it has no meaning"},
      {"group_norm samples=1 channels=5 spatial=1 groups=2", "groups: it must divide channels"},
      {"layer_norm rows=1 cols=2 x=f32 y=bf16 in_place=x", "in_place: y differs from x"},
  };
  for (const auto& [text, expected] : table) {
    EXPECT_NE(message(text).find(expected), std::string::npos) << message(text);
  }
}

TEST(Guards, NoticeASingleByte) {
  Problem problem(parse_case("layer_norm rows=2 cols=5 y_row_stride=7"));
  ASSERT_EQ(problem.forward(kReference), "");
  auto* y = static_cast<unsigned char*>(problem.forward_args().y.data);
  const auto touch = [&](unsigned char* byte) {
    const unsigned char saved = *byte;
    *byte = static_cast<unsigned char>(saved ^ 1);
    const std::string message = problem.check_memory(false);
    *byte = saved;
    return message;
  };
  EXPECT_EQ(touch(y - 1), "the guards around y were written to");
  EXPECT_EQ(touch(y + 12 * 4), "the guards around y were written to");
  EXPECT_EQ(touch(y + 5 * 4), "the gaps of y were written to");
  EXPECT_EQ(touch(y + 4 * 4), "");
}

// The bounds let rounding pass and nothing else.
TEST(Judge, NoticesOneWrongElement) {
  for (const char* line : {"layer_norm rows=3 cols=64", "rms_norm rows=3 cols=64 x=bf16",
                           "layer_norm rows=3 cols=4000 x=f16 activation=silu"}) {
    Problem problem(parse_case(line));
    ASSERT_EQ(check_forward(problem, kReference).failure, "") << line;
    Problem oracle = make_oracle(problem);
    ASSERT_EQ(oracle.forward(kReference), "");
    const ek_tensor& y = problem.forward_args().y;
    const auto type = static_cast<ek_dtype>(y.dtype);
    unsigned char* element = static_cast<unsigned char*>(y.data) + 70 * size_of(type);
    // A few millionths in float32; in a half type the neighbour on the far side.
    const double value = load(type, element);
    std::vector<double> exact;
    oracle.read(Tensor::kY, 70 / unit_size(problem.spec()), exact);
    const double target = exact[static_cast<size_t>(70 % unit_size(problem.spec()))];
    const double step = std::max(ulp(value, format_of(type)), 1e-5 * std::fabs(value));
    store(type, element, value + (value >= target ? step : -step));
    EXPECT_NE(compare_forward(problem, oracle).failure, "") << line;
  }
}

}  // namespace
}  // namespace evenkeel::support
