// The table of the rows that backward launches stashed over several passes, made from the routes of their
// calls.
#pragma once
#include "megamoe/cta/context.cuh"

namespace megamoe {

// One warp of every CTA, like RoutesByExpert. Rows stand in a pass's pool as plan_pass() has placed them
// if all chunks fitted: otherwise rows of the first fillings were overwritten, and no gradient may be made of
// the rest. Nor of rows of a launch that was given up: it has raised the abort cell.
struct RoutesOfPasses {
    template <class T>
    static MEGAMOE_DEVICE void make_table(Context& ctx) {
        const Args& args = ctx.args;
        const auto& kept = own<T>(args);
        StashedTable& table = ctx.smem.kept;
        bool lost = arch::ballot(ctx.mem.aborted()) != 0;
        MEGAMOE_UNROLL_BY(1)
        for (int p = 0; p < kept.num_passes; ++p) {
            int rows = T::Tiling::rows * place<T>(ctx, p);
            if (rows <= args.pool_rows) continue;
            lost = true;
            if (arch::lane_idx() == 0)
                ctx.mem.fault(Wait{Edge::kept, max_ranks, static_cast<uint32_t>(p)},
                              static_cast<uint32_t>(args.pool_rows), static_cast<uint32_t>(rows));
        }
        if (arch::lane_idx() != 0) return;
        table.lost = lost ? 1 : 0;
        ctx.smem.plan = {0, 0, 0, 0, 1, Phase::data, 1, {1, 0}, 0};
    }

  private:
    // Returns the blocks that the pass needs, in all lanes.
    template <class T>
    static MEGAMOE_DEVICE int place(Context& ctx, int pass) {
        const Args& args = ctx.args;
        const StashedPass& kept = own<T>(args).passes[pass];
        int num = args.num_local_experts, lane = arch::lane_idx(), most = 0, blocks = 0;
        int32_t* entry = ctx.smem.kept.entry + pass * (num + 1);
        MEGAMOE_UNROLL_BY(1)
        for (int r = 0; r < args.num_ranks; ++r) most = max_of(most, kept.header->tokens_of_rank[r]);
        const int32_t* routes = kept.chunk_prefix + num_chunks_of(most, args.num_ranks);
        MEGAMOE_UNROLL_BY(1)
        for (int e0 = 0; e0 < num; e0 += 32) {
            int e = e0 + lane, rows = e < num ? routes[int64_t{e} * (args.max_chunks + 1)] : 0;
            int own = ceil_div(rows, T::Tiling::rows), all = inclusive_sum(own);
            int half = ceil_div(rows, warpgroup_rows) & 1;
            if (e < num) entry[e] = (blocks + all - own) << 1 | half;
            blocks += arch::shfl(all, 31);
        }
        if (lane == 0) entry[num] = blocks << 1;
        return blocks;
    }
};

}  // namespace megamoe
