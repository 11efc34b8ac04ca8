// bf16 weights -> e4m3 and one fp32 scale per 128 x 128 block, in one pass over memory.
// [L, P * I, H]; blocks restart at each of the P planes, so the last block of a plane may be ragged. One CTA
// a block. Same formula as everywhere (docs/architecture.md), so the bits equal those of
// megamoe/formats/weights.py.
#pragma once
#include "megamoe/arch/arch.h"

namespace megamoe {

struct QuantizeWeightsArgs {
    const void* w;              // [L, P * I, H] bf16
    void* q;                    // [L, P * I, H] e4m3
    float* scale;               // [L, P * ceil(I/128), ceil(H/128)]
    int planes, rows, columns;  // P, I, H; H is a multiple of 8
};

constexpr int quantize_threads = 256;  // 16 columns of 8 elements x 16 rows, 8 times

struct alignas(16) Bf16x8 {
    uint32_t pairs[4];
};
struct alignas(8) E4m3x8 {
    uint32_t quads[2];
};

// gridDim: ceil(H/128), P * ceil(I/128), L
MEGAMOE_DEVICE void quantize_weights(const QuantizeWeightsArgs& args) {
    constexpr int passes = 8;
    __shared__ float s_amax[quantize_threads / 32];
    int blocks_in_plane = ceil_div(args.rows, 128);
    int plane = blockIdx.y / blocks_in_plane, block = blockIdx.y % blocks_in_plane;
    int column = blockIdx.x * 128 + threadIdx.x % 16 * 8;
    int64_t first_row = (static_cast<int64_t>(blockIdx.z) * args.planes + plane) * args.rows;
    auto element = [&](int pass, int64_t* at) {  // false: outside of the weights
        int row = block * 128 + pass * 16 + threadIdx.x / 16;
        *at = (first_row + row) * args.columns + column;
        return row < args.rows && column < args.columns;
    };

    Bf16x8 v[passes];
    float amax = 1e-10f;
    MEGAMOE_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
        int64_t at;
        bool inside = element(pass, &at);
        v[pass] =
            inside ? *reinterpret_cast<const Bf16x8*>(static_cast<const uint16_t*>(args.w) + at) : Bf16x8{};
        MEGAMOE_UNROLL
        for (int i = 0; i < 4; ++i) {
            uint32_t pair = v[pass].pairs[i];
            amax = fmaxf(fmaxf(amax, fabsf(arch::bf16_lo(pair))), fabsf(arch::bf16_hi(pair)));
        }
    }
    MEGAMOE_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
    if (threadIdx.x % 32 == 0) s_amax[threadIdx.x / 32] = amax;
    __syncthreads();
    MEGAMOE_UNROLL
    for (int warp = 0; warp < quantize_threads / 32; ++warp) amax = fmaxf(amax, s_amax[warp]);

    float inverse = __fdiv_rn(448.0f, amax);
    MEGAMOE_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
        int64_t at;
        if (!element(pass, &at)) continue;
        E4m3x8 out;
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            uint32_t first = v[pass].pairs[2 * i], second = v[pass].pairs[2 * i + 1];
            uint32_t lo = arch::pack_e4m3x2(arch::bf16_lo(first) * inverse, arch::bf16_hi(first) * inverse);
            uint32_t hi = arch::pack_e4m3x2(arch::bf16_lo(second) * inverse, arch::bf16_hi(second) * inverse);
            out.quads[i] = lo | hi << 16;
        }
        *reinterpret_cast<E4m3x8*>(static_cast<uint8_t*>(args.q) + at) = out;
    }
    if (threadIdx.x == 0) {
        int64_t at = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
        args.scale[at * gridDim.x + blockIdx.x] = __fdiv_rn(amax, 448.0f);
    }
}

}  // namespace megamoe
