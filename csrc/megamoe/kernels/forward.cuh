// The layer that a user calls: h = activation(x w13), y_rows = h w2.
#pragma once
#include "megamoe/epilogue/activation.cuh"
#include "megamoe/epilogue/plain.cuh"
#include "megamoe/fp4/forms.cuh"
#include "megamoe/kernels/two_gemm.cuh"

namespace megamoe {

template <bool may_have_panels, class Kind>
struct ArgsOfWeights {
    using Type = typename Kind::LaunchArgs;
};
template <class Kind>
struct ArgsOfWeights<true, Kind> {
    using Type = PackedArgs;
};

// panels: packed weights may be expanded in memory, in launches of many rows.
template <class P, class Activation, class S, bool panels = false, class Kind = ForwardKind>
struct ForwardLayer : Kind {
    // Packed weights beside e4m3 rows may be expanded in memory, by one kernel of two for the same launch.
    using LaunchArgs = typename ArgsOfWeights<P::X::scaled && P::W::slot_scale_bytes != 0, Kind>::Type;
    using Tiling = typename WithPackedWeights<S, P::W::slot_scale_bytes, panels>::Tiling;
    using Gemm1 = GemmOf<typename P::X, typename P::W, ActivationEpilogue<S, Activation, typename P::H>>;
    using Gemm2 = GemmOf<typename P::H, typename P::W, PlainEpilogue<S, Bf16Rows>>;
};

}  // namespace megamoe
