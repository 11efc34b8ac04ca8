// The plan of one pass: which chunks fit into the pool, where each expert's rows start, and which row each
// route has. The transport warps of every CTA run it. It is a function of chunk_prefix, so all CTAs agree
// without communication.
#pragma once
#include "megamoe/gemm/forms.cuh"
#include "megamoe/rows/batches.cuh"
#include "megamoe/rows/routes.cuh"

namespace megamoe {

// Pool rows (experts padded to whole blocks) that the chunks [begin, end) need; one warp, same result in all
// lanes.
template <int block_rows>
MEGAMOE_DEVICE int rows_needed(const Args& args, int begin, int end) {
    int rows = 0;
    MEGAMOE_UNROLL_BY(1)
    for (int e = arch::lane_idx(); e < args.num_local_experts; e += 32)
        rows += padded_rows(routes_between(args, e, begin, end), block_rows);
    MEGAMOE_UNROLL_BY(1)
    for (int mask = 16; mask > 0; mask >>= 1) rows += arch::shfl_xor(rows, mask);
    return rows;
}

// The longest range of chunks from `begin` that fits: binary search, since rows_needed grows with the range.
template <int block_rows>
MEGAMOE_DEVICE int pass_end(const Context& ctx, int begin) {
    int fits = begin, too_far = ctx.smem.num_chunks + 1;
    if (rows_needed<block_rows>(ctx.args, begin, ctx.smem.num_chunks) <= ctx.args.pool_rows)
        return ctx.smem.num_chunks;
    while (too_far - fits > 1) {
        int middle = (fits + too_far) / 2;
        if (rows_needed<block_rows>(ctx.args, begin, middle) <= ctx.args.pool_rows) {
            fits = middle;
        } else {
            too_far = middle;
        }
    }
    return max_of(fits, begin + 1);  // the host checked that one chunk always fits
}

struct PoolUse {
    int blocks, rows;  // rows without padding
};

// First block of each expert, for one warp: expert_start[e], and the total behind the last;
// padding_before[e].
template <int block_rows>
MEGAMOE_DEVICE PoolUse place_experts(const Context& ctx, int begin, int end) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    PoolUse running = {0, 0};
    MEGAMOE_UNROLL_BY(1)
    for (int e0 = 0; e0 < args.num_local_experts; e0 += 32) {
        int e = e0 + lane;
        int rows = e < args.num_local_experts ? routes_between(args, e, begin, end) : 0;
        PoolUse own = {ceil_div(rows, block_rows), rows}, inclusive = own;
        MEGAMOE_UNROLL_BY(1)
        for (int step = 1; step < 32; step <<= 1) {
            int from = max_of(lane - step, 0);
            int blocks_left = arch::shfl(inclusive.blocks, from),
                rows_left = arch::shfl(inclusive.rows, from);
            if (lane < step) continue;
            inclusive.blocks += blocks_left;
            inclusive.rows += rows_left;
        }
        if (e < args.num_local_experts) {
            int first = running.blocks + inclusive.blocks - own.blocks;
            ctx.routing.expert_start[e] = first;
            ctx.routing.padding_before[e] = first * block_rows - (running.rows + inclusive.rows - own.rows);
        }
        running.blocks += arch::shfl(inclusive.blocks, 31);
        running.rows += arch::shfl(inclusive.rows, 31);
    }
    if (lane == 0) ctx.routing.expert_start[args.num_local_experts] = running.blocks;
    return running;
}

// One row of block_table, and zeroed counters, for each block. Experts are spread over all transport threads.
template <class T>
MEGAMOE_DEVICE void write_block_table(const Context& ctx, int begin, int end, bool pairs_meet) {
    constexpr int block_rows = T::Tiling::rows;
    const Args& args = ctx.args;
    for (int e = transport_index(ctx); e < args.num_local_experts; e += num_transports(ctx)) {
        int rows = routes_between(args, e, begin, end);
        int first = ctx.routing.expert_start[e], blocks = ctx.routing.expert_start[e + 1] - first;
        if constexpr (T::WeightTiles::beside_rows) {
            if (arch::lane_idx() == 0) {
                own<T>(args).expert_rows[2 * e] = first;
                own<T>(args).expert_rows[2 * e + 1] = rows;
            }
        }
        Forms<T>::clear_counters(args, e);
        MEGAMOE_UNROLL_BY(1)
        for (int i = arch::lane_idx(); i < blocks; i += 32) {
            Run run = run_of(first, blocks, first + i);
            int32_t* entry = args.block_table + int64_t{2} * (first + i);
            entry[0] = e << 8 | min_of(block_rows, rows - i * block_rows);
            entry[1] = run.first << 8 | run.size;
            args.rows_ready[first + i] = 0;
            gemm_of<T>(args, GemmId::gemm1).done[first + i] = 0;
            gemm_of<T>(args, GemmId::gemm2).done[first + i] = 0;
        }
        if (pairs_meet) {
            int units = units_of(Shape<T>::tiles(args, GemmId::gemm1));
            for (int i = arch::lane_idx(); i < blocks * units; i += 32)
                args.meet.came[int64_t{first} * units + i] = 0;
        }
    }
}

// Gives every route of the pass its row: the expert's start, plus its routes in earlier chunks, plus earlier
// ones of this chunk, in (k, token) order.
template <class T>
MEGAMOE_DEVICE void assign_rows(const Context& ctx, int begin, int end) {
    constexpr int block_rows = T::Tiling::rows;
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    int32_t* counters = ctx.routing.expert_counters[transport_warp()];
    for (int chunk = begin + transport_index(ctx); chunk < end; chunk += num_transports(ctx)) {
        MEGAMOE_UNROLL_BY(1)
        for (int e = lane; e < args.num_local_experts; e += 32) {
            counters[e] = ctx.routing.expert_start[e] * block_rows + routes_between(args, e, begin, chunk);
        }
        arch::warp_sync();
        int ordered = chunk * chunk_tokens + lane;
        const int32_t* ids = args.route_ids + int64_t{ordered} * args.top_k;
        int lowest = max_local_experts, highest = -1, leader_k = -1, closer_k = -1;
        int32_t expert[routes_ahead];
        MEGAMOE_UNROLL_BY(1)
        for (int k0 = 0; k0 < args.top_k; k0 += routes_ahead) {
            load_routes(expert, ids, k0, args.top_k, -1);
            MEGAMOE_UNROLL
            for (int j = 0; j < routes_ahead; ++j) {  // of equal experts the first k leads, the last closes
                int e = expert[j];
                if (e >= 0 && e < lowest) {
                    lowest = e;
                    leader_k = k0 + j;
                }
                if (e >= 0 && e >= highest) {
                    highest = e;
                    closer_k = k0 + j;
                }
            }
        }
        MEGAMOE_UNROLL_BY(1)
        for (int k0 = 0; k0 < args.top_k; k0 += routes_ahead) {
            load_routes(expert, ids, k0, args.top_k, -1);
            MEGAMOE_UNROLL
            for (int j = 0; j < routes_ahead && k0 + j < args.top_k; ++j) {
                int e = expert[j], k = k0 + j;
                uint32_t same = arch::match_any(e);
                int row = e >= 0 ? counters[e] + arch::popc(same & arch::lanes_below()) : -1;
                arch::warp_sync();
                if (e >= 0 && (same & arch::lanes_below()) == 0) counters[e] += arch::popc(same);
                arch::warp_sync();
                args.route_rows[int64_t{ordered} * args.top_k + k] = row;
                if (e >= 0) {
                    uint32_t flags = (k == leader_k ? route_leader : 0) | (k == closer_k ? route_closer : 0);
                    args.pool_routes[row - ctx.routing.padding_before[e]] =
                        flags | static_cast<uint32_t>(ordered) << route_k_bits | static_cast<uint32_t>(k);
                    if constexpr (T::Sums::of_gradients)
                        own<T>(args).row_weight[row] = args.route_weights[int64_t{ordered} * args.top_k + k];
                }
            }
        }
    }
}

MEGAMOE_DEVICE void wait_for_grid(Context& ctx, bool leads) {
    transport_sync();
    if (leads) GridBarrier::arrive_and_wait(ctx.mem, ctx.args.arrivals, ctx.args.generation, num_ctas(ctx));
    transport_sync();
}

// Do pairs meet in a pass of so many rows?
MEGAMOE_DEVICE bool pairs_meet(const Args& args, int rows) {
    return args.meet.rows != 0 && rows >= args.meet.rows;
}

// A pass, or a phase of it: the phases of one pass have equal plans.
struct PassStart {
    int chunk;
    Phase phase;
    bool is_first;  // of the launch
};

constexpr PassStart first_pass = {0, Phase::data, true};
template <class T>
MEGAMOE_DEVICE PassStart pass_after(const PassPlan& plan) {
    if (plan.phase == Phase::recompute) return {plan.chunk_begin, Phase::data, false};
    // Pre-activations were saved of the first pass only.
    return {plan.chunk_end, T::Pool::restored ? Phase::recompute : Phase::data, false};
}

// Transport warps: plans the pass that starts at chunk `begin`, for the CTA's other roles too, who meet it at
// the cluster barrier that follows. Ends with the grid barrier that makes all CTAs' rows and tables visible.
//
// A poisoned launch plans no block. Invariant: a CTA that does not see the abort here has counts that all
// CTAs agree on, because a CTA whose waits failed raised (or saw) the abort before it arrived at the grid
// barrier that ordered the counts. Invariant: both CTAs of a pair run one plan, CTA 0's, so that neither
// waits for a half tile that the other does not load.
template <class T>
MEGAMOE_DEVICE void plan_pass(Context& ctx, PassStart start) {
    constexpr int block_rows = T::Tiling::rows;
    int begin = start.chunk;
    PassPlan& plan = ctx.smem.draft;
    bool leads = transport_warp() == 0 && arch::lane_idx() == 0;
    if (!start.is_first) wait_for_grid(ctx, leads);  // the last pass's tables and pool are not read any more
    if (transport_warp() == 0) {
        bool poisoned = arch::ballot(ctx.mem.aborted()) != 0;
        int end = poisoned ? begin : pass_end<block_rows>(ctx, begin);
        PoolUse use = poisoned ? PoolUse{0, 0} : place_experts<block_rows>(ctx, begin, end);
        bool is_last = poisoned || (end == ctx.smem.num_chunks && start.phase == Phase::data);
        Phase phase = poisoned ? Phase::data : start.phase;
        if (leads) {
            plan = {begin,
                    end,
                    use.blocks,
                    use.rows,
                    is_last ? 1 : 0,
                    phase,
                    rows_per_batch(ctx, use.rows),
                    pull_slices<T>(ctx, phase),
                    pairs_meet(ctx.args, use.rows) ? 1 : 0};
        }
    }
    if (leads) ctx.smem.row_batches_taken = ctx.smem.token_batches_taken = 0;
    transport_sync();
    Profile<T>::mark(ctx.args, Mark::drafted);
    if (plan.num_blocks != 0) {
        write_block_table<T>(ctx, begin, plan.chunk_end, can_meet<T> && plan.meets != 0);
        assign_rows<T>(ctx, begin, plan.chunk_end);
    }
    if constexpr (T::WeightTiles::beside_rows) {
        if (leads && cta_idx(ctx) == 0) {
            *own<T>(ctx.args).grads_ready = 0;
            MEGAMOE_UNROLL
            for (int i = 0; i < 3; ++i) own<T>(ctx.args).scheduled[i] = 0;
        }
    }
    arch::fence_proxy_async_shared();
    Profile<T>::mark(ctx.args, Mark::tabled);
    wait_for_grid(ctx, leads);
    if (leads && pair_member() == 0) {
        if (ctx.mem.aborted())
            plan = {begin, plan.chunk_end, 0, 0, 1, Phase::data,
                    1,     {1, 0},         0};  // other CTAs' tables may be missing
        ctx.smem.plan = plan;
        *arch::in_member(&ctx.smem.plan, 1) = plan;
        if (start.is_first) Forms<T>::decide(ctx, plan);
    }
}

}  // namespace megamoe
