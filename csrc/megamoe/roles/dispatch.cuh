// dispatch: the transport warps walk the pool in row order; at a token's leader, they pull it from its home
// rank and fan it out to all its rows, with ordinary 16-byte loads and stores. It waits for peers' staging
// only.
#pragma once
#include "megamoe/formats/format.h"
#include "megamoe/roles/routes.cuh"
#include "megamoe/roles/shares.cuh"

namespace megamoe {

// One warp: the row at `from`, of so many 16-byte vectors, to a row of the pool for each bit i of `targets`:
// lane i holds its number.
MEGAMOE_DEVICE void fan_out(const uint4_t* from, uint4_t* pool, int vectors, int lane_row, uint32_t targets) {
    constexpr int in_flight = 4;
    int lane = arch::lane_idx();
    MEGAMOE_UNROLL_BY(1)
    for (int v = lane; v - lane < vectors; v += in_flight * 32) {
        // No register of `data` may be left unset: such a one counts as live everywhere before, in math too.
        uint4_t data[in_flight];
        MEGAMOE_UNROLL
        for (int j = 0; j < in_flight; ++j) data[j] = arch::load_streaming_below(from, v + 32 * j, vectors);
        for (uint32_t left = targets; left != 0; left &= left - 1) {
            int64_t row = arch::shfl(lane_row, arch::ffs0(left));
            uint4_t* to = pool + row * vectors;
            MEGAMOE_UNROLL
            for (int j = 0; j < in_flight; ++j) arch::store_vec_below(to, v + 32 * j, vectors, data[j]);
        }
    }
}

template <class T>
MEGAMOE_DEVICE void pull_token(Context& ctx, int ordered) {
    using X = typename T::Gemm1::A;
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    int home = home_of(ordered, args.num_ranks);
    int64_t token = token_of(ordered, args.num_ranks);
    int lane_row = lane < args.top_k ? args.route_rows[int64_t{ordered} * args.top_k + lane] : -1;
    uint32_t targets = arch::ballot(lane_row >= 0);
    int vectors = args.hidden * X::element_bytes / static_cast<int>(sizeof(uint4_t));
    fan_out(ctx.window<const uint4_t>(home, args.window_x) + token * vectors,
            static_cast<uint4_t*>(args.x_pool), vectors, lane_row, targets);
    if constexpr (X::scaled) {
        int groups = ceil_div(args.hidden, scale_group);
        const auto* scales = ctx.window<const float>(home, args.window_x_scale) + token * groups;
        MEGAMOE_UNROLL_BY(1)
        for (int g = lane; g - lane < groups; g += 32) {
            float scale = g < groups ? scales[g] : 0.0f;
            for (uint32_t left = targets; left != 0; left &= left - 1) {
                int64_t row = arch::shfl(lane_row, arch::ffs0(left));
                if (g < groups) args.x_pool_scale[int64_t{g} * args.pool_rows + row] = scale;
            }
        }
    }
    arch::warp_sync();  // all lanes' stores happen before the release of each target's lane
    if (lane_row >= 0) RowsReady::publish(ctx.mem, args.rows_ready + lane_row / T::Tiling::rows, 1);
}

template <class T>
MEGAMOE_DEVICE void dispatch(Context& ctx) {
    constexpr int block_rows = T::Tiling::rows;
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    uint32_t staged = 0;  // home ranks known to have staged x
    int rows = rows_per_share(ctx.smem.plan.num_blocks, block_rows);
    int shares = ctx.smem.plan.num_blocks * (block_rows / rows);
    for (int i = transport_index(); i < shares; i += num_transports()) {
        int row = i * rows + lane;
        bool mine = lane < rows && row % block_rows < block_entry(args, i * rows / block_rows).rows();
        uint32_t route = mine ? args.row_route[row] : 0;
        for (uint32_t left = arch::ballot((route & route_leader) != 0); left != 0; left &= left - 1) {
            int ordered = route_token(arch::shfl(route, arch::ffs0(left)));
            int home = home_of(ordered, args.num_ranks);
            if ((staged >> home & 1) == 0) {
                bool ok = XReady::await(ctx.mem, ctx.window<uint32_t>(args.rank, args.window_staged) + home,
                                        ctx.epoch(), home);
                // Poisoned: pull nothing more; waits for rows return by themselves.
                if (arch::ballot(ok) != ~0u) return;
                arch::warp_sync();
                staged |= 1u << home;
            }
            pull_token<T>(ctx, ordered);
        }
    }
}

}  // namespace megamoe
