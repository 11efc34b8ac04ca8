// gemm1 of the forward layer: h = activation(gate, up), or activation(up).
#pragma once
#include "megamoe/act/policies.h"
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class Activation, class Rows>
struct ActivationEpilogue : Elementwise<Rows, Activation::gated ? 1 : 2> {
    static constexpr int planes = Activation::gated ? 2 : 1;

    static MEGAMOE_DEVICE void transform(const Args& args, float (&sum)[2][64]) {
        MEGAMOE_UNROLL
        for (int i = 0; i < 64; ++i) {
            sum[0][i] = Activation::apply(args, sum[0][i], sum[1][i]);
            if (!Activation::gated) sum[1][i] = Activation::apply(args, sum[1][i], 0.0f);
        }
    }
};

}  // namespace megamoe
