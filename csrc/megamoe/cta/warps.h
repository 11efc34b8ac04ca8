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
constexpr Role deal_role = {"deal", 3, 1};
constexpr Role transport_role = {"transport", 4, 4};
constexpr Role math_role = {"math", 8, 8};  // in groups of four warps

constexpr int num_math_warpgroups = math_role.num_warps / 4;

// Which warps a CTA has, a policy of its kind of launch: the four of one thread each, transport warps or none
// of them, and math. Without transport a math thread has registers for MMAs over all columns of a tile, where
// it otherwise has them for a half at a time: an instruction's sums stand side by side, 128 of them here, and
// a launch of 512 threads begins with no more registers than that.
template <int num_transport_>
struct WarpsOf {
    static constexpr int num_transport = num_transport_;
    static constexpr int first_math = transport_role.first_warp + num_transport;
    static constexpr int count = first_math + math_role.num_warps;
    static constexpr int num_threads = count * 32;
    static constexpr int registers = 65536 / num_threads / 8 * 8;  // that each thread begins with
    static constexpr bool whole_mmas = num_transport == 0;
};
using WithTransport = WarpsOf<transport_role.num_warps>;
using WithoutTransport = WarpsOf<0>;

// Of CTAs with transport, where rows move.
constexpr int num_warps = WithTransport::count;
constexpr int first_transport_warp = transport_role.first_warp;
constexpr int num_transport_warps = transport_role.num_warps;
constexpr int first_math_warp = WithTransport::first_math;
constexpr int num_movers = num_warps - first_transport_warp;
static_assert(first_math_warp == math_role.first_warp, "the roles are those of a CTA with transport");

// The prologue's two crews: crew 0 routes, crew 1, math later, stages x.
constexpr int crew_warps = num_warps / 2, crew_threads = crew_warps * 32;
static_assert(first_math_warp == crew_warps, "crew 1 are the math warps");

// Named barriers; 0 is the CTA's own.
constexpr int transport_barrier = 1;
constexpr int first_crew_barrier = 2;
constexpr int first_math_barrier = 4;  // of a warpgroup
constexpr int math_barrier = first_math_barrier + num_math_warpgroups;

}  // namespace megamoe
