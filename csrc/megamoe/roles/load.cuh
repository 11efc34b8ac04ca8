// load_a and load_b: one thread each, filling the pipeline stages by TMA. load_b never waits for rows, so weights stream
// from the first tile on. The ring positions live across passes, like the barriers' phases.
#pragma once
#include "megamoe/roles/context.h"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE void load_a(Context& ctx, RingPosition& ring) {
    using Precision = typename T::Precision;
    const Args& args = ctx.args;
    Smem& smem = ctx.smem;
    Tiles<T> tiles(ctx);
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        bool first = tile.stage == Stage::gemm1;
        Profile<T>::timed(args, first ? Mark::rows_wait : Mark::h_wait, true, [&] {
            if (first) {
                RowsReady::await(ctx.mem, args.rows_ready + tile.block, tile.rows(), tile.block);
            } else {
                HReady::await(ctx.mem, args.gemm1_done + tile.block, Shape<T>::tiles1(args), tile.block);
            }
        });
        const TensorMap* map = first ? &args.map_x_pool : &args.map_h;
        const float* scale = (first ? args.x_pool_scale : args.h_scale) + tile.row0();
        bool tall = tile.rows() > group_rows;  // a short block's second warpgroup has nothing to read
        uint32_t bytes = (tall ? 2 : 1) * chunk_bytes + (Precision::scaled ? sizeof(smem.a_scale[0]) : 0);
        int stages = Shape<T>::stages_of(args, tile.stage);
        for (int i = 0; i < stages; ++i, ring.advance()) {
            arch::mbar_wait(&smem.empty[ring.slot], ring.parity ^ 1);
            uint64_t* full = &smem.full[ring.slot];
            arch::mbar_arrive_expect_tx(full, bytes);
            uint8_t* a = smem.stages[ring.slot].a;
            arch::tma_load_2d(a, map, full, i * Precision::stage_k, tile.row0());
            if (tall) arch::tma_load_2d(a + chunk_bytes, map, full, i * Precision::stage_k, tile.row0() + group_rows);
            if (Precision::scaled) {
                arch::bulk_load(smem.a_scale[ring.slot], scale + int64_t{i} * args.pool_rows, sizeof(smem.a_scale[0]), full);
            }
        }
    }
}

template <class T>
MEGAMOE_DEVICE void load_b(Context& ctx, RingPosition& ring) {
    using Precision = typename T::Precision;
    const Args& args = ctx.args;
    Smem& smem = ctx.smem;
    Tiles<T> tiles(ctx);
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        bool planes = tile.stage == Stage::gemm1 && Shape<T>::gated;  // halves: gate and up, or neighbouring columns
        const TensorMap* map = tile.stage == Stage::gemm1 ? &args.map_w13 : &args.map_w2;
        int column0 = tile.n * (planes ? half_columns : tile_columns);
        int column1 = column0 + (planes ? 0 : half_columns);
        int stages = Shape<T>::stages_of(args, tile.stage);
        for (int i = 0; i < stages; ++i, ring.advance()) {
            arch::mbar_wait(&smem.empty[ring.slot], ring.parity ^ 1);
            uint64_t* full = &smem.full[ring.slot];
            arch::mbar_arrive_expect_tx(full, sizeof(smem.stages[0].b));
            auto& b = smem.stages[ring.slot].b;
            arch::tma_load_4d(b[0], map, full, i * Precision::stage_k, column0, 0, tile.expert());
            arch::tma_load_4d(b[1], map, full, i * Precision::stage_k, column1, planes ? 1 : 0, tile.expert());
        }
    }
}

}  // namespace megamoe
