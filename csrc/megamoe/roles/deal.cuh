// deal: one thread, ahead of the loaders and of the store thread, which looks up the tiles that they walk. To
// look one up takes some 1500 clk by estimate (divisions, two loads from L2), in which a loader would refill
// no slot.
//
// In backward it is one of a pair, in CTA 0, for both: it takes units as the pair gets to them, since a
// quarter of gemm1's may hold no tile and others are not equally long, so that shares made in advance are
// uneven by up to 12 % of the launch. A ticket hands nothing over but its number: the plan's barrier orders
// the counters' zeros, and what a unit reads has edges of its own.
// Elsewhere it is one of each CTA, and shares are made in advance: forward has few units without a tile, and
// waits for memory, which no other share of it makes quicker, while tickets take 6 us of 112 at few tokens
// (docs/tuning.md).
#pragma once
#include "megamoe/cta/tiles.h"

namespace megamoe {

// gemm2 whose tiles have so many pipeline slots of K is dealt by fixed shares: by hypothesis, pairs that take
// units so long by ticket drift apart, and each reads a shared weight tile from memory for itself. One H200,
// 2026-11-23, all of backward, tickets -> fixed shares: 448 slots 17344 -> 16538 us, 48 slots 7981 -> 8172,
// 24 slots 2300 -> 2380; nothing between 48 and 448 was measured (docs/tuning.md).
constexpr int long_tile_slots = 256;

// Of the pair: the unit behind one that it begins.
template <class T>
class Tickets {
  public:
    explicit MEGAMOE_DEVICE Tickets(const Context& ctx)
        : gemm2_is_long_(Shape<T>::k_slots(ctx.args, Stage::gemm2) >= long_tile_slots) {}
    MEGAMOE_DEVICE int behind(Context& ctx, Stage stage, int unit) const {
        if (stage == Stage::gemm2 && gemm2_is_long_) return unit + num_pairs(ctx);
        uint32_t* dealt = ctx.args.training.dealt + static_cast<int>(stage);
        return num_pairs(ctx) + static_cast<int>(ctx.mem.fetch_add(dealt, 1));
    }

  private:
    bool gemm2_is_long_;
};
struct InTurns {
    MEGAMOE_DEVICE int behind(const Context& ctx, Stage, int unit) const { return unit + num_pairs(ctx); }
};
// Forward's, also of launches that train: with few tokens one unit more is 5 % of a pair's.
class Evenly {
  public:
    MEGAMOE_DEVICE Evenly(const Context& ctx, UnitStream& stream)
        : gemm2_(stream.num_blocks * stream.units1, ctx.args.gemm2_rounds, num_pairs(ctx)) {
        stream.next2 = gemm2_.first(from_last(ctx));
    }
    MEGAMOE_DEVICE int behind(const Context& ctx, Stage stage, int unit) const {
        int pairs = num_pairs(ctx);
        return stage == Stage::gemm2 ? gemm2_.behind(unit, from_last(ctx), pairs) : unit + pairs;
    }

  private:
    MEGAMOE_DEVICE static int from_last(const Context& ctx) { return num_pairs(ctx) - 1 - pair_idx(ctx); }

    Gemm2Shares gemm2_;
};
// May move where `stream` begins.
template <class T>
MEGAMOE_DEVICE auto shares_of(const Context& ctx, UnitStream& stream) {
    if constexpr (deals_pair<T>) {
        return Tickets<T>(ctx);
    } else if constexpr (is_grouped<T>) {
        return InTurns{};
    } else {
        return Evenly(ctx, stream);
    }
}

template <class T>
MEGAMOE_DEVICE void deal(Context& ctx, DealRing& ring) {
    if (deals_pair<T> && pair_member() != 0) return;
    auto& slots = deal_slots<T>(ctx.smem);
    UnitStream stream = unit_stream<T>(ctx);
    auto shares = shares_of<T>(ctx, stream);
    for (bool more = true; more;) {
        more = !stream.done();
        Unit unit = Unit::none();
        if (more) unit = stream.pop([&](Stage stage, int begun) { return shares.behind(ctx, stage, begun); });
        Tile tile;
        if (!tile_of<T>(ctx, unit, deals_pair<T> ? 0 : pair_member(), &tile)) continue;
        ring.acquire(ctx.mem, slots);
        ctx.smem.deal.tile[ring.slot()] = tile;
        if constexpr (deals_pair<T>) {
            tile_of<T>(ctx, unit, 1, &tile);
            *arch::in_member(&ctx.smem.deal.tile[ring.slot()], 1) = tile;
        }
        ring.commit(ctx.mem, slots);
        ring.advance();
    }
}

}  // namespace megamoe
