// Sums of eight columns of bf16, in fp32.
#pragma once
#include "megamoe/arch/arch.cuh"

namespace megamoe {

MEGAMOE_DEVICE void add_vector(float (&sum)[8], uint4_t v, float weight) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    MEGAMOE_UNROLL
    for (int w = 0; w < 4; ++w) {
        sum[2 * w] += weight * arch::bf16_lo(words[w]);
        sum[2 * w + 1] += weight * arch::bf16_hi(words[w]);
    }
}
MEGAMOE_DEVICE uint4_t pack_vector(const float (&sum)[8]) {
    return {arch::pack_bf16x2(sum[0], sum[1]), arch::pack_bf16x2(sum[2], sum[3]),
            arch::pack_bf16x2(sum[4], sum[5]), arch::pack_bf16x2(sum[6], sum[7])};
}

}  // namespace megamoe
