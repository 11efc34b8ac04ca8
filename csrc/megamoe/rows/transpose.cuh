// transpose: the transport warps make x^T and dy^T for weight gradients in e4m3. Each block of 128 rows of
// the pool becomes [columns, 128], in tiles of 128 x 128 with one scale, a power of two. x comes from the
// tokens that forward saved. dy comes from the pool, as soon as gemm1 may read its block.
#pragma once
#include "megamoe/rows/restore.cuh"

namespace megamoe {

// Where the rows of a block are, in fours: rows r, r + 8, r + 1 and r + 9 of 16 are neighbours in a
// transposed column, since gemm1's epilogue packs those; a sum over rows may have any order. A lane finds
// four.
struct FoundRows {
    struct alignas(16) Factors {  // the row's scale, relative to the tile's; 0: a row of zeros
        float of[4];
    };
    const uint4_t* base;
    int at[4];    // of this lane's four: vectors behind it
    Factors* by;  // of all
    // There are no registers for the factors: they stand in the memory that the warp has as a mover, later.
    static MEGAMOE_DEVICE Factors* factors(const Context& ctx) {
        static_assert(sizeof(Factors) <= sizeof(ReducerState), "a lane's; other warps may be movers already");
        return reinterpret_cast<Factors*>(ctx.smem.movers.reducer + mover_warp() * 32);
    }
    static MEGAMOE_DEVICE int row(int j) {
        int lane = arch::lane_idx();
        return lane / 4 * 16 + lane % 4 * 2 + j / 2 + j % 2 * 8;
    }
};
// Finds the rows of a tile, columns 128 * group and on. Returns the tile's scale. No branch stands between
// the rows' loads, so that they are in flight together: a row past the last of the block loads that one's.
template <class T>
MEGAMOE_DEVICE float find_rows(const Context& ctx, int block, int group, bool is_dy, FoundRows& rows) {
    const Args& args = ctx.args;
    const auto& state = launch_args<T>(args).state;
    int used = T::Blocks::entry(ctx, block, T::Tiling::rows).rows(), vectors = vectors_of_row<E4m3Rows>(args);
    const float* scales =
        is_dy ? args.x_pool_scale + int64_t{group} * args.pool_rows : state.tokens_scale + group;
    int stride = is_dy ? 1 : ceil_div(args.hidden, scale_group);
    MEGAMOE_UNROLL
    for (int j = 0; j < 4; ++j) rows.at[j] = block * T::Tiling::rows + min_of(FoundRows::row(j), used - 1);
    if (!is_dy) {
        MEGAMOE_UNROLL
        for (int& at : rows.at) at = own<T>(args).row_tokens[at];
        MEGAMOE_UNROLL
        for (int& at : rows.at)
            at = static_cast<int>(
                saved_token(args, true, home_of(at, args.num_ranks), token_of(at, args.num_ranks)));
    }
    FoundRows::Factors by;
    MEGAMOE_UNROLL
    for (int j = 0; j < 4; ++j) by.of[j] = scales[int64_t{rows.at[j]} * stride];
    float largest = E4m3Group::least_amax / E4m3Group::largest;
    MEGAMOE_UNROLL
    for (int j = 0; j < 4; ++j) {
        rows.at[j] = rows.at[j] * vectors + group * (scale_group / 16);
        if (FoundRows::row(j) >= used) by.of[j] = 0.0f;
        largest = arch::larger_magnitude(largest, by.of[j]);
    }
    MEGAMOE_UNROLL
    for (int mask = 16; mask > 0; mask /= 2)
        largest = arch::larger_magnitude(largest, arch::shfl_xor(largest, mask));
    PowerOfTwo of_tile(largest * E4m3Group::largest);
    rows.base = static_cast<const uint4_t*>(is_dy ? args.x_pool : state.tokens);
    MEGAMOE_UNROLL
    for (float& factor : by.of) factor *= of_tile.inverse;
    arch::warp_sync();  // those of the tile before were read
    rows.by[arch::lane_idx()] = by;
    arch::warp_sync();
    return of_tile.scale;
}

// One warp: a tile of so many columns, zeros behind them, to 128 columns of 128 bytes. Four lanes share a
// row: each load takes a cycle for every line that it touches, and stores of less than 32 bytes in a line are
// far slower.
MEGAMOE_DEVICE void transpose_tile(const FoundRows& rows, int columns, uint32_t* to) {
    int lane = arch::lane_idx();
    MEGAMOE_UNROLL_BY(1)
    for (int round = 0; round < 8; ++round) {
        int four = round / 2 * 8 + lane / 4, vector = round % 2 * 4 + lane % 4;
        bool exists = vector * 16 < columns;
        uint32_t* column = to + vector * (16 * 32) + four;
        uint4_t data[4];
        MEGAMOE_UNROLL
        for (int j = 0; j < 4; ++j) data[j] = rows.base[arch::shfl(rows.at[j], four) + (exists ? vector : 0)];
        FoundRows::Factors by = rows.by[four];
        MEGAMOE_UNROLL
        for (float& factor : by.of) factor = exists ? factor : 0.0f;
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
                    pairs[i][k] = arch::pack_e4m3x2(v[0][k] * by.of[2 * i], v[1][k] * by.of[2 * i + 1]);
            }
            MEGAMOE_UNROLL
            for (int k = 0; k < 4; ++k) column[(4 * w + k) * 32] = pairs[0][k] | pairs[1][k] << 16;
        }
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
            FoundRows rows;
            rows.by = FoundRows::factors(ctx);
            float scale = find_rows<T>(ctx, block, group, is_dy, rows);
            int tile = block * groups + group;
            transpose_tile(rows, args.hidden - group * scale_group,
                           static_cast<uint32_t*>(is_dy ? own.dy_rows : own.x_rows) +
                               int64_t{tile} * (scale_group * T::Tiling::rows / 4));
            if (is_dy) {
                MEGAMOE_UNROLL
                for (int c = 0; c < scale_group; c += 32)
                    own.dy_rows_scale[int64_t{tile} * scale_group + c + arch::lane_idx()] = scale;
            } else if (arch::lane_idx() == 0) {
                own.x_rows_scale[int64_t{group} * transposed_blocks(args) + block] = scale;
            }
        }
    }
};
using TransposedRows = RestoredPool<TransposedForWeights>;

}  // namespace megamoe
