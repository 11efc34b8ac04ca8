// What several hosts have made of each token -> y, in fp32 and in their order: megamoe/backends/hosts.py.
#pragma once
#include "megamoe/arch/arch.cuh"

namespace megamoe {

struct SumRowsArgs {
    const void* rows;       // [R, H] bf16; row 0 is nothing
    const int64_t* places;  // [T, N] rows of a token; 0: none
    void* out;              // [T, H] bf16
    int num, columns;       // N, H; H a multiple of 8
};

constexpr int sum_rows_threads = 256;

// gridDim: T, ceil(H/8/256). A thread has 16 bytes of a row.
MEGAMOE_DEVICE void sum_rows_of_hosts(const SumRowsArgs& args) {
    int vectors = args.columns / 8;
    int vector = static_cast<int>(blockIdx.y * sum_rows_threads + threadIdx.x);
    if (vector >= vectors) return;
    int64_t token = blockIdx.x;
    const auto* rows = static_cast<const uint4_t*>(args.rows) + vector;
    float sum[8] = {};
    for (int i = 0; i < args.num; ++i) {
        int64_t place = args.places[token * args.num + i];
        if (place == 0) continue;
        uint4_t v = rows[place * vectors];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        MEGAMOE_UNROLL
        for (int w = 0; w < 4; ++w) {
            sum[2 * w] += arch::bf16_lo(words[w]);
            sum[2 * w + 1] += arch::bf16_hi(words[w]);
        }
    }
    static_cast<uint4_t*>(args.out)[token * vectors + vector] = {
        arch::pack_bf16x2(sum[0], sum[1]), arch::pack_bf16x2(sum[2], sum[3]),
        arch::pack_bf16x2(sum[4], sum[5]), arch::pack_bf16x2(sum[6], sum[7])};
}

}  // namespace megamoe
