// math: two warpgroups, each with 64 rows x 256 columns of a tile. The main loop multiplies, then the
// epilogue of the tile's GEMM writes to the output slots. The store warp continues from there.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"
#include "megamoe/gemm/mainloop.cuh"

namespace megamoe {

// This warpgroup's side of the output ring: claim a slot, fill it, hand it to the store warp. All 128 threads
// call both.
template <class T>
struct OutputSlots {
    Context& ctx;
    OutputRing<T>& ring;

    MEGAMOE_DEVICE uint8_t* claim() {
        ring.acquire(ctx.mem, tile_smem<T>().outputs[math_warpgroup()]);
        return tile_smem<T>().output[math_warpgroup()][ring.slot()];
    }
    // A pipeline slot of the epilogue's inputs, which becomes an output slot itself: the store warp gives it
    // back.
    MEGAMOE_DEVICE auto& claim_input(PipelineRing<T>& inputs) {
        auto& smem = tile_smem<T>();
        await_slot<T>(ctx, inputs);
        int slot = inputs.slot();
        inputs.advance();
        claim();
        if (math_warpgroup() == 0) smem.input_slot[ring.slot()] = slot;  // the other warpgroup's is the same
        return smem.slots[slot];
    }
    MEGAMOE_DEVICE void hand_over() {
        arch::fence_proxy_async_shared();
        ring.commit(ctx.mem, tile_smem<T>().outputs[math_warpgroup()]);
        ring.advance();
    }
    // The wide form: all 256 threads fill the first warpgroup's slot; `beside` it is the second's, for rows
    // from 64 on, which is not stored for a short tile and may hold anything. `ahead`: slots from this place
    // in the ring.
    struct Common {
        uint8_t *slot, *beside;
    };
    MEGAMOE_DEVICE Common claim_common(int ahead) {
        auto& smem = tile_smem<T>();
        OutputRing<T> at = ring;
        MEGAMOE_UNROLL
        for (int i = 0; i < ahead; ++i) at.advance();
        MEGAMOE_UNROLL
        for (int warpgroup = 0; warpgroup < num_math_warpgroups; ++warpgroup)
            at.acquire(ctx.mem, smem.outputs[warpgroup]);
        return {smem.output[0][at.slot()], smem.output[1][at.slot()]};
    }
    // A slot of claim_common(0) that both warpgroups have filled, and that the store warp awaits of both.
    MEGAMOE_DEVICE void hand_over_both() { hand_over(); }
    MEGAMOE_DEVICE void hand_over_common(int count) {
        arch::fence_proxy_async_shared();
        math_sync();  // either warpgroup's commits are for both
        MEGAMOE_UNROLL
        for (int i = 0; i < count; ++i) {
            ring.commit(ctx.mem, tile_smem<T>().outputs[math_warpgroup()]);
            ring.advance();
        }
    }
};

// Makes this warp's copy of the tile that begins in `slot`.
template <class T>
MEGAMOE_DEVICE void begin_tile(int slot) {
    Tile& tile = current_tile<T>();
    arch::warp_sync();  // no lane reads the last tile any more
    if (arch::lane_idx() == 0) tile = tile_smem<T>().tile[slot];
    arch::warp_sync();
}

// A tile of rows by a GEMM that is known here, with sums of its own.
template <class T, GemmId id>
MEGAMOE_DEVICE void run_apart(Context& ctx, PipelineRing<T>& ring, OutputSlots<T>& output, Tile tile) {
    Sums<T> sum;
    tile.gemm = id;
    Forms<T>::multiply(sum, ctx, ring, tile);
    tile = current_tile<T>();
    tile.gemm = id;
    finish<T>(ctx, tile, ring, output, sum);
}

template <class T>
MEGAMOE_DEVICE void math(Context& ctx, PipelineRing<T>& ring, OutputRing<T>& output_ring) {
    OutputSlots<T> output{ctx, output_ring};
    bool is_first = true, is_data = true;  // of the profile alone
    for (;;) {
        Profile<T>::mark(ctx.smem, TileMark::finished);
        await_slot<T>(ctx, ring);
        if (is_first) Profile<T>::mark(ctx.args, Mark::first_slot);
        is_first = false;
        begin_tile<T>(ring.slot());
        Tile tile = current_tile<T>();
        if (!tile.valid()) break;
        Profile<T>::begin_tile(ctx.smem);
        Profile<T>::mark(ctx.smem, TileMark::slot_seen);
        if (is_data && is_weight_gradient(tile.gemm)) {
            is_data = false;
            Profile<T>::mark(ctx.args, Mark::data_done);
        }
        if (tile.absent()) {
            skip_slots<T>(ctx, ring, tile.slots + tile.inputs);
        } else if (Forms<T>::run_wide(ctx, ring, output, tile)) {
            continue;
        } else if (tile.rows() <= math_warpgroup() * warpgroup_rows) {
            skip_slots<T>(ctx, ring, tile.slots);
            walk_slots<T>(
                ctx.args, tile,
                [&](int) {
                    output.claim_input(ring);
                    output.hand_over();
                },
                [&](int) {
                    output.claim();
                    output.hand_over();
                });
        } else {
            if constexpr (T::WeightTiles::any) {
                if (is_weight_gradient(tile.gemm)) {
                    Sums<T> sum;
                    multiply_gradient<T>(sum, ctx, ring, tile);
                    tile = current_tile<T>();
                    T::Blocks::spoil(ctx, sum);
                    T::WeightGemm::Epilogue::template run<T>(ctx, tile, ring, output, sum);
                    continue;
                }
            }
            if constexpr (Forms<T>::has_tall && T::num_row_gemms != 0) {
                if constexpr (T::Gemm1::B::column_scales) ColumnScales<T>::fetch(ctx, tile);
                if constexpr (sums_apart<T>) {
                    if (tile.gemm == GemmId::gemm1) {
                        run_apart<T, GemmId::gemm1>(ctx, ring, output, tile);
                    } else {
                        run_apart<T, GemmId::gemm2>(ctx, ring, output, tile);
                    }
                    continue;
                }
                Sums<T> sum;
                Forms<T>::multiply(sum, ctx, ring, tile);
                tile = current_tile<T>();
                finish<T>(ctx, tile, ring, output, sum);
            }
        }
    }
    skip_slots<T>(ctx, ring, 1);
    if constexpr (T::Gemm1::B::column_scales) ColumnScales<T>::end();
    // All have read what the epilogue keeps where they are movers next.
    if constexpr (T::WeightTiles::transposed) math_sync();
}

}  // namespace megamoe
