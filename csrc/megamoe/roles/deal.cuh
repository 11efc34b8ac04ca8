// deal: one thread a pair, in its CTA 0, which takes units as the pair gets to them and tells the loaders and
// the store threads of both CTAs.
//
// A ticket hands nothing over but its number: the plan's barrier orders the counters' zeros, and what a unit
// reads has edges of its own.
#pragma once
#include "megamoe/cta/tiles.h"

namespace megamoe {

// gemm2 whose tiles have so many pipeline slots of K is dealt by fixed shares: by hypothesis, pairs that take
// units so long by ticket drift apart, and each reads a shared weight tile from memory for itself. One H200,
// 2026-11-23, all of backward, tickets -> fixed shares: 448 slots 17344 -> 16538 us, 48 slots 7981 -> 8172,
// 24 slots 2300 -> 2380; nothing between 48 and 448 was measured (docs/tuning.md).
constexpr int long_tile_slots = 256;

template <class T>
MEGAMOE_DEVICE void deal(Context& ctx, DealRing& ring) {
    if (pair_member() != 0) return;
    DealSmem& deal = ctx.smem.deal;
    UnitStream stream = unit_stream<T>(ctx);
    bool gemm2_is_long = Shape<T>::k_slots(ctx.args, Stage::gemm2) >= long_tile_slots;
    auto take = [&](Stage stage, int unit) {
        if (stage == Stage::gemm2 && gemm2_is_long) return unit + num_pairs(ctx);
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
