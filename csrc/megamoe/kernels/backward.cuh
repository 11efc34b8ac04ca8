// All gradients of the layer: dgu = s (dy w2) act', dx rows = dgu w13, then dw13 = dgu^T x and dw2 = dy^T hs.
// bf16 weights are read as they lie, e4m3 ones as transposed copies, for e4m3 is multiplied K-major only.
// Weight gradients multiply bf16 rows in either precision, or transposed e4m3. docs/backward.md has the
// picture.
#pragma once
#include "megamoe/epilogue/activation_gradient.cuh"
#include "megamoe/epilogue/plain.cuh"
#include "megamoe/epilogue/pre_activation.cuh"
#include "megamoe/epilogue/transposed_gradient.cuh"
#include "megamoe/epilogue/weight_gradient.cuh"
#include "megamoe/kernels/two_gemm.cuh"

namespace megamoe {

// How backward's gemm1 and gemm2 read weights of a format.
template <class Weights>
struct Transposed {
    using Type = Weights;
};
template <>
struct Transposed<Bf16Weights> {
    using Type = Bf16Columns;
};

// What weight gradients multiply: the kind of launch, gemm1's epilogue, which writes half of it, and formats.
struct Bf16Operands {
    using Kind = BackwardKind;
    template <class S, class Activation, class Rows>
    using Epilogue = ActivationGradientEpilogue<S, Activation, Rows>;
    using A = Bf16Columns;
    using B = Bf16Columns;
};
struct E4m3Operands {
    using Kind = TransposedKind;
    template <class S, class Activation, class Rows>
    using Epilogue = TransposedGradientEpilogue<S, Activation, Rows>;
    using A = E4m3Rows;
    using B = E4m3Weights;
};

template <class P, class Activation, class S, class Operands = Bf16Operands>
struct BackwardLayer : Operands::Kind {
    using Rows = typename P::X;
    using Weights = typename Transposed<typename P::W>::Type;
    using Tiling = S;
    using Gemm1 = GemmOf<Rows, Weights, typename Operands::template Epilogue<S, Activation, Rows>>;
    using Gemm2 = GemmOf<Rows, Weights, PlainEpilogue<S, Bf16Rows>, Activation::gated ? 2 : 1>;
    using WeightGemm = GemmOf<typename Operands::A, typename Operands::B, WeightGradientEpilogue<S>>;
    using RecomputeGemm = GemmOf<Rows, typename P::W, RecomputeEpilogue<S, Activation>>;
};

}  // namespace megamoe
