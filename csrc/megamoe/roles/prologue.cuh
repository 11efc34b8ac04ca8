// What comes before the tiles, by two crews of eight warps side by side, one bound by latency, the other by
// bandwidth. Crew 1 are the warps that will be math: transport plans the first pass while they still stage.
//
//   crew 0, route: ids, weights -> window -> RoutesReady to every peer    (the last CTA to finish publishes)
//                  every peer's RoutesReady -> ids of all ranks -> chunk_prefix, route_ids, route_weights
//   crew 1, stage: x (quantized for FP8) -> window -> XReady to every peer    (likewise)
#pragma once
#include "megamoe/roles/routes.cuh"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE int own_tokens(const Args& args) {
    int n = args.num_tokens_device != nullptr ? *args.num_tokens_device : args.num_tokens;
    // As many as forward had; the count on the device may be another microbatch's by now.
    if (T::direction == Direction::backward) n = args.training.header->tokens_of_rank[args.rank];
    return max_of(0, min_of(n, args.num_tokens));  // the buffers hold args.num_tokens
}

// True in all threads of the crew whose arrival was the last of the grid: this crew's writes so far, of every
// CTA, are visible to it.
MEGAMOE_DEVICE bool last_to_arrive(Context& ctx, Memory::Cell ticket) {
    int32_t& is_last = ctx.smem.last_arrival[crew()];
    crew_sync();
    if (crew_thread() == 0) is_last = LastArrival::arrive(ctx.mem, ticket, num_ctas(ctx)) ? 1 : 0;
    crew_sync();
    return is_last != 0;
}

MEGAMOE_DEVICE void stage_routes(Context& ctx, int num_tokens) {
    const Args& args = ctx.args;
    int64_t base = int64_t{ctx.parity()} * args.max_tokens * args.top_k;
    auto* ids = ctx.window<int32_t>(args.rank, args.window_ids) + base;
    auto* weights = ctx.window<float>(args.rank, args.window_weights) + base;
    int total = num_tokens * args.top_k;
    MEGAMOE_UNROLL_BY(1)
    for (int i = cta_idx(ctx) * crew_threads + crew_thread(); i < total; i += num_ctas(ctx) * crew_threads) {
        ids[i] = topk_id(args, i);
        weights[i] = args.topk_weights[i];
    }
    if (!last_to_arrive(ctx, args.ids_ticket)) return;
    int peer = crew_thread();
    if (peer < args.num_ranks) {
        RouteCell* cell = route_cell(ctx, peer, args.rank);
        RoutesReady::publish(ctx.mem, &cell->epoch, &cell->num_tokens, &cell->config_hash, ctx.epoch(),
                             static_cast<uint32_t>(num_tokens), args.config_hash);
    }
}

template <class T>
MEGAMOE_DEVICE void stage_x(Context& ctx, int num_tokens) {
    using X = typename T::Gemm1::A;
    if constexpr (T::direction == Direction::forward && X::scaled) {
        if (ctx.args.x_scale != nullptr) return X::stage_quantized(ctx, num_tokens);
    }
    X::stage(ctx, num_tokens);
}

template <class T>
MEGAMOE_DEVICE void stage(Context& ctx) {
    stage_x<T>(ctx, own_tokens<T>(ctx.args));
    if (!last_to_arrive(ctx, ctx.args.x_ticket)) return;
    int peer = crew_thread();
    if (peer < ctx.args.num_ranks) {
        XReady::publish(ctx.mem, ctx.window<uint32_t>(peer, ctx.args.window_staged) + ctx.args.rank,
                        ctx.epoch());
    }
}

// What all ranks must agree on in this launch: layer and configuration; in backward the direction, the
// forward launch, so that another microbatch's is a fault by name, and whether it makes rows of dx.
template <class T>
MEGAMOE_DEVICE uint32_t launch_hash(const Args& args) {
    if (T::direction != Direction::backward) return args.config_hash;
    uint32_t made = only_weights<T>(args) ? 0x40000000u : 0;
    return args.config_hash + 0x7f4a7c15u + made +
           args.training.header->begun * 0x85ebca6bu;  // odd: no two epochs alike
}

// One thread. `most`: of any rank; `all`: of all together.
MEGAMOE_DEVICE void count_tokens(Context& ctx, int most, int all, int own) {
    const Args& args = ctx.args;
    ctx.smem.num_chunks = num_chunks_of(most, args.num_ranks);
    ctx.smem.num_tokens = all;
    ctx.smem.own_tokens = own;
    ctx.smem.sum_slices = sum_slices_of(args.hidden, most, args.num_ranks, args.ready_cells);
}

// Every rank's token count, into shared memory. A rank with another configuration is a fault, and counts as
// empty.
template <class T>
MEGAMOE_DEVICE void await_routes(Context& ctx) {
    const Args& args = ctx.args;
    int peer = crew_thread();
    if (peer < args.num_ranks) {
        RouteCell* cell = route_cell(ctx, args.rank, peer);
        uint32_t tokens = 0;
        if (RoutesReady::await(ctx.mem, &cell->epoch, ctx.epoch(), peer)) {
            tokens = ctx.mem.load(&cell->num_tokens, Order::relaxed, Scope::system);
            uint32_t hash = ctx.mem.load(&cell->config_hash, Order::relaxed, Scope::system);
            bool agrees = hash == launch_hash<T>(args);
            if constexpr (T::direction == Direction::backward)  // equal hashes imply it: no epoch comes again
                agrees = agrees && static_cast<int32_t>(tokens) == args.training.header->tokens_of_rank[peer];
            if (!agrees) {
                ctx.mem.fault(Wait{Edge::config, static_cast<uint32_t>(peer), 0}, launch_hash<T>(args), hash);
                tokens = 0;
            }
        }
        ctx.smem.tokens_of_rank[peer] = static_cast<int32_t>(tokens);
    }
    crew_sync();
    if (crew_thread() == 0) {
        int most = 0, all = 0;
        MEGAMOE_UNROLL_BY(1)
        for (int r = 0; r < args.num_ranks; ++r) {
            most = max_of(most, ctx.smem.tokens_of_rank[r]);
            all += ctx.smem.tokens_of_rank[r];
        }
        count_tokens(ctx, most, all, own_tokens<T>(args));
    }
    crew_sync();
}

// Counts this rank's routes per (chunk, expert); keeps the ids (as local experts) and weights in ordinary
// memory.
MEGAMOE_DEVICE void count_routes(Context& ctx) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx(), warp = crew_warp();
    int32_t* counters = ctx.routing.expert_counters[warp];
    MEGAMOE_UNROLL_BY(1)
    for (int chunk = cta_idx(ctx) * crew_warps + warp; chunk < ctx.smem.num_chunks;
         chunk += num_ctas(ctx) * crew_warps) {
        MEGAMOE_UNROLL_BY(1)
        for (int e = lane; e < args.num_local_experts; e += 32) counters[e] = 0;
        arch::warp_sync();
        int ordered = chunk * chunk_tokens + lane;
        int home = home_of(ordered, args.num_ranks), token = token_of(ordered, args.num_ranks);
        bool exists = token < ctx.smem.tokens_of_rank[home];
        int64_t from = (int64_t{ctx.parity()} * args.max_tokens + token) * args.top_k;
        const auto* ids = ctx.window<const int32_t>(home, args.window_ids) + from;
        const auto* weights = ctx.window<const float>(home, args.window_weights) + from;
        MEGAMOE_UNROLL_BY(1)
        for (int k0 = 0; k0 < args.top_k; k0 += routes_ahead) {
            int32_t id[routes_ahead];
            float weight[routes_ahead];
            load_routes(id, ids, k0, exists ? args.top_k : 0, -1);
            load_routes(weight, weights, k0, exists ? args.top_k : 0, 0.0f);
            MEGAMOE_UNROLL
            for (int j = 0; j < routes_ahead && k0 + j < args.top_k; ++j) {
                int expert = id[j] - args.expert_begin;
                if (expert < 0 || expert >= args.num_local_experts) expert = -1;
                int64_t to = int64_t{ordered} * args.top_k + k0 + j;
                args.route_ids[to] = expert;
                if (expert >= 0) args.route_weights[to] = weight[j];
                uint32_t same = arch::match_any(expert);
                if (expert >= 0 && (same & arch::lanes_below()) == 0) counters[expert] += arch::popc(same);
                arch::warp_sync();
            }
        }
        MEGAMOE_UNROLL_BY(1)
        for (int e = lane; e < args.num_local_experts; e += 32) {
            args.chunk_prefix[int64_t{e} * (args.max_chunks + 1) + chunk] = counters[e];
        }
        arch::warp_sync();
    }
}

// Counts -> exclusive prefixes over chunks, one warp an expert; the total stands behind the last chunk.
MEGAMOE_DEVICE void scan_routes(Context& ctx) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx(), chunks = ctx.smem.num_chunks;
    MEGAMOE_UNROLL_BY(1)
    for (int e = cta_idx(ctx) * crew_warps + crew_warp(); e < args.num_local_experts;
         e += num_ctas(ctx) * crew_warps) {
        int32_t* row = args.chunk_prefix + int64_t{e} * (args.max_chunks + 1);
        int running = 0;
        MEGAMOE_UNROLL_BY(1)
        for (int c0 = 0; c0 < chunks; c0 += 32) {
            int c = c0 + lane;
            int own = c < chunks ? row[c] : 0;
            int inclusive = inclusive_sum(own);
            if (c < chunks) row[c] = running + inclusive - own;
            running += arch::shfl(inclusive, 31);
        }
        if (lane == 0) row[chunks] = running;
    }
}

// Crew-converged; what this crew of all CTAs wrote before it is visible after it.
MEGAMOE_DEVICE void grid_sync(Context& ctx) {
    crew_sync();
    if (crew_thread() == 0) {
        GridBarrier::arrive_and_wait(ctx.mem, ctx.args.arrivals, ctx.args.generation, num_ctas(ctx));
    }
    crew_sync();
}

MEGAMOE_DEVICE void count_and_scan(Context& ctx) {
    MEGAMOE_UNROLL_BY(1)
    for (int step = 0; step < 2; ++step) {
        if (step == 0) {
            count_routes(ctx);
        } else {
            scan_routes(ctx);
        }
        grid_sync(ctx);
    }
}

// train: the state says whose it is, once this launch's counts are known; leave() says that it is complete.
MEGAMOE_DEVICE void begin_state(const Context& ctx) {
    if (cta_idx(ctx) != 0 || crew_thread() != 0) return;
    StateHeader& header = *ctx.args.training.header;
    header.begun = ctx.epoch();
    header.pool_rows = static_cast<uint32_t>(ctx.args.pool_rows);
    header.config_hash = ctx.args.config_hash;
    for (int r = 0; r < max_ranks; ++r)
        header.tokens_of_rank[r] = r < ctx.args.num_ranks ? ctx.smem.tokens_of_rank[r] : 0;
}

// backward: the routes are the state's, so only the flags are exchanged, as in every launch. A state that no
// launch of this layer completed is a fault; nothing is published then, and the peers learn of it when this
// launch ends.
template <class T>
MEGAMOE_DEVICE void route_again(Context& ctx) {
    const Args& args = ctx.args;
    const StateHeader& header = *args.training.header;
    bool fits = header.complete != 0 && header.complete == header.begun &&
                header.config_hash == args.config_hash &&
                header.pool_rows == static_cast<uint32_t>(args.pool_rows) &&
                header.tokens_of_rank[args.rank] <= args.num_tokens;
    if (fits) {
        int peer = crew_thread();
        if (cta_idx(ctx) == 0 && peer < args.num_ranks) {
            RouteCell* cell = route_cell(ctx, peer, args.rank);
            RoutesReady::publish(ctx.mem, &cell->epoch, &cell->num_tokens, &cell->config_hash, ctx.epoch(),
                                 static_cast<uint32_t>(header.tokens_of_rank[args.rank]),
                                 launch_hash<T>(args));
        }
        await_routes<T>(ctx);
        return;
    }
    if (crew_thread() == 0) {
        if (cta_idx(ctx) == 0) ctx.mem.fault(Wait{Edge::state, max_ranks, 0}, header.begun, header.complete);
        count_tokens(ctx, 0, 0, args.num_tokens);  // no row, no token that is combined: all of dx becomes NaN
    }
    crew_sync();
}

template <class T>
MEGAMOE_DEVICE void route(Context& ctx) {
    if constexpr (T::direction == Direction::backward) {
        route_again<T>(ctx);
    } else {
        stage_routes(ctx, own_tokens<T>(ctx.args));
        await_routes<T>(ctx);
        if constexpr (T::direction == Direction::train) begin_state(ctx);
        count_and_scan(ctx);
    }
    // The counters' memory becomes pipeline slots behind the plan's cluster barrier.
    arch::fence_proxy_async_shared();
}

}  // namespace megamoe
