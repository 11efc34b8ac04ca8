// transport: four warps a CTA that move rows with ordinary 16-byte loads and stores.
//   dispatch: walk the pool in row order; at a token's leader, pull it from its home rank and fan it out to
//             all its rows.
//   reduce:   walk the pool in row order; at a token's closer, once every block up to there is done, sum its
//             rows into its home's window.
//   combine:  sum the partials of each of this rank's own tokens, once every expert rank's is there.
// Dispatch finishes first (it waits for peers' staging only); then reduce and combine, whichever has work.
// The math warps join those two when they have no tiles left: most closers stand near the end of the pool,
// and four warps would be busy with them long after the last tile.
#pragma once
#include "megamoe/roles/plan.cuh"

namespace megamoe {

constexpr int vector_bytes = 16;

// ---- dispatch

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
    using X = typename T::Precision::X;
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    int home = home_of(ordered, args.num_ranks);
    int64_t token = token_of(ordered, args.num_ranks);
    int lane_row = lane < args.top_k ? args.route_rows[int64_t{ordered} * args.top_k + lane] : -1;
    uint32_t targets = arch::ballot(lane_row >= 0);
    int vectors = args.hidden * X::element_bytes / vector_bytes;
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
    if (lane_row >= 0) RowsReady::publish(ctx.mem, args.rows_ready + lane_row / block_rows, 1);
}

// Rows that a warp takes at a time: few, so that the first blocks are complete first; fewer yet when there
// are not many rows, so that every warp has some. Affects timing only.
MEGAMOE_DEVICE int rows_per_share(int num_blocks) {
    int rows = 4;
    while (rows > 1 && num_blocks * block_rows < rows * num_transports()) rows /= 2;
    return rows;
}

template <class T>
MEGAMOE_DEVICE void dispatch(Context& ctx) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    uint32_t staged = 0;  // home ranks known to have staged x
    int rows = rows_per_share(ctx.smem.plan.num_blocks);
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
                if (arch::ballot(ok) != ~0u)
                    return;  // poisoned: pull nothing more; waits for rows return by themselves
                arch::warp_sync();
                staged |= 1u << home;
            }
            pull_token<T>(ctx, ordered);
        }
    }
}

// ---- sums of rows, for reduce and combine

MEGAMOE_DEVICE void add_vector(float (&sum)[8], uint4_t v, float weight) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    MEGAMOE_UNROLL
    for (int w = 0; w < 4; ++w) {
        sum[2 * w] += weight * arch::bf16_lo(words[w]);
        sum[2 * w + 1] += weight * arch::bf16_hi(words[w]);
    }
}
MEGAMOE_DEVICE uint4_t pack_vector(const float (&sum)[8]) {
    return {arch::pack_bf16x2(sum[0], sum[1]), arch::pack_bf16x2(sum[2], sum[3]),
            arch::pack_bf16x2(sum[4], sum[5]), arch::pack_bf16x2(sum[6], sum[7])};
}

// Work of reduce and combine is dealt out to CTAs in shares, round robin; a CTA's movers take its shares as
// they come. Which warp does a sum changes no bit of it.
MEGAMOE_DEVICE int next_share(int32_t* taken) {
    int n = arch::lane_idx() == 0 ? arch::take_ticket(taken) : 0;
    return arch::shfl(n, 0) * arch::grid_dim() + arch::block_idx();
}

MEGAMOE_DEVICE SumJob& current_job(const Context& ctx) { return ctx.smem.job[mover_warp()]; }

// All lanes together; lane i brings address and weight of source i.
MEGAMOE_DEVICE void set_job(const Context& ctx, uint64_t out, uint64_t address, float weight,
                            uint32_t sources) {
    SumJob& job = current_job(ctx);
    int lane = arch::lane_idx();
    arch::warp_sync();  // no lane reads the last job any more
    job.address[lane] = address;
    job.weight[lane] = weight;
    if (lane == 0) {
        job.out = out;
        job.sources = sources;
    }
    arch::warp_sync();
}

// One warp does its job, in fp32: of two sources at a time, two vectors a lane, 32 apart. So four loads are
// in flight in each lane, 1 MB on the device, which is what NVLink needs; more would not fit the registers
// that FP8 math leaves.
MEGAMOE_DEVICE void sum_rows(const Context& ctx) {
    constexpr int width = 2, positions = 2;
    const SumJob& job = current_job(ctx);
    int vectors = ctx.args.hidden / 8;
    MEGAMOE_UNROLL_BY(1)
    for (int v = arch::lane_idx(); v < vectors; v += 32 * positions) {
        float sum[positions][8] = {};
        MEGAMOE_UNROLL_BY(1)
        for (uint32_t left = job.sources; left != 0;) {
            uint4_t data[width][positions];
            float weight[width];
            MEGAMOE_UNROLL
            for (int s = 0; s < width; ++s) {
                int source = left != 0 ? arch::ffs0(left) : 0, limit = left != 0 ? vectors : 0;
                auto* from = reinterpret_cast<const uint4_t*>(job.address[source]);
                weight[s] = left != 0 ? job.weight[source] : 0.0f;
                MEGAMOE_UNROLL
                for (int p = 0; p < positions; ++p)
                    data[s][p] = arch::load_streaming_below(from, v + 32 * p, limit);
                left &= left - 1;
            }
            MEGAMOE_UNROLL
            for (int s = 0; s < width; ++s) {
                MEGAMOE_UNROLL
                for (int p = 0; p < positions; ++p) add_vector(sum[p], data[s][p], weight[s]);
            }
        }
        MEGAMOE_UNROLL
        for (int p = 0; p < positions; ++p) {
            arch::store_vec_below(reinterpret_cast<uint4_t*>(job.out), v + 32 * p, vectors,
                                  pack_vector(sum[p]));
        }
    }
}

// ---- reduce

// Walks the pool in shares of rows behind gemm2; remembers up to where blocks are known to be done.
class Reducer {
  public:
    MEGAMOE_DEVICE explicit Reducer(const Context& ctx) {
        ReducerState& s = own(ctx);
        s.rows = rows_per_share(ctx.smem.plan.num_blocks);
        s.row = take(ctx);
        s.done = 0;
        s.closers = 0;
    }

    MEGAMOE_DEVICE bool finished(const Context& ctx) const {
        ReducerState& s = own(ctx);
        return s.row >= ctx.smem.plan.num_blocks * block_rows;
    }
    MEGAMOE_DEVICE Wait waits_for(const Context& ctx) const {
        return {Edge::y_rows_ready, max_ranks, static_cast<uint32_t>(own(ctx).done)};  // a block
    }
    MEGAMOE_DEVICE uint32_t seen(const Context& ctx) const {  // its tiles so far
        return ctx.mem.load(ctx.args.gemm[1].done + own(ctx).done, Order::relaxed, Scope::gpu);
    }

    // The next token's sum, if its share's blocks, and all before them, are done. Not when finished.
    MEGAMOE_DEVICE bool next(Context& ctx, int tiles2) {
        ReducerState& s = own(ctx);
        while (s.closers == 0) {
            if (finished(ctx) || !blocks_done(ctx, tiles2)) return false;
            load_share(ctx);
            if (s.closers == 0) s.row = take(ctx);
        }
        set_partial(ctx, route_token(arch::shfl(s.route, arch::ffs0(s.closers))));
        return true;
    }

    // The job of next() is done; with the last of a share, the share's partials are published.
    MEGAMOE_DEVICE void done(Context& ctx) {
        ReducerState& s = own(ctx);
        s.closers &= s.closers - 1;
        if (s.closers != 0) return;
        const Args& args = ctx.args;
        arch::warp_sync();  // all lanes' stores happen before each lane's release
        if ((s.route & route_closer) != 0) {
            int ordered = route_token(s.route);
            int ranks = args.num_ranks, home = home_of(ordered, ranks);
            auto* ready =
                ctx.window<uint32_t>(home, args.window_ready) + int64_t{args.rank} * args.max_tokens;
            PartialsReady::publish(ctx.mem, ready + token_of(ordered, ranks), ctx.epoch());
        }
        s.row = take(ctx);
    }

  private:
    MEGAMOE_DEVICE int take(const Context& ctx) const {
        return next_share(&ctx.smem.row_shares_taken) * own(ctx).rows;
    }

    MEGAMOE_DEVICE bool blocks_done(Context& ctx, int tiles2) {
        ReducerState& s = own(ctx);
        int block = s.row / block_rows;
        while (s.done <= block) {  // 32 blocks a look
            int b = s.done + arch::lane_idx();
            bool ready = b > block || YRowsReady::ready(ctx.mem, ctx.args.gemm[1].done + b, tiles2);
            uint32_t missing = ~arch::ballot(ready);
            if (missing != 0) {
                s.done += arch::ffs0(missing);
                return false;
            }
            s.done += 32;
        }
        s.done = block + 1;
        arch::warp_sync();
        // After the acquire: of a poisoned launch y_rows may be garbage, so nothing of it is published.
        return arch::ballot(arch::lane_idx() == 0 && ctx.mem.aborted()) == 0;
    }

    MEGAMOE_DEVICE void load_share(const Context& ctx) {
        ReducerState& s = own(ctx);
        int row = s.row + arch::lane_idx();
        bool mine =
            arch::lane_idx() < s.rows && row % block_rows < block_entry(ctx.args, s.row / block_rows).rows();
        s.route = mine ? ctx.args.row_route[row] : 0;
        s.closers = arch::ballot((s.route & route_closer) != 0);
    }

    // One token's partial: rows in k order times routing weights, into this rank's slot in its home's window.
    // It crosses the link now, while tiles are computed, and not when the home has all partials of the token:
    // half of them come true in the last tenth of a launch.
    MEGAMOE_DEVICE void set_partial(const Context& ctx, int ordered) const {
        const Args& args = ctx.args;
        int lane = arch::lane_idx();
        int64_t route = int64_t{ordered} * args.top_k + lane;
        int row = lane < args.top_k ? args.route_rows[route] : -1;
        int ranks = args.num_ranks, home = home_of(ordered, ranks);
        int64_t row_bytes = int64_t{args.hidden} * 2;
        int64_t slot = int64_t{args.rank} * args.max_tokens + token_of(ordered, ranks);
        set_job(ctx, args.window[home] + args.window_partials + slot * row_bytes,
                reinterpret_cast<uint64_t>(args.y_rows) + row * row_bytes,
                row >= 0 ? args.route_weights[route] : 0.0f, arch::ballot(row >= 0));
    }

    // Found anew at every use, for no register holds it over a sum.
    static MEGAMOE_DEVICE ReducerState& own(const Context& ctx) { return ctx.smem.reducer[mover_thread()]; }
};

// ---- combine

// A warp has up to four of the rank's own tokens at a time, and a lane for each (token, expert rank).
class Combiner {
  public:
    MEGAMOE_DEVICE explicit Combiner(const Context& ctx) { own(ctx).token = -1; }

    MEGAMOE_DEVICE bool finished(const Context& ctx) const { return !has_tokens(ctx) && all_taken(ctx); }
    MEGAMOE_DEVICE bool waiting(const Context& ctx) const {  // this lane
        return own(ctx).token >= 0 && own(ctx).is_waiting != 0;
    }

    // A token whose partials are all there, if there is one: y[token] = their sum in rank order, zero without
    // routes.
    MEGAMOE_DEVICE bool next(Context& ctx) {
        CombinerState& s = own(ctx);
        if (!has_tokens(ctx)) {
            take(ctx);
            s.is_owed = s.is_waiting = owes(ctx.args, s.token) ? 1 : 0;
        }
        if (waiting(ctx) && PartialsReady::ready(ctx.mem, ready_cell(ctx), ctx.epoch())) s.is_waiting = 0;
        uint32_t missing = arch::ballot(waiting(ctx)), owed = arch::ballot(s.is_owed != 0);
        uint32_t ready = arch::ballot(s.token >= 0 && lanes_of_token(missing, arch::lane_idx()) == 0);
        if (ready == 0) return false;
        arch::warp_sync();  // the lanes' acquires cover the whole warp's loads
        int chosen = arch::ffs0(ready), lane = arch::lane_idx();
        int token = arch::shfl(s.token, chosen);
        int64_t row_bytes = int64_t{ctx.args.hidden} * 2;
        int64_t slot = int64_t{lane} * ctx.args.max_tokens + token;
        uint64_t address =
            ctx.args.window[ctx.args.rank] + ctx.args.window_partials + slot * row_bytes;  // of rank `lane`
        set_job(ctx, reinterpret_cast<uint64_t>(ctx.args.y) + token * row_bytes, address, 1.0f,
                lanes_of_token(owed, chosen));
        if (lane / max_ranks == chosen / max_ranks) s.token = -1;
        return true;
    }

    // For a fault record: a token and the rank whose partial is missing, of a lane that waits.
    MEGAMOE_DEVICE Wait waits_for(const Context& ctx) const {
        return {Edge::partials_ready, static_cast<uint32_t>(expert_rank()),
                static_cast<uint32_t>(own(ctx).token)};
    }

    // Poisoned launch: no partial can be trusted, y becomes NaN.
    MEGAMOE_DEVICE void poison(Context& ctx) {
        CombinerState& s = own(ctx);
        while (!finished(ctx)) {
            if (!has_tokens(ctx)) take(ctx);
            MEGAMOE_UNROLL_BY(1)
            for (int first = 0; first < 32; first += max_ranks) {
                int token = arch::shfl(s.token, first);
                uint8_t* out = static_cast<uint8_t*>(ctx.args.y) + int64_t{token} * ctx.args.hidden * 2;
                int vectors = token >= 0 ? ctx.args.hidden / 8 : 0;
                MEGAMOE_UNROLL_BY(1)
                for (int v = arch::lane_idx(); v < vectors; v += 32)
                    arch::store_vec(out + int64_t{v} * vector_bytes, {~0u, ~0u, ~0u, ~0u});
            }
            s.token = -1;
        }
    }

  private:
    static_assert(32 % max_ranks == 0, "a token's lanes stand in one warp");
    static MEGAMOE_DEVICE int expert_rank() { return arch::lane_idx() % max_ranks; }
    static MEGAMOE_DEVICE uint32_t lanes_of_token(uint32_t lanes, int lane) {  // bit i is expert rank i
        return lanes >> (lane / max_ranks * max_ranks) & ((1u << max_ranks) - 1);
    }
    static MEGAMOE_DEVICE bool has_tokens(const Context& ctx) {
        return arch::ballot(own(ctx).token >= 0) != 0;
    }

    // Tokens of a share: few enough that every mover has some.
    static MEGAMOE_DEVICE int tokens_per_share(const Context& ctx) {
        int tokens = 32 / max_ranks;
        while (tokens > 1 && ctx.smem.own_tokens < tokens * num_movers * arch::grid_dim()) tokens /= 2;
        return tokens;
    }
    // A look at a count that others add to: an old value costs one empty share.
    static MEGAMOE_DEVICE bool all_taken(const Context& ctx) {
        int taken = arch::look_at_count(&ctx.smem.token_shares_taken);
        int next = arch::shfl(taken, 0) * arch::grid_dim() + arch::block_idx();
        return next * tokens_per_share(ctx) >= ctx.smem.own_tokens;
    }
    static MEGAMOE_DEVICE void take(const Context& ctx) {
        int tokens = tokens_per_share(ctx), i = arch::lane_idx() / max_ranks;
        int token = next_share(&ctx.smem.token_shares_taken) * tokens + i;
        own(ctx).token = i < tokens && token < ctx.smem.own_tokens ? token : -1;
    }

    // Does this lane's expert rank owe the token a partial? A token's lanes look at its routes together.
    static MEGAMOE_DEVICE bool owes(const Args& args, int token) {
        uint32_t ranks = 0;
        MEGAMOE_UNROLL_BY(1)
        for (int k = expert_rank(); k < args.top_k && token >= 0; k += max_ranks) {
            int id = topk_id(args, int64_t{token} * args.top_k + k);
            if (id >= 0) ranks |= 1u << rank_of_expert(args.num_experts, args.num_ranks, id);
        }
        MEGAMOE_UNROLL
        for (int mask = max_ranks / 2; mask > 0; mask /= 2) ranks |= arch::shfl_xor(ranks, mask);
        return (ranks >> expert_rank() & 1) != 0;
    }

    static MEGAMOE_DEVICE uint32_t* ready_cell(const Context& ctx) {
        return ctx.window<uint32_t>(ctx.args.rank, ctx.args.window_ready) +
               int64_t{expert_rank()} * ctx.args.max_tokens + own(ctx).token;
    }

    // Found anew at every use, for no register holds it over a sum.
    static MEGAMOE_DEVICE CombinerState& own(const Context& ctx) { return ctx.smem.combiner[mover_thread()]; }
};

// Reduce first: peers wait for it. Returns when the pass is reduced and, in the last pass, all own tokens are
// combined.
template <class T>
MEGAMOE_DEVICE void reduce_and_combine(Context& ctx) {
    Reducer reducer(ctx);
    Combiner combiner(ctx);
    uint32_t idle_since = 0;  // set before it is read
    MEGAMOE_UNROLL_BY(1)
    for (uint32_t polls = 0;;) {
        bool reduced = reducer.finished(ctx), combined = ctx.smem.plan.is_last == 0 || combiner.finished(ctx);
        if (reduced && combined) return;
        bool reduces = !reduced && reducer.next(ctx, Shape<T>::tiles(ctx.args, Stage::gemm2));
        if (reduces || (!combined && combiner.next(ctx))) {
            sum_rows(ctx);
            if (reduces) reducer.done(ctx);
            polls = 0;
            continue;
        }
        // 528 warps asking for one line keep an L2 slice busy that the tiles need too, so the pauses grow to
        // about 1 us.
        arch::sleep_ns(min_of(32u << min_of(polls, 5u), 1024u));
        if (++polls % 16 != 0) continue;
        uint32_t now = arch::shfl(ctx.mem.coarse_time(), 0);  // one verdict of the warp
        if (polls == 16) idle_since = now;
        bool give_up = ctx.mem.aborted();
        if (now - idle_since > ctx.mem.coarse_timeout()) {  // no progress for the whole time-out
            give_up = true;
            reduced = reducer.finished(ctx);  // since the look above the last shares may have been empty
            if (!reduced && arch::lane_idx() == 0) {
                ctx.mem.fault(reducer.waits_for(ctx), Shape<T>::tiles(ctx.args, Stage::gemm2),
                              reducer.seen(ctx));
            } else if (reduced && combiner.waiting(ctx)) {
                ctx.mem.fault(combiner.waits_for(ctx), ctx.epoch(), 0);
            }
        }
        if (arch::ballot(give_up) != 0) break;
    }
    if (ctx.smem.plan.is_last != 0) combiner.poison(ctx);
}

}  // namespace megamoe
