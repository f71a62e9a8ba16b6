// Numbers of GELU, and the normal distribution's tail: Phi(-a) = exp(-a^2 / 2) * P(a) / Q(a) for a >= 0.
//
// P / Q is a minimax fit (Remez exchange in 80 digits, of the relative error) of exp(a^2 / 2) * erfc(a / sqrt(2)) / 2,
// out to where exp() underflows. All coefficients are positive, so nothing cancels in either sum.
#pragma once

namespace evenkeel {

template <class T>
struct NormalTail;

// Up to a = 14.5; off by 6e-9, a tenth of a rounding.
template <>
struct NormalTail<float> {
  static constexpr float kP[] = {0.5f, 0.438297696f, 0.183237203f, 0.0406339328f, 0.00411641333f};
  static constexpr float kQ[] = {1,           1.67448033f,  1.20251162f,
                                 0.46947608f, 0.101860611f, 0.0103181983f};
};

// Up to a = 39; off by 5e-17, half a rounding.
template <>
struct NormalTail<double> {
  static constexpr double kP[] = {0.5,
                                  0.7748811596588642,
                                  0.59405707404976,
                                  0.2893405688220111,
                                  0.09770300775130647,
                                  0.023623572535572075,
                                  0.00408956363988181,
                                  0.0004904545027969989,
                                  3.7257628247694156e-05,
                                  1.385861004462287e-06};
  static constexpr double kQ[] = {1,
                                  2.3476468801205836,
                                  2.561265347965072,
                                  1.714413295108033,
                                  0.7820609738367691,
                                  0.254969343833455,
                                  0.06043795473816283,
                                  0.01034440686385776,
                                  0.0012328609627087685,
                                  9.339102440922682e-05,
                                  3.473838378503994e-06};
};

// Phi is 0 or 1, and the density 0, from here on: where a is cut off, nothing overflows.
inline constexpr int kNormalEnd = 40;
inline constexpr double kRootOfHalf = 0.70710678118654752440;
inline constexpr double kInverseRootOf2Pi = 0.39894228040143267794;

// GELU's tanh form is z * sigmoid(z * (kGeluTanh1 + kGeluTanh3 * z^2)), since (1 + tanh(u)) / 2 = sigmoid(2u). Beyond
// kGeluTanhEnd that sigmoid is 0 or 1.
inline constexpr double kGeluTanh1 = 1.5957691216057307118;  // 2 * sqrt(2 / pi)
inline constexpr double kGeluTanh3 = 0.071354816272600250;   // times 0.044715
inline constexpr int kGeluTanhEnd = 24;

}  // namespace evenkeel
