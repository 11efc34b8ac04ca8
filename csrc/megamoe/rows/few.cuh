// Few tokens, without a pool: every CTA finds its tiles in the ids alone. Expert and token determine the
// place of a row, so nothing is counted, scanned or planned. On one rank, gather waits for all CTAs only if
// they quantize a bf16 x.
//
//   h        expert * 64 + i, for the i-th token of the expert, in the place of x_pool
//   y_rows   expert * 64 + token
//
// deal finds tiles, gather loads their rows into pipeline slots, scatter stores output slots, and reduce sums
// the rows of a token. Each expert has one counter of finished tiles per GEMM. A layer's Way defines where
// ids and x come from and where sums go: OneRank below, or Pushed (rows/push.cuh), whose rows have other
// places.
#pragma once
#include "megamoe/formats/e4m3.cuh"
#include "megamoe/gemm/gemm.cuh"
#include "megamoe/rows/crews.cuh"
#include "megamoe/rows/routes.cuh"
#include "megamoe/rows/stage.cuh"
#include "megamoe/rows/vectors.cuh"

namespace megamoe {

// Behind the counters of blocks, which other launches use. Zeros, but while such a launch runs.
template <class T>
MEGAMOE_DEVICE uint32_t* few_done(const Args& args, GemmId id, int expert) {
    return gemm_of<T>(args, id).done + args.pool_rows / Tile128x256::rows + expert;
}

// One warp of all CTAs: what statistics() reads, as if all routes, of each expert, were in the first chunk.
// most: tokens of the rank that has most.
MEGAMOE_DEVICE void leave_counts(const Args& args, int most, const uint32_t* routes) {
    int chunks = num_chunks_of(most, args.num_ranks);
    MEGAMOE_UNROLL_BY(1)
    for (int e = arch::lane_idx(); e < args.num_local_experts; e += 32) {
        int32_t* prefix = args.chunk_prefix + int64_t{e} * (args.max_chunks + 1);
        MEGAMOE_UNROLL_BY(1)
        for (int c = 0; c <= chunks; ++c) prefix[c] = c == 0 ? 0 : static_cast<int32_t>(routes[e]);
    }
}

// Reads the ids and lists the experts that they name. Returns how many there are. Called by one warp.
template <class T>
MEGAMOE_DEVICE int list_experts(Context& ctx) {
    const Args& args = ctx.args;
    FewSmem& few = ctx.smem.few;
    int lane = arch::lane_idx(), tokens = own_tokens<T>(args), experts = args.num_local_experts;
    MEGAMOE_UNROLL_BY(1)
    for (int e = lane; e < experts; e += 32) few.routes[e] = 0;
    arch::warp_sync();
    const auto* ids = static_cast<const int32_t*>(args.topk_ids);
    const int words = args.ids_are_int64 != 0 ? 2 : 1;  // of an id; see topk_id()
    constexpr int ahead = 4;                            // loads in flight
    static_assert(max_top_k % ahead == 0, "there is room behind the last k");
    MEGAMOE_UNROLL_BY(1)
    for (int token = lane; token < max_few_tokens; token += 32) {
        MEGAMOE_UNROLL_BY(1)
        for (int k0 = 0; k0 < args.top_k; k0 += ahead) {
            int low[ahead], high[ahead];
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j) {
                const int32_t* id = ids + int64_t{token * args.top_k + k0 + j} * words;
                bool exists = token < tokens && k0 + j < args.top_k;
                low[j] = exists ? id[0] : -1;
                high[j] = exists ? id[words - 1] : 0;
            }
            MEGAMOE_UNROLL
            for (int j = 0; j < ahead; ++j) {
                int e = low[j] - args.expert_begin;
                bool is_local = low[j] >= 0 && e >= 0 && e < experts && (words == 1 || high[j] == 0);
                few.ids[k0 + j][token] = static_cast<int16_t>(is_local ? e : -1);
                if (is_local) arch::count_shared(&few.routes[e], 1);
            }
        }
    }
    arch::warp_sync();
    if (cta_idx(ctx) == 0) {
        if (lane == 0) route_cell(ctx, args.rank, args.rank)->num_tokens = static_cast<uint32_t>(tokens);
        leave_counts(args, tokens, few.routes);
    }
    int count = 0;
    MEGAMOE_UNROLL_BY(1)
    for (int e = lane; e - lane < experts; e += 32) {
        bool is_touched = e < experts && few.routes[e] != 0;
        uint32_t all = arch::ballot(is_touched);
        if (is_touched) few.experts[count + arch::popc(all & arch::lanes_below())] = static_cast<uint16_t>(e);
        count += arch::popc(all);
    }
    arch::warp_sync();
    return count;
}

// The tiles of a unit: one column of tiles of an expert.
template <class T>
MEGAMOE_DEVICE void deal_unit(Context& ctx, DealtRing& ring, GemmId id, int unit, int tiles) {
    FewSmem& few = ctx.smem.few;
    int lane = arch::lane_idx(), expert = few.experts[unit / tiles];
    bool has[2] = {false, false};  // tokens `lane` and 32 + lane
    MEGAMOE_UNROLL_BY(4)
    for (int k = 0; k < ctx.args.top_k; ++k) {
        has[0] |= few.ids[k][lane] == expert;
        has[1] |= few.ids[k][32 + lane] == expert;
    }
    uint32_t low = arch::ballot(has[0]), high = arch::ballot(has[1]);
    int row[2] = {arch::popc(low & arch::lanes_below()),
                  arch::popc(low) + arch::popc(high & arch::lanes_below())};
    int rows = arch::popc(low) + arch::popc(high);
    MEGAMOE_UNROLL_BY(1)
    for (int first = 0; first < rows; first += few_block_rows) {
        ring.acquire(ctx.mem, few.slots);
        FewSmem::Dealt& dealt = few.dealt[ring.slot()];
        MEGAMOE_UNROLL
        for (int j = 0; j < 2; ++j) {
            int at = row[j] - first;
            if (has[j] && at >= 0 && at < few_block_rows)
                dealt.tokens[at] = static_cast<uint8_t>(32 * j + lane);
        }
        int of_tile = min_of(rows - first, few_block_rows);
        if (lane == 0) {
            dealt.tile = {id,
                          Shared::a,
                          (expert * max_few_tokens + first) / few_block_rows,
                          unit % tiles,
                          {expert << 8 | of_tile},
                          Shape<T>::k_slots(ctx.args, id),
                          0,
                          0};
            dealt.tile.slots = ceil_div(dealt.tile.slots, Forms<T>::slot_steps(dealt.tile));
            dealt.is_last = first + few_block_rows >= rows ? 1 : 0;
        }
        arch::warp_sync();
        if (lane == 0) ring.commit(ctx.mem, few.slots);
        ring.advance();
    }
}

// One warp: the tiles of this CTA, gemm1's before gemm2's. CTAs at the end have more of gemm2.
template <class T>
MEGAMOE_DEVICE void deal(Context& ctx) {
    const Args& args = ctx.args;
    DealtRing ring;
    int experts = T::Way::template list<T>(ctx);
    Profile<T>::mark(args, Mark::routed);
    int ctas = num_ctas(ctx), from_last = ctas - 1 - cta_idx(ctx);
    int tiles1 = Shape<T>::tiles(args, GemmId::gemm1), tiles2 = Shape<T>::tiles(args, GemmId::gemm2);
    Gemm2Shares shares(experts * tiles1, args.hidden / args.intermediate, ctas, 0);
    int unit1 = cta_idx(ctx), unit2 = shares.first(from_last);
    MEGAMOE_UNROLL_BY(1)
    while (unit1 < experts * tiles1 || unit2 < experts * tiles2) {
        bool is_h = unit1 < experts * tiles1;
        T::Way::template deal_unit<T>(ctx, ring, is_h ? GemmId::gemm1 : GemmId::gemm2, is_h ? unit1 : unit2,
                                      is_h ? tiles1 : tiles2);
        (is_h ? unit1 : unit2) = is_h ? unit1 + ctas : shares.behind(unit2, from_last, ctas);
    }
    Profile<T>::mark(args, Mark::planned);
    if (arch::lane_idx() != 0) return;  // a late one could miss the phase: nobody waits for it
    auto& few = T::Way::smem(ctx);
    ring.acquire(ctx.mem, few.slots);
    few.dealt[ring.slot()].tile = Tile::none();
    ring.commit(ctx.mem, few.slots);
}

// A warp's next tile, with the token of its row number `lane`.
template <class T>
struct DealtTile {
    Tile tile;
    int token;
    bool is_last;
    MEGAMOE_DEVICE DealtTile(Context& ctx, DealtRing& ring) {
        auto& few = T::Way::smem(ctx);
        ring.await(ctx.mem, few.slots);
        const auto& dealt = few.dealt[ring.slot()];
        tile = dealt.tile;
        token = dealt.tokens[arch::lane_idx()];
        is_last = dealt.is_last != 0;
        arch::warp_sync();
        if (arch::lane_idx() == 0) ring.release(ctx.mem, few.slots);
        ring.advance();
    }
};

// Where the rows of a tile's A are, in e4m3: row number `lane` of the tile.
struct RowsInMemory {
    const uint8_t* row;
    const float* scale;
    int scale_stride;  // from a slot's to the next one's
    int bytes;         // of a row
};

// One warp begins to copy rows of a step of K, and copies their scales.
MEGAMOE_DEVICE void copy_rows(const RowsInMemory& from, uint8_t* to, float* scales, int rows, int step) {
    int lane = arch::lane_idx(), byte = lane % 8 * 16, at = step * slot_k_bytes + byte;
    MEGAMOE_UNROLL_BY(4)
    for (int first = 0; first < rows; first += 4) {
        int r = first + lane / 8;
        auto row = reinterpret_cast<const uint8_t*>(arch::shfl(reinterpret_cast<uint64_t>(from.row), r));
        bool exists = at < from.bytes;
        if (r < rows) arch::copy_async(to + swizzled(r, byte), row + (exists ? at : 0), exists);
    }
    if (lane < rows) scales[lane] = from.scale[int64_t{step} * from.scale_stride];
}

// A of all tiles, by the transport warps: each fills every fourth slot.
template <class T>
MEGAMOE_DEVICE void gather(Context& ctx) {
    const Args& args = ctx.args;
    auto& smem = tile_smem<T>();
    // Of laps a warp sees the parity alone. What it knows of a slot that it passed is its own last slot's
    // lap, and that is enough where this is at most a lap behind.
    static_assert(T::Tiling::num_slots >= num_transport_warps, "a warp takes slots that are still in use");
    PipelineRing<T> ring;
    DealtRing dealt;
    using S = typename T::Tiling;
    typename T::Way::template X<T> x(ctx);
    int turn = transport_warp();  // slots until this warp's next one
    auto take = [&] {
        bool mine = turn == 0;
        turn = mine ? num_transport_warps - 1 : turn - 1;
        if (mine) ring.acquire(ctx.mem, smem.pipeline);
        return mine;
    };
    auto commit = [&] {
        arch::fence_proxy_async_shared();  // MMAs read it
        arch::warp_sync();
        if (arch::lane_idx() == 0) ring.commit(ctx.mem, smem.pipeline);
    };
    for (;;) {
        DealtTile<T> next(ctx, dealt);
        const Tile& tile = next.tile;
        if (!tile.valid()) break;
        Profile<T>::begin_tile(ctx.smem);
        int rows = tile.rows();
        RowsInMemory from;
        if (tile.gemm == GemmId::gemm1) {
            from = x.rows(ctx, next.token, rows);
        } else {
            if (arch::lane_idx() == 0)
                HReady::await(ctx.mem, few_done<T>(args, GemmId::gemm1, tile.expert()),
                              Shape<T>::tiles(args, GemmId::gemm1), tile.expert());
            arch::warp_sync();
            int row = scale_row0<T>(tile) + arch::lane_idx();
            int bytes = T::Gemm2::A::row_bytes(args.intermediate);
            from = {static_cast<const uint8_t*>(args.x_pool) + int64_t{row} * bytes,
                    gemm_of<T>(args, GemmId::gemm2).a_scale + row, args.pool_rows, bytes};
        }
        Profile<T>::mark(ctx.smem, TileMark::rows_seen);
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < tile.slots; ++i, ring.advance()) {
            if (!take()) continue;
            uint8_t* to = smem.slots[ring.slot()].a;
            float* scales = smem.a_scale[ring.slot()];
            int steps = Forms<T>::slot_steps(tile), first = i * steps;
            MEGAMOE_UNROLL_BY(1)
            for (int s = 0; s < steps; ++s) {
                if (s != 0 && first + s == Shape<T>::k_slots(args, tile.gemm)) break;
                copy_rows(from, to + s * S::step_rows * slot_k_bytes, scales + s * S::step_rows, rows,
                          first + s);
            }
            arch::copies_wait();
            commit();
        }
    }
    if (take()) commit();  // the slot that ends math
}

// One warp: rows of finished tiles from the output slots to memory. A half of a tile is one box of h, or two
// of y_rows.
template <class T>
MEGAMOE_DEVICE void scatter(Context& ctx) {
    const Args& args = ctx.args;
    auto& smem = tile_smem<T>();
    OutputRing<T> output;
    DealtRing dealt;
    int lane = arch::lane_idx();
    for (;;) {
        DealtTile<T> next(ctx, dealt);
        const Tile& tile = next.tile;
        if (!tile.valid()) break;
        Profile<T>::begin_tile(ctx.smem);
        bool is_h = tile.gemm == GemmId::gemm1;
        int64_t row_bytes = is_h ? T::Gemm2::A::row_bytes(args.intermediate) : args.hidden * 2;
        int halves = is_h ? T::Gemm1::Epilogue::halves : 2, boxes = is_h ? 1 : 2;
        int row = scale_row0<T>(tile) + lane;
        if (!is_h) row = T::Way::y_row(args, tile.expert(), next.token);
        auto* base = static_cast<uint8_t*>(is_h ? args.x_pool : args.y_rows);
        MEGAMOE_UNROLL_BY(1)
        for (int half = 0; half < halves; ++half) {
            output.await(ctx.mem, smem.outputs[0]);
            MEGAMOE_UNROLL_BY(2)
            for (int first = 0; first < tile.rows(); first += 4) {
                int r = first + lane / 8;
                auto* to = base + arch::shfl(row, r) * row_bytes;
                MEGAMOE_UNROLL_BY(1)
                for (int box = 0; box < boxes; ++box) {
                    int at = ((tile.n * halves + half) * boxes + box) * slot_k_bytes + lane % 8 * 16;
                    const uint8_t* from = smem.output[box][output.slot()] + swizzled(r, lane % 8 * 16);
                    if (r < tile.rows() && at < row_bytes)
                        arch::store_vec(to + at, *reinterpret_cast<const uint4_t*>(from));
                }
            }
            arch::warp_sync();
            if (lane == 0) output.release(ctx.mem, smem.outputs[0]);
            output.advance();
        }
        if (lane == 0 && next.is_last) HReady::publish(ctx.mem, few_done<T>(args, tile.gemm, tile.expert()));
        Profile<T>::mark(ctx.smem, TileMark::published);
    }
}

// Polls until ready() holds for all lanes. False for all of them in a launch that is given up. wait, expected
// and cell are a lane's, for the fault record.
template <class Ready>
MEGAMOE_DEVICE bool await_lanes(Context& ctx, Wait wait, uint32_t expected, const Memory::Cell cell,
                                Ready is_ready) {
    uint32_t begun = ctx.mem.coarse_time();
    MEGAMOE_UNROLL_BY(1)
    for (uint32_t polls = 1;; ++polls) {
        bool ready = is_ready();
        if (arch::ballot(!ready) == 0) break;
        arch::sleep_ns(32);
        if (polls % 16 != 0) continue;
        bool late = !ready && ctx.mem.coarse_time() - begun > ctx.mem.coarse_timeout();
        if (late) ctx.mem.fault(wait, expected, ctx.mem.load(cell, Order::relaxed, Scope::gpu));
        if (arch::ballot(late || ctx.mem.aborted()) != 0) return false;
    }
    arch::warp_sync();
    return true;
}
// Lane k: is the token's k-th expert done?
template <class T>
MEGAMOE_DEVICE bool await_experts(Context& ctx, int expert) {
    uint32_t* cell = few_done<T>(ctx.args, GemmId::gemm2, max_of(expert, 0));
    uint32_t tiles = Shape<T>::tiles(ctx.args, GemmId::gemm2);
    return await_lanes(ctx, {Edge::y_rows_ready, max_ranks, static_cast<uint32_t>(expert)}, tiles, cell,
                       [&] { return expert < 0 || YRowsReady::ready(ctx.mem, cell, tiles); });
}

// One warp: of vector v of each row of y_rows, with weights: lane k holds those of source k, for each set
// bit. All rows are in flight, up to eight; they are added in k order.
MEGAMOE_DEVICE void sum_few(float (&sum)[8], uint64_t row, float weight, uint32_t sources, int v, int vectors,
                            int count) {
    constexpr int ahead = 8;
    MEGAMOE_UNROLL_BY(1)
    for (int k0 = 0; k0 < count; k0 += ahead) {
        uint4_t data[ahead];
        MEGAMOE_UNROLL
        for (int j = 0; j < ahead; ++j) {
            auto* from = reinterpret_cast<const uint4_t*>(arch::shfl(row, k0 + j));
            data[j] = arch::load_streaming_below(from, v, (sources >> j & 1) != 0 ? vectors : 0);
        }
        MEGAMOE_UNROLL
        for (int j = 0; j < ahead; ++j) add_vector(sum, data[j], arch::shfl(weight, k0 + j));
        sources >>= ahead;
    }
}

// Movers: y of a token, a vector of it a lane. A token without routes becomes zeros.
template <class T>
MEGAMOE_DEVICE void reduce_few(Context& ctx) {
    const Args& args = ctx.args;
    int lane = arch::lane_idx(), vectors = args.hidden / sum_vector, slices = ceil_div(vectors, 32);
    MEGAMOE_UNROLL_BY(1)
    for (int job = mover_warp() * num_ctas(ctx) + cta_idx(ctx); job < own_tokens<T>(args) * slices;
         job += num_movers * num_ctas(ctx)) {
        int token = job / slices, v = job % slices * 32 + lane, expert = -1;
        float weight = 0.0f;
        if (lane < args.top_k) {
            expert = topk_id(args, token * args.top_k + lane) - args.expert_begin;
            weight = args.topk_weights[token * args.top_k + lane];
        }
        if (expert >= args.num_local_experts) expert = -1;
        if (expert < 0) weight = 0.0f;
        if (!await_experts<T>(ctx, expert)) return;
        Profile<T>::mark(args, Mark::y_rows_seen);
        auto* rows = static_cast<const uint4_t*>(args.y_rows);
        auto row = reinterpret_cast<uint64_t>(rows + int64_t{expert * max_few_tokens + token} * vectors);
        uint32_t sources = arch::ballot(expert >= 0);
        float sum[8] = {};
        sum_few(sum, row, weight, sources, v, vectors, args.top_k);
        auto* y = static_cast<uint4_t*>(args.rows_out) + int64_t{token} * vectors;
        arch::store_vec_below(y, v, vectors, pack_vector(sum));
    }
}

// ids and x where the caller has them, sums into y.
struct OneRank {
    static MEGAMOE_DEVICE FewSmem& smem(Context& ctx) { return ctx.smem.few; }
    static MEGAMOE_DEVICE void init(Context&) {}
    template <class Visit>
    static MEGAMOE_DEVICE void each_barrier(Context&, Visit) {}
    // Is x not as MMAs take it? Then the math warps of all CTAs stage it first.
    template <class T>
    static MEGAMOE_DEVICE bool stages_x(const Args& args) {
        return !T::Gemm1::A::Words::is_plain || args.in_scale == nullptr;
    }
    template <class T>
    static MEGAMOE_DEVICE void stage(Context& ctx) {
        using A = typename T::Gemm1::A;
        if (!stages_x<T>(ctx.args)) return;
        if constexpr (A::Words::is_plain) {
            stage_rows<A, 1>(ctx, own_tokens<T>(ctx.args));
        } else {
            stage_x<T, 1>(ctx, own_tokens<T>(ctx.args));
        }
        announce_x(ctx);
        Profile<T>::mark(ctx.args, Mark::staged);
    }
    template <class T>
    static MEGAMOE_DEVICE void exchange(Context&) {}
    template <class T>
    static MEGAMOE_DEVICE int list(Context& ctx) {
        return list_experts<T>(ctx);
    }
    template <class T>
    static MEGAMOE_DEVICE void deal_unit(Context& ctx, DealtRing& ring, GemmId id, int unit, int tiles) {
        megamoe::deal_unit<T>(ctx, ring, id, unit, tiles);
    }
    // What gather reads: x as the caller has it, or as the math warps have staged it.
    template <class T>
    struct X {
        const uint8_t* first;
        const float* scale;
        MEGAMOE_DEVICE explicit X(Context& ctx) {
            const Args& args = ctx.args;
            bool staged = stages_x<T>(args);
            if (staged && arch::lane_idx() == 0)
                XReady::await(ctx.mem, ctx.window<uint32_t>(args.rank, args.window_staged) + args.rank,
                              ctx.epoch(), args.rank);
            arch::warp_sync();
            first = staged ? ctx.window<const uint8_t>(args.rank, args.window_x)
                           : static_cast<const uint8_t*>(args.rows_in);
            scale = staged ? ctx.window<const float>(args.rank, args.window_x_scale) : args.in_scale;
        }
        MEGAMOE_DEVICE RowsInMemory rows(Context& ctx, int of_lane, int count) const {
            using A = typename T::Gemm1::A;
            int token = arch::lane_idx() < count ? of_lane : 0, hidden = ctx.args.hidden;
            int bytes = A::row_bytes(hidden);
            return {first + int64_t{token} * bytes, scale + int64_t{token} * A::num_scales(hidden), 1, bytes};
        }
    };
    static MEGAMOE_DEVICE int y_row(const Args&, int expert, int token) {
        return expert * max_few_tokens + token;
    }
    template <class T>
    static MEGAMOE_DEVICE void reduce(Context& ctx) {
        reduce_few<T>(ctx);
    }
    static MEGAMOE_DEVICE bool takes_ordinary(const Context&) { return false; }
};

}  // namespace megamoe
