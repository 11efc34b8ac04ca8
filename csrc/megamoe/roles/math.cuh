// math: two warpgroups, each 64 rows x 256 columns of a tile. Main loop, then the epilogue of the tile's
// stage into the swizzled output chunks; the store warp takes it from there.
#pragma once
#include "megamoe/gemm/mainloop.cuh"

namespace megamoe {

// bias[column], with columns at or past `width` left alone.
MEGAMOE_DEVICE void add_bias(float (&v)[64], const float* bias, int column0, int width, Fragment f) {
    MEGAMOE_UNROLL
    for (int g = 0; g < 16; ++g) {
        int column = column0 + f.column(g);
        float b0 = column < width ? bias[column] : 0.0f, b1 = column < width ? bias[column + 1] : 0.0f;
        v[4 * g] += b0;
        v[4 * g + 1] += b1;
        v[4 * g + 2] += b0;
        v[4 * g + 3] += b1;
    }
}

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

// Bias; for gemm1 the activation; then out: h as the precision stores it, y_rows as bf16.
template <class T>
MEGAMOE_DEVICE void finish(const Context& ctx, const Tile& tile, OutputSlots& output, float (&sum)[2][64]) {
    const Args& args = ctx.args;
    Fragment f;
    bool first = tile.stage == Stage::gemm1;
    Halves halves = halves_of<T>(tile.stage, tile.n);
    const Gemm& gemm = gemm_of(args, tile.stage);
    if (const float* bias = gemm.bias; bias != nullptr) {
        bias += int64_t{tile.expert()} * gemm.n * halves.num_planes();
        MEGAMOE_UNROLL
        for (int half = 0; half < 2; ++half)
            add_bias(sum[half], bias + halves.plane(half) * gemm.n, halves.column(half), gemm.n, f);
    }
    if (first) {
        MEGAMOE_UNROLL
        for (int i = 0; i < 64; ++i) {
            sum[0][i] = T::Activation::apply(args, sum[0][i], sum[1][i]);
            if (!Shape<T>::gated) sum[1][i] = T::Activation::apply(args, sum[1][i], 0.0f);
        }
    }
    using H = typename T::Precision::H;
    if constexpr (!same<H, Bf16Rows>) {
        if (first) {
            MEGAMOE_UNROLL
            for (int half = 0; half < (Shape<T>::gated ? 1 : 2); ++half) {
                int scale_row = halves.column0 / scale_group + half;
                float* scales = gemm.out_scale + int64_t{scale_row} * args.pool_rows + tile.row0() +
                                math_group() * group_rows;
                bool exists = scale_row < ceil_div(gemm.n, scale_group);
                H::write_half(output, sum[half], exists ? scales : nullptr, f);
            }
            return;
        }
    }
    Bf16Rows::write_half(output, sum[0], nullptr, f);
    if (!halves.planes) Bf16Rows::write_half(output, sum[1], nullptr, f);
}

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
            for (int c = 0; c < Shape<T>::output_chunks(tile.stage); ++c) {
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
