// load_a and load_b: one thread each, filling the pipeline's slots by TMA. load_b never waits for rows, so
// weights stream from the first tile on. The ring positions live across passes, like the barriers' phases.
//
// Of the operand that a pair of CTAs shares, either CTA loads one half into both. Both walk the same units,
// and a slot is refilled only when the math warps of both have released it; so bytes of the partner can reach
// a full barrier before this CTA's own expect_tx, but never in another phase.
//
// load_b also tells the math warps which tile begins, so that they need neither tables nor registers for
// that; a slot without data and with a tile that is not valid ends the pass.
#pragma once
#include "megamoe/cta/context.h"

namespace megamoe {

// A slot without data, for whoever has to keep in step.
template <class T>
MEGAMOE_DEVICE void pass_slot(Context& ctx, PipelineRing<T>& ring) {
    ring.acquire(ctx.mem, tile_smem<T>().pipeline);
    ring.commit(ctx.mem, tile_smem<T>().pipeline);
    ring.advance();
}

template <class T>
MEGAMOE_DEVICE void load_a(Context& ctx, PipelineRing<T>& ring) {
    const Args& args = ctx.args;
    auto& smem = tile_smem<T>();
    Tiles<T> tiles(ctx);
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        bool first = tile.stage == Stage::gemm1;
        Profile<T>::timed(
            ctx.smem, first ? Mark::rows_wait : Mark::h_wait, [] { return true; },
            [&] {
                if (first) {
                    RowsReady::await(ctx.mem, args.rows_ready + tile.block, tile.rows(), tile.block);
                } else {
                    HReady::await(ctx.mem, args.gemm[0].done + tile.block,
                                  Shape<T>::tiles(args, Stage::gemm1), tile.block);
                }
            });
        const Gemm& gemm = gemm_of(args, tile.stage);
        const float* scale = gemm.a_scale + row0<T>(tile);
        bool tall = tile.rows() > group_rows;  // a short block's second warpgroup has nothing to read
        uint32_t bytes =
            (tall ? 2 : 1) * box_bytes + (Shape<T>::a_scaled(tile.stage) ? sizeof(smem.a_scale[0]) : 0);
        int slots = Shape<T>::slots_of(args, tile.stage);
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < slots; ++i, ring.advance()) {
            ring.acquire(ctx.mem, smem.pipeline);
            ring.commit(ctx.mem, smem.pipeline, bytes);
            uint64_t* full = &smem.pipeline.full[ring.slot()];
            uint8_t* a = smem.slots[ring.slot()].a;
            int k = i * Shape<T>::slot_k(tile.stage);
            if (tile.shared == Shared::a) {
                int half = pair_member();
                if (half == 0 || tall)
                    arch::tma_load_2d_both(a + half * box_bytes, &gemm.a, full, k,
                                           row0<T>(tile) + half * group_rows);
            } else {
                arch::tma_load_2d(a, &gemm.a, full, k, row0<T>(tile));
                if (tall) arch::tma_load_2d(a + box_bytes, &gemm.a, full, k, row0<T>(tile) + group_rows);
            }
            if (Shape<T>::a_scaled(tile.stage)) {
                arch::bulk_load(smem.a_scale[ring.slot()], scale + int64_t{i} * args.pool_rows,
                                sizeof(smem.a_scale[0]), full);
            }
        }
    }
    pass_slot<T>(ctx, ring);
}

template <class T>
MEGAMOE_DEVICE void load_b(Context& ctx, PipelineRing<T>& ring) {
    using W = typename T::Gemm1::B;
    static_assert(same<W, typename T::Gemm2::B>, "both GEMMs' weights have one format");
    const Args& args = ctx.args;
    auto& smem = tile_smem<T>();
    Tiles<T> tiles(ctx);
    for (;;) {
        Tile tile = tiles.next();
        ring.acquire(ctx.mem, smem.pipeline);
        smem.tile[ring.slot()] = tile;
        if (!tile.valid()) break;
        int slots = Shape<T>::slots_of(args, tile.stage);
        if (tile.absent()) {
            MEGAMOE_UNROLL_BY(1)
            for (int i = 0; i < slots; ++i) pass_slot<T>(ctx, ring);
            continue;
        }
        const Gemm& gemm = gemm_of(args, tile.stage);
        auto halves = halves_of<T>(tile.stage, tile.n);
        typename W::Scales scales(gemm, tile, halves);
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < slots; ++i, ring.advance()) {
            scales.fetch();  // in flight while this thread waits for the slot
            ring.acquire(ctx.mem, smem.pipeline);
            auto& b = smem.slots[ring.slot()].b;
            ring.expect(ctx.mem, smem.pipeline, sizeof(b));
            uint64_t* full = &smem.pipeline.full[ring.slot()];
            int k = i * Shape<T>::slot_k(tile.stage);
            if (tile.shared == Shared::b) {
                int half = pair_member();
                arch::tma_load_4d_both(b[half], &gemm.b, full, k, halves.column(half), halves.plane(half),
                                       tile.expert());
            } else {
                arch::tma_load_4d(b[0], &gemm.b, full, k, halves.column(0), halves.plane(0), tile.expert());
                arch::tma_load_4d(b[1], &gemm.b, full, k, halves.column(1), halves.plane(1), tile.expert());
            }
            scales.put(smem.b_scale[ring.slot()]);
            ring.commit(ctx.mem, smem.pipeline);  // the scales too, and the tile
        }
    }
    pass_slot<T>(ctx, ring);
}

}  // namespace megamoe
