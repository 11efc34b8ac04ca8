// load_a and load_b: one thread each, filling the pipeline stages by TMA. load_b never waits for rows, so
// weights stream from the first tile on. The ring positions live across passes, like the barriers' phases.
//
// Of the operand that a pair of CTAs shares, either CTA loads one half into both. Both walk the same units,
// and a slot is refilled only when the math warps of both have released it; so bytes of the partner can reach
// a full barrier before this CTA's own expect_tx, but never in another phase.
//
// load_b also tells the math warps which tile begins, so that they need neither tables nor registers for
// that; a stage without data and with a tile that is not valid ends the pass.
#pragma once
#include "megamoe/cta/context.h"

namespace megamoe {

// A stage without data, for whoever has to keep in step.
MEGAMOE_DEVICE void pass_stage(Context& ctx, StageRing& ring) {
    ring.acquire(ctx.mem, ctx.smem.stage_slots);
    ring.commit(ctx.mem, ctx.smem.stage_slots);
    ring.advance();
}

template <class T>
MEGAMOE_DEVICE void load_a(Context& ctx, StageRing& ring) {
    const Args& args = ctx.args;
    Smem& smem = ctx.smem;
    Tiles<T> tiles(ctx);
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        bool first = tile.stage == Stage::gemm1;
        Profile<T>::timed(
            smem, first ? Mark::rows_wait : Mark::h_wait, [] { return true; },
            [&] {
                if (first) {
                    RowsReady::await(ctx.mem, args.rows_ready + tile.block, tile.rows(), tile.block);
                } else {
                    HReady::await(ctx.mem, args.gemm[0].done + tile.block,
                                  Shape<T>::tiles(args, Stage::gemm1), tile.block);
                }
            });
        const Gemm& gemm = gemm_of(args, tile.stage);
        const float* scale = gemm.a_scale + tile.row0();
        bool tall = tile.rows() > group_rows;  // a short block's second warpgroup has nothing to read
        uint32_t bytes =
            (tall ? 2 : 1) * chunk_bytes + (Shape<T>::a_scaled(tile.stage) ? sizeof(smem.a_scale[0]) : 0);
        int stages = Shape<T>::stages_of(args, tile.stage);
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < stages; ++i, ring.advance()) {
            ring.acquire(ctx.mem, smem.stage_slots);
            ring.commit(ctx.mem, smem.stage_slots, bytes);
            uint64_t* full = &smem.stage_slots.full[ring.slot()];
            uint8_t* a = smem.stages[ring.slot()].a;
            int k = i * Shape<T>::stage_k(tile.stage);
            if (tile.shared == Shared::a) {
                int half = pair_member();
                if (half == 0 || tall)
                    arch::tma_load_2d_both(a + half * chunk_bytes, &gemm.a, full, k,
                                           tile.row0() + half * group_rows);
            } else {
                arch::tma_load_2d(a, &gemm.a, full, k, tile.row0());
                if (tall) arch::tma_load_2d(a + chunk_bytes, &gemm.a, full, k, tile.row0() + group_rows);
            }
            if (Shape<T>::a_scaled(tile.stage)) {
                arch::bulk_load(smem.a_scale[ring.slot()], scale + int64_t{i} * args.pool_rows,
                                sizeof(smem.a_scale[0]), full);
            }
        }
    }
    pass_stage(ctx, ring);
}

template <class T>
MEGAMOE_DEVICE void load_b(Context& ctx, StageRing& ring) {
    using W = typename T::Gemm1::B;
    static_assert(same<W, typename T::Gemm2::B>, "both GEMMs' weights have one format");
    const Args& args = ctx.args;
    Smem& smem = ctx.smem;
    Tiles<T> tiles(ctx);
    for (;;) {
        Tile tile = tiles.next();
        ring.acquire(ctx.mem, smem.stage_slots);
        smem.tile[ring.slot()] = tile;
        if (!tile.valid()) break;
        int stages = Shape<T>::stages_of(args, tile.stage);
        if (tile.absent()) {
            MEGAMOE_UNROLL_BY(1)
            for (int i = 0; i < stages; ++i) pass_stage(ctx, ring);
            continue;
        }
        const Gemm& gemm = gemm_of(args, tile.stage);
        Halves halves = halves_of<T>(tile.stage, tile.n);
        typename W::Scales scales(gemm, tile, halves);
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < stages; ++i, ring.advance()) {
            scales.fetch();  // in flight while this thread waits for the slot
            ring.acquire(ctx.mem, smem.stage_slots);
            auto& b = smem.stages[ring.slot()].b;
            ring.expect(ctx.mem, smem.stage_slots, sizeof(b));
            uint64_t* full = &smem.stage_slots.full[ring.slot()];
            int k = i * Shape<T>::stage_k(tile.stage);
            if (tile.shared == Shared::b) {
                int half = pair_member();
                arch::tma_load_4d_both(b[half], &gemm.b, full, k, halves.column(half), halves.plane(half),
                                       tile.expert());
            } else {
                arch::tma_load_4d(b[0], &gemm.b, full, k, halves.column(0), halves.plane(0), tile.expert());
                arch::tma_load_4d(b[1], &gemm.b, full, k, halves.column(1), halves.plane(1), tile.expert());
            }
            scales.put(smem.b_scale[ring.slot()]);
            ring.commit(ctx.mem, smem.stage_slots);  // the scales too, and the tile
        }
    }
    pass_stage(ctx, ring);
}

}  // namespace megamoe
