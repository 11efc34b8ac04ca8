// The sums as they are.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class Rows>
struct PlainEpilogue : Elementwise<Rows, 2> {
    static constexpr int planes = 1;

    static MEGAMOE_DEVICE void transform(const Args&, float (&)[2][64]) {}
};

}  // namespace megamoe
