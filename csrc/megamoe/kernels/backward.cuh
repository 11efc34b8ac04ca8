// All gradients of the layer: dgu = s (dy w2) act', dx rows = dgu w13, then dw13 = dgu^T x and dw2 = dy^T hs.
// bf16 weights are read in place. e4m3 weights are read as transposed copies, because MMAs take e4m3 only
// K-major. Packed weights are expanded to bf16 in memory, and the rest is as in BF16. Weight gradients
// multiply bf16 rows, or transposed e4m3. docs/backward.md has the picture.
#pragma once
#include "megamoe/epilogue/activation_gradient.cuh"
#include "megamoe/epilogue/plain.cuh"
#include "megamoe/epilogue/pre_activation.cuh"
#include "megamoe/epilogue/transposed_gradient.cuh"
#include "megamoe/epilogue/weight_gradient.cuh"
#include "megamoe/fp4/matrices.cuh"
#include "megamoe/kernels/two_gemm.cuh"

namespace megamoe {

// What backward multiplies, of a layer with these formats: rows, forward's weights, for recompute, and how
// gemm1 and gemm2 read weights; and the shape of its tiles.
template <class P, class S, bool packed = P::W::slot_scale_bytes != 0>
struct Multiplied {
    using Rows = typename P::X;
    using Weights = typename P::W;
    using Transposed = Weights;
    using Tiling = S;
};
template <class X, class H, class S>
struct Multiplied<Precision<X, Bf16Weights, H>, S, false> {
    using Rows = X;
    using Weights = Bf16Weights;
    using Transposed = Bf16Columns;
    using Tiling = S;
};
template <class P, class S>
struct Multiplied<P, S, true> : Multiplied<Precision<Bf16Rows, Bf16Weights, Bf16Rows>, S> {
    using Tiling =
        TileShape<S::rows, S::half_columns, S::num_slots, S::num_output_slots, InRooms<typename P::W>>;
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
    using Formats = Multiplied<P, S>;
    using Rows = typename Formats::Rows;
    using Weights = typename Formats::Transposed;
    using SavedX = typename P::X;  // of tokens in the state
    using Tiling = typename Formats::Tiling;
    using Gemm1 = GemmOf<Rows, Weights, typename Operands::template Epilogue<S, Activation, Rows>>;
    using Gemm2 = GemmOf<Rows, Weights, PlainEpilogue<S, Bf16Rows>, Activation::gated ? 2 : 1>;
    using WeightGemm = GemmOf<typename Operands::A, typename Operands::B, WeightGradientEpilogue<S>>;
    using RecomputeGemm = GemmOf<Rows, typename Formats::Weights, RecomputeEpilogue<S, Activation>>;
};

}  // namespace megamoe
