// Before the tiles, two crews of eight warps work side by side: latency limits one, bandwidth the other. Crew
// 1 are the later math warps, so transport can plan the first pass while they still stage.
//
//   crew 0, route: ids, weights -> window -> RoutesReady to every peer    (by the last CTA to finish)
//                  every peer's RoutesReady -> ids of all ranks -> chunk_prefix, route_ids, route_weights
//   crew 1, stage: x (quantized for FP8) -> window -> XReady to every peer    (likewise)
#pragma once
#include "megamoe/cta/context.cuh"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE int own_tokens(const Args& args) {
    return max_of(
        0, min_of(T::Routes::template tokens<T>(args), args.num_tokens));  // the buffers hold args.num_tokens
}

// True in all threads of the crew whose arrival was the last of the grid: this crew's writes so far, of every
// CTA, are visible to it.
MEGAMOE_DEVICE bool last_to_arrive(Context& ctx, Memory::Cell ticket) {
    int32_t& is_last = ctx.smem.last_arrival[crew()];
    crew_sync();
    if (crew_thread() == 0) is_last = LastArrival::arrive(ctx.mem, ticket, num_ctas(ctx)) ? 1 : 0;
    crew_sync();
    return is_last != 0;
}

}  // namespace megamoe
