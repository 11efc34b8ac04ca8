// A copy by one crew of all CTAs, 16 bytes a thread.
#pragma once
#include "megamoe/cta/context.h"

namespace megamoe {

// `total`: pieces of 16 bytes.
MEGAMOE_DEVICE void copy_by_crews(Context& ctx, uint4_t* to, const uint4_t* from, int64_t total) {
    int64_t stride = int64_t{num_ctas(ctx)} * crew_threads;
    MEGAMOE_UNROLL_BY(1)
    for (int64_t i = int64_t{cta_idx(ctx)} * crew_threads + crew_thread(); i < total; i += 4 * stride) {
        uint4_t v[4];  // four loads in flight
        MEGAMOE_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (i + j * stride < total) v[j] = arch::load_streaming(from + i + j * stride);
        }
        MEGAMOE_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (i + j * stride < total) arch::store_vec(to + i + j * stride, v[j]);
        }
    }
}

}  // namespace megamoe
