// The warps of a CTA: roles, crews, named barriers.
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {

// The roles. Registers belong to a warpgroup of four warps, hence the order. What each does in a pass is in
// kernels/two_gemm.cuh; jit/abi.py reads the names for messages.
struct Role {
    const char* name;
    int first_warp, num_warps;
};
constexpr Role load_a_role = {"load_a", 0, 1};
constexpr Role load_b_role = {"load_b", 1, 1};
constexpr Role store_role = {"store", 2, 1};
constexpr Role scheduler_role = {"scheduler", 3, 1};
constexpr Role transport_role = {"transport", 4, 4};
constexpr Role math_role = {"math", 8, 8};  // in groups of four warps

constexpr int num_warps = math_role.first_warp + math_role.num_warps;
constexpr int num_threads = num_warps * 32;
constexpr int first_transport_warp = transport_role.first_warp;
constexpr int num_transport_warps = transport_role.num_warps;
constexpr int first_math_warp = math_role.first_warp;
constexpr int num_math_warpgroups = math_role.num_warps / 4;
constexpr int num_movers = num_warps - first_transport_warp;

// The prologue's two crews: crew 0 routes, crew 1, math later, stages x.
constexpr int crew_warps = num_warps / 2, crew_threads = crew_warps * 32;
static_assert(first_math_warp == crew_warps, "crew 1 are the math warps");

// Named barriers; 0 is the CTA's own.
constexpr int transport_barrier = 1;
constexpr int first_crew_barrier = 2;
constexpr int first_math_barrier = 4;  // of a warpgroup
constexpr int math_barrier = first_math_barrier + num_math_warpgroups;

}  // namespace megamoe
