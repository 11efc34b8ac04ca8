// Few tokens of several ranks: home ranks push ids, weights and x into the windows of their peers, where
// every CTA reads them. docs/protocol.md argues why each may be overwritten. If a rank has more tokens, all
// ranks see that and run the ordinary kernel instead.
//
//   tokens   have numbers, the same in all CTAs of a rank: rank by rank
//   h        in blocks of 32 rows, after those of the experts before, in the place of x_pool
//   y_rows   number * K + k
#pragma once
#include "megamoe/rows/batches.cuh"
#include "megamoe/rows/few.cuh"
#include "megamoe/rows/route.cuh"

namespace megamoe {

constexpr int ids_of_word = 2;

// Words that home rank `home` pushes into rank `at`'s window: its count of tokens, then ids, then weights.
// Those of the next home are `stride` words behind them.
struct PushedWords {
    uint64_t* count;
    uint64_t* ids;      // [tokens, 1 << shift], two of 16 bits each
    uint64_t* weights;  // [tokens, K]
    int shift, stride;
    template <class T>
    static MEGAMOE_DEVICE PushedWords of(const Context& ctx, int at, int home) {
        const Args& args = ctx.args;
        int tokens = own<T>(args).tokens, shift = own<T>(args).ids_shift;
        int stride = 1 + tokens * ((1 << shift) + args.top_k);
        auto* first = ctx.window<uint64_t>(at, own<T>(args).window_few_words) +
                      (ctx.parity() * args.num_ranks + home) * stride;
        return {first, first + 1, first + 1 + (tokens << shift), shift, stride};
    }
};

// One warp: a lane's words, once all of them are there. False in a launch that is given up.
template <int n>
MEGAMOE_DEVICE bool await_words(Context& ctx, uint64_t* const (&word)[n], uint64_t (&found)[n], int home) {
    return await_lanes(ctx, {Edge::routes_ready, static_cast<uint32_t>(home), 0}, ctx.epoch(),
                       reinterpret_cast<uint32_t*>(word[0]) + 1, [&] {
                           bool all = true;
                           MEGAMOE_UNROLL
                           for (int j = 0; j < n; ++j) found[j] = WordPushed::look(ctx.mem, word[j]);
                           MEGAMOE_UNROLL
                           for (int j = 0; j < n; ++j) all = all && WordPushed::is_of(found[j], ctx.epoch());
                           return all;
                       });
}

// A token of a home rank in the window of rank `at`.
template <class T>
struct PushedToken {
    uint8_t* row;
    float* scales;
    uint32_t* ready;
    MEGAMOE_DEVICE PushedToken(const Context& ctx, int at, int home, int token) {
        const Pushes& own_args = own<T>(ctx.args);
        int64_t i = int64_t{home} * own_args.tokens + token;
        row = ctx.window<uint8_t>(at, own_args.window_few_x) + i * ctx.args.hidden;
        scales =
            ctx.window<float>(at, own_args.window_few_x_scale) + i * T::Gemm1::A::num_scales(ctx.args.hidden);
        ready = ctx.window<uint32_t>(at, own_args.window_few_x_ready) + i;
    }
};

// One warp: the ranks that have experts of an own token, a bit each.
MEGAMOE_DEVICE uint32_t ranks_of_token(const Args& args, int token) {
    uint32_t ranks = 0;
    int lane = arch::lane_idx();
    if (lane < args.top_k) {
        int id = topk_id(args, int64_t{token} * args.top_k + lane);
        if (id >= 0) ranks = 1u << rank_of_expert(args.num_experts, args.num_ranks, id);
    }
    MEGAMOE_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) ranks |= arch::shfl_xor(ranks, mask);
    return ranks;
}

// One warp: 32 words to a peer: of ids, and behind them of weights; part -1 is the count of tokens.
template <class T>
MEGAMOE_DEVICE void push_words(Context& ctx, int peer, int part) {
    const Args& args = ctx.args;
    auto words = PushedWords::of<T>(ctx, peer, args.rank);
    int tokens = own_tokens<T>(args), lane = arch::lane_idx(), i = part * 32 + lane;
    int id_parts = ceil_div(tokens << words.shift, 32);
    if (part < 0) {
        if (lane == 0) WordPushed::publish(ctx.mem, words.count, ctx.epoch(), static_cast<uint32_t>(tokens));
    } else if (part < id_parts) {
        int token = i >> words.shift, k = (i - (token << words.shift)) * ids_of_word;
        if (token >= tokens || k >= args.top_k) return;
        int64_t at = int64_t{token} * args.top_k + k;
        int low = topk_id(args, at), high = k + 1 < args.top_k ? topk_id(args, at + 1) : -1;
        WordPushed::publish(ctx.mem, words.ids + i, ctx.epoch(),
                            static_cast<uint16_t>(low) | static_cast<uint32_t>(high) << 16);
    } else {
        i -= id_parts * 32;
        if (i < tokens * args.top_k)
            WordPushed::publish(ctx.mem, words.weights + i, ctx.epoch(),
                                __builtin_bit_cast(uint32_t, args.topk_weights[i]));
    }
}
template <class T>
MEGAMOE_DEVICE bool is_few_here(const Args& args) {
    return own_tokens<T>(args) <= own<T>(args).tokens;
}
template <class T>
MEGAMOE_DEVICE int word_parts(const Args& args) {
    int tokens = own_tokens<T>(args);
    return 1 + ceil_div(tokens << own<T>(args).ids_shift, 32) + ceil_div(tokens * args.top_k, 32);
}

// One warp: x of an own token to a peer that has an expert of it, quantized on the way if the caller has
// bf16.
template <class T>
MEGAMOE_DEVICE void push_token(Context& ctx, int token, int peer) {
    using X = typename T::Gemm1::A;
    const Args& args = ctx.args;
    PushedToken<T> to(ctx, peer, args.rank, token);
    int lane = arch::lane_idx(), groups = X::num_scales(args.hidden);
    if (args.in_scale == nullptr) {
        constexpr int ahead = 4;  // loads in flight
        int vectors = args.hidden / 8;
        auto* from = static_cast<const uint4_t*>(args.rows_in) + int64_t{token} * vectors;
        MEGAMOE_UNROLL_BY(1)
        for (int v = lane; v - lane < vectors; v += 32 * ahead) {
            uint4_t data[ahead];
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j) data[j] = arch::load_streaming_below(from, v + 32 * j, vectors);
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j)
                X::quantize(data[j], to.row, to.scales, (v + 32 * j) * 8, args.hidden);
        }
    } else {
        constexpr int ahead = 8;
        int vectors = args.hidden / 16;
        auto* from = static_cast<const uint4_t*>(args.rows_in) + int64_t{token} * vectors;
        MEGAMOE_UNROLL_BY(1)
        for (int v = lane; v - lane < vectors; v += 32 * ahead) {
            uint4_t data[ahead];
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j) data[j] = arch::load_streaming_below(from, v + 32 * j, vectors);
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j)
                arch::store_vec_below(reinterpret_cast<uint4_t*>(to.row), v + 32 * j, vectors, data[j]);
        }
        MEGAMOE_UNROLL_BY(1)
        for (int g = lane; g < groups; g += 32) to.scales[g] = args.in_scale[int64_t{token} * groups + g];
    }
    arch::warp_sync();
    if (lane == 0) XReady::publish(ctx.mem, to.ready, ctx.epoch());
}

// A rank of another configuration is a fault. Behind an acquire of the cell's epoch.
MEGAMOE_DEVICE void check_hash(Context& ctx, RouteCell* cell, int peer) {
    uint32_t hash = ctx.mem.load(&cell->config_hash, Order::relaxed, Scope::system);
    uint32_t expected = ctx.args.config_hash;
    if (hash != expected) ctx.mem.fault(Wait{Edge::config, static_cast<uint32_t>(peer), 0}, expected, hash);
}

// One warp: lane r has the tokens of rank r. Returns whether all ranks are in a launch of few tokens, which
// all find alike: those push their count before they publish their route cell. So one whose cell is there
// without a count has more tokens, or saves what backward needs.
template <class T>
MEGAMOE_DEVICE bool await_counts(Context& ctx, int& tokens) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx(), home = lane < args.num_ranks ? lane : args.rank;
    bool is_few = is_few_here<T>(args), is_seen = false;
    auto* word = PushedWords::of<T>(ctx, args.rank, home).count;
    RouteCell* cell = route_cell(ctx, args.rank, home);
    tokens = 0;
    auto count = [&] {
        uint64_t seen = WordPushed::look(ctx.mem, word);
        bool there = WordPushed::is_of(seen, ctx.epoch());
        if (there) tokens = min_of(static_cast<int>(seen), own<T>(args).tokens);
        return there;
    };
    auto look = [&] {
        if (!is_seen) is_seen = count();
        if (!is_seen && ctx.mem.load(&cell->epoch, Order::acquire, Scope::system) == ctx.epoch()) {
            check_hash(ctx, cell, home);
            is_few = count();
            is_seen = true;
        }
        return is_seen;
    };
    Wait wait = {Edge::routes_ready, static_cast<uint32_t>(home), 0};
    if (is_few) await_lanes(ctx, wait, ctx.epoch(), &cell->epoch, look);
    if (lane >= args.num_ranks) tokens = 0;
    return arch::ballot(!is_few) == 0;
}

// One warp: each rank has begun this launch, so it has ended the one before, and what it had pushed into its
// window by then was read.
MEGAMOE_DEVICE void await_ranks(Context& ctx) {
    const Args& args = ctx.args;
    int peer = arch::lane_idx();
    if (peer < args.num_ranks) {
        RouteCell* cell = route_cell(ctx, args.rank, peer);
        if (RoutesReady::await(ctx.mem, &cell->epoch, ctx.epoch(), peer)) check_hash(ctx, cell, peer);
    }
    arch::warp_sync();
}

// One warp: numbers the tokens of all ranks, brings their ids and lists the experts that they name. Returns
// how many there are.
template <class T>
MEGAMOE_DEVICE int list_pushed(Context& ctx) {
    const Args& args = ctx.args;
    PushSmem& push = ctx.smem.push;
    int lane = arch::lane_idx(), experts = args.num_local_experts;
    MEGAMOE_UNROLL_BY(1)
    for (int e = lane; e < experts; e += 32) push.blocks[e] = 0;
    auto words = PushedWords::of<T>(ctx, args.rank, 0);
    int count;
    bool is_few = await_counts<T>(ctx, count);
    Profile<T>::mark(args, Mark::routes_seen);
    int num_tokens = 0, most = 0;
    MEGAMOE_UNROLL_BY(1)
    for (int r = 0; r < args.num_ranks; ++r) {
        int of_rank = is_few ? arch::shfl(count, r) : 0;
        most = max_of(most, of_rank);
        MEGAMOE_UNROLL_BY(1)
        for (int t = lane; t < of_rank; t += 32)
            push.source[num_tokens + t] = static_cast<uint16_t>(r << 8 | t);
        num_tokens += of_rank;
    }
    if (lane == 0) {
        push.num_tokens = num_tokens;
        push.many = is_few ? 0 : 1;
    }
    arch::warp_sync();
    constexpr int ahead = 8;  // loads in flight
    int shift = words.shift, total = num_tokens << shift;
    MEGAMOE_UNROLL_BY(1)
    for (int i0 = lane; i0 - lane < total; i0 += 32 * ahead) {
        uint64_t* of_ids[ahead];
        uint64_t found[ahead];
        MEGAMOE_UNROLL
        for (int j = 0; j < ahead; ++j) {
            int i = i0 + 32 * j, number = i >> shift, of_token = i - (number << shift);
            if (i >= total || of_token * ids_of_word >= args.top_k) number = of_token = 0;  // one that exists
            int source = push.source[number];
            of_ids[j] = words.ids + (source >> 8) * words.stride + ((source & 0xff) << shift) + of_token;
        }
        await_words(ctx, of_ids, found, 0);
        MEGAMOE_UNROLL
        for (int j = 0; j < ahead; ++j) {
            int i = i0 + 32 * j, number = i >> shift, k = (i - (number << shift)) * ids_of_word;
            if (i >= total || k >= args.top_k) continue;
            MEGAMOE_UNROLL
            for (int half = 0; half < ids_of_word; ++half) {
                int id = static_cast<int16_t>(found[j] >> 16 * half), e = id - args.expert_begin;
                bool is_local = id >= 0 && e >= 0 && e < experts;
                push.ids[k + half][number] = static_cast<int16_t>(is_local ? e : -1);
                if (is_local) arch::count_shared(&push.blocks[e], 1);
            }
        }
    }
    arch::warp_sync();
    if (lane == 0) ctx.mem.arrive(push.listed);
    if (cta_idx(ctx) == 0 && is_few) leave_counts(args, most, push.blocks);
    int listed = 0, blocks = 0;
    MEGAMOE_UNROLL_BY(1)
    for (int e = lane; e - lane < experts; e += 32) {
        int own_blocks = e < experts ? ceil_div(static_cast<int>(push.blocks[e]), few_block_rows) : 0;
        int behind = inclusive_sum(own_blocks);
        uint32_t touched = arch::ballot(own_blocks != 0);
        if (own_blocks != 0)
            push.experts[listed + arch::popc(touched & arch::lanes_below())] = static_cast<uint16_t>(e);
        if (e < experts) push.blocks[e] = static_cast<uint32_t>(blocks + behind - own_blocks);
        listed += arch::popc(touched);
        blocks += arch::shfl(behind, 31);
    }
    arch::warp_sync();
    return listed;
}

// The tiles of a unit: one column of tiles of an expert.
template <class T>
MEGAMOE_DEVICE void deal_pushed(Context& ctx, DealtRing& ring, GemmId id, int unit, int tiles) {
    PushSmem& push = ctx.smem.push;
    int lane = arch::lane_idx(), expert = push.experts[unit / tiles], rows = 0;
    MEGAMOE_UNROLL_BY(1)
    for (int number = lane; number - lane < push.num_tokens; number += 32) {
        int first = -1;  // k of the token's row
        MEGAMOE_UNROLL_BY(4)
        for (int k = 0; k < ctx.args.top_k; ++k) {
            if (push.ids[k][number] == expert && first < 0) first = k;
        }
        bool has = number < push.num_tokens && first >= 0;
        uint32_t all = arch::ballot(has);
        if (has)
            push.unit[rows + arch::popc(all & arch::lanes_below())] =
                static_cast<uint16_t>(first << 8 | number);
        rows += arch::popc(all);
    }
    arch::warp_sync();
    MEGAMOE_UNROLL_BY(1)
    for (int first = 0; first < rows; first += few_block_rows) {
        ring.acquire(ctx.mem, push.slots);
        PushSmem::Dealt& dealt = push.dealt[ring.slot()];
        if (first + lane < rows) dealt.tokens[lane] = push.unit[first + lane];
        if (lane == 0) {
            dealt.tile = {id,
                          Shared::a,
                          static_cast<int>(push.blocks[expert]) + first / few_block_rows,
                          unit % tiles,
                          {expert << 8 | min_of(rows - first, few_block_rows)},
                          Shape<T>::k_slots(ctx.args, id),
                          0,
                          0};
            dealt.is_last = first + few_block_rows >= rows ? 1 : 0;
        }
        arch::warp_sync();
        if (lane == 0) ring.commit(ctx.mem, push.slots);
        ring.advance();
    }
}

// Columns of a token's sum that a warp has at a time: a vector a lane.
MEGAMOE_DEVICE int pushed_slices(const Args& args) { return ceil_div(args.hidden / sum_vector, 32); }

// What a mover sums: of each source, a lane's, a row and its weight; vectors of `to`; and the flag that says
// that they are there, if peers wait for it. A poisoned launch has none.
struct PushedSum {
    uint64_t row;
    float weight;
    uint32_t sources;
    int count;  // of lanes that may have a source
    uint4_t* to;
    uint32_t* ready;
    bool given_up;
};

// This rank's partial of a token, from its rows to its home.
template <class T>
MEGAMOE_DEVICE PushedSum partial_of(Context& ctx, int number, int slice) {
    const Args& args = ctx.args;
    PushSmem& push = ctx.smem.push;
    int lane = arch::lane_idx(), vectors = args.hidden / sum_vector;
    int source = push.source[number], home = source >> 8, token = source & 0xff;
    int expert = lane < args.top_k ? push.ids[lane][number] : -1;
    uint32_t sources = arch::ballot(expert >= 0);
    if (sources == 0) return {0, 0.0f, 0, 0, nullptr, nullptr, false};
    auto words = PushedWords::of<T>(ctx, args.rank, home);
    uint64_t* const word[1] = {words.weights + token * args.top_k +
                               (expert >= 0 ? lane : arch::ffs0(sources))};
    uint64_t weight[1];
    int k = arch::ffs0(arch::match_any(expert));  // an expert that is named twice has one row
    bool ok = await_words(ctx, word, weight, home) && await_experts<T>(ctx, expert);
    Profile<T>::mark(args, Mark::y_rows_seen);
    auto* rows = static_cast<const uint4_t*>(args.y_rows);
    return {reinterpret_cast<uint64_t>(rows + (int64_t{number} * args.top_k + k) * vectors),
            expert >= 0 ? __builtin_bit_cast(float, static_cast<uint32_t>(weight[0])) : 0.0f, sources,
            args.top_k,
            ctx.window<uint4_t>(home, args.window_partials) +
                (int64_t{args.rank} * args.max_tokens + token) * vectors,
            ready_cell(ctx, home, args.rank, token, slice),
            // The cell is asked after the acquire: in a poisoned launch y_rows may be garbage.
            !ok || arch::ballot(lane == 0 && ctx.mem.aborted()) != 0};
}

// y of an own token, from the partials of all ranks, in their order.
template <class T>
MEGAMOE_DEVICE PushedSum y_of(Context& ctx, int token, int slice) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx(), vectors = args.hidden / sum_vector;
    uint32_t ranks = ranks_of_token(args, token);
    bool owes = (ranks >> lane & 1) != 0;
    uint32_t* cell = ready_cell(ctx, args.rank, owes ? lane : 0, token, slice);
    Wait wait = {Edge::partials_ready, static_cast<uint32_t>(lane), static_cast<uint32_t>(token)};
    bool ok = await_lanes(ctx, wait, ctx.epoch(), cell,
                          [&] { return !owes || PartialsReady::ready(ctx.mem, cell, ctx.epoch()); });
    auto* partials = ctx.window<const uint4_t>(args.rank, args.window_partials);
    return {reinterpret_cast<uint64_t>(partials + (int64_t{lane} * args.max_tokens + token) * vectors),
            1.0f,
            ranks,
            args.num_ranks,
            static_cast<uint4_t*>(args.rows_out) + int64_t{token} * vectors,
            nullptr,
            !ok};
}

struct Pushed {
    static MEGAMOE_DEVICE PushSmem& smem(Context& ctx) { return ctx.smem.push; }
    static MEGAMOE_DEVICE void init(Context& ctx) { ctx.smem.sum_slices = {pushed_slices(ctx.args), 32}; }
    template <class Visit>
    static MEGAMOE_DEVICE void each_barrier(Context& ctx, Visit visit) {
        visit(&ctx.smem.push.listed, 1);
        visit(&ctx.smem.push.all_begun, 1);
    }
    // Math warps, before their first slot: x, a token to a rank at a time. It waits for nothing.
    template <class T>
    static MEGAMOE_DEVICE void stage(Context& ctx) {
        const Args& args = ctx.args;
        int tokens = is_few_here<T>(args) ? own_tokens<T>(args) : 0;
        MEGAMOE_UNROLL_BY(1)
        for (int job = (arch::warp_idx() - first_math_warp) * num_ctas(ctx) + cta_idx(ctx);
             job < tokens * args.num_ranks; job += math_role.num_warps * num_ctas(ctx)) {
            int token = job / args.num_ranks, peer = job % args.num_ranks;
            if ((ranks_of_token(args, token) >> peer & 1) != 0) push_token<T>(ctx, token, peer);
        }
        Profile<T>::mark(args, Mark::staged);
    }
    // One warp: the words of this rank to its peers, and their beginning.
    template <class T>
    static MEGAMOE_DEVICE void exchange(Context& ctx) {
        const Args& args = ctx.args;
        PushSmem& push = ctx.smem.push;
        int lane = arch::lane_idx(), jobs = is_few_here<T>(args) ? args.num_ranks * word_parts<T>(args) : 0;
        MEGAMOE_UNROLL_BY(1)
        for (int job = cta_idx(ctx); job < jobs; job += num_ctas(ctx))
            push_words<T>(ctx, job % args.num_ranks, job / args.num_ranks - 1);
        Profile<T>::mark(args, Mark::ids_staged);
        arch::warp_sync();
        ctx.mem.wait(push.listed, 0);
        if (push.many == 0) {
            if (lane < args.num_ranks && lane % num_ctas(ctx) == cta_idx(ctx)) {
                RouteCell* cell = route_cell(ctx, lane, args.rank);
                RoutesReady::publish(ctx.mem, &cell->epoch, &cell->num_tokens, &cell->config_hash,
                                     ctx.epoch(), static_cast<uint32_t>(own_tokens<T>(args)),
                                     args.config_hash);
            }
            arch::warp_sync();
            await_ranks(ctx);
            Profile<T>::mark(args, Mark::counted);
        }
        if (lane == 0) ctx.mem.arrive(push.all_begun);
    }
    template <class T>
    static MEGAMOE_DEVICE int list(Context& ctx) {
        return list_pushed<T>(ctx);
    }
    template <class T>
    static MEGAMOE_DEVICE void deal_unit(Context& ctx, DealtRing& ring, GemmId id, int unit, int tiles) {
        deal_pushed<T>(ctx, ring, id, unit, tiles);
    }
    // What gather reads, behind the flags of the rows' tokens.
    template <class T>
    struct X {
        MEGAMOE_DEVICE explicit X(Context&) {}
        MEGAMOE_DEVICE RowsInMemory rows(Context& ctx, int of_lane, int count) const {
            int source = ctx.smem.push.source[arch::lane_idx() < count ? of_lane & 0xff : 0];
            PushedToken<T> from(ctx, ctx.args.rank, source >> 8, source & 0xff);
            if (arch::lane_idx() < count) XReady::await(ctx.mem, from.ready, ctx.epoch(), source >> 8);
            arch::warp_sync();
            Profile<T>::mark(ctx.args, Mark::x_seen);
            return {from.row, from.scales, 1, ctx.args.hidden};
        }
    };
    static MEGAMOE_DEVICE int y_row(const Args& args, int, int of_lane) {
        return (of_lane & 0xff) * args.top_k + (of_lane >> 8);
    }
    // Movers: partials of the tokens of all ranks, then own tokens.
    template <class T>
    static MEGAMOE_DEVICE void reduce(Context& ctx) {
        const Args& args = ctx.args;
        ctx.mem.wait(ctx.smem.push.all_begun, 0);  // partials of the launch before are combined
        if (ctx.smem.push.many != 0) return;
        int slices = pushed_slices(args), pushes = ctx.smem.push.num_tokens * slices;
        MEGAMOE_UNROLL_BY(1)
        for (int job = mover_warp() * num_ctas(ctx) + cta_idx(ctx);
             job < pushes + own_tokens<T>(args) * slices; job += num_movers * num_ctas(ctx)) {
            int of_kind = job < pushes ? job : job - pushes, slice = of_kind % slices;
            PushedSum of = job < pushes ? partial_of<T>(ctx, of_kind / slices, slice)
                                        : y_of<T>(ctx, of_kind / slices, slice);
            if (of.given_up) return;
            if (of.to == nullptr) continue;
            float sum[8] = {};
            int v = slice * 32 + arch::lane_idx(), vectors = args.hidden / sum_vector;
            sum_few(sum, of.row, of.weight, of.sources, v, vectors, of.count);
            arch::store_vec_below(of.to, v, vectors, pack_vector(sum));
            arch::warp_sync();
            if (of.ready != nullptr && arch::lane_idx() == 0)
                PartialsReady::publish(ctx.mem, of.ready, ctx.epoch());
            if (of.ready != nullptr) Profile<T>::mark(args, Mark::pulled);
        }
    }
    static MEGAMOE_DEVICE bool takes_ordinary(const Context& ctx) { return ctx.smem.push.many != 0; }
};

}  // namespace megamoe
