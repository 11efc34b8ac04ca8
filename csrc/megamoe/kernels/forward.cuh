// The layer that a user calls: h = activation(x w13), y_rows = h w2.
#pragma once
#include "megamoe/epilogue/activation.cuh"
#include "megamoe/epilogue/plain.cuh"
#include "megamoe/kernels/two_gemm.cuh"

namespace megamoe {

template <class P, class Activation, class S>
struct ForwardLayer {
    static constexpr Direction direction = Direction::forward;
    using Tiling = typename WithScales<S, P::W::slot_scale_bytes>::Tiling;
    using Gemm1 = GemmOf<typename P::X, typename P::W, ActivationEpilogue<S, Activation, typename P::H>>;
    using Gemm2 = GemmOf<typename P::H, typename P::W, PlainEpilogue<S, Bf16Rows>>;
    template <class T>
    using RowsOf = RowsOfPool<T>;
    template <class T>
    using WeightsOf = WeightRows<T>;
};

}  // namespace megamoe
