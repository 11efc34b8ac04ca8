// Transposed e4m3 outputs, for weight gradients. An output slot is 64 columns of all 128 rows; each warpgroup
// fills its half of the rows. The scales are powers of two, which are exact in bf16.
#pragma once
#include "megamoe/cta/blocks.cuh"
#include "megamoe/formats/e4m3_group.cuh"
#include "megamoe/formats/fragment.cuh"
#include "megamoe/gemm/gemm.cuh"

namespace megamoe {

constexpr uint32_t magnitudes = 0x7fff7fffu;  // of a pair of bf16

MEGAMOE_DEVICE int math_warp() { return arch::warp_idx() - first_math_warp; }
MEGAMOE_DEVICE float largest_of_warp(uint32_t m) {
    MEGAMOE_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) m = arch::larger_u16x2(m, arch::shfl_xor(m, mask));
    return arch::larger_magnitude(arch::bf16_lo(m), arch::bf16_hi(m));
}
// Of h, one scale for 128 columns of the block, from the largest of each warp. Returns its inverse.
template <class T>
MEGAMOE_DEVICE float scale_block(const Context& ctx, const float* largest, int block, int column, int width) {
    E4m3Group group;
    MEGAMOE_UNROLL
    for (int w = 0; w < math_role.num_warps; w += 2) group.include(largest[w], largest[w + 1]);
    PowerOfTwo by(group.amax());
    int64_t at = int64_t{column / scale_group} * transposed_blocks(ctx.args) + block;
    arch::put_float(own<T>(ctx.args).hs_scale + at, by.scale, false,
                    column < width && arch::thread_idx() == first_math_warp * 32);
    return by.inverse;
}

// Where a lane stores a transposed column of eight. Of a warp's 16 rows, r and r + 8 are neighbours.
MEGAMOE_DEVICE int transposed_at() { return swizzled(arch::lane_idx(), 16 * math_warp()); }
// Two columns of rows r and r + 8.
MEGAMOE_DEVICE uint32_t transposed_pairs(uint32_t top, uint32_t low, uint32_t by) {
    top = arch::mul_bf16x2(top, by), low = arch::mul_bf16x2(low, by);
    uint32_t even = arch::pack_e4m3x2(arch::bf16_lo(top), arch::bf16_lo(low));
    uint32_t odd = arch::pack_e4m3x2(arch::bf16_hi(top), arch::bf16_hi(low));
    return even | odd << 16;
}
// 128 columns: pairs v[i][g] of rows r + 8 i. inverse(g): of their scales, as a pair of bf16.
template <class Output, int pairs, class Inverse>
MEGAMOE_DEVICE void write_transposed(Output& output, const uint32_t (&v)[2][pairs], Inverse inverse) {
    auto to = output.claim_common(0);
    int at = transposed_at();
    MEGAMOE_UNROLL
    for (int g = 0; g < pairs; g += 4) {
        uint32_t four[4];
        MEGAMOE_UNROLL
        for (int k = 0; k < 4; ++k) four[k] = transposed_pairs(v[0][g + k], v[1][g + k], inverse(g + k));
        arch::store_transposed(g < pairs / 2 ? to.slot : to.beside, at + g % (pairs / 2) * 8 * slot_k_bytes,
                               four);
    }
    output.hand_over_both();
}

// A half of a tile that is h, of a grouped launch. Rows behind the expert's last become zeros.
template <class T, class Output, int n>
MEGAMOE_DEVICE void write_transposed_half(const Context& ctx, const Tile& tile, int column, int width,
                                          Output& output, const float (&v)[n]) {
    int rows = rows_used<T>(tile) - math_warpgroup() * warpgroup_rows - Fragment().row;
    uint32_t pairs[2][n / 4], largest = 0;
    MEGAMOE_UNROLL
    for (int i = 0; i < 2; ++i) {
        MEGAMOE_UNROLL
        for (int g = 0; g < n / 4; ++g) {
            uint32_t pair = arch::pack_bf16x2(v[4 * g + 2 * i], v[4 * g + 2 * i + 1]);
            pairs[i][g] = 8 * i < rows ? pair : 0;
            largest = arch::larger_u16x2(largest, pairs[i][g] & magnitudes);
        }
    }
    float* of_warps = ctx.smem.experts.column_scales[0];  // no transposed output has these
    float own = largest_of_warp(largest);
    math_sync();  // all have read those of the half before
    of_warps[math_warp()] = own;
    math_sync();
    float inverse = scale_block<T>(ctx, of_warps, tile.block, column, width);
    uint32_t both = arch::pack_bf16x2(inverse, inverse);
    write_transposed(output, pairs, [&](int) { return both; });
}

}  // namespace megamoe
