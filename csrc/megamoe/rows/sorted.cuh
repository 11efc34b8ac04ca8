// What a grouped launch does in addition to its tiles: the table of experts, and zeros for rows of no expert.
#pragma once
#include "megamoe/cta/context.cuh"
#include "megamoe/rows/experts.cuh"

namespace megamoe {

// One warp of every CTA: all of them make the same table, so that none waits for another.
struct RoutesByExpert {
    template <class T>
    static MEGAMOE_DEVICE void make_table(Context& ctx) {
        const auto& grouped = own<T>(ctx.args);
        ExpertTable& table = ctx.smem.experts;
        int num = ctx.args.num_local_experts, lane = arch::lane_idx();
        SortedExperts experts{grouped.ends, num, grouped.num_rows, grouped.row_alignment, T::Tiling::rows};
        MEGAMOE_UNROLL_BY(1)
        for (int e0 = 0; e0 < num; e0 += 32) {
            SortedExperts::Own own = experts.next(e0);
            if (e0 + lane < num) {
                table.first_block[e0 + lane] = own.first_block;
                table.end_before[e0 + lane] = own.end_before;
            }
        }
        if (lane != 0) return;
        int rows = experts.end_before, blocks = experts.blocks_before;
        table.first_block[num] = blocks;
        table.end_before[num] = rows;
        table.alignment = grouped.row_alignment;
        ctx.smem.plan = {0, 0, blocks, rows, 1, Phase::data, 1, {1, 0}};
    }
};

// The transport warps of all CTAs: scales by block where no row is.
template <class T>
MEGAMOE_DEVICE void clear_scales(const Context& ctx, float* scales, int groups) {
    const ExpertTable& table = ctx.smem.experts;
    int first = transport_index(ctx) * 32 + arch::lane_idx(), stride = num_transports(ctx) * 32;
    int num = ctx.args.num_local_experts, places = ctx.args.pool_rows;
    MEGAMOE_UNROLL_BY(1)
    for (int e = 0; e <= num; ++e) {
        int begin = table.first_block[e] * T::Tiling::rows + (e < num ? table.rows(e) : 0);
        int count = (e < num ? table.first_block[e + 1] * T::Tiling::rows : places) - begin;
        MEGAMOE_UNROLL_BY(1)
        for (int64_t i = first; i < int64_t{count} * groups; i += stride)
            scales[i / count * places + begin + i % count] = 0.0f;
    }
}
// And blocks of transposed outputs that no expert has, with their scales; `groups` of 128 columns, of h and
// of dgu.
template <class T>
MEGAMOE_DEVICE void clear_blocks(const Context& ctx, int h_groups, int dgu_groups) {
    const auto& grouped = own<T>(ctx.args);
    int first = transport_index(ctx) * 32 + arch::lane_idx(), stride = num_transports(ctx) * 32;
    auto clear = [&](float* to, int lines, int of_block, int blocks) {
        int64_t begin = int64_t{ctx.smem.plan.num_blocks} * of_block, end = int64_t{blocks} * of_block;
        MEGAMOE_UNROLL_BY(1)
        for (int line = 0; line < lines && to != nullptr; ++line, to += end) {
            MEGAMOE_UNROLL_BY(1)
            for (int64_t i = begin + first; i < end; i += stride) to[i] = 0.0f;
        }
    };
    constexpr int square = scale_group * scale_group / static_cast<int>(sizeof(float));
    int blocks = transposed_blocks(ctx.args);  // the last of scales alone
    clear(grouped.blocks[0], 1, h_groups * square, blocks - 1);
    clear(grouped.hs_scale, h_groups, 1, blocks);
    clear(grouped.blocks[1], 1, dgu_groups * square, blocks - 1);
    clear(grouped.dgu_columns_scale, 1, dgu_groups * scale_group, blocks);
}
// And rows before each expert's first, and behind the last expert.
template <class T>
MEGAMOE_DEVICE void clear_rest(Context& ctx) {
    const auto& grouped = own<T>(ctx.args);
    const ExpertTable& table = ctx.smem.experts;
    int first = transport_index(ctx) * 32 + arch::lane_idx(), stride = num_transports(ctx) * 32;
    int num = ctx.args.num_local_experts;
    MEGAMOE_UNROLL_BY(1)
    for (int e = grouped.row_alignment == 1 ? num : 1; e <= num; ++e) {
        int rows = (e < num ? table.first_row(e) : grouped.num_rows) - table.end_before[e];
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < 3 && rows != 0; ++i) {
            if (grouped.cleared[i] == nullptr) continue;
            int64_t vectors = grouped.cleared_row_bytes[i] / static_cast<int>(sizeof(uint4_t));
            auto* to = static_cast<uint4_t*>(grouped.cleared[i]) + table.end_before[e] * vectors;
            vectors *= rows;
            MEGAMOE_UNROLL_BY(1)
            for (int64_t v = first; v < vectors; v += stride) arch::store_vec(to + v, {0, 0, 0, 0});
        }
    }
}

}  // namespace megamoe
