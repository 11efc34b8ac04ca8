// How much of the pool, or of the rank's own tokens, a warp takes at a time.
#pragma once
#include "megamoe/cta/context.h"

namespace megamoe {

// Rows that a warp takes at a time: few, so that the first blocks are complete first; fewer yet when there
// are not many rows, so that every warp has some. Affects timing only.
MEGAMOE_DEVICE int rows_per_share(const Context& ctx, int block_rows) {
    int rows = 4;
    while (rows > 1 && ctx.smem.plan.num_blocks * block_rows < rows * num_transports(ctx)) rows /= 2;
    return rows;
}

// Work of reduce and combine is dealt out to CTAs in shares, round robin; a CTA's movers take its shares as
// they come. Which warp does a sum changes no bit of it.
MEGAMOE_DEVICE int next_share(const Context& ctx, int32_t* taken) {
    int n = arch::lane_idx() == 0 ? arch::take_ticket(taken) : 0;
    return arch::shfl(n, 0) * num_ctas(ctx) + cta_idx(ctx);
}

}  // namespace megamoe
