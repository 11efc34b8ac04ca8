// How many rows of the pool, or of the rank's own tokens, a warp takes at a time.
#pragma once
#include "megamoe/gemm/operands.cuh"

namespace megamoe {

// Rows that a warp takes at a time: few, so that the first blocks are complete first; one where tokens are
// fewer than warps. A token has one leader and one closer, which alone are work, and these stand together.
// Affects timing only.
constexpr int max_batch_rows = 4;
MEGAMOE_DEVICE int rows_per_batch(const Context& ctx, int num_rows) {
    return num_rows < num_transports(ctx) * max_of(ctx.args.top_k, max_batch_rows) ? 1 : max_batch_rows;
}

template <class X>
MEGAMOE_DEVICE int vectors_of_row(const Args& args) {
    return X::row_bytes(args.hidden) / static_cast<int>(sizeof(uint4_t));
}

// Slices of a row that is dispatched: what a warp has in flight at once, where there are enough warps. Each
// rank cuts them for itself, as it does rows_ready, which counts them.
constexpr int pulls_in_flight = 4;  // vectors of a lane
template <class T>
MEGAMOE_DEVICE Slices pull_slices(const Context& ctx, Phase phase) {
    int vectors = vectors_of_row<typename T::Gemm1::A>(ctx.args);
    int most = num_transports(ctx) / max_of(1, ctx.smem.num_tokens);
    // <dy, b2> is of a whole row; restore moves whole rows, and reads again what its warp has pulled in e4m3.
    if constexpr (T::Pool::restored) {
        bool rereads = T::Gemm1::A::scaled && gemm_of<T>(ctx.args, GemmId::dw2).m != 0;
        if (own<T>(ctx.args).b2 != nullptr || rereads || phase == Phase::recompute) most = 1;
    }
    return slices_of(vectors, pulls_in_flight * 32, most);
}

// The flag at `home` which says that expert rank `rank`'s slice of a token's partial is there.
MEGAMOE_DEVICE uint32_t* ready_cell(const Context& ctx, int home, int rank, int token, int slice) {
    return ctx.window<uint32_t>(home, ctx.args.window_ready) + int64_t{rank} * ctx.args.ready_cells +
           token * ctx.smem.sum_slices.count + slice;
}

// Work of reduce and combine is distributed to CTAs in batches, round robin; a CTA's movers take its batches
// as they come. Which warp does a sum changes no bit of it.
MEGAMOE_DEVICE int next_batch(const Context& ctx, int32_t* taken) {
    int n = arch::lane_idx() == 0 ? arch::take_ticket(taken) : 0;
    return arch::shfl(n, 0) * num_ctas(ctx) + cta_idx(ctx);
}

}  // namespace megamoe
