// transport: four warps a CTA that move rows with ordinary 16-byte loads and stores.
//   dispatch: walk the pool in row order; at a token's leader, pull it from its home rank and fan it out to
//   all its rows. reduce:   walk the pool in row order; at a token's closer, once every block up to there is
//   done, sum its rows. combine:  for each of this rank's own tokens, once every expert rank's partial is
//   ready, sum the partials.
// Dispatch finishes first (it waits for peers' staging only); then reduce and combine, whichever has work.
#pragma once
#include "megamoe/roles/plan.cuh"

namespace megamoe {

constexpr int vector_bytes = 16;

// ---- dispatch

// One warp: row `from` (of `bytes`) to each of the n rows in `rows` (lane i holds the i-th row; -1 = none).
MEGAMOE_DEVICE void fan_out(const uint8_t* from, uint8_t* pool, int bytes, int lane_row, uint32_t targets) {
    constexpr int in_flight = 8;
    int lane = arch::lane_idx();
    int vectors = bytes / vector_bytes;
    MEGAMOE_UNROLL_BY(1)
    for (int v0 = lane; v0 - lane < vectors; v0 += in_flight * 32) {
        uint4_t data[in_flight];
        MEGAMOE_UNROLL
        for (int j = 0; j < in_flight; ++j) {
            if (v0 + 32 * j < vectors)
                data[j] = arch::load_streaming(from + int64_t{v0 + 32 * j} * vector_bytes);
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
    fan_out(ctx.window<const uint8_t>(home, args.window_x) + token * bytes,
            static_cast<uint8_t*>(args.x_pool), bytes, lane_row, targets);
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

// Rows that a warp takes at a time: few, so that the first blocks are complete first; fewer yet when there
// are not many rows, so that every warp has some. Affects timing only.
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

// out[0..hidden) = sum over the set bits i of `sources`, lowest first, of weight_i * row_i. Lane i holds
// address and weight of source i.
struct SumJob {
    uint8_t* out;
    uint64_t lane_address;
    float lane_weight;
    uint32_t sources;
};

// One step of sum_rows: `positions` vectors of this lane, 32 apart from v0 on, of depth / positions sources
// at a time, all in flight together.
constexpr int depth = 8;  // 16-byte loads a lane has in flight

template <int positions>
MEGAMOE_DEVICE void sum_vectors(const SumJob& job, int v0, int vectors) {
    constexpr int width = depth / positions;
    uint4_t data[depth];
    uint32_t left = job.sources;
    MEGAMOE_UNROLL
    for (int s = 0; s < width; ++s) {
        if (left == 0) break;
        auto* from = reinterpret_cast<const uint8_t*>(arch::shfl(job.lane_address, arch::ffs0(left)));
        left &= left - 1;
        MEGAMOE_UNROLL
        for (int p = 0; p < positions; ++p) {
            if (v0 + 32 * p < vectors)
                data[s * positions + p] = arch::load_streaming(from + int64_t{v0 + 32 * p} * vector_bytes);
        }
    }
    MEGAMOE_UNROLL
    for (int p = 0; p < positions; ++p) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        left = job.sources;
        MEGAMOE_UNROLL
        for (int s = 0; s < width; ++s) {
            if (left == 0) break;
            add_vector(sum, data[s * positions + p], arch::shfl(job.lane_weight, arch::ffs0(left)));
            left &= left - 1;
        }
        if (positions == 1) {  // more sources than that: the rest, `depth` at a time
            while (left != 0) {
                uint32_t batch = left;
                MEGAMOE_UNROLL
                for (int s = 0; s < depth; ++s) {
                    if (batch == 0) break;
                    auto* from =
                        reinterpret_cast<const uint8_t*>(arch::shfl(job.lane_address, arch::ffs0(batch)));
                    batch &= batch - 1;
                    if (v0 < vectors) data[s] = arch::load_streaming(from + int64_t{v0} * vector_bytes);
                }
                MEGAMOE_UNROLL
                for (int s = 0; s < depth; ++s) {
                    if (left == 0) break;
                    add_vector(sum, data[s], arch::shfl(job.lane_weight, arch::ffs0(left)));
                    left &= left - 1;
                }
            }
        }
        if (v0 + 32 * p < vectors)
            arch::store_vec(job.out + int64_t{v0 + 32 * p} * vector_bytes, pack_vector(sum));
    }
}

// One warp does a job, in fp32. With few sources, several vectors of a lane at once, to keep loads in flight.
MEGAMOE_DEVICE void sum_rows(const SumJob& job, int hidden) {
    int lane = arch::lane_idx(), vectors = hidden / 8, count = arch::popc(job.sources);
    int positions = count <= 2 ? 4 : count <= 4 ? 2 : 1;
    MEGAMOE_UNROLL_BY(1)
    for (int v0 = lane; v0 - lane < vectors; v0 += 32 * positions) {
        if (positions == 4) {
            sum_vectors<4>(job, v0, vectors);
        } else if (positions == 2) {
            sum_vectors<2>(job, v0, vectors);
        } else {
            sum_vectors<1>(job, v0, vectors);
        }
    }
}

// ---- reduce

// Walks the pool in units of rows behind gemm2; remembers up to where blocks are known to be done. Holds as
// few registers as it can: what follows from the plan is computed again.
class Reducer {
  public:
    MEGAMOE_DEVICE explicit Reducer(const Context& ctx)
        : unit_(rows_per_unit(ctx.smem.plan.num_blocks)), row_(transport_index() * unit_) {}

    MEGAMOE_DEVICE bool finished(const Context& ctx) const {
        return row_ >= ctx.smem.plan.num_blocks * block_rows;
    }
    MEGAMOE_DEVICE uint32_t waits_for() const {
        return static_cast<uint32_t>(done_);
    }  // block, for a fault record

    // The next token's sum, if its unit's blocks, and all before them, are done. Not when finished.
    MEGAMOE_DEVICE bool next(Context& ctx, int tiles2, SumJob* job) {
        while (closers_ == 0) {
            if (finished(ctx) || !blocks_done(ctx, tiles2)) return false;
            load_unit(ctx);
            if (closers_ == 0) row_ += unit_ * num_transports();
        }
        *job = partial(ctx, route_token(arch::shfl(route_, arch::ffs0(closers_))));
        return true;
    }

    // The job of next() is done; with the last of a unit, the unit's partials are published.
    MEGAMOE_DEVICE void done(Context& ctx) {
        closers_ &= closers_ - 1;
        if (closers_ != 0) return;
        const Args& args = ctx.args;
        arch::warp_sync();  // all lanes' stores happen before each lane's release
        if ((route_ & route_closer) != 0) {
            int ordered = route_token(route_);
            int home = home_of(ordered, args.num_ranks);
            auto* ready =
                ctx.window<uint32_t>(home, args.window_ready) + int64_t{args.rank} * args.max_tokens;
            PartialsReady::publish(ctx.mem, ready + token_of(ordered, args.num_ranks), ctx.epoch());
        }
        row_ += unit_ * num_transports();
    }

  private:
    MEGAMOE_DEVICE bool blocks_done(Context& ctx, int tiles2) {
        int block = row_ / block_rows;
        while (done_ <= block) {  // 32 blocks a look
            int b = done_ + arch::lane_idx();
            bool ready = b > block || YRowsReady::ready(ctx.mem, ctx.args.gemm2_done + b, tiles2);
            uint32_t missing = ~arch::ballot(ready);
            if (missing != 0) {
                done_ += arch::ffs0(missing);
                return false;
            }
            done_ += 32;
        }
        done_ = block + 1;
        arch::warp_sync();
        // After the acquire: of a poisoned launch y_rows may be garbage, so nothing of it is published.
        return arch::ballot(arch::lane_idx() == 0 && ctx.mem.aborted()) == 0;
    }

    MEGAMOE_DEVICE void load_unit(const Context& ctx) {
        int row = row_ + arch::lane_idx();
        bool mine =
            arch::lane_idx() < unit_ && row % block_rows < block_entry(ctx.args, row_ / block_rows).rows();
        route_ = mine ? ctx.args.row_route[row] : 0;
        closers_ = arch::ballot((route_ & route_closer) != 0);
    }

    // One token's partial: rows in k order times routing weights, into the window slot of its home.
    MEGAMOE_DEVICE SumJob partial(const Context& ctx, int ordered) const {
        const Args& args = ctx.args;
        int lane = arch::lane_idx();
        int64_t route = int64_t{ordered} * args.top_k + lane;
        int row = lane < args.top_k ? args.route_rows[route] : -1;
        int64_t row_bytes = int64_t{args.hidden} * 2;
        int64_t slot =
            int64_t{home_of(ordered, args.num_ranks)} * args.max_tokens + token_of(ordered, args.num_ranks);
        return {ctx.window<uint8_t>(args.rank, args.window_partials) + slot * row_bytes,
                reinterpret_cast<uint64_t>(args.y_rows) + row * row_bytes,
                row >= 0 ? args.route_weights[route] : 0.0f, arch::ballot(row >= 0)};
    }

    int unit_, row_;
    int done_ = 0;          // blocks before this one are done
    uint32_t route_ = 0;    // of this lane's row of the unit
    uint32_t closers_ = 0;  // lanes of the unit whose tokens are still to be summed
};

// ---- combine

// This warp's own tokens, a lane each; 32 at a time.
class Combiner {
  public:
    MEGAMOE_DEVICE explicit Combiner(const Context& ctx) : base_(transport_index()) { load(ctx); }

    MEGAMOE_DEVICE bool finished() const { return arch::ballot(token_ >= 0) == 0; }
    MEGAMOE_DEVICE bool waiting() const { return token_ >= 0; }  // this lane

    // A token whose partials are all there, if there is one: y[token] = their sum in rank order, zero without
    // routes.
    MEGAMOE_DEVICE bool next(Context& ctx, SumJob* job) {
        bool ready = token_ >= 0;
        for (uint32_t left = waiting_; ready && left != 0; left &= left - 1) {
            int rank = arch::ffs0(left);
            ready = PartialsReady::ready(ctx.mem, ready_cell(ctx, rank), ctx.epoch());
            if (ready) waiting_ &= ~(1u << rank);
        }
        uint32_t candidates = arch::ballot(ready);
        if (candidates == 0) return false;
        arch::warp_sync();  // the lane's acquires cover the whole warp's loads
        int chosen = arch::ffs0(candidates), lane = arch::lane_idx();
        int token = arch::shfl(token_, chosen);
        int64_t row_bytes = int64_t{ctx.args.hidden} * 2;
        int64_t slot = int64_t{ctx.args.rank} * ctx.args.max_tokens + token;
        uint64_t address = lane < ctx.args.num_ranks
                               ? ctx.args.window[lane] + ctx.args.window_partials + slot * row_bytes
                               : 0;
        *job = {static_cast<uint8_t*>(ctx.args.y) + token * row_bytes, address, 1.0f,
                arch::shfl(ranks_, chosen)};
        if (lane == chosen) token_ = -1;
        return true;
    }

    // The job of next() is done.
    MEGAMOE_DEVICE void done(const Context& ctx) {
        if (!finished()) return;
        base_ += 32 * num_transports();
        load(ctx);
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
                uint8_t* out = static_cast<uint8_t*>(ctx.args.y) +
                               int64_t{arch::shfl(token_, arch::ffs0(left))} * ctx.args.hidden * 2;
                MEGAMOE_UNROLL_BY(1)
                for (int v = arch::lane_idx(); v < ctx.args.hidden / 8; v += 32) {
                    arch::store_vec(out + int64_t{v} * vector_bytes, {~0u, ~0u, ~0u, ~0u});
                }
            }
            token_ = -1;
            done(ctx);
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

    MEGAMOE_DEVICE uint32_t* ready_cell(const Context& ctx, int rank) const {
        return ctx.window<uint32_t>(ctx.args.rank, ctx.args.window_ready) +
               int64_t{rank} * ctx.args.max_tokens + token_;
    }
    int base_;
    int token_;         // this lane's token, or -1
    uint32_t ranks_;    // expert ranks that owe it a partial
    uint32_t waiting_;  // those not seen ready yet
};

// Reduce first: peers wait for it. Returns when the pass is reduced and, in the last pass, all own tokens are
// combined.
template <class T>
MEGAMOE_DEVICE void reduce_and_combine(Context& ctx) {
    Reducer reducer(ctx);
    Combiner combiner(ctx);
    uint32_t idle_since = ctx.mem.coarse_time();
    MEGAMOE_UNROLL_BY(1)
    for (uint32_t polls = 0;;) {
        bool reduced = reducer.finished(ctx), combined = ctx.smem.plan.is_last == 0 || combiner.finished();
        if (reduced && combined) return;
        SumJob job;
        bool reduces = !reduced && reducer.next(ctx, Shape<T>::tiles2(ctx.args), &job);
        if (reduces || (!combined && combiner.next(ctx, &job))) {
            sum_rows(job, ctx.args.hidden);
            if (reduces) {
                reducer.done(ctx);
            } else {
                combiner.done(ctx);
            }
            polls = 0;
            continue;
        }
        // 660 warps asking for one line keep an L2 slice busy that the tiles need too, so the pauses grow to
        // about 1 us.
        arch::sleep_ns(min_of(32u << min_of(polls, 5u), 1024u));
        if (++polls % 16 != 0) continue;
        uint32_t now = ctx.mem.coarse_time();
        if (polls == 16) idle_since = now;
        bool give_up = ctx.mem.aborted();
        if (now - idle_since > ctx.mem.coarse_timeout()) {  // no progress for the whole time-out
            give_up = true;
            Wait wait =
                reduced ? combiner.waits_for() : Wait{Edge::y_rows_ready, max_ranks, reducer.waits_for()};
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
