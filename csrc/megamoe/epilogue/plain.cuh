// The sums as they are.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class S, class Rows>
struct PlainEpilogue : Elementwise<S, Rows, 2> {
    static constexpr int planes = 1;

    template <int n>
    static MEGAMOE_DEVICE void transform(const Args&, float (&)[2][n]) {}
};

}  // namespace megamoe
