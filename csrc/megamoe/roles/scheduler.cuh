// scheduler: one thread, which looks up tiles ahead of the loaders and the store thread. A look-up takes
// about 1500 clk by estimate (divisions, two loads from L2); a loader would refill no slot meanwhile.
//
// In backward, CTA 0 of each pair has one for both CTAs. The pair takes a unit by a ticket when it gets to
// it: a quarter of gemm1's units may hold no tile and others differ in length, so fixed shares are uneven by
// up to 12 % of the launch. A ticket hands over only its number: the plan's barrier orders the counters'
// zeros, and each input of a unit has its own edge. In other launches each CTA has one, and shares are fixed.
// Forward has few units without a tile and waits for memory, which other shares would not make faster.
// Tickets cost 5 % with few tokens (0005).
#pragma once
#include "megamoe/gemm/tiles.cuh"

namespace megamoe {

// A gemm2 whose tiles have at least so many pipeline slots of K is scheduled in fixed shares. The hypothesis
// is that pairs that take units so long by ticket drift apart, and each reads a shared weight tile from
// memory for itself. One H200, 2026-11-23, all of backward, tickets -> fixed shares: 448 slots 17344 -> 16538
// us, 48 slots 7981 -> 8172, 24 slots 2300 -> 2380; nothing between 48 and 448 was measured.
constexpr int long_tile_slots = 256;

// How units are scheduled. Next<T>(ctx, stream) says which unit the pair has behind one that it begins, and
// may move where `stream` begins. for_pair: one thread of a pair schedules for both CTAs; otherwise each CTA
// has its own. in_rounds: each GEMM is scheduled in rounds of all pairs, so it follows from a unit's number
// which pairs begin theirs beside it, and they can meet.
struct ByTickets {
    static constexpr bool for_pair = true, in_rounds = false;
    template <class T>
    class Next {
      public:
        MEGAMOE_DEVICE Next(const Context& ctx, UnitStream&)
            : gemm2_is_long_(Shape<T>::k_slots(ctx.args, GemmId::gemm2) >= long_tile_slots) {}
        MEGAMOE_DEVICE int behind(Context& ctx, GemmId id, int unit) const {
            if (id == GemmId::gemm2 && gemm2_is_long_) return unit + num_pairs(ctx);
            uint32_t* scheduled = own<T>(ctx.args).scheduled + static_cast<int>(id);
            return num_pairs(ctx) + static_cast<int>(ctx.mem.fetch_add(scheduled, 1));
        }

      private:
        bool gemm2_is_long_;
    };
};
struct InTurns {
    static constexpr bool for_pair = false, in_rounds = false;
    template <class T>
    struct Next {
        MEGAMOE_DEVICE Next(const Context&, UnitStream&) {}
        MEGAMOE_DEVICE int behind(const Context& ctx, GemmId, int unit) const {
            return unit + num_pairs(ctx);
        }
    };
};
// For forward, also in launches that train: with few tokens, one unit more is 5 % of a pair's work.
struct Evenly {
    static constexpr bool for_pair = false, in_rounds = true;
    template <class T>
    class Next {
      public:
        MEGAMOE_DEVICE Next(Context& ctx, UnitStream& stream) {
            int pairs = num_pairs(ctx), from = meets<T>(ctx) ? stream.rounds_before_last(pairs) * pairs : 0;
            ctx.smem.meet.shares = {stream.num_blocks * stream.units1,
                                    ctx.args.hidden / ctx.args.intermediate, pairs, from};
            stream.next2 = ctx.smem.meet.shares.first(from_last(ctx));
        }
        MEGAMOE_DEVICE int behind(const Context& ctx, GemmId id, int unit) const {
            int pairs = num_pairs(ctx);
            return id == GemmId::gemm2 ? ctx.smem.meet.shares.behind(unit, from_last(ctx), pairs)
                                       : unit + pairs;
        }

      private:
        MEGAMOE_DEVICE static int from_last(const Context& ctx) { return num_pairs(ctx) - 1 - pair_idx(ctx); }
    };
};

template <class T>
MEGAMOE_DEVICE void schedule(Context& ctx, TileRing& ring) {
    if (T::Scheduling::for_pair && pair_member() != 0) return;
    auto& slots = scheduled_slots<T>(ctx.smem);
    volatile auto& known = ctx.smem.meet;
    UnitStream in_registers = unit_stream<T>(ctx);
    UnitStream& stream = can_meet<T> ? ctx.smem.meet.stream : in_registers;
    if constexpr (can_meet<T>) stream = in_registers;
    typename T::Scheduling::template Next<T> next(ctx, stream);
    if constexpr (can_meet<T>) known.tiles = Shape<T>::tiles(ctx.args, GemmId::gemm1);
    auto gemm1_first = [&] {
        if constexpr (can_meet<T>) {
            if (meets<T>(ctx)) return stream.next1 / num_pairs(ctx) < known.rounds1;
        }
        return stream.by_steps();
    };
    for (bool more = true; more;) {
        more = !stream.done();
        if constexpr (can_meet<T>) {
            if (meets<T>(ctx)) {
                Round round2 = ctx.smem.meet.shares.round_of(stream.next2, num_pairs(ctx));
                known.rounds1 = stream.rounds_before(round2, num_pairs(ctx));
            }
        }
        Unit unit = Unit::none();
        if (more)
            unit = stream.pop([&](GemmId id, int begun) { return next.behind(ctx, id, begun); }, gemm1_first);
        if constexpr (can_meet<T>) {
            bool comes = more && pair_member() == 0 && meets<T>(ctx);
            known.drafted = comes ? meeting_before<T>(ctx, unit).packed : 0;
        }
        Tile tile;
        if (!tile_of<T>(ctx, unit, T::Scheduling::for_pair ? 0 : pair_member(), &tile)) continue;
        ring.acquire(ctx.mem, slots);
        ctx.smem.scheduler.tile[ring.slot()] = tile;
        if constexpr (can_meet<T>) ctx.smem.meet.before[ring.slot()].packed = known.drafted;
        if constexpr (T::Scheduling::for_pair) {
            tile_of<T>(ctx, unit, 1, &tile);
            *arch::in_member(&ctx.smem.scheduler.tile[ring.slot()], 1) = tile;
        }
        ring.commit(ctx.mem, slots);
        ring.advance();
    }
}

}  // namespace megamoe
