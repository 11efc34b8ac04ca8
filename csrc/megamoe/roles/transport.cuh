// transport: five warps a CTA that move rows with ordinary 16-byte loads and stores.
//   dispatch: walk the pool in row order; at a token's leader, pull it from its home rank and fan it out to all its rows.
//   reduce:   walk the pool in row order; at a token's closer, once every block up to there is done, sum its rows.
//   combine:  for each of this rank's own tokens, once every expert rank's partial is ready, sum the partials.
// Dispatch finishes first (it waits for peers' staging only); then reduce and combine, whichever has work.
#pragma once
#include "megamoe/roles/plan.cuh"

namespace megamoe {

constexpr int vector_bytes = 16;

// ---- dispatch

// One warp: row `from` (of `bytes`) to each of the n rows in `rows` (lane i holds the i-th row; -1 = none).
MEGAMOE_DEVICE void fan_out(const uint8_t* from, uint8_t* pool, int bytes, int lane_row, uint32_t targets) {
    constexpr int in_flight = 4;
    int lane = arch::lane_idx();
    int vectors = bytes / vector_bytes;
    MEGAMOE_UNROLL_BY(1)
    for (int v0 = lane; v0 - lane < vectors; v0 += in_flight * 32) {
        uint4_t data[in_flight];
        MEGAMOE_UNROLL
        for (int j = 0; j < in_flight; ++j) {
            if (v0 + 32 * j < vectors) data[j] = arch::load_streaming(from + int64_t{v0 + 32 * j} * vector_bytes);
        }
        for (uint32_t left = targets; left != 0; left &= left - 1) {
            int64_t row = arch::shfl(lane_row, arch::ffs0(left));
            uint8_t* to = pool + row * bytes;
            MEGAMOE_UNROLL
            for (int j = 0; j < in_flight; ++j) {
                if (v0 + 32 * j < vectors) arch::store_vec(to + int64_t{v0 + 32 * j} * vector_bytes, data[j]);
            }
        }
    }
}

template <class T>
MEGAMOE_DEVICE void pull_token(Context& ctx, int ordered) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    int home = home_of(ordered, args.num_ranks);
    int64_t token = token_of(ordered, args.num_ranks);
    int lane_row = lane < args.top_k ? args.route_rows[int64_t{ordered} * args.top_k + lane] : -1;
    uint32_t targets = arch::ballot(lane_row >= 0);
    int bytes = args.hidden * T::Precision::element_bytes;
    fan_out(ctx.window<const uint8_t>(home, args.window_x) + token * bytes, static_cast<uint8_t*>(args.x_pool), bytes,
            lane_row, targets);
    if constexpr (T::Precision::scaled) {
        int groups = Shape<T>::scale_groups_h(args);
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

// Rows that a warp takes at a time: few, so that the first blocks are complete first; fewer yet when there are not many rows,
// so that every warp has some. Affects timing only.
MEGAMOE_DEVICE int rows_per_unit(int num_blocks) {
    int unit = 4;
    while (unit > 1 && num_blocks * block_rows < unit * num_transports()) unit /= 2;
    return unit;
}

template <class T>
MEGAMOE_DEVICE void dispatch(Context& ctx) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    uint32_t staged = 0;  // home ranks known to have staged x
    int unit = rows_per_unit(ctx.smem.plan.num_blocks);
    int units = ctx.smem.plan.num_blocks * (block_rows / unit);
    for (int u = transport_index(); u < units; u += num_transports()) {
        int row = u * unit + lane;
        bool mine = lane < unit && row % block_rows < block_entry(args, u * unit / block_rows).rows();
        uint32_t route = mine ? args.row_route[row] : 0;
        for (uint32_t left = arch::ballot((route & route_leader) != 0); left != 0; left &= left - 1) {
            int ordered = route_token(arch::shfl(route, arch::ffs0(left)));
            int home = home_of(ordered, args.num_ranks);
            if ((staged >> home & 1) == 0) {
                bool ok = XReady::await(ctx.mem, ctx.window<uint32_t>(args.rank, args.window_staged) + home, ctx.epoch(), home);
                if (arch::ballot(ok) != ~0u) return;  // poisoned: pull nothing more; waits for rows return by themselves
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
    return {arch::pack_bf16x2(sum[0], sum[1]), arch::pack_bf16x2(sum[2], sum[3]), arch::pack_bf16x2(sum[4], sum[5]),
            arch::pack_bf16x2(sum[6], sum[7])};
}

// One warp: out[0..hidden) = sum over the set bits i of `sources`, lowest first, of weight_i * row_i, in fp32.
// Lane i holds address and weight of source i. Two vectors of a lane are in flight for up to `depth` sources at once.
MEGAMOE_DEVICE void sum_rows(uint8_t* out, int hidden, uint64_t lane_address, float lane_weight, uint32_t sources) {
    constexpr int depth = 4;
    int lane = arch::lane_idx(), vectors = hidden / 8;
    MEGAMOE_UNROLL_BY(1)
    for (int v0 = lane; v0 - lane < vectors; v0 += 32) {
        bool in_range = v0 < vectors;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (uint32_t left = sources; left != 0;) {
            uint4_t data[depth];
            uint32_t batch = left;
            MEGAMOE_UNROLL
            for (int j = 0; j < depth; ++j) {
                if (batch != 0) {
                    uint64_t address = arch::shfl(lane_address, arch::ffs0(batch));
                    if (in_range) data[j] = arch::load_streaming(reinterpret_cast<const uint8_t*>(address) + int64_t{v0} * vector_bytes);
                    batch &= batch - 1;
                }
            }
            MEGAMOE_UNROLL
            for (int j = 0; j < depth; ++j) {
                if (left != 0) {
                    float weight = arch::shfl(lane_weight, arch::ffs0(left));
                    if (in_range) add_vector(sum, data[j], weight);
                    left &= left - 1;
                }
            }
        }
        if (in_range) arch::store_vec(out + int64_t{v0} * vector_bytes, pack_vector(sum));
    }
}

// ---- reduce

// One token's partial: rows in k order times routing weights, into the window slot of its home.
MEGAMOE_DEVICE void reduce_token(Context& ctx, int ordered) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx();
    int home = home_of(ordered, args.num_ranks);
    int64_t token = token_of(ordered, args.num_ranks);
    int64_t route = int64_t{ordered} * args.top_k + lane;
    int row = lane < args.top_k ? args.route_rows[route] : -1;
    float weight = row >= 0 ? args.route_weights[route] : 0.0f;
    int64_t row_bytes = int64_t{args.hidden} * 2;
    uint64_t address = reinterpret_cast<uint64_t>(args.y_rows) + row * row_bytes;
    auto* out = ctx.window<uint8_t>(args.rank, args.window_partials) + (int64_t{home} * args.max_tokens + token) * row_bytes;
    sum_rows(out, args.hidden, address, weight, arch::ballot(row >= 0));
}

// Walks the pool in units of rows behind gemm2; remembers up to where blocks are known to be done. Holds as few registers as
// it can: what follows from the plan is computed again.
class Reducer {
  public:
    MEGAMOE_DEVICE explicit Reducer(const Context& ctx)
        : unit_(rows_per_unit(ctx.smem.plan.num_blocks)), row_(transport_index() * unit_) {}

    MEGAMOE_DEVICE bool finished(const Context& ctx) const { return row_ >= ctx.smem.plan.num_blocks * block_rows; }
    MEGAMOE_DEVICE uint32_t waits_for() const { return static_cast<uint32_t>(done_); }  // block, for a fault record

    // Does the next unit if its blocks, and all before them, are done.
    MEGAMOE_DEVICE bool try_unit(Context& ctx, int tiles2) {
        const Args& args = ctx.args;
        int lane = arch::lane_idx();
        int block = row_ / block_rows;
        while (done_ <= block) {  // 32 blocks a look
            int b = done_ + lane;
            bool ready = b > block || YRowsReady::ready(ctx.mem, args.gemm2_done + b, tiles2);
            uint32_t missing = ~arch::ballot(ready);
            if (missing != 0) {
                done_ += arch::ffs0(missing);
                return false;
            }
            done_ += 32;
        }
        done_ = block + 1;
        arch::warp_sync();
        if (arch::ballot(arch::lane_idx() == 0 && ctx.mem.aborted()) != 0) {  // y_rows may be garbage: publish nothing
            return false;
        }
        int row = row_ + lane;
        bool mine = lane < unit_ && row % block_rows < block_entry(args, block).rows();
        uint32_t route = mine ? args.row_route[row] : 0;
        bool closes = (route & route_closer) != 0;
        for (uint32_t left = arch::ballot(closes); left != 0; left &= left - 1) {
            reduce_token(ctx, route_token(arch::shfl(route, arch::ffs0(left))));
        }
        arch::warp_sync();  // the unit's stores happen before each lane's release
        if (closes) {
            int ordered = route_token(route);
            int home = home_of(ordered, args.num_ranks);
            auto* ready = ctx.window<uint32_t>(home, args.window_ready) + int64_t{args.rank} * args.max_tokens;
            PartialsReady::publish(ctx.mem, ready + token_of(ordered, args.num_ranks), ctx.epoch());
        }
        row_ += unit_ * num_transports();
        return true;
    }

  private:
    int unit_, row_;
    int done_ = 0;  // blocks before this one are done
};

// ---- combine

// This warp's own tokens, a lane each; 32 at a time.
class Combiner {
  public:
    MEGAMOE_DEVICE explicit Combiner(const Context& ctx) : base_(transport_index()) { load(ctx); }

    MEGAMOE_DEVICE bool finished() const { return arch::ballot(token_ >= 0) == 0; }
    MEGAMOE_DEVICE bool waiting() const { return token_ >= 0; }  // this lane

    // Combines one token whose partials are all there, if there is one.
    MEGAMOE_DEVICE bool try_token(Context& ctx) {
        bool ready = token_ >= 0;
        for (uint32_t left = waiting_; ready && left != 0; left &= left - 1) {
            int rank = arch::ffs0(left);
            ready = PartialsReady::ready(ctx.mem, ready_cell(ctx, rank), ctx.epoch());
            if (ready) waiting_ &= ~(1u << rank);
        }
        uint32_t candidates = arch::ballot(ready);
        if (candidates == 0) return false;
        arch::warp_sync();  // the lane's acquires cover the whole warp's loads
        int chosen = arch::ffs0(candidates);
        combine_token(ctx, arch::shfl(token_, chosen), arch::shfl(ranks_, chosen));
        retire(ctx, chosen);
        return true;
    }

    // For a fault record: a token and the rank whose partial is missing (of some lane that waits).
    MEGAMOE_DEVICE Wait waits_for() const {
        uint32_t missing = waiting_ != 0 ? waiting_ : ranks_;
        uint32_t peer = missing != 0 ? static_cast<uint32_t>(arch::ffs0(missing)) : max_ranks;
        return {Edge::partials_ready, peer, static_cast<uint32_t>(token_)};
    }

    // Poisoned launch: no partial can be trusted, y becomes NaN.
    MEGAMOE_DEVICE void poison(Context& ctx) {
        while (!finished()) {
            for (uint32_t left = arch::ballot(token_ >= 0); left != 0; left &= left - 1) {
                uint8_t* out = row_of_y(ctx, arch::shfl(token_, arch::ffs0(left)));
                MEGAMOE_UNROLL_BY(1)
                for (int v = arch::lane_idx(); v < ctx.args.hidden / 8; v += 32) {
                    arch::store_vec(out + int64_t{v} * vector_bytes, {~0u, ~0u, ~0u, ~0u});
                }
            }
            token_ = -1;
            base_ += 32 * num_transports();
            load(ctx);
        }
    }

  private:
    MEGAMOE_DEVICE void load(const Context& ctx) {
        const Args& args = ctx.args;
        int64_t t = base_ + int64_t{arch::lane_idx()} * num_transports();
        token_ = t < ctx.smem.own_tokens ? static_cast<int>(t) : -1;
        ranks_ = 0;
        if (token_ >= 0) {
            MEGAMOE_UNROLL_BY(1)
            for (int k = 0; k < args.top_k; ++k) {
                int id = topk_id(args, t * args.top_k + k);
                if (id >= 0) ranks_ |= 1u << rank_of_expert(args.num_experts, args.num_ranks, id);
            }
        }
        waiting_ = ranks_;
    }

    MEGAMOE_DEVICE void retire(const Context& ctx, int lane) {
        if (arch::lane_idx() == lane) token_ = -1;
        if (finished()) {
            base_ += 32 * num_transports();
            load(ctx);
        }
    }

    MEGAMOE_DEVICE uint32_t* ready_cell(const Context& ctx, int rank) const {
        return ctx.window<uint32_t>(ctx.args.rank, ctx.args.window_ready) + int64_t{rank} * ctx.args.max_tokens + token_;
    }
    MEGAMOE_DEVICE uint8_t* row_of_y(const Context& ctx, int token) const {
        return static_cast<uint8_t*>(ctx.args.y) + int64_t{token} * ctx.args.hidden * 2;
    }

    // y[token] = sum of the partials of `ranks`, in rank order; a token without routes becomes zero.
    MEGAMOE_DEVICE void combine_token(Context& ctx, int token, uint32_t ranks) {
        const Args& args = ctx.args;
        int lane = arch::lane_idx();
        uint64_t address = 0;
        if (lane < args.num_ranks) {
            int64_t slot = int64_t{args.rank} * args.max_tokens + token;
            address = args.window[lane] + args.window_partials + slot * args.hidden * 2;
        }
        sum_rows(row_of_y(ctx, token), args.hidden, address, 1.0f, ranks);
    }

    int base_;
    int token_;          // this lane's token, or -1
    uint32_t ranks_;     // expert ranks that owe it a partial
    uint32_t waiting_;   // those not seen ready yet
};

// Reduce first: peers wait for it. Returns when the pass is reduced and, in the last pass, all own tokens are combined.
template <class T>
MEGAMOE_DEVICE void reduce_and_combine(Context& ctx) {
    Reducer reducer(ctx);
    Combiner combiner(ctx);
    uint32_t idle_since = ctx.mem.coarse_time();
    MEGAMOE_UNROLL_BY(1)
    for (uint32_t polls = 0;;) {
        bool reduced = reducer.finished(ctx), combined = ctx.smem.plan.is_last == 0 || combiner.finished();
        if (reduced && combined) return;
        if ((!reduced && reducer.try_unit(ctx, Shape<T>::tiles2(ctx.args))) || (!combined && combiner.try_token(ctx))) {
            polls = 0;
            continue;
        }
        // 660 warps asking for one line keep an L2 slice busy that the tiles need too, so the pauses grow to about 1 us.
        arch::sleep_ns(min_of(32u << min_of(polls, 5u), 1024u));
        if (++polls % 16 != 0) continue;
        uint32_t now = ctx.mem.coarse_time();
        if (polls == 16) idle_since = now;
        bool give_up = ctx.mem.aborted();
        if (now - idle_since > ctx.mem.coarse_timeout()) {  // no progress for the whole time-out
            give_up = true;
            Wait wait = reduced ? combiner.waits_for() : Wait{Edge::y_rows_ready, max_ranks, reducer.waits_for()};
            if (reduced ? combiner.waiting() : arch::lane_idx() == 0) ctx.mem.fault(wait, ctx.epoch(), 0);
        }
        if (arch::ballot(give_up) != 0) break;
    }
    if (ctx.smem.plan.is_last != 0) combiner.poison(ctx);
}

template <class T>
MEGAMOE_DEVICE void transport(Context& ctx) {
    dispatch<T>(ctx);
    Profile<T>::mark(ctx.args, Mark::dispatched);
    reduce_and_combine<T>(ctx);
}

}  // namespace megamoe
