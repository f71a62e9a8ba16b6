// The epilogue of one vector: from centered values to the output, in the compute type.
#pragma once

#include "cuda/primitives/functors.cuh"
#include "cuda/row/policy.h"

namespace evenkeel::cuda {

// y of one vector of centered values.
template <typename X, EpilogueTerms kTerms, int W, typename C>
__device__ inline void evaluate_epilogue(const ForwardArguments& a, const C (&x)[W], C rstd,
                                         C shift, const C (&weight)[W], const C (&bias)[W],
                                         C (&y)[W]) {
#pragma unroll
  for (int k = 0; k < W; ++k) y[k] = x[k] * rstd + shift;
  if constexpr (kTerms.casting) {
    if (a.formula.rounds) RoundToX<X>::value(a.x, y, y);
  }
#pragma unroll
  for (int k = 0; k < W; ++k) y[k] = y[k] * weight[k] + bias[k];
  if constexpr (kTerms.activation) {
    with_activation(a.formula, [&](auto activation) {
#pragma unroll
      for (int k = 0; k < W; ++k) y[k] = activation.value(y[k]);
    });
  }
}

}  // namespace evenkeel::cuda
