// The context of every role: the launch's arguments, the CTA's shared memory, and operations on flags.
#pragma once
#include "megamoe/cta/profile.cuh"
#include "megamoe/cta/smem.h"
#include "megamoe/cta/threads.cuh"
#include "megamoe/protocol/edges.h"
#include "megamoe/protocol/ring.h"
#if defined(MEGAMOE_EMULATE)
#include "megamoe/protocol/host_memory.h"
#else
#include "megamoe/protocol/ptx_memory.cuh"
#endif

namespace megamoe {

struct Context {
    const Args& args;
    Smem& smem;
    RoutingSmem& routing;
    Memory mem;

    template <class V>
    MEGAMOE_DEVICE V* window(int rank, int64_t offset) const {
        return reinterpret_cast<V*>(args.window[rank] + offset);
    }
    MEGAMOE_DEVICE uint32_t epoch() const { return smem.epoch; }
    MEGAMOE_DEVICE int parity() const { return static_cast<int>(smem.epoch & 1); }
};

// What rank `of` says of this launch, in rank `at`'s window.
MEGAMOE_DEVICE RouteCell* route_cell(const Context& ctx, int at, int of) {
    const Args& args = ctx.args;
    return ctx.window<RouteCell>(at, args.window_routes) + ctx.parity() * args.num_ranks + of;
}

// Which CTA this is of those that take part in the launch, and how many do. Volatile for the same reason as
// special registers are.
MEGAMOE_DEVICE int cta_idx(const Context& ctx) { return *static_cast<volatile int32_t*>(&ctx.smem.cta); }
MEGAMOE_DEVICE int num_ctas(const Context& ctx) {
    return *static_cast<volatile int32_t*>(&ctx.smem.num_ctas);
}
MEGAMOE_DEVICE int transport_index(const Context& ctx) {
    return cta_idx(ctx) * num_transport_warps + transport_warp();
}
MEGAMOE_DEVICE int num_transports(const Context& ctx) { return num_ctas(ctx) * num_transport_warps; }

template <class T>
MEGAMOE_DEVICE CtaSmem<typename T::Tiling>& cta_smem() {
    return *reinterpret_cast<CtaSmem<typename T::Tiling>*>(arch::dynamic_smem());
}
template <class T>
MEGAMOE_DEVICE TileSmem<typename T::Tiling>& tile_smem() {
    return cta_smem<T>().tiles;
}

// A math warp's copy of its tile: the slot that it began in may hold another before its epilogue.
template <class T>
MEGAMOE_DEVICE Tile& current_tile() {
    return tile_smem<T>().math_tile[arch::warp_idx() - first_math_warp];
}

// The argument of a layer's launch. Roles are handed the part of it that all launches have.
template <class T>
MEGAMOE_DEVICE const typename T::LaunchArgs& launch_args(const Args& args) {
    return reinterpret_cast<const typename T::LaunchArgs&>(args);
}
template <class T>
MEGAMOE_DEVICE const auto& own(const Args& args) {
    return launch_args<T>(args).own;
}
// A row of the launch's table. One of weight gradients alone has one row, or dw13's and dw2's.
template <class T>
constexpr int num_gemms = sizeof(T::LaunchArgs::gemm) / sizeof(T::LaunchArgs::gemm[0]);
template <class T>
MEGAMOE_DEVICE const auto& gemm_of(const Args& args, GemmId id) {
    const auto& gemm = launch_args<T>(args).gemm;
    if constexpr (num_gemms<T> == 1) {
        return gemm[0];
    } else if constexpr (T::num_row_gemms == 0) {
        return gemm[id == GemmId::dw2 ? 1 : 0];
    } else {
        return gemm[static_cast<int>(id)];
    }
}

MEGAMOE_DEVICE int pair_member() { return arch::block_idx() % pair_ctas; }
MEGAMOE_DEVICE int pair_idx(const Context& ctx) { return cta_idx(ctx) / pair_ctas; }
MEGAMOE_DEVICE int num_pairs(const Context& ctx) { return num_ctas(ctx) / pair_ctas; }

template <class T>
using PipelineRing = Ring<T::Tiling::num_slots>;
template <class T>
using OutputRing = Ring<T::Tiling::num_output_slots>;

// Math: the slot can be read.
template <class T>
MEGAMOE_DEVICE void await_slot(Context& ctx, PipelineRing<T> ring) {
    Profile<T>::timed(
        ctx.smem, Mark::slot_wait, [] { return arch::thread_idx() == first_math_warp * 32; },
        [&] { ring.await(ctx.mem, tile_smem<T>().pipeline); });
}

// A thread's sums of a tile, by half.
template <class T>
using Sums = float[2][T::Tiling::sums];

// Routes of an expert in the chunks [chunk_begin, chunk_end).
MEGAMOE_DEVICE int routes_between(const Args& args, int expert, int chunk_begin, int chunk_end) {
    const int32_t* row = args.chunk_prefix + int64_t{expert} * (args.max_chunks + 1);
    return row[chunk_end] - row[chunk_begin];
}

}  // namespace megamoe
