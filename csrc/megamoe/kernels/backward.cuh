// All gradients of the layer: dgu = s (dy w2) act', dx rows = dgu w13, then dw13 = dgu^T x and dw2 = dy^T hs.
// The weights are read as they lie; docs/backward.md has the picture.
#pragma once
#include "megamoe/epilogue/activation_gradient.cuh"
#include "megamoe/epilogue/plain.cuh"
#include "megamoe/epilogue/pre_activation.cuh"
#include "megamoe/epilogue/weight_gradient.cuh"
#include "megamoe/gemm/operands_backward.h"
#include "megamoe/kernels/two_gemm.cuh"

namespace megamoe {

template <class P, class Activation, class S>
struct BackwardLayer {
    static constexpr Direction direction = Direction::backward;
    static_assert(same<typename P::X, Bf16Rows>, "gradients are computed in bf16");
    using Tiling = S;
    using Gemm1 = GemmOf<Bf16Rows, Bf16Columns, ActivationGradientEpilogue<S, Activation>>;
    using Gemm2 = GemmOf<Bf16Rows, Bf16Columns, PlainEpilogue<S, Bf16Rows>, Activation::gated ? 2 : 1>;
    using WeightGemm = GemmOf<Bf16Columns, Bf16Columns, WeightGradientEpilogue<S>>;
    using RecomputeGemm = GemmOf<Bf16Rows, Bf16Weights, RecomputeEpilogue<S, Activation>>;
    template <class T>
    using RowsOf = GradientRows<T>;
    template <class T>
    using WeightsOf = GradientWeights<T>;
};

}  // namespace megamoe
