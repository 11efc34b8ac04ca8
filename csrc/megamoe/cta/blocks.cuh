// Blocks of rows: their place in memory, and their expert. Each kind of launch uses one of these types.
#pragma once
#include "megamoe/cta/context.cuh"

namespace megamoe {

// Where most launches have the maps of their operands: in the table.
struct MapsOfTable {
    template <class T>
    static MEGAMOE_DEVICE const TensorMap* rows_map(const Args& args, GemmId id) {
        return gemm_of<T>(args, id).a;
    }
    template <class T>
    static MEGAMOE_DEVICE const TensorMap* weights_map(const Args& args, GemmId id) {
        return &gemm_of<T>(args, id).b;
    }
    // Makes NaN of a weight tile's sums where rows of it are lost.
    template <class Sums>
    static MEGAMOE_DEVICE void spoil(const Context&, Sums&) {}
};

// Routing weights of a block's rows; null: all are `all`.
struct BlockWeights {
    const float* first;
    float all;
};

// Rows of the pool, where the plan of the pass has placed them.
struct PoolBlocks : MapsOfTable {
    static constexpr bool in_pool = true, by_plane = true, has_tails = false, of_passes = false;
    static MEGAMOE_DEVICE BlockEntry entry(const Context& ctx, int block, int) {
        return {ctx.args.block_table[int64_t{2} * block]};
    }
    static MEGAMOE_DEVICE Run run(const Context& ctx, int block) {
        int packed = ctx.args.block_table[int64_t{2} * block + 1];
        return {packed >> 8, packed & 0xff};
    }
    template <class T>
    static MEGAMOE_DEVICE int rows_of_expert(const Context& ctx, int expert) {
        return ctx.smem.plan.num_blocks != 0 ? own<T>(ctx.args).expert_rows[2 * expert + 1] : 0;
    }
    // The K of a weight gradient: an expert's rows, from its first on; past the pool for one without rows.
    struct RowsOfK {
        int first;
        MEGAMOE_DEVICE void at(int, int& k, const TensorMap*&, const TensorMap*) const { k += first; }
    };
    template <class T>
    static MEGAMOE_DEVICE int first_row_of_expert(const Context& ctx, int expert) {
        const int32_t* entry = own<T>(ctx.args).expert_rows + 2 * expert;
        return ctx.smem.plan.num_blocks == 0 || entry[1] == 0 ? ctx.args.pool_rows
                                                              : entry[0] * T::Tiling::rows;
    }
    template <class T>
    static MEGAMOE_DEVICE RowsOfK rows_of_k(const Context& ctx, const Tile& tile, bool mn_major) {
        return {mn_major ? first_row_of_expert<T>(ctx, tile.expert()) : 0};
    }
    // What the rows of a weight gradient's K are multiplied by for that of its bias; null: by 1.
    using RowWeights = const float*;
    template <class T>
    static MEGAMOE_DEVICE RowWeights row_weights(const Context& ctx, const Tile& tile) {
        RowWeights weights = nullptr;
        int row = first_row_of_expert<T>(ctx, tile.expert());
        if (tile.gemm != GemmId::dw13 && row < ctx.args.pool_rows)
            weights = own<T>(ctx.args).row_weight + row;
        return weights;
    }
    // Of row 32 * `half` + lane of a slot.
    static MEGAMOE_DEVICE float weight(RowWeights weights, int slot, int half) {
        return weights != nullptr ? weights[slot * warpgroup_rows + 32 * half + arch::lane_idx()] : 1.0f;
    }
    // Of the next block of transposed rows.
    static MEGAMOE_DEVICE BlockWeights next_weights(RowWeights& weights, int block_rows) {
        BlockWeights found = {weights, 1.0f};
        if (weights != nullptr) weights += block_rows;
        return found;
    }
    template <class T>
    static MEGAMOE_DEVICE int at(const Args&, int row) {
        return row;
    }
    static MEGAMOE_DEVICE int first_row(const ExpertTable&, const Tile& tile, int block_rows) {
        return tile.block * block_rows;
    }
    // One thread: 64 rows of a tile to an output that has the launch's rows.
    static MEGAMOE_DEVICE void store(const TensorMap* map, const void* from, int column, int row0, int) {
        arch::tma_store_2d(map, from, column, row0);
    }
};

// Rows that the caller has sorted by expert, where they follow each other; the table is rows/sorted.cuh's.
struct SortedBlocks : MapsOfTable {
    static constexpr bool in_pool = false, by_plane = false, has_tails = true, of_passes = false;
    static MEGAMOE_DEVICE BlockEntry entry(const Context& ctx, int block, int block_rows) {
        const ExpertTable& table = ctx.smem.experts;
        int expert = expert_of(ctx, block);
        int before = (block - table.first_block[expert]) * block_rows;
        return {expert << 8 | min_of(block_rows, table.rows(expert) - before)};
    }
    static MEGAMOE_DEVICE Run run(const Context& ctx, int block) {
        const int32_t* first = ctx.smem.experts.first_block + expert_of(ctx, block);
        return run_of(first[0], first[1] - first[0], block);
    }
    template <class T>
    static MEGAMOE_DEVICE int rows_of_expert(const Context& ctx, int expert) {
        return ctx.smem.experts.rows(expert);
    }
    // The K of a weight gradient. Whole groups of 64 rows of an expert are read where they stand; the rows
    // that are left behind them are in the tails, filled up with zero rows. The tail of an expert without
    // rows is zeros alone.
    struct RowsOfK {
        int first, rows, tail;
        // Which row a slot begins at, and in which map.
        MEGAMOE_DEVICE void at(int slot, int& k, const TensorMap*& map, const TensorMap* tails) const {
            bool is_whole = (slot + 1) * warpgroup_rows <= rows;
            k = is_whole ? first + slot * warpgroup_rows : tail;
            map = is_whole ? map : tails;
        }
    };
    template <class T>
    static MEGAMOE_DEVICE RowsOfK rows_of_k(const Context& ctx, const Tile& tile, bool) {
        int expert = tile.expert();
        return {ctx.smem.experts.first_row(expert), ctx.smem.experts.rows(expert), expert * warpgroup_rows};
    }
    using RowWeights = const float*;
    template <class T>
    static MEGAMOE_DEVICE RowWeights row_weights(const Context&, const Tile&) {
        return nullptr;
    }
    static MEGAMOE_DEVICE float weight(RowWeights, int, int) { return 1.0f; }
    // A row that has a weight: this one, or the last.
    template <class T>
    static MEGAMOE_DEVICE int at(const Args& args, int row) {
        return min_of(row, own<T>(args).num_rows - 1);
    }
    static MEGAMOE_DEVICE int first_row(const ExpertTable& table, const Tile& tile, int block_rows) {
        int expert = tile.expert();
        return table.first_row(expert) + (tile.block - table.first_block[expert]) * block_rows;
    }
    // The map is ragged: its dimensions are (columns, 64, rows + 1, 1), with one distance between rows in
    // both, and it begins 64 rows early. A box at 64 - n, first + n is `first` and the n - 1 rows behind it,
    // as TMA clips the others. docs/ops.md has the picture, and why loads do not do it.
    static MEGAMOE_DEVICE void store(const TensorMap* map, const void* from, int column, int row0, int rows) {
        int n = min_of(warpgroup_rows, rows);
        arch::tma_store_4d(map, from, column, warpgroup_rows - n, row0 + n, 0);
    }

  private:
    // The last expert whose first block does not come after this one. Others that begin at the same block,
    // before it, have no rows.
    static MEGAMOE_DEVICE int expert_of(const Context& ctx, int block) {
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
};

// The K of weight gradients as blocks of 128 transposed rows, of one expert each. They are added to what is
// there, so one without rows has no tile.
struct TransposedBlocks : SortedBlocks {
    static constexpr bool has_tails = false;
    struct RowsOfK {
        int first;
        MEGAMOE_DEVICE void at(int, int&, const TensorMap*&, const TensorMap*) const {}
    };
    template <class T>
    static MEGAMOE_DEVICE RowsOfK rows_of_k(const Context& ctx, const Tile& tile, bool) {
        return {ctx.smem.experts.first_block[tile.expert()] * T::Tiling::rows};
    }
    static MEGAMOE_DEVICE BlockWeights next_weights(RowWeights&, int) { return {nullptr, 1.0f}; }
};

// Rows of pools that backward launches have kept, one for each of several passes; the table is
// rows/kept.cuh's. Such a launch has no output with rows: of what SortedBlocks has for these, nothing runs.
// transposed: they are blocks of 128 rows in e4m3.
template <bool transposed>
struct StashedBlocks : SortedBlocks {
    static constexpr bool by_plane = true, has_tails = false, of_passes = true;
    static constexpr int slot_rows = transposed ? 2 * warpgroup_rows : warpgroup_rows;

    // An expert's rows of all passes, as slots of 64, or 128, one after the other. Slots are asked for in
    // order.
    class Rows {
      public:
        int pass;
        Rows() = default;
        MEGAMOE_DEVICE Rows(const Context& ctx, const StashedWeights& kept, int expert)
            : pass(0),
              entry_(ctx.smem.kept.entry + expert),
              stride_(ctx.args.num_local_experts + 1),
              left_(kept.num_passes),
              begin_(0),
              end_(num_slots(entry_)) {}
        // The row of the pass's pool that a slot begins at; -1 where there is none, and pass is 0.
        MEGAMOE_DEVICE int row_of(int slot) {
            MEGAMOE_UNROLL_BY(1)
            while (slot >= end_) {
                if (left_ == 1) {
                    pass = 0;
                    return -1;
                }
                --left_, ++pass;
                entry_ += stride_;
                begin_ = end_;
                end_ += num_slots(entry_);
            }
            return ((transposed ? *entry_ >> 1 : *entry_ & ~1) + slot - begin_) * slot_rows;
        }
        static MEGAMOE_DEVICE int num_slots(const int32_t* entry) {
            if (transposed) return (entry[1] >> 1) - (entry[0] >> 1);
            return (entry[1] & ~1) - (entry[0] & ~1) - (entry[0] & 1);
        }

      private:
        const int32_t* entry_;
        int stride_, left_, begin_, end_;
    };
    template <class T>
    static MEGAMOE_DEVICE int rows_of_expert(const Context& ctx, int expert) {
        int slots = 0;
        MEGAMOE_UNROLL_BY(1)
        for (int p = 0; p < own<T>(ctx.args).num_passes; ++p)
            slots += Rows::num_slots(ctx.smem.kept.entry + p * (ctx.args.num_local_experts + 1) + expert);
        return slots * slot_rows;
    }

    template <class T>
    static MEGAMOE_DEVICE const TensorMap* rows_map(const Args& args, GemmId id) {
        const StashedPass& first = own<T>(args).passes[0];
        return id == GemmId::dw13 ? first.dgu : &first.dy;
    }
    template <class T>
    static MEGAMOE_DEVICE const TensorMap* weights_map(const Args& args, GemmId id) {
        const StashedPass& first = own<T>(args).passes[0];
        return id == GemmId::dw13 ? &first.x : &first.hs;
    }
    struct RowsOfK {
        Rows rows;
        int past;  // a row behind all of a pool: zeros
        MEGAMOE_DEVICE void at(int slot, int& k, const TensorMap*& map, const TensorMap*) {
            int row = rows.row_of(slot);
            k = row < 0 ? past : row;
            map = of_pass(map, rows.pass);
        }
    };
    static MEGAMOE_DEVICE const TensorMap* of_pass(const TensorMap* map, int pass) {
        return map + pass * static_cast<int>(sizeof(StashedPass) / sizeof(TensorMap));
    }
    static_assert(sizeof(StashedPass) % sizeof(TensorMap) == 0, "maps of a pass are a whole number further");
    template <class T>
    static MEGAMOE_DEVICE RowsOfK rows_of_k(const Context& ctx, const Tile& tile, bool) {
        return {Rows(ctx, own<T>(ctx.args), tile.expert()), ctx.args.pool_rows};
    }

    // Rows that are lost make every gradient NaN, those of biases by way of these.
    struct RowWeights {
        Rows rows;
        const StashedPass* first;  // null: all weights are `all`
        float all;
        int slot = 0;  // the next, of next_weights()
    };
    static MEGAMOE_DEVICE BlockWeights slot_weights(RowWeights& weights, int slot) {
        int row = weights.first != nullptr ? weights.rows.row_of(slot) : -1;
        if (row < 0) return {nullptr, weights.all};
        return {weights.first[weights.rows.pass].row_weight + row, weights.all};
    }
    static MEGAMOE_DEVICE BlockWeights next_weights(RowWeights& weights, int) {
        return slot_weights(weights, weights.slot++);
    }
    static MEGAMOE_DEVICE float weight(RowWeights& weights, int slot, int half) {
        BlockWeights of_slot = slot_weights(weights, slot);
        return of_slot.first != nullptr ? of_slot.first[32 * half + arch::lane_idx()] : of_slot.all;
    }
    template <class T>
    static MEGAMOE_DEVICE RowWeights row_weights(const Context& ctx, const Tile& tile) {
        const auto& kept = own<T>(ctx.args);
        bool lost = ctx.smem.kept.lost != 0, by_row = tile.gemm != GemmId::dw13 && !lost;
        return {Rows(ctx, kept, tile.expert()), by_row ? kept.passes : nullptr, lost ? nan_value() : 1.0f};
    }
    template <class Sums>
    static MEGAMOE_DEVICE void spoil(const Context& ctx, Sums& sum) {
        if (ctx.smem.kept.lost == 0) return;
        MEGAMOE_UNROLL
        for (auto& half : sum) {
            MEGAMOE_UNROLL
            for (float& v : half) v = nan_value();
        }
    }

  private:
    static MEGAMOE_DEVICE float nan_value() { return arch::bf16_hi(0x7fc00000u); }
};

// The first row of a tile's block: in the pool, or of the caller's rows.
template <class T>
MEGAMOE_DEVICE int row0(const Tile& tile) {
    return T::Blocks::first_row(cta_smem<T>().common.experts, tile, T::Tiling::rows);
}
// Where the scales of a tile's rows stand: by block, also where the rows of experts follow each other.
template <class T>
MEGAMOE_DEVICE int scale_row0(const Tile& tile) {
    return tile.block * T::Tiling::rows;
}
// A tile's rows that its expert has: all, but of a grouped launch that makes zero rows behind them, too.
template <class T>
MEGAMOE_DEVICE int rows_used(const Tile& tile) {
    if constexpr (!T::WeightTiles::transposed || T::WeightTiles::any) return tile.rows();
    const ExpertTable& table = cta_smem<T>().common.experts;
    int before = (tile.block - table.first_block[tile.expert()]) * T::Tiling::rows;
    return min_of(T::Tiling::rows, table.rows(tile.expert()) - before);
}
// One thread: 64 rows of a tile, from its row `row` on, to an output that has the launch's rows.
template <class T>
MEGAMOE_DEVICE void store_rows(const TensorMap* map, const void* from, int column, const Tile& tile,
                               int row) {
    T::Blocks::store(map, from, column, row0<T>(tile) + row, rows_used<T>(tile) - row);
}

}  // namespace megamoe
