// load_a and load_b: one thread each, which fills the pipeline's slots by TMA. load_b waits for no row of x,
// so weights stream from the first tile on. It waits for weights that other warps expand (gemm/forms.cuh), in
// meetings, and before weight gradients. The ring positions live across passes, like the barriers' phases.
//
// If a pair of CTAs shares an operand, each CTA loads one half of it into both. Both walk the same units. A
// slot is refilled only after the math warps of both have released it. So bytes of the partner can reach a
// full barrier before this CTA's own expect_tx, but never in another phase.
//
// load_b also tells the math warps which tile begins, so they need no tables and no registers for that. A
// slot without data, with an invalid tile, ends the pass.
#pragma once
#include "megamoe/gemm/load_slots.cuh"
#include "megamoe/gemm/tiles.cuh"

namespace megamoe {

// Passes on a slot without data, for those who have to keep in step.
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
        if constexpr (T::WeightTiles::beside_rows) {
            if (!is_weight_gradient(tile.gemm) || awaited_) return;
            awaited_ = true;
            GradsReady::await(ctx.mem, own<T>(ctx.args).grads_ready,
                              num_ctas(ctx) * (1 + num_transport_warps), tile.expert());
        }
    }

  private:
    bool awaited_ = false;
};

template <class T>
MEGAMOE_DEVICE void load_a(Context& ctx, PipelineRing<T>& ring, TileRing& scheduled) {
    using A = RowsOperand<T>;
    const Args& args = ctx.args;
    auto& smem = tile_smem<T>();
    Tiles<T> tiles(ctx, scheduled);
    Gradients<T> gradients;
    for (Tile tile = tiles.next(); tile.valid(); tile = tiles.next()) {
        Profile<T>::begin_tile(ctx.smem);
        Profile<T>::timed(
            ctx.smem, tile.gemm == GemmId::gemm2 ? Mark::h_wait : Mark::rows_wait, [] { return true; },
            [&] {
                A::ready(ctx, tile);
                gradients.await(ctx, tile);
            });
        Profile<T>::mark(ctx.smem, TileMark::rows_seen);
        A rows(ctx, tile);
        const float* scale = rows.scales(args, tile);
        int small = A::small_boxes(tile);
        bool both = tile.shared == Shared::a;
        if (Forms<T>::slot_steps(tile) > 1) {
            if constexpr (Forms<T>::is_packed) Forms<T>::load_a(ctx, ring, tile, rows, small, scale);
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

// Loads what the epilogue of the tile reads, in slots behind those of K.
template <class T>
MEGAMOE_DEVICE void load_inputs(Context& ctx, PipelineRing<T>& ring, const Tile& tile) {
    of_gemm<T>(tile.gemm, [&](auto gemm) {
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

// Before a tile, the pairs that share an operand begin to load it together. load_a does not meet, since it
// may wait for rows: a pair that has none yet must not hold up the others.
MEGAMOE_DEVICE void keep_in_step(Context& ctx, PlacedMeeting meeting, int slots) {
    volatile int32_t& patience = ctx.smem.meet.patience;
    uint32_t* came = ctx.args.meet.came + meeting.cell();
    if (patience <= 0) {
        InStep::pass_by(ctx.mem, came);
        return;
    }
    uint32_t cycles = static_cast<uint32_t>(slots * ctx.args.meet.cycles);
    bool met = InStep::come(ctx.mem, came, meeting.pairs(), cycles);
    patience = InStep::patience_behind(patience, met);
}

template <class T>
MEGAMOE_DEVICE void load_b(Context& ctx, PipelineRing<T>& ring, TileRing& scheduled) {
    using B = WeightsOperand<T>;
    using W = typename T::Gemm1::B;
    using Scales = typename W::Scales;
    static_assert(same<Scales, typename T::Gemm2::B::Scales>, "both GEMMs' weights have one format");
    auto& smem = tile_smem<T>();
    // This comes after the plan's barriers, where other CTAs' TMA stores of pre-activations in the phase
    // before are complete.
    if constexpr (T::WeightTiles::beside_rows) ctx.mem.fence_proxy_async();
    Tiles<T> tiles(ctx, scheduled);
    Gradients<T> gradients;
    // In this form ptxas sees that one thread's loop does not diverge, and has coordinates in uniform
    // registers.
    PlacedMeeting meeting;
    if constexpr (can_meet<T>) ctx.smem.meet.patience = InStep::patience;
    for (Tile tile = tiles.next(meeting);; tile = tiles.next(meeting)) {
        ring.acquire(ctx.mem, smem.pipeline);
        smem.tile[ring.slot()] = tile;
        if (!tile.valid()) break;
        Profile<T>::begin_tile(ctx.smem);
        Profile<T>::mark(ctx.smem, tile);
        if constexpr (can_meet<T>) {
            if (meeting.any()) keep_in_step(ctx, meeting, tile.slots);
        }
        if (tile.absent()) {
            MEGAMOE_UNROLL_BY(1)
            for (int i = 0; i < tile.slots + tile.inputs; ++i) pass_slot<T>(ctx, ring);
            continue;
        }
        gradients.await(ctx, tile);
        Profile<T>::mark(ctx.smem, TileMark::asked);
        B weights(ctx, tile);
        if constexpr (Forms<T>::in_rooms) {
            if (!is_weight_gradient(tile.gemm)) weights.expert = Forms<T>::place_of(ctx, tile);
        }
        bool scaled = Shape<T>::b_scaled(tile.gemm);  // a weight gradient's bf16 B is not
        Scales scales = weights.template scales<Scales>(ctx.args, tile);
        if constexpr (Forms<T>::is_packed) {
            Forms<T>::load_b(ctx, ring, tile, weights, scales);
            continue;
        }
        bool both = tile.shared == Shared::b;
        of_sharing(both,
                   [&](auto sharing) { load_weights<T>(ctx, ring, tile, sharing, weights, scales, scaled); });
        load_inputs<T>(ctx, ring, tile);
    }
    pass_slot<T>(ctx, ring);
}

}  // namespace megamoe
