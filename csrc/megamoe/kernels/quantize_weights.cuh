// bf16 weights -> e4m3 and one fp32 scale per 128 x 128 block, in one pass over memory.
// [L, P * I, H]; blocks restart at each of the P planes, so the last block of a plane may be ragged. One CTA
// a block. Same formula as everywhere (docs/numerics.md), so the bits equal those of
// megamoe/formats/weights.py.
#pragma once
#include "megamoe/formats/e4m3_group.h"

namespace megamoe {

struct QuantizeWeightsArgs {
    const void* w;                                    // [L, P, I, H] bf16, strided
    void* q;                                          // [L, P * I, H] e4m3
    float* scale;                                     // [L, P * ceil(I/128), ceil(H/128)]
    int planes, rows, columns;                        // P, I, H; H is a multiple of 8
    int64_t expert_stride, plane_stride, row_stride;  // of w, in elements; multiples of 8
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
    __shared__ E4m3Group s_groups[quantize_threads / 32];
    int blocks_in_plane = ceil_div(args.rows, scale_group);
    int plane = blockIdx.y / blocks_in_plane, block = blockIdx.y % blocks_in_plane;
    int column = blockIdx.x * scale_group + threadIdx.x % 16 * 8;
    int64_t first_row = (static_cast<int64_t>(blockIdx.z) * args.planes + plane) * args.rows;
    const auto* w = static_cast<const uint16_t*>(args.w) + blockIdx.z * args.expert_stride +
                    plane * args.plane_stride + column;
    auto row_of = [&](int pass) {
        return block * scale_group + pass * 16 + static_cast<int>(threadIdx.x / 16);
    };
    auto is_inside = [&](int row) { return row < args.rows && column < args.columns; };

    Bf16x8 v[passes];
    E4m3Group group;
    MEGAMOE_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
        int row = row_of(pass);
        v[pass] = is_inside(row) ? *reinterpret_cast<const Bf16x8*>(w + row * args.row_stride) : Bf16x8{};
        MEGAMOE_UNROLL
        for (uint32_t pair : v[pass].pairs) group.include(arch::bf16_lo(pair), arch::bf16_hi(pair));
    }
    group.join_lanes<32>();
    if (threadIdx.x % 32 == 0) s_groups[threadIdx.x / 32] = group;
    __syncthreads();
    MEGAMOE_UNROLL
    for (int warp = 0; warp < quantize_threads / 32; ++warp) group.include(s_groups[warp]);

    float inverse = group.inverse();
    MEGAMOE_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
        int row = row_of(pass);
        if (!is_inside(row)) continue;
        int64_t at = (first_row + row) * args.columns + column;
        E4m3x8 out;
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i)
            out.quads[i] = e4m3_of_bf16(v[pass].pairs[2 * i], v[pass].pairs[2 * i + 1], inverse);
        *reinterpret_cast<E4m3x8*>(static_cast<uint8_t*>(args.q) + at) = out;
    }
    if (threadIdx.x == 0) {
        int64_t at = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
        args.scale[at * gridDim.x + blockIdx.x] = group.scale();
    }
}

}  // namespace megamoe
