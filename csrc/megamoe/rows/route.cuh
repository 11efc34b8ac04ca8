// route: crew 0 exchanges ids and weights with every rank and counts this rank's routes (rows/crews.cuh).
#pragma once
#include "megamoe/gemm/gemm.cuh"
#include "megamoe/rows/crews.cuh"
#include "megamoe/rows/routes.cuh"

namespace megamoe {

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

// Called by one thread. `most`: tokens of the rank that has most; `all`: of all ranks together.
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
            bool agrees = hash == T::Routes::template hash<T>(args) &&
                          T::Routes::template agrees<T>(args, peer, tokens);
            if (!agrees) {
                ctx.mem.fault(Wait{Edge::config, static_cast<uint32_t>(peer), 0},
                              T::Routes::template hash<T>(args), hash);
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

template <class T>
MEGAMOE_DEVICE void count_and_scan(Context& ctx) {
    MEGAMOE_UNROLL_BY(1)
    for (int step = 0; step < 2; ++step) {
        if (step == 0) {
            count_routes(ctx);
        } else {
            scan_routes(ctx);
        }
        grid_sync(ctx);
        if (step == 0) Profile<T>::mark(ctx.args, Mark::counted);
    }
}

// backward: the routes are the state's, so only the flags are exchanged, as in every launch. A state that no
// launch of this layer completed is a fault; nothing is published then, and the peers learn of it when this
// launch ends.
template <class T>
MEGAMOE_DEVICE void route_again(Context& ctx) {
    const Args& args = ctx.args;
    const StateHeader& header = *launch_args<T>(args).state.header;
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
                                 T::Routes::template hash<T>(args));
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

// Where routes come from. tokens(): of this rank; hash(): what all ranks must agree on in this launch;
// agrees(): does a rank's count of tokens fit?
struct ExchangedRoutes {
    template <class T>
    static MEGAMOE_DEVICE int tokens(const Args& args) {
        return args.num_tokens_device != nullptr ? *args.num_tokens_device : args.num_tokens;
    }
    template <class T>
    static MEGAMOE_DEVICE uint32_t hash(const Args& args) {
        return args.config_hash;
    }
    template <class T>
    static MEGAMOE_DEVICE bool agrees(const Args&, int, uint32_t) {
        return true;
    }
    template <class T>
    static MEGAMOE_DEVICE void route(Context& ctx) {
        stage_routes(ctx, own_tokens<T>(ctx.args));
        Profile<T>::mark(ctx.args, Mark::ids_staged);
        await_routes<T>(ctx);
        Profile<T>::mark(ctx.args, Mark::routes_seen);
        T::State::template begin<T>(ctx);
        count_and_scan<T>(ctx);
    }
};
// The routes are those of the forward launch whose state this one was given.
struct RoutesOfState {
    // As many as forward had; the count on the device may be another microbatch's by now.
    template <class T>
    static MEGAMOE_DEVICE int tokens(const Args& args) {
        return launch_args<T>(args).state.header->tokens_of_rank[args.rank];
    }
    // The direction; the forward launch, so that the state of another microbatch is a fault by name; and
    // whether the launch makes rows of dx.
    template <class T>
    static MEGAMOE_DEVICE uint32_t hash(const Args& args) {
        uint32_t made = only_weights<T>(args) ? 0x40000000u : 0;
        return args.config_hash + 0x7f4a7c15u + made +
               launch_args<T>(args).state.header->begun * 0x85ebca6bu;  // odd: no two epochs alike
    }
    // Equal hashes imply it: no epoch comes again.
    template <class T>
    static MEGAMOE_DEVICE bool agrees(const Args& args, int peer, uint32_t tokens) {
        return launch_args<T>(args).state.header->tokens_of_rank[peer] == static_cast<int32_t>(tokens);
    }
    template <class T>
    static MEGAMOE_DEVICE void route(Context& ctx) {
        route_again<T>(ctx);
    }
};

template <class T>
MEGAMOE_DEVICE void route(Context& ctx) {
    T::Routes::template route<T>(ctx);
    // The counters' memory becomes pipeline slots behind the plan's cluster barrier.
    arch::fence_proxy_async_shared();
}

}  // namespace megamoe
