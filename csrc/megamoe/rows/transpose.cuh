// transpose: the transport warps make x^T and dy^T for weight gradients in e4m3. Each block of 128 rows of
// the pool becomes [columns, 128], in tiles of 128 x 128 with one scale, a power of two. x comes from the
// tokens that forward saved. dy comes from the pool, as soon as gemm1 may read its block.
#pragma once
#include "megamoe/rows/restore.cuh"

namespace megamoe {

// Four rows of a block, of positions 4 * lane and on in a transposed column. Rows r and r + 8 of 16 are
// neighbours there, since gemm1's epilogue packs those; a sum over rows may have any order.
struct FourRows {
    const uint8_t* base;
    int at[4];    // 16-byte vectors behind it
    float by[4];  // the row's scale, relative to the tile's; 0: a row of zeros
    static MEGAMOE_DEVICE int row(int j) {
        int lane = arch::lane_idx();
        return lane / 4 * 16 + lane % 4 * 2 + j / 2 + j % 2 * 8;
    }
};
// Finds the rows of a tile, columns 128 * group and on. Returns the tile's scale.
template <class T>
MEGAMOE_DEVICE float find_rows(const Context& ctx, int block, int group, bool is_dy, FourRows& rows) {
    const Args& args = ctx.args;
    int used = T::Blocks::entry(ctx, block, T::Tiling::rows).rows(), vectors = vectors_of_row<E4m3Rows>(args);
    rows.base = static_cast<const uint8_t*>(is_dy ? args.x_pool : launch_args<T>(args).state.tokens) +
                group * scale_group;
    float largest = E4m3Group::least_amax / E4m3Group::largest;
    MEGAMOE_UNROLL
    for (int j = 0; j < 4; ++j) {
        int of_block = FourRows::row(j), row = block * T::Tiling::rows + of_block;
        rows.by[j] = 0.0f;
        rows.at[j] = 0;
        if (of_block >= used) continue;
        int at = row;
        const float* scale = args.x_pool_scale + int64_t{group} * args.pool_rows + row;
        if (!is_dy) {
            int ordered = own<T>(args).row_tokens[row];
            at = static_cast<int>(
                saved_token(args, true, home_of(ordered, args.num_ranks), token_of(ordered, args.num_ranks)));
            scale = launch_args<T>(args).state.tokens_scale +
                    int64_t{at} * ceil_div(args.hidden, scale_group) + group;
        }
        rows.at[j] = at * vectors;
        rows.by[j] = *scale;
        largest = arch::larger_magnitude(largest, rows.by[j]);
    }
    MEGAMOE_UNROLL
    for (int mask = 16; mask > 0; mask /= 2)
        largest = arch::larger_magnitude(largest, arch::shfl_xor(largest, mask));
    PowerOfTwo by(largest * E4m3Group::largest);
    MEGAMOE_UNROLL
    for (int j = 0; j < 4; ++j) rows.by[j] *= by.inverse;
    return by.scale;
}

// One warp: a tile of so many columns, zeros behind them, to 128 columns of 128 bytes.
MEGAMOE_DEVICE void transpose_tile(const FourRows& rows, int columns, uint32_t* to) {
    to += arch::lane_idx();
    MEGAMOE_UNROLL_BY(1)
    for (int c = 0; c < scale_group; c += 16) {
        uint4_t data[4];
        MEGAMOE_UNROLL
        for (int j = 0; j < 4; ++j) {
            data[j] = {0, 0, 0, 0};
            if (rows.by[j] != 0.0f && c < columns)
                data[j] = *reinterpret_cast<const uint4_t*>(rows.base + int64_t{rows.at[j]} * 16 + c);
        }
        MEGAMOE_UNROLL
        for (int w = 0; w < 4; ++w) {
            uint32_t pairs[2][4];
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) {
                float v[2][4];
                MEGAMOE_UNROLL
                for (int j = 0; j < 2; ++j) {
                    const uint4_t& row = data[2 * i + j];
                    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
                    arch::unpack_e4m3x4(words[w], v[j]);
                }
                MEGAMOE_UNROLL
                for (int k = 0; k < 4; ++k)
                    pairs[i][k] = arch::pack_e4m3x2(v[0][k] * rows.by[2 * i], v[1][k] * rows.by[2 * i + 1]);
            }
            MEGAMOE_UNROLL
            for (int k = 0; k < 4; ++k) to[(4 * w + k) * 32] = pairs[0][k] | pairs[1][k] << 16;
        }
        to += 16 * 32;
    }
}

struct TransposedForWeights {
    template <class T>
    static MEGAMOE_DEVICE void restore(Context& ctx) {
        const Args& args = ctx.args;
        const auto& own = megamoe::own<T>(args);
        bool x = gemm_of<T>(args, GemmId::dw13).m != 0, dy = gemm_of<T>(args, GemmId::dw2).m != 0;
        int groups = ceil_div(args.hidden, scale_group), of_block = 2 * groups, awaited = -1;
        MEGAMOE_UNROLL_BY(1)
        for (int i = transport_index(ctx); i < ctx.smem.plan.num_blocks * of_block;
             i += num_transports(ctx)) {
            int block = i / of_block, group = i % of_block;
            bool is_dy = group >= groups;
            if (is_dy) group -= groups;
            if (!(is_dy ? dy : x)) continue;
            if (block != awaited) {
                bool ok = true;
                if (arch::lane_idx() == 0)
                    ok = RowsReady::await(ctx.mem, args.rows_ready + block,
                                          T::Tiling::rows * ctx.smem.plan.pulls.count, block);
                if (arch::ballot(ok) != ~0u) return;  // no gradient is published after an abort
                arch::warp_sync();
                awaited = block;
            }
            FourRows rows;
            float scale = find_rows<T>(ctx, block, group, is_dy, rows);
            int64_t column = (int64_t{block} * groups + group) * scale_group;
            transpose_tile(
                rows, args.hidden - group * scale_group,
                static_cast<uint32_t*>(is_dy ? own.dy_rows : own.x_rows) + column * (scale_group / 4));
            if (is_dy) {
                MEGAMOE_UNROLL
                for (int c = 0; c < scale_group; c += 32)
                    own.dy_rows_scale[column + c + arch::lane_idx()] = scale;
            } else if (arch::lane_idx() == 0) {
                own.x_rows_scale[int64_t{group} * transposed_blocks(args) + block] = scale;
            }
        }
    }
};
using TransposedRows = RestoredPool<TransposedForWeights>;

}  // namespace megamoe
