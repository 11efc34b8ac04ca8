// store: one thread that TMA-stores the output chunks which the math warpgroups leave in shared memory, waits
// until they are written, and publishes the tile. Kept out of the math warps: the wait (about 1 us) would
// cost a short tile 20 %.
#pragma once
#include "megamoe/roles/context.h"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE void store(Context& ctx, OutputRing& output) {
    const Args& args = ctx.args;
    Smem& smem = ctx.smem;
    ctx.mem.fence_proxy_async();  // after the plan's barriers: the last pass's reads of h and y_rows by other
                                  // CTAs are over
    Tiles<T> tiles(ctx);
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        if (tile.absent()) continue;
        bool first = tile.stage == Stage::gemm1;
        const TensorMap* map = first ? &args.map_h : &args.map_y_rows;
        int width = first ? args.intermediate : args.hidden;
        int chunks = Shape<T>::output_chunks(tile.stage);
        int chunk_columns = stage_k_bytes / (first ? T::Precision::element_bytes : 2);
        MEGAMOE_UNROLL_BY(1)
        for (int c = 0; c < chunks; ++c, output.advance()) {
            int column = (tile.n * chunks + c) * chunk_columns;
            for (int group = 0; group < num_math_groups; ++group) {
                arch::mbar_wait(&smem.output_full[group][output.slot()], output.parity());
                if (column < width && tile.rows() > group * group_rows) {
                    arch::tma_store_2d(map, smem.output[group][output.slot()], column,
                                       tile.row0() + group * group_rows);
                }
            }
            arch::bulk_commit();
            arch::bulk_wait_read();
            for (int group = 0; group < num_math_groups; ++group)
                arch::mbar_arrive(&smem.output_empty[group][output.slot()]);
        }
        if (first) {
            HReady::publish(ctx.mem, args.gemm1_done + tile.block);
        } else {
            YRowsReady::publish(ctx.mem, args.gemm2_done + tile.block);
        }
    }
}

}  // namespace megamoe
