// store: one thread that TMA-stores the output slots of the math warpgroups, waits until they are written,
// and publishes the tile. Math warps do not do this: the wait (about 1 us) would cost a short tile 20 %.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"
#include "megamoe/gemm/tiles.cuh"

namespace megamoe {

// Says that this CTA's tiles of gemm1 are stored: weight tiles need those of all CTAs. It is not said after
// an abort, when they may be garbage, nor in a phase that makes pre-activations again, which is not gemm1.
template <class T>
class Gemm1Stored {
  public:
    MEGAMOE_DEVICE explicit Gemm1Stored(const Context& ctx) : said_(recomputes<T>(ctx)) {}
    MEGAMOE_DEVICE void look(Context& ctx, bool done) {
        if constexpr (T::WeightTiles::beside_rows) {
            if (!done || said_) return;
            said_ = true;
            if (!ctx.mem.aborted()) GradsReady::publish(ctx.mem, own<T>(ctx.args).grads_ready);
        }
    }

  private:
    bool said_;
};

// A pipeline slot whose inputs math has overwritten with outputs, and which it left to this thread to give
// back.
template <class T>
MEGAMOE_DEVICE void store_input(Context& ctx, const Tile& tile, int input, const OutputRing<T>& output) {
    auto& smem = tile_smem<T>();
    for (int warpgroup = 0; warpgroup < num_math_warpgroups; ++warpgroup)
        output.await(ctx.mem, smem.outputs[warpgroup]);
    int slot = smem.input_slot[output.slot()];
    of_gemm<T>(tile.gemm, [&](auto gemm) {
        using E = typename decltype(gemm)::Epilogue;
        if constexpr (E::inputs != 0) E::template store_input<T>(ctx, tile, input, smem.slots[slot]);
    });
    arch::bulk_commit();
    arch::bulk_wait_read();
    for (int warpgroup = 0; warpgroup < num_math_warpgroups; ++warpgroup)
        output.release(ctx.mem, smem.outputs[warpgroup]);
    ctx.mem.arrive(smem.pipeline.empty[slot], math_role.num_warps);
}

// Asks for what an output slot of a weight tile will be added to, if there is such a slot. Whoever stores
// asks, so that this is as many slots ahead as it is meant to be.
template <class T>
MEGAMOE_DEVICE void ask_for(const Context& ctx, const Tile& tile, int slot) {
    using E = typename T::WeightGemm::Epilogue;
    if (slot < E::template slots<T>(ctx.args))
        E::template prefetch_slot<T>(ctx, tile, GradientBlock<T>(ctx.args, tile), slot);
}

// Stores one output slot of each warpgroup.
template <class T>
MEGAMOE_DEVICE void store_output(Context& ctx, const Tile& tile, int slot, const OutputRing<T>& output) {
    auto& smem = tile_smem<T>();
    Destination to = of_gemm<T>(
        tile.gemm, [&](auto gemm) { return decltype(gemm)::Epilogue::template output<T>(ctx, tile, slot); });
    if constexpr (T::WeightTiles::transposed) {
        if (to.transposed_row >= 0) output.await(ctx.mem, smem.outputs[1]);  // both fill both boxes
    }
    MEGAMOE_UNROLL_BY(1)
    for (int warpgroup = 0; warpgroup < num_math_warpgroups; ++warpgroup) {
        output.await(ctx.mem, smem.outputs[warpgroup]);
        const void* from = smem.output[warpgroup][output.slot()];
        int row = warpgroup * warpgroup_rows;
        if (to.column >= to.width || tile.rows() <= row) continue;
        if constexpr (T::WeightTiles::transposed) {
            if (to.transposed_row >= 0) {
                arch::tma_store_2d(to.map, from, 0, to.transposed_row + row);
                continue;
            }
        }
        if constexpr (T::WeightTiles::any) {
            if (is_weight_gradient(tile.gemm)) {
                T::WeightGemm::Epilogue::template store<T>(ctx, tile, to, row, from,
                                                           adds_weight_gradients<T>(ctx));
                continue;
            }
        }
        store_rows<T>(to.map, from, to.column, tile, row);
    }
    arch::bulk_commit();
    arch::bulk_wait_read();
    for (int warpgroup = 0; warpgroup < num_math_warpgroups; ++warpgroup)
        output.release(ctx.mem, smem.outputs[warpgroup]);
}

template <class T>
MEGAMOE_DEVICE void store(Context& ctx, OutputRing<T>& output, TileRing& scheduled) {
    const Args& args = ctx.args;
    // This comes after the plan's barriers: other CTAs no longer read the last pass's h and y_rows.
    ctx.mem.fence_proxy_async();
    Tiles<T> tiles(ctx, scheduled);
    Gemm1Stored<T> stored(ctx);
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        Profile<T>::begin_tile(ctx.smem);
        // This is said before this tile, because its loaders may wait for it, and also after units of gemm1
        // that hold no tile.
        if (tile.gemm != GemmId::gemm1) stored.look(ctx, tile.gemm1_done != 0);
        if (tile.absent()) continue;
        if constexpr (T::WeightTiles::any) {
            // The prefetch comes now, when the last tile is stored, about 5 us before this one is: when it
            // came three slots earlier, much of it left L2 again.
            if (is_weight_gradient(tile.gemm) && adds_weight_gradients<T>(ctx)) {
                if constexpr (T::WeightTiles::asked_ahead == 0) {
                    T::WeightGemm::Epilogue::template prefetch<T>(ctx, tile);
                } else {
                    for (int c = 0; c < T::WeightTiles::asked_ahead; ++c) ask_for<T>(ctx, tile, c);
                }
            }
        }
        walk_slots<T>(
            args, tile,
            [&](int input) {
                store_input<T>(ctx, tile, input, output);
                output.advance();
            },
            [&](int slot) {
                if constexpr (T::WeightTiles::asked_ahead != 0) {
                    if (adds_weight_gradients<T>(ctx))
                        ask_for<T>(ctx, tile, slot + T::WeightTiles::asked_ahead);
                }
                store_output<T>(ctx, tile, slot, output);
                output.advance();
            });
        if constexpr (!T::Blocks::in_pool) continue;  // nobody waits
        if (tile.gemm == GemmId::gemm1 || (Forms<T>::in_rooms && tile.gemm == GemmId::recompute))
            HReady::publish(ctx.mem, gemm_of<T>(args, GemmId::gemm1).done + tile.block);  // a room too
        if (tile.gemm == GemmId::gemm2)
            YRowsReady::publish(ctx.mem, gemm_of<T>(args, GemmId::gemm2).done + tile.block);
        Profile<T>::mark(ctx.smem, TileMark::published);
    }
    stored.look(ctx, true);
    // No edge says that these tiles are there: the next phase reads them, or the next launch.
    if constexpr (!T::Blocks::in_pool || T::WeightTiles::any) ctx.mem.async_complete();
}

}  // namespace megamoe
