// store: one thread that TMA-stores the output slots which the math warpgroups leave in shared memory, waits
// until they are written, and publishes the tile. Kept out of the math warps: the wait (about 1 us) would
// cost a short tile 20 %.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE void store(Context& ctx, OutputRing<T>& output) {
    using E1 = typename T::Gemm1::Epilogue;
    using E2 = typename T::Gemm2::Epilogue;
    const Args& args = ctx.args;
    auto& smem = tile_smem<T>();
    // After the plan's barriers: the last pass's reads of h and y_rows by other CTAs are over.
    ctx.mem.fence_proxy_async();
    Tiles<T> tiles(ctx);
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        if (tile.absent()) continue;
        bool first = tile.stage == Stage::gemm1;
        const Gemm& gemm = gemm_of(args, tile.stage);
        int slots = Shape<T>::output_slots(tile.stage);
        MEGAMOE_UNROLL_BY(1)
        for (int c = 0; c < slots; ++c, output.advance()) {
            Destination to = first ? E1::output(gemm, tile.n, c) : E2::output(gemm, tile.n, c);
            for (int group = 0; group < num_math_groups; ++group) {
                output.await(ctx.mem, smem.outputs[group]);
                if (to.column < to.width && tile.rows() > group * group_rows) {
                    arch::tma_store_2d(to.map, smem.output[group][output.slot()], to.column,
                                       row0<T>(tile) + group * group_rows);
                }
            }
            arch::bulk_commit();
            arch::bulk_wait_read();
            for (int group = 0; group < num_math_groups; ++group)
                output.release(ctx.mem, smem.outputs[group]);
        }
        if (first) {
            HReady::publish(ctx.mem, gemm.done + tile.block);
        } else {
            YRowsReady::publish(ctx.mem, gemm.done + tile.block);
        }
    }
}

}  // namespace megamoe
