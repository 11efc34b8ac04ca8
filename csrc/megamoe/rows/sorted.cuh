// What a grouped launch does besides its tiles: the table of experts, and zeros for rows of no expert.
#pragma once
#include "megamoe/cta/context.cuh"

namespace megamoe {

// One warp of every CTA: all of them make the same table, so that none waits for another. Ends are taken as
// never smaller than the one before and never past the rows: bad ones lose rows, and touch nothing else.
struct RoutesByExpert {
    template <class T>
    static MEGAMOE_DEVICE void make_table(Context& ctx) {
        const auto& grouped = own<T>(ctx.args);
        ExpertTable& table = ctx.smem.experts;
        int num = ctx.args.num_local_experts, lane = arch::lane_idx();
        int rows = 0, blocks = 0;  // of the experts so far
        MEGAMOE_UNROLL_BY(1)
        for (int e0 = 0; e0 < num; e0 += 32) {
            int e = e0 + lane;
            int end = rows;
            if (e < num) end = grouped.ends != nullptr ? grouped.ends[e] : grouped.num_rows;
            end = max_of(rows, min_of(end, grouped.num_rows));
            MEGAMOE_UNROLL_BY(1)
            for (int step = 1; step < 32; step <<= 1) {
                int left = arch::shfl(end, max_of(lane - step, 0));
                end = max_of(end, left);
            }
            int before = arch::shfl(end, max_of(lane - 1, 0));
            if (lane == 0) before = rows;
            int begin = min_of((before + grouped.row_alignment - 1) & -grouped.row_alignment, end);
            int own = ceil_div(end - begin, T::Tiling::rows), all = inclusive_sum(own);
            if (e < num) {
                table.first_block[e] = blocks + all - own;
                table.end_before[e] = before;
            }
            rows = arch::shfl(end, 31);
            blocks += arch::shfl(all, 31);
        }
        if (lane != 0) return;
        table.first_block[num] = blocks;
        table.end_before[num] = rows;
        table.alignment = grouped.row_alignment;
        ctx.smem.plan = {0, 0, blocks, rows, 1, Phase::data, 1, {1, 0}};
    }
};

// The transport warps of all CTAs: rows before each expert's first, and behind the last expert.
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
