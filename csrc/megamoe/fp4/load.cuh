// load_a and load_b for packed weights.
#pragma once
#include "megamoe/fp4/format.cuh"
#include "megamoe/fp4/panels.cuh"
#include "megamoe/fp4/steps.cuh"
#include "megamoe/gemm/load_slots.cuh"

namespace megamoe {

// A slot of a short tile has two steps. The tile shares A, so each CTA loads one step for both.
template <class T, class Rows>
MEGAMOE_DEVICE void load_a_steps(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Rows& rows, int small,
                                 const float* scale) {
    auto& smem = tile_smem<T>();
    int mine = pair_member();
    bool scaled = Shape<T>::a_scaled(tile.gemm);
    uint32_t scale_bytes = small * small_box_rows * sizeof(float);
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < tile.slots; ++i, ring.advance()) {
        SlotSteps<T> steps(ctx.args, tile, i);
        uint8_t* to = smem.slots[ring.slot()].a + mine * box_bytes;
        uint64_t* full = &smem.pipeline.full[ring.slot()];
        ring.acquire(ctx.mem, smem.pipeline);
        ring.commit(ctx.mem, smem.pipeline,
                    steps.num * (small * small_box_bytes + (scaled ? scale_bytes : 0)));
        if (mine < steps.num) load_small(to, full, steps.first + mine, rows, {small}, true);
        MEGAMOE_UNROLL_BY(1)
        for (int s = 0; s < steps.num && scaled; ++s) {
            arch::bulk_load(smem.a_scale[ring.slot()] + s * warpgroup_rows,
                            scale + int64_t{steps.first + s} * ctx.args.pool_rows, scale_bytes, full);
        }
    }
}

// Packed weights, `per_slot` steps of K in each slot, and their scales, which each CTA loads for itself.
template <class T, int per_slot, bool both, class Weights, class Scales>
MEGAMOE_DEVICE void load_packed(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Sharing<both> sharing,
                                Weights& weights, const Scales& scales) {
    using Packed = PackedHalf<typename T::Gemm1::A, typename T::Gemm1::B>;
    auto& smem = tile_smem<T>();
    int steps = Shape<T>::k_slots(ctx.args, tile.gemm);
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < tile.slots; ++i, ring.advance()) {
        auto& slot = smem.slots[ring.slot()];
        uint64_t* full = &smem.pipeline.full[ring.slot()];
        int first = i * per_slot, num = per_slot == 1 ? 1 : min_of(per_slot, steps - first);
        ring.acquire(ctx.mem, smem.pipeline);
        ring.commit(ctx.mem, smem.pipeline, 2 * num * (Packed::num_bytes + Packed::scale_bytes));
        auto load_step = [&](int s) {
            if (both) {
                weights.load(slot.b[sharing.mine] + s * Packed::num_bytes, full, first + s, sharing.mine,
                             true);
            } else {
                weights.load(slot.b[0] + s * Packed::num_bytes, full, first + s, 0, false);
                weights.load(slot.b[1] + s * Packed::num_bytes, full, first + s, 1, false);
            }
            scales.template load<Packed>(slot.scales + Packed::scale_offset(s, 0), full, first + s);
        };
        load_step(0);
        if (per_slot == 2 && num == 2) load_step(1);
    }
}

template <class T, class Weights, class Scales>
MEGAMOE_DEVICE void load_packed_b(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Weights& weights,
                                  Scales& scales) {
    bool both = tile.shared == Shared::b;
    if (slot_steps<T>(tile) > 1) {
        load_packed<T, 2>(ctx, ring, tile, Sharing<false>{}, weights, scales);
    } else if (!has_panels<T>() || is_wide<T>(tile)) {
        of_sharing(both, [&](auto sharing) { load_packed<T, 1>(ctx, ring, tile, sharing, weights, scales); });
    } else if constexpr (T::Tiling::Forms::panels) {
        PanelRows<T> panel(ctx, tile);
        of_sharing(both, [&](auto sharing) {
            load_weights<T>(ctx, ring, tile, sharing, panel, scales, T::Gemm1::A::scaled);
        });
    }
}

}  // namespace megamoe
