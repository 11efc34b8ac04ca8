// math: two warpgroups, each 64 rows x 256 columns of a tile. Main loop, then the epilogue of the tile's
// stage into the output slots; the store warp takes it from there.
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
};

// Makes that copy, of the tile that begins in `slot`.
template <class T>
MEGAMOE_DEVICE void begin_tile(int slot) {
    Tile& tile = current_tile<T>();
    arch::warp_sync();  // no lane reads the last tile any more
    if (arch::lane_idx() == 0) tile = tile_smem<T>().tile[slot];
    arch::warp_sync();
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
        } else if (tile.rows() <= math_group() * group_rows) {
            idle_slots<T>(ctx, ring, tile.slots);
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
            if constexpr (T::direction == Direction::backward) {
                if (is_weight_gradient(tile.stage)) {
                    Sums<T> sum;
                    multiply_gradient<T>(sum, ctx, ring, tile);
                    tile = current_tile<T>();
                    T::WeightGemm::Epilogue::template run<T>(ctx, tile, ring, output, sum);
                    continue;
                }
            }
            Sums<T> sum;
            multiply<T>(sum, ctx, ring, tile, tile.slots);
            tile = current_tile<T>();
            finish<T>(ctx, tile, ring, output, sum);
        }
    }
    skip_slots<T>(ctx, ring, 1);
}

}  // namespace megamoe
