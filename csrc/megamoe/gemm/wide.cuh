// The wide form of a tile's main loop, for few rows: weights are the M of the MMAs, rows their N. Each
// warpgroup has 64 columns of each half, so it has gate and up of the same columns. Bits are those of the
// tall form.
#pragma once
#include "megamoe/gemm/mainloop.cuh"

namespace megamoe {

// A thread's sums of a tile, by half, for `n` rows.
template <int n>
using WideSums = float[2][n / 2];

// Sums and products are zeros before the loop: if they were undefined, they would be alive in the other forms
// of the tile, and ptxas would spill.
template <int n>
MEGAMOE_DEVICE void clear(WideSums<n>& sum) {
    MEGAMOE_UNROLL
    for (int i = 0; i < n / 2; ++i) sum[0][i] = sum[1][i] = 0.0f;
}

// A slot's products, times the scales of its rows and halves. The scales are read before the slot is
// released.
template <int n>
struct WideScales {
    float of_row[n / 4];
    MEGAMOE_DEVICE WideScales(const float* scales, int quad) {
        MEGAMOE_UNROLL
        for (int i = 0; i < n / 4; ++i) of_row[i] = scales[i / 2 * 8 + 2 * quad + i % 2];
    }
    MEGAMOE_DEVICE void promote(WideSums<n>& sum, const WideSums<n>& acc, const float (&weight_scale)[2]) {
        MEGAMOE_UNROLL
        for (int half = 0; half < 2; ++half) {
            MEGAMOE_UNROLL
            for (int i = 0; i < n / 4; ++i) {
                float s = of_row[i] * weight_scale[half];
                int at = i / 2 * 4 + i % 2;
                sum[half][at] += s * acc[half][at];
                sum[half][at + 2] += s * acc[half][at + 2];
            }
        }
    }
};

// e4m3 weights from their pipeline slots.
template <class T, int n>
MEGAMOE_DEVICE void multiply_wide(WideSums<n>& sum, Context& ctx, PipelineRing<T>& ring, int slots) {
    auto& smem = tile_smem<T>();
    arch::Desc rows = arch::make_desc(smem.slots[0].a);
    arch::Desc weights = arch::make_desc(smem.slots[0].b[0] + math_warpgroup() * box_bytes);
    int quad = WideFragment().quad;
    WideSums<n> product;
    clear<n>(sum);
    clear<n>(product);
    for (int i = 0; i < slots; ++i) {
        int at = ring.slot() * static_cast<int>(sizeof(smem.slots[0]));
        arch::Desc b = arch::desc_advance(rows, at), a0 = arch::desc_advance(weights, at);
        arch::Desc a1 = arch::desc_advance(a0, T::Tiling::half_columns * slot_k_bytes);
        await_slot<T>(ctx, ring);
        arch::fence_accumulator(product[0]);
        arch::fence_accumulator(product[1]);
        arch::wgmma_fence();
        MEGAMOE_UNROLL
        for (int k = 0; k < slot_k_bytes; k += mma_k_bytes) {
            arch::Desc b_k = arch::desc_advance(b, k);
            arch::wgmma<e4m3_t>(product[0], arch::desc_advance(a0, k), b_k, k != 0);
            arch::wgmma<e4m3_t>(product[1], arch::desc_advance(a1, k), b_k, k != 0);
        }
        arch::wgmma_commit();
        WideScales<n> scales(smem.a_scale[ring.slot()], quad);
        const float of_weights[2] = {smem.b_scale[ring.slot()][0], smem.b_scale[ring.slot()][1]};
        arch::wgmma_wait<0>();
        arch::fence_accumulator(product[0]);
        arch::fence_accumulator(product[1]);
        arch::warp_sync();  // all lanes have read the scales
        ring.release(ctx.mem, smem.pipeline);
        ring.advance();
        scales.promote(sum, product, of_weights);
    }
}

}  // namespace megamoe
