// deal: one thread a pair, in its CTA 0, which takes units as the pair gets to them and tells the loaders and
// the store threads of both CTAs.
//
// A ticket hands nothing over but its number: the plan's barrier orders the counters' zeros, and what a unit
// reads has edges of its own.
#pragma once
#include "megamoe/cta/tiles.h"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE void deal(Context& ctx, DealRing& ring) {
    if (pair_member() != 0) return;
    DealSmem& deal = ctx.smem.deal;
    UnitStream stream = unit_stream<T>(ctx);
    auto take = [&](Stage stage, int) {
        uint32_t* dealt = ctx.args.training.dealt + static_cast<int>(stage);
        return num_pairs(ctx) + static_cast<int>(ctx.mem.fetch_add(dealt, 1));
    };
    for (bool more = true; more; ring.advance()) {
        more = !stream.done();
        Unit unit = more ? stream.pop(take) : Unit::none();
        ring.acquire(ctx.mem, deal.slots);
        MEGAMOE_UNROLL
        for (int member = 0; member < pair_ctas; ++member)
            *arch::in_member(&deal.unit[ring.slot()], member) = unit;
        ring.commit(ctx.mem, deal.slots);
    }
}

}  // namespace megamoe
