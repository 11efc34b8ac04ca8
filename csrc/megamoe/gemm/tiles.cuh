// What schedule() looks up, and the stream of tiles that loaders and store thread walk.
#pragma once
#include "megamoe/cta/blocks.cuh"
#include "megamoe/gemm/forms.cuh"
#include "megamoe/gemm/operands.cuh"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE WeightMatrix weight_matrix(const Args& args, GemmId id) {
    using S = typename T::Tiling;
    bool first = id == GemmId::dw13;
    if (num_gemms<T> == 1 && !first) return {0, 0};
    const auto& gemm = gemm_of<T>(args, id);
    if (gemm.m == 0) return {0, 0};
    return {(first ? w13_planes<T>() : 1) * ceil_div(gemm.m, S::rows), ceil_div(gemm.n, S::columns)};
}

// Blocks of a step: two gemm1 tiles for each CTA, or what the caller asked for.
template <class T>
MEGAMOE_DEVICE int step_blocks(const Context& ctx) {
    const Args& args = ctx.args;
    int blocks = args.step_blocks != 0 ? args.step_blocks
                                       : ceil_div(2 * num_ctas(ctx), Shape<T>::tiles(args, GemmId::gemm1));
    return max_of(blocks, max_run);
}

template <class T>
MEGAMOE_DEVICE bool recomputes(const Context& ctx) {
    return T::Pool::restored && ctx.smem.plan.phase == Phase::recompute;
}

// How many units of each GEMM are in this pass. A grouped launch has one GEMM alone.
template <class T>
MEGAMOE_DEVICE GemmId gemm_now(const Context& ctx, GemmId id) {
    if (id == GemmId::gemm1 && recomputes<T>(ctx)) return GemmId::recompute;
    return T::num_row_gemms < 2 ? GemmId::gemm1 : id;
}
// Units of a block. recompute has more than gemm1: a tile of it makes both planes of half as many columns.
template <class T>
MEGAMOE_DEVICE int units_of_block(const Context& ctx, GemmId id) {
    return units_of(Shape<T>::tiles(ctx.args, gemm_now<T>(ctx, id)));
}

// This pair's units in this pass, from the first ones on.
template <class T>
MEGAMOE_DEVICE UnitStream unit_stream(const Context& ctx) {
    int weights = 0;
    if constexpr (T::WeightTiles::any) {
        if (!recomputes<T>(ctx))
            weights = num_weight_units(ctx.args.num_local_experts, weight_matrix<T>(ctx.args, GemmId::dw13),
                                       weight_matrix<T>(ctx.args, GemmId::dw2));
    }
    UnitStream stream(ctx.smem.plan.num_blocks, units_of_block<T>(ctx, GemmId::gemm1),
                      units_of_block<T>(ctx, GemmId::gemm2), weights, step_blocks<T>(ctx), pair_idx(ctx),
                      num_pairs(ctx));
    if (T::num_row_gemms < 2 || recomputes<T>(ctx) || only_weights<T>(ctx.args))
        stream.next2 = stream.num_blocks * stream.units2;
    if (T::num_row_gemms == 0) stream.next1 = stream.num_blocks * stream.units1;
    return stream;
}

// CTA `member`'s tile of a unit of weight gradients. False if there is none, or if it would add zeros. Where
// zeros are written, the tile of an expert without rows has one slot of them.
template <class T>
MEGAMOE_DEVICE bool weight_tile(const Context& ctx, int number, int member, bool adds, Tile* out) {
    using S = typename T::Tiling;
    WeightMatrix w13 = weight_matrix<T>(ctx.args, GemmId::dw13), w2 = weight_matrix<T>(ctx.args, GemmId::dw2);
    WeightUnit w = weight_unit(number, w13, w2);
    int rows = T::Blocks::template rows_of_expert<T>(ctx, w.expert);
    if (rows == 0 && adds) return false;
    WeightMatrix matrix = w.gemm == GemmId::dw13 ? w13 : w2;
    UnitTile unit;
    if (!unit_in_run(run_of(0, matrix.m_blocks, w.position.portion), w.position, matrix.n_tiles,
                     LastBlock::behind, member, &unit))
        return false;
    *out = {w.gemm,
            unit.shared,
            unit.block,
            unit.n < matrix.n_tiles ? unit.n : -1,
            {w.expert << 8 | S::rows},
            max_of(1, ceil_div(rows, T::WeightGemm::slot_k)),
            0,
            0};
    return true;
}

// Do pairs meet in this pass?
template <class T>
MEGAMOE_DEVICE bool meets(const Context& ctx) {
    return can_meet<T> && ctx.smem.plan.meets != 0;
}

// Where pairs meet before they begin a unit: in gemm1 alone.
template <class T>
MEGAMOE_DEVICE PlacedMeeting meeting_before(const Context& ctx, Unit scheduled) {
    if (scheduled.gemm() != GemmId::gemm1) return {0};
    const volatile auto& known = ctx.smem.meet;
    int tiles = known.tiles, of_block = units_of(tiles);
    Position p = {scheduled.gemm(), scheduled.number() / of_block, scheduled.number() % of_block};
    Meeting m = meeting_of(T::Blocks::run(ctx, p.portion), p, tiles, ctx.args.meet.many,
                           Round::of(scheduled.number(), num_pairs(ctx)));
    return {m.pairs < 2 ? 0 : m.first << 8 | m.pairs};
}

// CTA `member`'s tile of a unit. False for a unit that holds no tile, of either CTA.
template <class T>
MEGAMOE_DEVICE bool tile_of(const Context& ctx, Unit scheduled, int member, Tile* out) {
    *out = Tile::none();
    if (!scheduled.valid()) return true;
    bool done = scheduled.gemm1_done();
    if constexpr (T::WeightTiles::any) {
        if (is_weight_gradient(scheduled.gemm())) {
            bool holds = weight_tile<T>(ctx, scheduled.number(), member, adds_weight_gradients<T>(ctx), out);
            out->gemm1_done = done;
            return holds;
        }
    }
    Position p =
        scheduled.position(units_of_block<T>(ctx, GemmId::gemm1), units_of_block<T>(ctx, GemmId::gemm2));
    GemmId id = gemm_now<T>(ctx, p.gemm);
    int tiles = Shape<T>::tiles(ctx.args, id);
    UnitTile unit;
    LastBlock last = meets<T>(ctx) ? LastBlock::beside : LastBlock::behind;
    if (!unit_in_run(T::Blocks::run(ctx, p.portion), p, tiles, last, member, &unit)) return false;
    *out = {id,
            unit.shared,
            unit.block,
            unit.n < tiles ? unit.n : -1,
            T::Blocks::entry(ctx, unit.block, T::Tiling::rows),
            Shape<T>::k_slots(ctx.args, id),
            Shape<T>::input_slots(id),
            done};
    if constexpr (T::WeightTiles::transposed) {  // gemm1 makes the zero rows of its transposed outputs, too
        if (id == GemmId::gemm1) out->entry = {(out->entry.packed & ~0xff) | T::Tiling::rows};
    }
    if constexpr (Forms<T>::is_packed) {
        // What a launch that trains saves has rows behind an expert's last: the wide form makes those of the
        // tile alone.
        if (T::Pool::padded) out->entry = {(out->entry.packed & ~0xff) | rows_filled<T>(out->rows())};
        out->slots = ceil_div(out->slots, Forms<T>::slot_steps(*out));
    }
    return true;
}

template <class T>
MEGAMOE_DEVICE auto& scheduled_slots(Smem& smem) {
    if constexpr (T::Scheduling::for_pair) {
        return smem.scheduler.pair;
    } else {
        return smem.scheduler.own;
    }
}

// The tiles of this CTA, in order, as its loaders and its store thread walk them: the same for each.
template <class T>
class Tiles {
  public:
    MEGAMOE_DEVICE Tiles(Context& ctx, TileRing& ring) : ctx_(ctx), ring_(ring) {}
    MEGAMOE_DEVICE Tile next() {
        PlacedMeeting before;
        return next(before);
    }
    // `before`: where the pair meets others before it; CTA 0 does so for both.
    MEGAMOE_DEVICE Tile next(PlacedMeeting& before) {
        ring_.await(ctx_.mem, scheduled_slots<T>(ctx_.smem));
        Tile tile = ctx_.smem.scheduler.tile[ring_.slot()];
        if constexpr (can_meet<T>) before = ctx_.smem.meet.before[ring_.slot()];
        ring_.release(ctx_.mem, scheduled_slots<T>(ctx_.smem));
        ring_.advance();
        return tile;
    }

  private:
    Context& ctx_;
    TileRing& ring_;
};

}  // namespace megamoe
