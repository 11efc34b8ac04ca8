// The place of a thread among the warps of its CTA. Callers ask again where they need it, which saves a
// register.
#pragma once
#include "megamoe/arch/arch.cuh"
#include "megamoe/cta/warps.h"

namespace megamoe {

// Sum over the lanes up to this one.
MEGAMOE_DEVICE int inclusive_sum(int own) {
    int lane = arch::lane_idx();
    MEGAMOE_UNROLL_BY(1)
    for (int step = 1; step < 32; step <<= 1) {
        int left = arch::shfl(own, max_of(lane - step, 0));
        if (lane >= step) own += left;
    }
    return own;
}

MEGAMOE_DEVICE void cta_sync() { arch::named_sync(0, num_threads); }

MEGAMOE_DEVICE int crew() { return arch::warp_idx() / crew_warps; }
MEGAMOE_DEVICE int crew_warp() { return arch::warp_idx() % crew_warps; }
MEGAMOE_DEVICE int crew_thread() { return arch::thread_idx() % crew_threads; }
MEGAMOE_DEVICE void crew_sync() { arch::named_sync(first_crew_barrier + crew(), crew_threads); }

MEGAMOE_DEVICE int transport_warp() { return arch::warp_idx() - first_transport_warp; }
MEGAMOE_DEVICE void transport_sync() { arch::named_sync(transport_barrier, num_transport_warps * 32); }

// Movers: the transport warps, and math warps that have no tiles left.
MEGAMOE_DEVICE int mover_warp() { return arch::warp_idx() - first_transport_warp; }
MEGAMOE_DEVICE int mover_thread() { return arch::thread_idx() - first_transport_warp * 32; }

// Which of the two math warpgroups this is.
MEGAMOE_DEVICE int math_warpgroup() { return (arch::warp_idx() - first_math_warp) / 4; }
MEGAMOE_DEVICE void warpgroup_sync(int warpgroup) { arch::named_sync(first_math_barrier + warpgroup, 128); }
MEGAMOE_DEVICE void math_sync() { arch::named_sync(math_barrier, math_role.num_warps * 32); }

}  // namespace megamoe
