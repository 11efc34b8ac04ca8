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

template <class S, class Activation, class Rows>
struct ActivationEpilogue<S, Rolled<Activation>, Rows> : ActivationEpilogue<S, Activation, Rows> {
    static_assert(Activation::gated, "else both halves are h");
    template <int n>
    static MEGAMOE_DEVICE void transform(const Args& args, float (&sum)[2][n]) {
        MEGAMOE_UNROLL_BY(1)
        for (int part = 0; part < 2; ++part) {
            MEGAMOE_UNROLL
            for (int i = 0; i < n / 2; ++i) {
                float h = Activation::apply(args, sum[0][i], sum[1][i]);
                sum[0][i] = sum[0][i + n / 2];
                sum[1][i] = sum[1][i + n / 2];
                sum[1][i + n / 2] = h;
            }
        }
        MEGAMOE_UNROLL
        for (int i = 0; i < n; ++i) sum[0][i] = sum[1][i];
    }
};

// The same where gate and up columns alternate: neighbours in a thread's sums, so a tile is 256 columns of
// one plane, and 128 of h.
template <class S, class Activation, class Rows>
struct ActivationEpilogue<S, Interleaved<Activation>, Rows> : Elementwise<S, Rows, 1> {
    static constexpr int planes = 1, columns = S::columns;
    static constexpr bool multiplies_rows = true, interleaved = true;

    // Of eight columns of h a thread makes those of its place in the quad, and four behind it: a and b. As
    // sums, it has two neighbours instead. Each lane sends one of both, then the other. Halves of the sums
    // take turns in the first.
    template <int n>
    static MEGAMOE_DEVICE void transform(const Args& args, float (&sum)[2][n]) {
        constexpr int copies = copies_of<Activation>;
        int lane = arch::lane_idx(), quad = lane & 3, first = lane & ~3;
        int from = first + (quad == 1 || quad == 2 ? 3 - quad : quad);  // 0 2 1 3
        int then = first + (quad < 2 ? 2 * quad + 1 : 2 * quad - 4);    // 1 3 0 2
        MEGAMOE_UNROLL_BY(copies)
        for (int half = 0; half < 2; ++half) {
            float h[n / 2];
            MEGAMOE_UNROLL
            for (int j = 0; j < n / 2; j += 2) {  // of column group j / 4, row j / 2 % 2
                const float* v = sum[0] + j / 4 * 8 + j % 4;
                float a = Activation::apply(args, v[0], v[1]), b = Activation::apply(args, v[4], v[5]);
                float one = arch::shfl(quad % 2 != 0 ? b : a, from);
                float two = arch::shfl(quad % 2 != 0 ? a : b, then);
                h[j] = quad < 2 ? one : two;
                h[j + 1] = quad < 2 ? two : one;
            }
            MEGAMOE_UNROLL
            for (int j = 0; j < n; ++j) {
                sum[0][j] = sum[1][j];
                sum[1][j] = j < n / 2 ? sum[1][j + n / 2] : h[j - n / 2];
            }
        }
        MEGAMOE_UNROLL
        for (int j = 0; j < n; ++j) sum[0][j] = sum[1][j];
    }
};

}  // namespace megamoe
