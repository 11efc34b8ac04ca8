// math: two warpgroups, each 64 rows x 256 columns of a tile. Main loop, then the epilogue of the tile's
// stage into the swizzled output chunks; the store warp takes it from there.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"
#include "megamoe/gemm/mainloop.cuh"

namespace megamoe {

// This warpgroup's side of the output ring: claim a slot, fill it, hand it to the store warp. All 128 threads
// call both.
struct OutputSlots {
    Context& ctx;
    OutputRing& ring;

    MEGAMOE_DEVICE uint8_t* claim() {
        ring.acquire(ctx.mem, ctx.smem.output_slots[math_group()]);
        return ctx.smem.output[math_group()][ring.slot()];
    }
    MEGAMOE_DEVICE void hand_over() {
        arch::fence_proxy_async_shared();
        ring.commit(ctx.mem, ctx.smem.output_slots[math_group()]);
        ring.advance();
    }
};

// The warp's copy of the tile that begins in `slot`: the slot may hold another before this one's epilogue.
MEGAMOE_DEVICE Tile& current_tile(Smem& smem) { return smem.math_tile[arch::warp_idx() - first_math_warp]; }
MEGAMOE_DEVICE void begin_tile(Smem& smem, int slot) {
    Tile& tile = current_tile(smem);
    arch::warp_sync();  // no lane reads the last tile any more
    if (arch::lane_idx() == 0) tile = smem.tile[slot];
    arch::warp_sync();
}

template <class T>
MEGAMOE_DEVICE void math(Context& ctx, StageRing& ring, OutputRing& output_ring) {
    OutputSlots output{ctx, output_ring};
    for (;;) {
        await_stage<T>(ctx, ring);
        begin_tile(ctx.smem, ring.slot());
        Tile tile = current_tile(ctx.smem);
        if (!tile.valid()) break;
        int stages = Shape<T>::stages_of(ctx.args, tile.stage);
        if (tile.absent()) {
            skip_stages(ctx, ring, stages);
        } else if (tile.rows() <= math_group() * group_rows) {
            skip_stages(ctx, ring, stages);
            for (int c = 0; c < Shape<T>::output_slots(tile.stage); ++c) {
                output.claim();
                output.hand_over();
            }
        } else {
            float sum[2][64];
            multiply<T>(sum, ctx, ring, tile.stage);
            tile = current_tile(ctx.smem);
            finish<T>(ctx, tile, output, sum);
        }
    }
    skip_stages(ctx, ring, 1);
}

}  // namespace megamoe
