// What the prologue, the plan and the movers know about a route, and how they read it.
#pragma once
#include "megamoe/cta/context.cuh"

namespace megamoe {

// pool_routes: ordered token * 32 + k, and whether the row is its token's first or last in pool order.
constexpr uint32_t route_leader = 1u << 31;
constexpr uint32_t route_closer = 1u << 30;
constexpr int route_k_bits = 5;
static_assert(1 << route_k_bits == max_top_k, "a route holds its k");
MEGAMOE_PURE int route_token(uint32_t route) {
    return static_cast<int>((route & ~(route_leader | route_closer)) >> route_k_bits);
}

// 64-bit ids outside int32 must not wrap into range: every id outside [0, E) becomes -1.
MEGAMOE_DEVICE int32_t topk_id(const Args& args, int64_t i) {
    if (args.ids_are_int64 != 0) {
        int64_t id = static_cast<const int64_t*>(args.topk_ids)[i];
        return id >= 0 && id < args.num_experts ? static_cast<int32_t>(id) : -1;
    }
    int32_t id = static_cast<const int32_t*>(args.topk_ids)[i];
    return id >= 0 && id < args.num_experts ? id : -1;
}

// v[j] = from[k0 + j], or `none` at and past `count`. So many loads are in flight: one after the other they
// would add up, 1.5 us each from a peer's memory.
constexpr int routes_ahead = 4;
template <class V>
MEGAMOE_DEVICE void load_routes(V (&v)[routes_ahead], const V* from, int k0, int count, V none) {
    MEGAMOE_UNROLL
    for (int j = 0; j < routes_ahead; ++j) v[j] = k0 + j < count ? from[k0 + j] : none;
}

}  // namespace megamoe
