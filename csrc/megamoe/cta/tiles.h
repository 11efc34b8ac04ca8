// The tile stream that all roles of a CTA walk, and what it looks up.
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

// The tiles of this CTA, in order; the same stream for every role.
template <class T>
class Tiles {
  public:
    // `all_weights`: nothing but the tiles of weight gradients, those of experts without rows too.
    MEGAMOE_DEVICE explicit Tiles(const Context& ctx, bool all_weights = false)
        : ctx_(ctx),
          all_weights_(all_weights),
          stream_(ctx.smem.plan.num_blocks, units_of(Shape<T>::tiles(ctx.args, first_stage())),
                  units_of(Shape<T>::tiles(ctx.args, second_stage)), step_blocks(ctx),
                  cta_idx(ctx) / pair_ctas, num_ctas(ctx) / pair_ctas) {
        if (is_grouped<T> || recomputes() || all_weights || only_weights<T>(ctx.args))
            stream_.next2 = stream_.num_blocks * stream_.units2;
        if (T::direction == Direction::grouped_weights || all_weights)
            stream_.next1 = stream_.num_blocks * stream_.units1;
    }

    MEGAMOE_DEVICE Tile next() {
        while (!stream_.done()) {
            Position p = stream_.pop();
            Stage stage = p.stage == Stage::gemm1 ? first_stage() : p.stage;
            int tiles = Shape<T>::tiles(ctx_.args, stage);
            UnitTile unit;
            if (!unit_in_group(block_group<T>(ctx_, p.portion), p, tiles, pair_member(), &unit)) continue;
            Tile tile = {stage,
                         unit.shared,
                         unit.block,
                         unit.n < tiles ? unit.n : -1,
                         block_entry<T>(ctx_, unit.block),
                         Shape<T>::k_slots(ctx_.args, stage),
                         Shape<T>::input_slots(stage)};
            if constexpr (T::Gemm1::B::expanded) tile.slots = ceil_div(tile.slots, slot_steps<T>(tile));
            return tile;
        }
        if constexpr (has_weight_tiles<T>) {
            if (!recomputes()) return next_weights();
        }
        return {Stage::gemm1, Shared::b, -1, 0, {0}, 0, 0};
    }
    // No tile of gemm1 is to come.
    MEGAMOE_DEVICE bool gemm1_done() const { return !recomputes() && stream_.gemm1_done(); }

  private:
    MEGAMOE_DEVICE bool recomputes() const {
        return T::direction == Direction::backward && ctx_.smem.plan.phase == Phase::recompute;
    }
    static constexpr Stage second_stage = is_grouped<T> ? Stage::gemm1 : Stage::gemm2;  // it has one alone
    MEGAMOE_DEVICE Stage first_stage() const { return recomputes() ? Stage::recompute : Stage::gemm1; }

    // An expert without rows has one slot, of zeros, unless zeros would be added.
    MEGAMOE_DEVICE Tile next_weights() {
        using S = typename T::Tiling;
        const Args& args = ctx_.args;
        WeightMatrix w13 = weight_matrix<T>(args, Stage::dw13), w2 = weight_matrix<T>(args, Stage::dw2);
        int num_units = num_weight_units(args.num_local_experts, w13, w2);
        while (next_weight_ * stride() + pair() < num_units) {
            WeightUnit w = weight_unit(next_weight_++ * stride() + pair(), w13, w2);
            int rows = rows_of_expert<T>(ctx_, w.expert);
            if (rows == 0 && adds_weight_gradients(ctx_) && !all_weights_) continue;
            WeightMatrix matrix = w.stage == Stage::dw13 ? w13 : w2;
            UnitTile unit;
            if (!unit_in_group(group_of(0, matrix.m_blocks, w.position.portion), w.position, matrix.n_tiles,
                               pair_member(), &unit))
                continue;
            return {w.stage,
                    unit.shared,
                    unit.block,
                    unit.n < matrix.n_tiles ? unit.n : -1,
                    {w.expert << 8 | S::rows},
                    max_of(1, ceil_div(rows, group_rows)),
                    0};
        }
        return {Stage::gemm1, Shared::b, -1, 0, {0}, 0, 0};
    }

    // Two gemm1 tiles a CTA and step, or what the caller asked for.
    static MEGAMOE_DEVICE int step_blocks(const Context& ctx) {
        const Args& args = ctx.args;
        int blocks = args.step_blocks != 0 ? args.step_blocks
                                           : ceil_div(2 * num_ctas(ctx), Shape<T>::tiles(args, Stage::gemm1));
        return max_of(blocks, max_group);
    }
    MEGAMOE_DEVICE int pair() const { return cta_idx(ctx_) / pair_ctas; }
    MEGAMOE_DEVICE int stride() const { return num_ctas(ctx_) / pair_ctas; }

    const Context& ctx_;
    bool all_weights_;
    UnitStream stream_;
    int next_weight_ = 0;  // of this pair
};

}  // namespace megamoe
