// Blocks of rows: where they stand, and whose they are. A kind of launch has one of the two.
#pragma once
#include "megamoe/cta/context.cuh"

namespace megamoe {

// Rows of the pool, where the plan of the pass has placed them.
struct PoolBlocks {
    static constexpr bool in_pool = true;
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
    static MEGAMOE_DEVICE int first_row(const ExpertTable&, const Tile& tile, int block_rows) {
        return tile.block * block_rows;
    }
    // One thread: 64 rows of a tile to an output that has the launch's rows.
    static MEGAMOE_DEVICE void store(const TensorMap* map, const void* from, int column, int row0, int) {
        arch::tma_store_2d(map, from, column, row0);
    }
};

// Rows that the caller has sorted by expert, where they follow each other; the table is rows/sorted.cuh's.
struct SortedBlocks {
    static constexpr bool in_pool = false;
    static MEGAMOE_DEVICE BlockEntry entry(const Context& ctx, int block, int block_rows) {
        const ExpertTable& table = ctx.smem.experts;
        int expert = expert_of(ctx, block);
        int first = table.first_row[expert] + (block - table.first_block[expert]) * block_rows;
        return {expert << 8 | min_of(block_rows, table.first_row[expert + 1] - first)};
    }
    static MEGAMOE_DEVICE Run run(const Context& ctx, int block) {
        const int32_t* first = ctx.smem.experts.first_block + expert_of(ctx, block);
        return run_of(first[0], first[1] - first[0], block);
    }
    template <class T>
    static MEGAMOE_DEVICE int rows_of_expert(const Context& ctx, int expert) {
        const int32_t* first = ctx.smem.experts.first_row + expert;
        return first[1] - first[0];
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
        int first = ctx.smem.experts.first_row[tile.expert()];
        return {first, ctx.smem.experts.first_row[tile.expert() + 1] - first, tile.expert() * warpgroup_rows};
    }
    static MEGAMOE_DEVICE int first_row(const ExpertTable& table, const Tile& tile, int block_rows) {
        int expert = tile.expert();
        return table.first_row[expert] + (tile.block - table.first_block[expert]) * block_rows;
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
// One thread: 64 rows of a tile, from its row `row` on, to an output that has the launch's rows.
template <class T>
MEGAMOE_DEVICE void store_rows(const TensorMap* map, const void* from, int column, const Tile& tile,
                               int row) {
    T::Blocks::store(map, from, column, row0<T>(tile) + row, tile.rows() - row);
}

}  // namespace megamoe
