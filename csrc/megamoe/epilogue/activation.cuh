// gemm1 of the forward layer: h = activation(gate, up), or activation(up).
#pragma once
#include "megamoe/act/policies.cuh"
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class S, class Activation, class Rows>
struct ActivationEpilogue : Elementwise<S, Rows, Activation::gated ? 1 : 2> {
    static constexpr int planes = Activation::gated ? 2 : 1;
    static constexpr bool multiplies_rows = true;

    template <int n>
    static MEGAMOE_DEVICE void transform(const Args& args, float (&sum)[2][n]) {
        MEGAMOE_UNROLL
        for (int i = 0; i < n; ++i) {
            sum[0][i] = Activation::apply(args, sum[0][i], sum[1][i]);
            if (!Activation::gated) sum[1][i] = Activation::apply(args, sum[1][i], 0.0f);
        }
    }
};

}  // namespace megamoe
