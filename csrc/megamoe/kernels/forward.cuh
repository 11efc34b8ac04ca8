// The layer of an inference call: h = activation(x w13), y_rows = h w2.
#pragma once
#include "megamoe/epilogue/activation.cuh"
#include "megamoe/epilogue/plain.cuh"
#include "megamoe/fp4/forms.cuh"
#include "megamoe/kernels/two_gemm.cuh"

namespace megamoe {

// The tile shape of a layer: S with the forms that its formats have.
template <class P, class S, bool panels, class Kind>
constexpr auto forward_tiling() {
    if constexpr (P::W::slot_scale_bytes != 0) {
        return WithPackedWeights<S, P::W::slot_scale_bytes, panels>{};
    } else if constexpr (same<Kind, ForwardKind> && same<typename P::W, E4m3Weights>) {
        return TileShape<S::rows, S::half_columns, S::num_slots, S::num_output_slots, TallOrWide>{};
    } else {
        return S{};
    }
}

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
    static constexpr bool expands = P::X::scaled && P::W::slot_scale_bytes != 0 && same<Kind, ForwardKind>;
    using LaunchArgs = typename ArgsOfWeights<expands, Kind>::Type;
    using Tiling = decltype(forward_tiling<P, S, panels, Kind>());
    using Gemm1 = GemmOf<typename P::X, typename P::W, ActivationEpilogue<S, Activation, typename P::H>>;
    using Gemm2 = GemmOf<typename P::H, typename P::W, PlainEpilogue<S, Bf16Rows>>;
};

}  // namespace megamoe
