// What deal() looks up, and the stream of tiles that loaders and store thread walk.
#pragma once
#include "megamoe/cta/context.h"

namespace megamoe {

// The last expert whose first block is not behind this one: those before it that begin there have no rows.
MEGAMOE_DEVICE int expert_of_block(const Context& ctx, int block) {
    int first = 0, last = ctx.args.num_local_experts - 1;
    MEGAMOE_UNROLL_BY(1)
    while (first < last) {
        int middle = (first + last + 1) / 2;
        if (ctx.smem.experts.first_block[middle] <= block) {
            first = middle;
        } else {
            last = middle - 1;
        }
    }
    return first;
}
template <class T>
MEGAMOE_DEVICE BlockEntry block_entry(const Context& ctx, int block) {
    if constexpr (is_grouped<T>) {
        const ExpertTable& table = ctx.smem.experts;
        int expert = expert_of_block(ctx, block);
        int first = table.first_row[expert] + (block - table.first_block[expert]) * T::Tiling::rows;
        return {expert << 8 | min_of(T::Tiling::rows, table.first_row[expert + 1] - first)};
    } else {
        return {ctx.args.block_table[int64_t{2} * block]};
    }
}
template <class T>
MEGAMOE_DEVICE Group block_group(const Context& ctx, int block) {
    if constexpr (is_grouped<T>) {
        const int32_t* first = ctx.smem.experts.first_block + expert_of_block(ctx, block);
        return group_of(first[0], first[1] - first[0], block);
    } else {
        int packed = ctx.args.block_table[int64_t{2} * block + 1];
        return {packed >> 8, packed & 0xff};
    }
}
// Rows of an expert in this pass, of a launch that has weight tiles.
template <class T>
MEGAMOE_DEVICE int rows_of_expert(const Context& ctx, int expert) {
    if constexpr (is_grouped<T>) {
        const int32_t* first = ctx.smem.experts.first_row + expert;
        return first[1] - first[0];
    } else {
        return ctx.smem.plan.num_blocks != 0 ? ctx.args.training.expert_rows[2 * expert + 1] : 0;
    }
}

template <class T>
MEGAMOE_DEVICE WeightMatrix weight_matrix(const Args& args, Stage stage) {
    using S = typename T::Tiling;
    bool first = stage == Stage::dw13;
    if ((args.training.weights_wanted & (first ? 1 : 2)) == 0) return {0, 0};
    return {(first ? T::Gemm2::k_planes : 1) * ceil_div(gradient_rows(args, stage), S::rows),
            ceil_div(gradient_columns(args, stage), S::columns)};
}

// Two gemm1 tiles a CTA and step, or what the caller asked for.
template <class T>
MEGAMOE_DEVICE int step_blocks(const Context& ctx) {
    const Args& args = ctx.args;
    int blocks = args.step_blocks != 0 ? args.step_blocks
                                       : ceil_div(2 * num_ctas(ctx), Shape<T>::tiles(args, Stage::gemm1));
    return max_of(blocks, max_group);
}

template <class T>
MEGAMOE_DEVICE bool recomputes(const Context& ctx) {
    return T::direction == Direction::backward && ctx.smem.plan.phase == Phase::recompute;
}
MEGAMOE_DEVICE int pair_idx(const Context& ctx) { return cta_idx(ctx) / pair_ctas; }
MEGAMOE_DEVICE int num_pairs(const Context& ctx) { return num_ctas(ctx) / pair_ctas; }

// What units of either stage are in this pass. A grouped launch has one GEMM alone.
template <class T>
MEGAMOE_DEVICE Stage stage_now(const Context& ctx, Stage stage) {
    if (stage == Stage::gemm1 && recomputes<T>(ctx)) return Stage::recompute;
    return is_grouped<T> ? Stage::gemm1 : stage;
}
// Units of a block. recompute has more than gemm1: a tile of it makes both planes of half as many columns.
template <class T>
MEGAMOE_DEVICE int units_of_block(const Context& ctx, Stage stage) {
    return units_of(Shape<T>::tiles(ctx.args, stage_now<T>(ctx, stage)));
}

// This pair's units in this pass, from the first ones on.
template <class T>
MEGAMOE_DEVICE UnitStream unit_stream(const Context& ctx) {
    int weights = 0;
    if constexpr (has_weight_tiles<T>) {
        if (!recomputes<T>(ctx))
            weights = num_weight_units(ctx.args.num_local_experts, weight_matrix<T>(ctx.args, Stage::dw13),
                                       weight_matrix<T>(ctx.args, Stage::dw2));
    }
    UnitStream stream(ctx.smem.plan.num_blocks, units_of_block<T>(ctx, Stage::gemm1),
                      units_of_block<T>(ctx, Stage::gemm2), weights, step_blocks<T>(ctx), pair_idx(ctx),
                      num_pairs(ctx));
    if (is_grouped<T> || recomputes<T>(ctx) || only_weights<T>(ctx.args))
        stream.next2 = stream.num_blocks * stream.units2;
    if (T::direction == Direction::grouped_weights) stream.next1 = stream.num_blocks * stream.units1;
    return stream;
}

// CTA `member`'s tile of a unit of weight gradients. False if there is none, or if it would add zeros; one of
// an expert without rows that writes zeros has one slot of them.
template <class T>
MEGAMOE_DEVICE bool weight_tile(const Context& ctx, int number, int member, bool adds, Tile* out) {
    using S = typename T::Tiling;
    WeightMatrix w13 = weight_matrix<T>(ctx.args, Stage::dw13), w2 = weight_matrix<T>(ctx.args, Stage::dw2);
    WeightUnit w = weight_unit(number, w13, w2);
    int rows = rows_of_expert<T>(ctx, w.expert);
    if (rows == 0 && adds) return false;
    WeightMatrix matrix = w.stage == Stage::dw13 ? w13 : w2;
    UnitTile unit;
    if (!unit_in_group(group_of(0, matrix.m_blocks, w.position.portion), w.position, matrix.n_tiles, member,
                       &unit))
        return false;
    *out = {w.stage,
            unit.shared,
            unit.block,
            unit.n < matrix.n_tiles ? unit.n : -1,
            {w.expert << 8 | S::rows},
            max_of(1, ceil_div(rows, group_rows)),
            0,
            0};
    return true;
}

// CTA `member`'s tile of a unit. False for a unit that holds no tile, of either CTA.
template <class T>
MEGAMOE_DEVICE bool tile_of(const Context& ctx, Unit dealt, int member, Tile* out) {
    *out = Tile::none();
    if (!dealt.valid()) return true;
    bool done = dealt.gemm1_done();
    if constexpr (has_weight_tiles<T>) {
        if (is_weight_gradient(dealt.stage())) {
            bool holds = weight_tile<T>(ctx, dealt.number(), member, adds_weight_gradients(ctx), out);
            out->gemm1_done = done;
            return holds;
        }
    }
    Position p = dealt.position(units_of_block<T>(ctx, Stage::gemm1), units_of_block<T>(ctx, Stage::gemm2));
    Stage stage = stage_now<T>(ctx, p.stage);
    int tiles = Shape<T>::tiles(ctx.args, stage);
    UnitTile unit;
    if (!unit_in_group(block_group<T>(ctx, p.portion), p, tiles, member, &unit)) return false;
    *out = {stage,
            unit.shared,
            unit.block,
            unit.n < tiles ? unit.n : -1,
            block_entry<T>(ctx, unit.block),
            Shape<T>::k_slots(ctx.args, stage),
            Shape<T>::input_slots(stage),
            done};
    if constexpr (T::Gemm1::B::expanded) out->slots = ceil_div(out->slots, slot_steps<T>(*out));
    return true;
}

// In backward one thread of a pair deals its units out as it gets to them, else one of each CTA goes by
// shares made in advance (roles/deal.cuh).
template <class T>
constexpr bool deals_pair = T::direction == Direction::backward;
template <class T>
MEGAMOE_DEVICE auto& deal_slots(Smem& smem) {
    if constexpr (deals_pair<T>) {
        return smem.deal.pair;
    } else {
        return smem.deal.own;
    }
}

// The tiles of this CTA, in order, as its loaders and its store thread walk them: the same for each.
template <class T>
class Tiles {
  public:
    MEGAMOE_DEVICE Tiles(Context& ctx, DealRing& ring) : ctx_(ctx), ring_(ring) {}
    MEGAMOE_DEVICE Tile next() {
        ring_.await(ctx_.mem, deal_slots<T>(ctx_.smem));
        Tile tile = ctx_.smem.deal.tile[ring_.slot()];
        ring_.release(ctx_.mem, deal_slots<T>(ctx_.smem));
        ring_.advance();
        return tile;
    }

  private:
    Context& ctx_;
    DealRing& ring_;
};

}  // namespace megamoe
