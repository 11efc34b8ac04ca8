// The warps of a CTA, and where a thread stands among them. Asked again where it is needed: no register is
// spared for it.
#pragma once
#include "megamoe/arch/arch.h"

namespace megamoe {

// The roles. Registers belong to a warpgroup of four warps, hence the order. What each does in a pass is in
// kernels/two_gemm.cuh; megamoe/jit/abi.py reads the names for messages.
struct Role {
    const char* name;
    int first_warp, num_warps;
};
constexpr Role load_a_role = {"load_a", 0, 1};
constexpr Role load_b_role = {"load_b", 1, 1};
constexpr Role store_role = {"store", 2, 1};
constexpr Role deal_role = {"deal", 3, 1};
constexpr Role transport_role = {"transport", 4, 4};
constexpr Role math_role = {"math", 8, 8};  // in groups of four warps

constexpr int num_warps = math_role.first_warp + math_role.num_warps;
constexpr int num_threads = num_warps * 32;
constexpr int first_transport_warp = transport_role.first_warp;
constexpr int num_transport_warps = transport_role.num_warps;
constexpr int first_math_warp = math_role.first_warp;
constexpr int num_math_groups = math_role.num_warps / 4;
constexpr int num_movers = num_warps - first_transport_warp;

// The prologue's two crews: crew 0 routes, crew 1, math later, stages x.
constexpr int crew_warps = num_warps / 2, crew_threads = crew_warps * 32;
static_assert(first_math_warp == crew_warps, "crew 1 are the math warps");

// Named barriers; 0 is the CTA's own.
constexpr int transport_barrier = 1;
constexpr int first_crew_barrier = 2;
constexpr int first_math_barrier = 4;  // of a warpgroup
constexpr int math_barrier = first_math_barrier + num_math_groups;

// Of the lanes up to this one.
MEGAMOE_DEVICE int inclusive_sum(int own) {
    int lane = arch::lane_idx();
    MEGAMOE_UNROLL_BY(1)
    for (int step = 1; step < 32; step <<= 1) {
        int left = arch::shfl(own, max_of(lane - step, 0));
        if (lane >= step) own += left;
    }
    return own;
}

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
MEGAMOE_DEVICE int math_group() { return (arch::warp_idx() - first_math_warp) / 4; }
MEGAMOE_DEVICE void math_group_sync(int group) { arch::named_sync(first_math_barrier + group, 128); }
MEGAMOE_DEVICE void math_sync() { arch::named_sync(math_barrier, math_role.num_warps * 32); }

}  // namespace megamoe
