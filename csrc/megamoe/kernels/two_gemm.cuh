// The persistent kernel: two GEMMs, with rows moved before, between and after them. One CTA per SM, 16 warps,
// each with its role. docs/architecture.md has the picture. A layer is a type with
//
//   a kind of launch     its policies (kernels/kinds.cuh)
//   Tiling               shape of its tiles (schedule/tile_shape.h)
//   Gemm1, Gemm2         GemmOf<rows, weights, epilogue>; backward also has WeightGemm and RecomputeGemm
//   profile              True: with timestamps
#pragma once
#include "megamoe/kernels/cta.cuh"
#include "megamoe/kernels/kinds.cuh"
#include "megamoe/roles/load.cuh"
#include "megamoe/roles/math.cuh"
#include "megamoe/roles/movers.cuh"
#include "megamoe/roles/scheduler.cuh"
#include "megamoe/roles/store.cuh"
#include "megamoe/rows/plan.cuh"
#include "megamoe/rows/route.cuh"
#include "megamoe/rows/stage.cuh"

namespace megamoe {

// 65536 registers / 128 threads = 512 a thread of each of the four warpgroups: the transport warps have what
// the loaders and the math warps leave. Backward's loaders have the most operands to tell apart.
template <class T>
constexpr int load_registers = T::WeightTiles::beside_rows ? 40 : 32;
template <class T>
constexpr int transport_registers = 512 - load_registers<T> - 2 * math_registers<T>;

// Runs `body` once a pass, between the cluster barriers that frame it, which mover_passes() meets too. Called
// by converged warps.
template <class Body>
MEGAMOE_DEVICE void each_pass(Context& ctx, Body body) {
    for (;;) {
        arch::cluster_sync();  // the plan is made
        body();
        arch::warp_sync();
        if (ctx.smem.plan.is_last != 0) break;
        arch::cluster_sync();  // no role touches the pool any more
    }
}

// The math warps' passes. After them they are movers of the last pass, with the registers of transport.
template <class T>
MEGAMOE_DEVICE void math_passes(Context& ctx) {
    arch::registers_grow<math_registers<T>>();
    PipelineRing<T> ring;
    OutputRing<T> output;
    each_pass(ctx, [&] { math<T>(ctx, ring, output); });
    arch::registers_shrink<transport_registers<T>>();
    Profile<T>::mark(ctx.args, Mark::math_done);
}

// The movers' passes: all of them for the transport warps, which also make the plans, and the last one for
// the math warps.
template <class T>
MEGAMOE_DEVICE void mover_passes(Context& ctx) {
    MEGAMOE_UNROLL_BY(1)
    for (PassStart start = first_pass;;) {
        if (arch::warp_idx() < first_math_warp) {
            plan_pass<T>(ctx, start);
            Profile<T>::mark(ctx.args, Mark::planned);
            arch::warp_sync();
            arch::cluster_sync();
            T::Pool::template fill<T>(ctx);
            Profile<T>::mark(ctx.args, Mark::dispatched);
        }
        if (ctx.smem.plan.phase == Phase::data) reduce_and_combine<T>(ctx);
        arch::warp_sync();
        if (ctx.smem.plan.is_last != 0) break;
        // Read before the barrier: behind it, in a poisoned launch, the partner may already write the next
        // plan here.
        start = pass_after<T>(ctx.smem.plan);
        arch::cluster_sync();
    }
    Profile<T>::mark(ctx.args, Mark::combined);
}

// In a poisoned launch the last thread to leave makes every weight gradient NaN, when the stores of all
// others are complete. A loader that gave up saw the abort before it loaded, and so before this thread looked
// for it: no garbage stays. This is cold code, and slow.
template <class T>
MEGAMOE_DEVICE void lose_gradients(Context& ctx) {
    using E = typename T::WeightGemm::Epilogue;
    auto* slot = reinterpret_cast<uint4_t*>(tile_smem<T>().output[0][0]);  // all slots are free again
    constexpr uint32_t nan = 0x7fc07fc0;                                   // of two bf16, and of fp32
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < box_bytes / static_cast<int>(sizeof(uint4_t)); ++i) slot[i] = {nan, nan, nan, nan};
    ctx.mem.fence_proxy_async();
    int units = num_weight_units(ctx.args.num_local_experts, weight_matrix<T>(ctx.args, GemmId::dw13),
                                 weight_matrix<T>(ctx.args, GemmId::dw2));
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < pair_ctas * units; ++i) {
        Tile tile;
        if (!weight_tile<T>(ctx, i / pair_ctas, i % pair_ctas, false, &tile) || tile.absent()) continue;
        MEGAMOE_UNROLL_BY(1)
        for (int c = 0; c < E::template slots<T>(ctx.args); ++c) {
            Destination to = E::template output<T>(ctx, tile, c);
            for (int row = 0; row < T::Tiling::rows && to.column < to.width; row += warpgroup_rows)
                E::template store<T>(ctx, tile, to, row, slot, false);
        }
        BiasGradient<T>::lose(ctx, tile);
    }
    arch::bulk_commit();
    ctx.mem.async_complete();
}

// The same for y where reduce writes it, token by token: which sums are missing is not known.
template <class T>
MEGAMOE_DEVICE void lose_y(const Context& ctx) {
    auto* y = static_cast<uint4_t*>(ctx.args.rows_out);
    int64_t vectors = int64_t{own_tokens<T>(ctx.args)} * (ctx.args.hidden / sum_vector);
    MEGAMOE_UNROLL_BY(1)
    for (int64_t v = 0; v < vectors; ++v) arch::store_vec(y + v, {~0u, ~0u, ~0u, ~0u});
}

// The last thread to leave a poisoned launch tells all ranks.
MEGAMOE_DEVICE void give_up(Context& ctx) {
    // If there is no record yet, a fault of a peer ended this launch.
    ctx.mem.fault(Wait{Edge::peer_abort, max_ranks, 0}, 0, 0);
    for (int peer = 0; peer < ctx.args.num_ranks; ++peer) ctx.mem.raise_abort(peer);
}

// The launch ends when its last CTA leaves, whether it took part or not; only then does the epoch advance. A
// CTA stays until its partner has sent it the last arrival on its barriers.
template <class T>
MEGAMOE_DEVICE void leave(Context& ctx) {
    constexpr int leaving_thread = first_transport_warp * 32;  // it has the registers for what may follow
    arch::cluster_sync();
    if (arch::thread_idx() == leaving_thread &&
        LastArrival::arrive(ctx.mem, ctx.args.exit_ticket, arch::grid_dim())) {
        if (ctx.mem.aborted()) {
            give_up(ctx);
            if constexpr (T::WeightTiles::any) lose_gradients<T>(ctx);
            if (sums_into_y<T>(ctx.args)) lose_y<T>(ctx);
        } else {
            T::State::template complete<T>(ctx);
        }
        ctx.mem.store(ctx.args.joined, 0, Order::relaxed, Scope::gpu);
        ctx.mem.store(ctx.args.epoch, ctx.epoch(), Order::release, Scope::gpu);
    }
}

// One thread of a warp, whose rings live across the passes.
template <class Ring, class Body>
MEGAMOE_DEVICE void thread_passes(Context& ctx, Body body) {
    Ring ring;
    TileRing scheduled;
    each_pass(ctx, [&] {
        if (arch::lane_idx() == 0) body(ring, scheduled);
    });
}

// Who does what: every warp is here once, in the order of cta/warps.h.
template <class T>
MEGAMOE_DEVICE void run_role(Context& ctx, int warp) {
    if (warp >= first_transport_warp) {
        if (warp >= first_math_warp) {
            math_passes<T>(ctx);
        } else {
            arch::registers_shrink<transport_registers<T>>();
        }
        mover_passes<T>(ctx);
        return;
    }
    arch::registers_shrink<load_registers<T>>();
    if (warp == load_a_role.first_warp) {
        thread_passes<PipelineRing<T>>(ctx,
                                       [&](auto& ring, auto& scheduled) { load_a<T>(ctx, ring, scheduled); });
    } else if (warp == load_b_role.first_warp) {
        thread_passes<PipelineRing<T>>(ctx,
                                       [&](auto& ring, auto& scheduled) { load_b<T>(ctx, ring, scheduled); });
    } else if (warp == store_role.first_warp) {
        thread_passes<OutputRing<T>>(ctx,
                                     [&](auto& ring, auto& scheduled) { store<T>(ctx, ring, scheduled); });
    } else {
        thread_passes<TileRing>(ctx, [&](auto& ring, auto&) { schedule<T>(ctx, ring); });
    }
}

// For the door, of every rank of the launch, this one too.
struct Peers {
    const Context& ctx;
    MEGAMOE_DEVICE int count() const { return ctx.args.num_ranks; }
    MEGAMOE_DEVICE uint32_t patience_ns() const { return ctx.args.peers_ns; }
    MEGAMOE_DEVICE uint32_t* to(int peer) const { return &route_cell(ctx, peer, ctx.args.rank)->launched; }
    MEGAMOE_DEVICE uint32_t* from(int peer) const { return &route_cell(ctx, ctx.args.rank, peer)->launched; }
};

// All threads, behind init_barriers(). Says which of the launch's CTAs this one is, and of how many.
MEGAMOE_DEVICE void join(Context& ctx) {
    const Args& args = ctx.args;
    if (args.join_ns == 0) return;
    if (arch::thread_idx() == 0 && pair_member() == 0) {
        Door::Place pair = Door::enter(ctx.mem, args.joined, args.members, ctx.epoch(),
                                       arch::grid_dim() / pair_ctas, args.join_ns, Peers{ctx});
        for (int member = 0; member < pair_ctas; ++member) {
            *arch::in_member(&ctx.smem.cta, member) = pair.number * pair_ctas + member;
            *arch::in_member(&ctx.smem.num_ctas, member) = pair.count * pair_ctas;
        }
    }
    arch::warp_sync();
    arch::cluster_sync();
}

MEGAMOE_DEVICE void begin_launch(const Context& ctx) {
    arch::wait_for_previous_grid();
    if (arch::thread_idx() != 0) return;
    ctx.smem.epoch = ctx.mem.load(ctx.args.epoch, Order::relaxed, Scope::gpu) + 1;
    ctx.smem.cta = arch::block_idx();
    ctx.smem.num_ctas = arch::grid_dim();
}

template <class T>
MEGAMOE_DEVICE void two_gemm(const Args& args) {
    Smem& smem = cta_smem<T>().common;
    Context ctx{args, smem, cta_smem<T>().routing, Memory(args)};
    begin_launch(ctx);
    if (arch::thread_idx() == 0) T::State::template invalidate<T>(args);
    init_barriers<T>();
    Profile<T>::begin(args, smem);
    join(ctx);
    if (num_ctas(ctx) != 0) {
        if (arch::warp_idx() >= first_math_warp) {
            stage<T>(ctx);
            Profile<T>::mark(args, Mark::staged);
        } else {
            route<T>(ctx);
            Profile<T>::mark(args, Mark::routed);
        }
        arch::warp_sync();  // setmaxnreg and the cluster barrier are for converged warps
        run_role<T>(ctx, arch::warp_idx());
    }
    leave<T>(ctx);
    Profile<T>::end(args, smem);
}

}  // namespace megamoe
