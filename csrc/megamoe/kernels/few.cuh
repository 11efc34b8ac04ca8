// The layer of forward.cuh for at most 64 tokens per rank, without a plan. Tiles have up to 32 rows, in the
// wide form; pairs of CTAs share nothing. rows/few.cuh explains the rows' path and what CTAs wait for.
//
//   warp 0      with several ranks: pushes ids to peers, see rows/push.cuh
//   warp 1      load_b: requests weights as soon as it knows a tile
//   warp 2      scatter: stores finished rows to memory
//   warp 3      deal: finds tiles in the ids, and in one CTA the counts for statistics()
//   warps 4-7   gather: loads rows of A into slots, then reduces
//   warps 8-15  quantize x if needed, with several ranks push it to peers; math, then reduce
#pragma once
#include "megamoe/kernels/forward.cuh"
#include "megamoe/rows/few.cuh"

namespace megamoe {

// Slots of 32 KB of weights and 4 KB of rows, or of 34 KB and 8 KB in two steps of K.
template <class S, int scale_bytes>
struct FewTiling {
    using Type = TileShape<few_block_rows, S::half_columns, 4, 2, PackedForms<scale_bytes, false>, false>;
};
template <class S>
struct FewTiling<S, 0> {
    using Type = TileShape<few_block_rows, S::half_columns, 5, 2, TallOrWide, false>;
};

template <class P, class Activation, class S>
struct FewLayer : ForwardLayer<P, Activation, S> {
    using Tiling = typename FewTiling<S, P::W::slot_scale_bytes>::Type;
    using Way = OneRank;
};

// visit(mbarrier, arrivals of a phase)
template <class T, class Visit>
MEGAMOE_DEVICE void each_few_barrier(Context& ctx, Visit visit) {
    auto& smem = tile_smem<T>();
    auto& few = T::Way::smem(ctx);
    for (int s = 0; s < T::Tiling::num_slots; ++s) {
        visit(&smem.pipeline.full[s], 2);  // load_b and a warp of gather
        visit(&smem.pipeline.empty[s].bits, math_role.num_warps);
        Forms<T>::each_barrier(s, visit);
    }
    for (int s = 0; s < T::Tiling::num_output_slots; ++s) {
        visit(&smem.outputs[0].full[s], math_role.num_warps * 32);
        visit(&smem.outputs[0].empty[s], 1);
    }
    for (int s = 0; s < num_dealt; ++s) {
        visit(&few.slots.full[s], 1);
        visit(&few.slots.empty[s], 2 + num_transport_warps);  // load_b, scatter, gather
    }
    T::Way::each_barrier(ctx, visit);
}

template <class T>
MEGAMOE_DEVICE void init_few_barriers(Context& ctx) {
    static_assert(sizeof(CtaSmem<typename T::Tiling>) <= max_smem_bytes, "more than a CTA can have");
    if (arch::thread_idx() == 0) {
        each_few_barrier<T>(ctx, arch::mbar_init);
        T::Way::init(ctx);
        arch::mbar_fence_init();
    }
    cta_sync();
}

template <class T>
MEGAMOE_DEVICE void load_few_weights(Context& ctx) {
    using Scales = typename T::Gemm1::B::Scales;
    auto& few = T::Way::smem(ctx);
    auto& smem = tile_smem<T>();
    PipelineRing<T> ring;
    DealtRing dealt;
    for (;;) {
        dealt.await(ctx.mem, few.slots);
        Tile tile = few.dealt[dealt.slot()].tile;
        dealt.release(ctx.mem, few.slots);
        dealt.advance();
        ring.acquire(ctx.mem, smem.pipeline);
        smem.tile[ring.slot()] = tile;
        if (!tile.valid()) break;
        Profile<T>::begin_tile(ctx.smem);
        Profile<T>::mark(ctx.smem, tile);
        Profile<T>::mark(ctx.smem, TileMark::asked);
        WeightsOperand<T> weights(ctx, tile);
        Scales scales = weights.template scales<Scales>(ctx.args, tile);
        if constexpr (Forms<T>::is_packed) {
            Forms<T>::load_b(ctx, ring, tile, weights, scales);
        } else {
            load_weights<T>(ctx, ring, tile, Sharing<false>{}, weights, scales, true);
        }
    }
    ring.commit(ctx.mem, smem.pipeline);
}

// All math threads' side of the output slots, each of which has a box for either warpgroup.
template <class T>
struct FewOutput {
    Context& ctx;
    OutputRing<T> ring;
    using Common = typename OutputSlots<T>::Common;
    MEGAMOE_DEVICE Common claim_common(int box) {
        auto& smem = tile_smem<T>();
        ring.acquire(ctx.mem, smem.outputs[0]);
        return {smem.output[box][ring.slot()], smem.output[1 - box][ring.slot()]};
    }
    MEGAMOE_DEVICE void hand_over_common(int) {
        ring.commit(ctx.mem, tile_smem<T>().outputs[0]);
        ring.advance();
    }
};

template <class T>
MEGAMOE_DEVICE void multiply_few(Context& ctx) {
    PipelineRing<T> ring;
    FewOutput<T> output{ctx};
    for (bool is_first = true;; is_first = false) {
        Profile<T>::mark(ctx.smem, TileMark::finished);
        await_slot<T>(ctx, ring);
        if (is_first) Profile<T>::mark(ctx.args, Mark::first_slot);
        begin_tile<T>(ring.slot());
        Tile tile = current_tile<T>();
        if (!tile.valid()) break;
        Profile<T>::begin_tile(ctx.smem);
        Profile<T>::mark(ctx.smem, TileMark::slot_seen);
        Forms<T>::run_wide(ctx, ring, output, tile);
    }
    Profile<T>::mark(ctx.args, Mark::math_done);
}

// The last CTA out leaves the counters as it has found them. In a poisoned launch y becomes NaN.
template <class T>
MEGAMOE_DEVICE void leave_few(Context& ctx) {
    const Args& args = ctx.args;
    if (arch::warp_idx() != first_transport_warp) return;
    int last = 0;
    if (arch::lane_idx() == 0)
        last = LastArrival::arrive(ctx.mem, args.exit_ticket, arch::grid_dim()) ? 1 : 0;
    if (arch::shfl(last, 0) == 0) return;
    arch::warp_sync();  // all lanes write behind what lane 0 acquired
    MEGAMOE_UNROLL_BY(1)
    for (int e = arch::lane_idx(); e < args.num_local_experts; e += 32) {
        *few_done<T>(args, GemmId::gemm1, e) = 0;
        *few_done<T>(args, GemmId::gemm2, e) = 0;
    }
    if (arch::lane_idx() != 0) return;
    if (ctx.mem.aborted()) {
        give_up(ctx);
        lose_y<T>(ctx);
    }
    ctx.mem.store(args.epoch, ctx.epoch(), Order::release, Scope::gpu);
}

// Weights that math expands need more registers than all other code.
constexpr int few_math_registers = 176, few_other_registers = (512 - 2 * few_math_registers) / 2;
template <class T, int registers>
MEGAMOE_DEVICE void take_registers() {
    if constexpr (Forms<T>::is_packed) {
        arch::warp_sync();
        if constexpr (registers == few_math_registers) {
            arch::registers_grow<registers>();
        } else {
            arch::registers_shrink<registers>();
        }
    }
}

// Returns whether a rank has too many tokens; then nothing was run.
template <class T>
MEGAMOE_DEVICE bool run_few(const Args& args) {
    Smem& smem = cta_smem<T>().common;
    Context ctx{args, smem, cta_smem<T>().routing, Memory(args)};
    begin_launch(ctx);
    Profile<T>::begin(args, smem);
    init_few_barriers<T>(ctx);
    int warp = arch::warp_idx();
    if (warp >= first_math_warp) {
        take_registers<T, few_math_registers>();
        T::Way::template stage<T>(ctx);
        multiply_few<T>(ctx);
        take_registers<T, few_other_registers>();
    } else if (take_registers<T, few_other_registers>(); warp >= first_transport_warp) {
        gather<T>(ctx);
        Profile<T>::mark(args, Mark::dispatched);
    } else if (warp == load_a_role.first_warp) {
        T::Way::template exchange<T>(ctx);
    } else if (warp == load_b_role.first_warp) {
        if (arch::lane_idx() == 0) load_few_weights<T>(ctx);
    } else if (warp == store_role.first_warp) {
        scatter<T>(ctx);
    } else if (warp == scheduler_role.first_warp) {
        deal<T>(ctx);
    }
    arch::warp_sync();
    if (warp >= first_transport_warp) {
        T::Way::template reduce<T>(ctx);
        Profile<T>::mark(args, Mark::combined);
    }
    cta_sync();
    if (T::Way::takes_ordinary(ctx)) {
        // Their memory holds rows of tiles then.
        if (arch::thread_idx() == 0)
            each_few_barrier<T>(ctx, [](uint64_t* bar, int) { arch::mbar_inval(bar); });
        cta_sync();
        return true;
    }
    leave_few<T>(ctx);
    Profile<T>::end(args, smem);
    return false;
}

template <class T>
MEGAMOE_DEVICE void few(const Args& args) {
    run_few<T>(args);
}

}  // namespace megamoe
