// The loops over a tile's pipeline slots that load_a and load_b run.
#pragma once
#include "megamoe/gemm/operands.cuh"

namespace megamoe {

// Between the moment at which a slot becomes free and the issue of its last copy, a loader does nothing that
// it could have done before: a slot's round trip is some 2800 clk, three are under way, and a loader's own
// time comes on top. So there are two loops, for an operand that the pair shares and for one of the CTA's
// own, and which CTA this is is asked once a tile.
template <bool both>
struct Sharing {
    int mine = pair_member();  // the box or half that this CTA loads for both
};
template <class F>
MEGAMOE_DEVICE void of_sharing(bool both, F f) {
    if (both) {
        f(Sharing<true>{});
    } else {
        f(Sharing<false>{});
    }
}

// The small boxes of a tile that a loader loads, up to `end`: every second one where the pair shares them.
struct SmallBoxes {
    int end, first = 0, stride = 1;
};
template <class Rows>
MEGAMOE_DEVICE void load_small(uint8_t* to, uint64_t* full, int step, Rows& rows, SmallBoxes boxes,
                               bool both) {
    MEGAMOE_UNROLL_BY(1)
    for (int box = boxes.first; box < boxes.end; box += boxes.stride)
        rows.load_small(to + box * small_box_bytes, full, step, box, both);
}

// A slot has a step of K: `small` boxes of A, or one or two boxes of 64 rows. Of boxes that both CTAs need,
// each CTA loads every second one into both.
template <class T, bool is_small, bool both, class Rows>
MEGAMOE_DEVICE void load_a_slots(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Sharing<both> sharing,
                                 Rows& rows, int small, const float* scale) {
    auto& smem = tile_smem<T>();
    bool tall = tile.rows() > warpgroup_rows;  // a short block has one box of 64 rows
    bool scaled = Shape<T>::a_scaled(tile.gemm);
    uint32_t scale_bytes = is_small ? small * small_box_rows * sizeof(float) : sizeof(smem.a_scale[0]);
    uint32_t bytes =
        (is_small ? small * small_box_bytes : (tall ? 2 : 1) * box_bytes) + (scaled ? scale_bytes : 0);
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < tile.slots; ++i, ring.advance()) {
        if constexpr (seeks_blocks<T>) rows.seek(ctx, tile, i);
        uint8_t* to = smem.slots[ring.slot()].a;
        uint64_t* full = &smem.pipeline.full[ring.slot()];
        ring.acquire(ctx.mem, smem.pipeline);
        ring.commit(ctx.mem, smem.pipeline, bytes);
        if constexpr (is_small) {
            load_small(to, full, i, rows, {small, both ? sharing.mine : 0, both ? pair_ctas : 1}, both);
        } else if (both) {
            if (sharing.mine == 0 || tall)
                rows.load(to + sharing.mine * box_bytes, full, i, sharing.mine, true);
        } else {
            rows.load(to, full, i, 0, false);
            if (tall) rows.load(to + box_bytes, full, i, 1, false);
        }
        if constexpr (seeks_blocks<T>) {
            arch::bulk_load(smem.a_scale[ring.slot()], rows.block_scale, scale_bytes, full);
        } else if (scaled) {
            arch::bulk_load(smem.a_scale[ring.slot()],
                            scale + int64_t{i} * Shape<T>::a_scale_stride(ctx.args, tile.gemm), scale_bytes,
                            full);
        }
    }
}

// A tile's weights as MMAs take them.
template <class T, bool both, class Weights, class Scales>
MEGAMOE_DEVICE void load_weights(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Sharing<both> sharing,
                                 Weights& weights, Scales& scales, bool scaled) {
    auto& smem = tile_smem<T>();
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < tile.slots; ++i, ring.advance()) {
        if constexpr (seeks_blocks<T>) weights.seek(ctx, tile, i, scales);
        if (scaled) scales.fetch();  // in flight while this thread waits for the slot
        auto& b = smem.slots[ring.slot()].b;
        uint64_t* full = &smem.pipeline.full[ring.slot()];
        ring.acquire(ctx.mem, smem.pipeline);
        ring.expect(ctx.mem, smem.pipeline, sizeof(b));
        if (both) {
            weights.load(b[sharing.mine], full, i, sharing.mine, true);
        } else {
            weights.load(b[0], full, i, 0, false);
            weights.load(b[1], full, i, 1, false);
        }
        if (scaled) scales.put(smem.b_scale[ring.slot()]);
        ring.commit(ctx.mem, smem.pipeline);  // the scales too, and the tile
    }
}

}  // namespace megamoe
