// Where the operands of a tile lie: what load_a and load_b ask for a pipeline slot. A layer has two types,
//
//   RowsOf<T>      ready(ctx, tile): waits; load(to, full, slot, half, both): 64 rows of A, MN-major columns;
//                  small_boxes(tile): of 16 rows, 0: none; load_small(to, full, slot, box, both)
//   WeightsOf<T>   load(to, full, slot, half, both): one half of B
//
// `both`: into both CTAs of the pair. K-major operands are boxes with 128 bytes of K in a row; MN-major ones
// have 128 bytes of M or N in a row, one row a k.
#pragma once
#include "megamoe/cta/blocks.cuh"
#include "megamoe/gemm/gemm.cuh"

namespace megamoe {

MEGAMOE_DEVICE void load_2d(bool both, void* to, const TensorMap* map, uint64_t* full, int c0, int c1) {
    if (both) {
        arch::tma_load_2d_both(to, map, full, c0, c1);
    } else {
        arch::tma_load_2d(to, map, full, c0, c1);
    }
}
MEGAMOE_DEVICE void load_4d(bool both, void* to, const TensorMap* map, uint64_t* full, int c0, int c1, int c2,
                            int c3) {
    if (both) {
        arch::tma_load_4d_both(to, map, full, c0, c1, c2, c3);
    } else {
        arch::tma_load_4d(to, map, full, c0, c1, c2, c3);
    }
}

// An MN-major half of B: columns from c0 on.
template <class S>
MEGAMOE_DEVICE void load_columns(bool both, uint8_t* to, const TensorMap* map, uint64_t* full, int c0, int c1,
                                 int c2, int c3) {
    MEGAMOE_UNROLL_BY(1)
    for (int n = 0; n < S::half_columns; n += mma_mn_columns, to += box_bytes)
        load_4d(both, to, map, full, c0 + n, c1, c2, c3);
}

// Rows of a block that dispatch fills, and gemm1 waits for: in a launch that trains, with zero rows behind
// the last.
template <class T>
MEGAMOE_DEVICE int rows_filled(int rows) {
    return T::Pool::padded ? padded_rows(rows, warpgroup_rows) : rows;
}

struct NoSmallBoxes {
    static MEGAMOE_DEVICE int small_boxes(const Tile&) { return 0; }
    MEGAMOE_DEVICE void load_small(void*, uint64_t*, int, int, bool) {}
};

// gemm1: x of the pool; gemm2: h. Both K-major, under gemm.a. Of a block that is not full no more rows are
// fetched than it has, up to whole small boxes: 64 rows where 8 are meant would be an eighth of what tiles
// read from L2, and take 3 % of the time (docs/tuning.md). What lies in a slot behind them is other tiles',
// and what comes of it, each row of a row, is read by nobody; but where a launch trains, weight gradients
// read the rows of gu and h that come of zero rows.
template <class T>
struct RowsOfPool {
    const Gemm& gemm;
    const TensorMap& small;
    int slot_k, row;
    MEGAMOE_DEVICE RowsOfPool(const Context& ctx, const Tile& tile)
        : gemm(gemm_of(ctx.args, tile.gemm)),
          small(ctx.args.small_boxes[tile.gemm == GemmId::gemm2 ? 1 : 0]),
          slot_k(Shape<T>::slot_k(tile.gemm)),
          row(row0<T>(tile)) {}

    static MEGAMOE_DEVICE void ready(Context& ctx, const Tile& tile) {
        if (tile.gemm != GemmId::gemm2) {
            RowsReady::await(ctx.mem, ctx.args.rows_ready + tile.block,
                             rows_filled<T>(tile.rows()) * ctx.smem.plan.pulls.count, tile.block);
        } else {
            HReady::await(ctx.mem, ctx.args.gemm[0].done + tile.block,
                          Shape<T>::tiles(ctx.args, GemmId::gemm1), tile.block);
        }
    }
    MEGAMOE_DEVICE void load(void* to, uint64_t* full, int slot, int half, bool both) {
        load_2d(both, to, &gemm.a, full, slot * slot_k, row + half * warpgroup_rows);
    }
    static MEGAMOE_DEVICE int small_boxes(const Tile& tile) {
        if (T::Pool::padded) return 0;
        int boxes = ceil_div(tile.rows(), small_box_rows);
        return boxes * small_box_rows < T::Tiling::rows ? boxes : 0;
    }
    MEGAMOE_DEVICE void load_small(void* to, uint64_t* full, int slot, int box, bool both) {
        load_2d(both, to, &small, full, slot * slot_k, row + box * small_box_rows);
    }
};

// Weights as forward reads them, K-major: one box a half.
template <class T>
struct WeightRows {
    const TensorMap* map;
    Halves<typename T::Tiling> halves;
    int slot_k, expert;
    MEGAMOE_DEVICE WeightRows(const Context& ctx, const Tile& tile)
        : map(&gemm_of(ctx.args, tile.gemm).b),
          halves(halves_of<T>(tile.gemm, tile.n)),
          slot_k(Shape<T>::slot_k(tile.gemm)),
          expert(tile.expert()) {}
    MEGAMOE_DEVICE void load(void* to, uint64_t* full, int slot, int half, bool both) {
        constexpr int packed = T::Gemm1::B::packed;
        load_4d(both, to, map, full, slot * slot_k / packed, halves.column(half), halves.plane(half), expert);
    }
};

}  // namespace megamoe
