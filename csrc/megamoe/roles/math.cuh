// math: two warpgroups, each 64 rows x 256 columns of a tile. Main loop, then the epilogue of the tile's
// stage into the output slots; the store warp takes it from there.
#pragma once
#include "megamoe/epilogue/wide.cuh"
#include "megamoe/gemm/wide.cuh"

namespace megamoe {

// This warpgroup's side of the output ring: claim a slot, fill it, hand it to the store warp. All 128 threads
// call both.
template <class T>
struct OutputSlots {
    Context& ctx;
    OutputRing<T>& ring;

    MEGAMOE_DEVICE uint8_t* claim() {
        ring.acquire(ctx.mem, tile_smem<T>().outputs[math_group()]);
        return tile_smem<T>().output[math_group()][ring.slot()];
    }
    // A pipeline slot of the epilogue's inputs, which becomes an output slot itself: the store warp gives it
    // back.
    MEGAMOE_DEVICE auto& claim_input(PipelineRing<T>& inputs) {
        auto& smem = tile_smem<T>();
        await_slot<T>(ctx, inputs);
        int slot = inputs.slot();
        inputs.advance();
        claim();
        if (math_group() == 0) smem.input_slot[ring.slot()] = slot;  // the other group's is the same
        return smem.slots[slot];
    }
    MEGAMOE_DEVICE void hand_over() {
        arch::fence_proxy_async_shared();
        ring.commit(ctx.mem, tile_smem<T>().outputs[math_group()]);
        ring.advance();
    }
    // The wide form: all 256 threads fill the first warpgroup's slot; `beside` it is the second's, for rows
    // from 64 on. Of a short tile that is not stored and may hold anything. `ahead`: of this place in the
    // ring.
    struct Common {
        uint8_t *slot, *beside;
    };
    MEGAMOE_DEVICE Common claim_common(int ahead) {
        auto& smem = tile_smem<T>();
        OutputRing<T> at = ring;
        MEGAMOE_UNROLL
        for (int i = 0; i < ahead; ++i) at.advance();
        MEGAMOE_UNROLL
        for (int group = 0; group < num_math_groups; ++group) at.acquire(ctx.mem, smem.outputs[group]);
        return {smem.output[0][at.slot()], smem.output[1][at.slot()]};
    }
    MEGAMOE_DEVICE void hand_over_common(int count) {
        arch::fence_proxy_async_shared();
        math_sync();  // either warpgroup's commits are for both
        MEGAMOE_UNROLL
        for (int i = 0; i < count; ++i) {
            ring.commit(ctx.mem, tile_smem<T>().outputs[math_group()]);
            ring.advance();
        }
    }
};

// Makes that copy, of the tile that begins in `slot`.
template <class T>
MEGAMOE_DEVICE void begin_tile(int slot) {
    Tile& tile = current_tile<T>();
    arch::warp_sync();  // no lane reads the last tile any more
    if (arch::lane_idx() == 0) tile = tile_smem<T>().tile[slot];
    arch::warp_sync();
}

// A tile in the wide form, as wide as its rows need. Each form runs to its own end: sums of two that meet
// spill.
template <class T, int n>
MEGAMOE_DEVICE void run_wide_rows(Context& ctx, PipelineRing<T>& ring, OutputSlots<T>& output,
                                  const Tile& tile) {
    WideSums<n> sum;
    multiply_wide<T, n>(sum, ctx, ring, Shape<T>::k_slots(ctx.args, tile.stage), slot_steps<T>(tile));
    finish_wide<T>(ctx, current_tile<T>(), output, sum);
}
template <class T>
MEGAMOE_DEVICE void run_wide(Context& ctx, PipelineRing<T>& ring, OutputSlots<T>& output, const Tile& tile) {
    if constexpr (T::Gemm1::B::expanded) {
        if (tile.rows() <= 16) {
            run_wide_rows<T, 16>(ctx, ring, output, tile);
        } else if (tile.rows() <= 32) {
            run_wide_rows<T, 32>(ctx, ring, output, tile);
        } else if (has_tall<T> || tile.rows() <= 64) {
            run_wide_rows<T, 64>(ctx, ring, output, tile);
        } else if constexpr (!has_tall<T>) {
            run_wide_rows<T, 128>(ctx, ring, output, tile);
        }
    }
}

template <class T>
MEGAMOE_DEVICE void math(Context& ctx, PipelineRing<T>& ring, OutputRing<T>& output_ring) {
    OutputSlots<T> output{ctx, output_ring};
    bool is_first = true, is_data = true;  // of the profile alone
    for (;;) {
        await_slot<T>(ctx, ring);
        if (is_first) Profile<T>::mark(ctx.args, Mark::first_slot);
        is_first = false;
        begin_tile<T>(ring.slot());
        Tile tile = current_tile<T>();
        if (!tile.valid()) break;
        if (is_data && is_weight_gradient(tile.stage)) {
            is_data = false;
            Profile<T>::mark(ctx.args, Mark::data_done);
        }
        if (tile.absent()) {
            skip_slots<T>(ctx, ring, tile.slots + tile.inputs);
        } else if (is_wide<T>(tile)) {
            run_wide<T>(ctx, ring, output, tile);
        } else if (tile.rows() <= math_group() * group_rows) {
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
            if constexpr (has_weight_tiles<T>) {
                if (is_weight_gradient(tile.stage)) {
                    Sums<T> sum;
                    multiply_gradient<T>(sum, ctx, ring, tile);
                    tile = current_tile<T>();
                    T::WeightGemm::Epilogue::template run<T>(ctx, tile, ring, output, sum);
                    continue;
                }
            }
            if constexpr (has_tall<T> && T::direction != Direction::grouped_weights) {
                Sums<T> sum;
                multiply<T>(sum, ctx, ring, tile, tile.slots);
                tile = current_tile<T>();
                finish<T>(ctx, tile, ring, output, sum);
            }
        }
    }
    skip_slots<T>(ctx, ring, 1);
}

}  // namespace megamoe
