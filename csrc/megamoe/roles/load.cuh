// load_a and load_b: one thread each, filling the pipeline's slots by TMA. load_b waits for no row of x, so
// weights stream from the first tile on; for panels it does, and before weight gradients. The ring positions
// live across passes, like the barriers' phases.
//
// Of the operand that a pair of CTAs shares, either CTA loads one half into both. Both walk the same units,
// and a slot is refilled only when the math warps of both have released it; so bytes of the partner can reach
// a full barrier before this CTA's own expect_tx, but never in another phase.
//
// load_b also tells the math warps which tile begins, so that they need neither tables nor registers for
// that; a slot without data and with a tile that is not valid ends the pass.
#pragma once
#include "megamoe/cta/tiles.h"
#include "megamoe/formats/fp4.cuh"
#include "megamoe/gemm/operands_expanded.h"

namespace megamoe {

// A slot without data, for whoever has to keep in step.
template <class T>
MEGAMOE_DEVICE void pass_slot(Context& ctx, PipelineRing<T>& ring) {
    ring.acquire(ctx.mem, tile_smem<T>().pipeline);
    ring.commit(ctx.mem, tile_smem<T>().pipeline);
    ring.advance();
}

// A tile of weight gradients waits for all of the pass's gemm1 and x rows, once. After an abort they may be
// missing: then lose_gradients() makes NaN of what comes out.
template <class T>
class Gradients {
  public:
    MEGAMOE_DEVICE void await(Context& ctx, const Tile& tile) {
        if constexpr (T::direction == Direction::backward) {
            if (!is_weight_gradient(tile.stage) || awaited_) return;
            awaited_ = true;
            GradsReady::await(ctx.mem, ctx.args.training.grads_ready,
                              num_ctas(ctx) * (1 + num_transport_warps), tile.expert());
        }
    }

  private:
    bool awaited_ = false;
};

// The loops over a tile's slots. Between the moment at which a slot is free and its last copy's issue nothing
// stands that can be known before: a slot's round trip is some 2800 clk, three are under way, and what a
// loader takes comes on top. So there is a loop for an operand that the pair shares and one for an operand of
// its own, and who this CTA is is asked once a tile.
template <bool both>
struct Sharing {
    int half = pair_member();  // that this CTA loads for both
};
template <class F>
MEGAMOE_DEVICE void of_sharing(bool both, F f) {
    if (both) {
        f(Sharing<true>{});
    } else {
        f(Sharing<false>{});
    }
}

// Every `stride`-th of so many small boxes.
template <class Rows>
MEGAMOE_DEVICE void load_small(uint8_t* to, uint64_t* full, int step, Rows& rows, int small, int first,
                               int stride, bool both) {
    MEGAMOE_UNROLL_BY(1)
    for (int box = first; box < small; box += stride)
        rows.load_small(to + box * small_box_bytes, full, step, box, both);
}

// A slot has a step of K: A's `small` boxes, or one of 64 rows or two. Of those that both CTAs need, each
// loads every second into both.
template <class T, bool is_small, bool both, class Rows>
MEGAMOE_DEVICE void load_a_slots(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Sharing<both> sharing,
                                 Rows& rows, int small, const float* scale) {
    auto& smem = tile_smem<T>();
    bool tall = tile.rows() > group_rows;  // a short block has one box of 64 rows
    bool scaled = Shape<T>::a_scaled(tile.stage);
    uint32_t scale_bytes = is_small ? small * small_box_rows * sizeof(float) : sizeof(smem.a_scale[0]);
    uint32_t bytes =
        (is_small ? small * small_box_bytes : (tall ? 2 : 1) * box_bytes) + (scaled ? scale_bytes : 0);
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < tile.slots; ++i, ring.advance()) {
        uint8_t* to = smem.slots[ring.slot()].a;
        uint64_t* full = &smem.pipeline.full[ring.slot()];
        ring.acquire(ctx.mem, smem.pipeline);
        ring.commit(ctx.mem, smem.pipeline, bytes);
        if constexpr (is_small) {
            load_small(to, full, i, rows, small, both ? sharing.half : 0, both ? pair_ctas : 1, both);
        } else if (both) {
            if (sharing.half == 0 || tall)
                rows.load(to + sharing.half * box_bytes, full, i, sharing.half, true);
        } else {
            rows.load(to, full, i, 0, false);
            if (tall) rows.load(to + box_bytes, full, i, 1, false);
        }
        if (scaled)
            arch::bulk_load(smem.a_scale[ring.slot()], scale + int64_t{i} * ctx.args.pool_rows, scale_bytes,
                            full);
    }
}

// A slot has two steps: a short tile's, which shares A, so that either CTA loads a step for both.
template <class T, class Rows>
MEGAMOE_DEVICE void load_a_steps(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Rows& rows, int small,
                                 const float* scale) {
    auto& smem = tile_smem<T>();
    int mine = pair_member();
    bool scaled = Shape<T>::a_scaled(tile.stage);
    uint32_t scale_bytes = small * small_box_rows * sizeof(float);
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < tile.slots; ++i, ring.advance()) {
        SlotSteps<T> steps(ctx.args, tile, i);
        uint8_t* to = smem.slots[ring.slot()].a + mine * box_bytes;
        uint64_t* full = &smem.pipeline.full[ring.slot()];
        ring.acquire(ctx.mem, smem.pipeline);
        ring.commit(ctx.mem, smem.pipeline,
                    steps.num * (small * small_box_bytes + (scaled ? scale_bytes : 0)));
        if (mine < steps.num) load_small(to, full, steps.first + mine, rows, small, 0, 1, true);
        MEGAMOE_UNROLL_BY(1)
        for (int s = 0; s < steps.num && scaled; ++s) {
            arch::bulk_load(smem.a_scale[ring.slot()] + s * group_rows,
                            scale + int64_t{steps.first + s} * ctx.args.pool_rows, scale_bytes, full);
        }
    }
}

template <class T>
MEGAMOE_DEVICE void load_a(Context& ctx, PipelineRing<T>& ring, DealRing& dealt) {
    using A = typename T::template RowsOf<T>;
    const Args& args = ctx.args;
    auto& smem = tile_smem<T>();
    Tiles<T> tiles(ctx, dealt);
    Gradients<T> gradients;
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        Profile<T>::timed(
            ctx.smem, tile.stage == Stage::gemm2 ? Mark::h_wait : Mark::rows_wait, [] { return true; },
            [&] {
                A::ready(ctx, tile);
                gradients.await(ctx, tile);
            });
        A rows(ctx, tile);
        const float* scale = gemm_of(args, tile.stage).a_scale + scale_row0<T>(tile);
        int small = A::small_boxes(tile);
        bool both = tile.shared == Shared::a;
        if (slot_steps<T>(tile) > 1) {
            load_a_steps<T>(ctx, ring, tile, rows, small, scale);
        } else if (small != 0) {
            of_sharing(both, [&](auto sharing) {
                load_a_slots<T, true>(ctx, ring, tile, sharing, rows, small, scale);
            });
        } else {
            of_sharing(both, [&](auto sharing) {
                load_a_slots<T, false>(ctx, ring, tile, sharing, rows, 0, scale);
            });
        }
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < tile.inputs; ++i) pass_slot<T>(ctx, ring);  // load_b fills them
    }
    pass_slot<T>(ctx, ring);
}

// What the epilogue of the tile reads, in slots behind those of K.
template <class T>
MEGAMOE_DEVICE void load_inputs(Context& ctx, PipelineRing<T>& ring, const Tile& tile) {
    of_stage<T>(tile.stage, [&](auto gemm) {
        using E = typename decltype(gemm)::Epilogue;
        if constexpr (E::inputs != 0) {
            auto& smem = tile_smem<T>();
            MEGAMOE_UNROLL_BY(1)
            for (int i = 0; i < tile.inputs; ++i, ring.advance()) {
                ring.acquire(ctx.mem, smem.pipeline);
                ring.commit(ctx.mem, smem.pipeline, E::input_bytes(tile));
                E::template load_input<T>(ctx, tile, i, smem.slots[ring.slot()],
                                          &smem.pipeline.full[ring.slot()]);
            }
        }
    });
}

// Packed weights, `per_slot` steps of K in each slot, and their scales, which each CTA loads for itself.
template <class T, int per_slot, bool both, class Weights, class Scales>
MEGAMOE_DEVICE void load_packed(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Sharing<both> sharing,
                                Weights& weights, const Scales& scales) {
    using Packed = PackedHalf<typename T::Gemm1::A, typename T::Gemm1::B>;
    auto& smem = tile_smem<T>();
    int steps = Shape<T>::k_slots(ctx.args, tile.stage);
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < tile.slots; ++i, ring.advance()) {
        auto& slot = smem.slots[ring.slot()];
        uint64_t* full = &smem.pipeline.full[ring.slot()];
        int first = i * per_slot, num = per_slot == 1 ? 1 : min_of(per_slot, steps - first);
        ring.acquire(ctx.mem, smem.pipeline);
        ring.commit(ctx.mem, smem.pipeline, 2 * num * (Packed::num_bytes + Packed::scale_bytes));
        auto load_step = [&](int s) {
            if (both) {
                weights.load(slot.b[sharing.half] + s * Packed::num_bytes, full, first + s, sharing.half,
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

// A tile's weights as MMAs take them.
template <class T, bool both, class Weights, class Scales>
MEGAMOE_DEVICE void load_weights(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Sharing<both> sharing,
                                 Weights& weights, Scales& scales, bool scaled) {
    auto& smem = tile_smem<T>();
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < tile.slots; ++i, ring.advance()) {
        if (scaled) scales.fetch();  // in flight while this thread waits for the slot
        auto& b = smem.slots[ring.slot()].b;
        uint64_t* full = &smem.pipeline.full[ring.slot()];
        ring.acquire(ctx.mem, smem.pipeline);
        ring.expect(ctx.mem, smem.pipeline, sizeof(b));
        if (both) {
            weights.load(b[sharing.half], full, i, sharing.half, true);
        } else {
            weights.load(b[0], full, i, 0, false);
            weights.load(b[1], full, i, 1, false);
        }
        if (scaled) scales.put(smem.b_scale[ring.slot()]);
        ring.commit(ctx.mem, smem.pipeline);  // the scales too, and the tile
    }
}

template <class T>
MEGAMOE_DEVICE void load_b(Context& ctx, PipelineRing<T>& ring, DealRing& dealt) {
    using B = typename T::template WeightsOf<T>;
    using W = typename T::Gemm1::B;
    using Scales = typename W::Scales;
    static_assert(same<Scales, typename T::Gemm2::B::Scales>, "both GEMMs' weights have one format");
    auto& smem = tile_smem<T>();
    // Behind the plan's barriers: other CTAs' TMA stores of pre-activations in the phase before are complete.
    if constexpr (T::direction == Direction::backward) ctx.mem.fence_proxy_async();
    Tiles<T> tiles(ctx, dealt);
    Gradients<T> gradients;
    // In this form ptxas sees that one thread's loop does not diverge, and has coordinates in uniform
    // registers.
    for (Tile tile = tiles.next();; tile = tiles.next()) {
        ring.acquire(ctx.mem, smem.pipeline);
        smem.tile[ring.slot()] = tile;
        if (!tile.valid()) break;
        if (tile.absent()) {
            MEGAMOE_UNROLL_BY(1)
            for (int i = 0; i < tile.slots + tile.inputs; ++i) pass_slot<T>(ctx, ring);
            continue;
        }
        gradients.await(ctx, tile);
        B weights(ctx, tile);
        bool scaled = Shape<T>::b_scaled(tile.stage);  // a weight gradient's B is not
        Scales scales(b_scale_of<T>(ctx.args, tile.stage), gemm_of(ctx.args, tile.stage).n,
                      Shape<T>::scale_columns(ctx.args, tile.stage, scale_group), tile.expert(),
                      weights.halves);
        bool both = tile.shared == Shared::b;
        if constexpr (W::expanded) {
            if (slot_steps<T>(tile) > 1) {
                load_packed<T, 2>(ctx, ring, tile, Sharing<false>{}, weights, scales);
            } else if (!has_panels<T>() || is_wide<T>(tile)) {
                of_sharing(both, [&](auto sharing) {
                    load_packed<T, 1>(ctx, ring, tile, sharing, weights, scales);
                });
            } else if constexpr (T::Tiling::panels) {
                PanelRows<T> panel(ctx, tile);
                of_sharing(both, [&](auto sharing) {
                    load_weights<T>(ctx, ring, tile, sharing, panel, scales, T::Gemm1::A::scaled);
                });
            }
            continue;
        }
        of_sharing(both,
                   [&](auto sharing) { load_weights<T>(ctx, ring, tile, sharing, weights, scales, scaled); });
        load_inputs<T>(ctx, ring, tile);
    }
    pass_slot<T>(ctx, ring);
}

}  // namespace megamoe
