// Where the operands of a grouped launch's tiles lie: nobody has to wait for them.
//
//   kernel      A                               B
//   rows        rows, K-major; in P planes      weights as forward has them, K-major: WeightRows; or
//   MN-major,
//               of K where `k_planes` is 2      [L, P, k, n]: GroupedColumns
//   weights     rows, MN-major                  rows, MN-major: both with K = rows of the expert
#pragma once
#include "megamoe/gemm/operands_backward.cuh"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE int slots_of_k_plane(const Args& args) {  // far away where K has one plane
    return T::Gemm1::k_planes == 2 ? Shape<T>::k_slots(args, GemmId::gemm1) / 2 : 1 << 24;
}

template <class T>
struct GroupedRows : NoSmallBoxes {
    const TensorMap* map;  // of the first plane
    int row, plane_slots;
    MEGAMOE_DEVICE GroupedRows(const Context& ctx, const Tile& tile)
        : map(T::Gemm1::k_planes == 2 ? ctx.args.training.dgu_rows : &ctx.args.gemm[0].a),
          row(row0<T>(tile)),
          plane_slots(slots_of_k_plane<T>(ctx.args)) {}

    static MEGAMOE_DEVICE void ready(Context&, const Tile&) {}
    // Behind the expert's last row stand the next one's: what comes of them is not stored.
    MEGAMOE_DEVICE void load(void* to, uint64_t* full, int slot, int half, bool both) {
        PlaneOfK at(slot, plane_slots, T::Gemm1::slot_k);
        load_2d(both, to, map + at.plane, full, at.k, row + half * warpgroup_rows);
    }
};

template <class T>
struct GroupedColumns {
    using S = typename T::Tiling;
    const TensorMap* map;
    Halves<S> halves;
    int expert, plane_slots;
    MEGAMOE_DEVICE GroupedColumns(const Context& ctx, const Tile& tile)
        : map(&ctx.args.gemm[0].b),
          halves(halves_of<T>(tile.gemm, tile.n)),
          expert(tile.expert()),
          plane_slots(slots_of_k_plane<T>(ctx.args)) {}
    MEGAMOE_DEVICE void load(uint8_t* to, uint64_t* full, int slot, int half, bool both) {
        PlaneOfK at(slot, plane_slots, T::Gemm1::slot_k);
        load_columns<S>(both, to, map, full, halves.column(half), at.k, at.plane, expert);
    }
};

// Of both operands of a weight tile: 64 rows of its expert, whole ones where they stand; what is left of the
// expert behind them, with zero rows, is in the tails. An expert without rows has a tail of zeros alone.
struct RowsOfK {
    int first, rows, tail;
    MEGAMOE_DEVICE RowsOfK(const Context& ctx, const Tile& tile)
        : first(ctx.smem.experts.first_row[tile.expert()]),
          rows(ctx.smem.experts.first_row[tile.expert() + 1] - first),
          tail(tile.expert() * warpgroup_rows) {}
    MEGAMOE_DEVICE bool is_whole(int slot) const { return (slot + 1) * warpgroup_rows <= rows; }
    MEGAMOE_DEVICE int row(int slot) const { return is_whole(slot) ? first + slot * warpgroup_rows : tail; }
};

template <class T>
struct RowsAndTails : NoSmallBoxes {
    const Args& args;
    RowsOfK k;
    int m;
    MEGAMOE_DEVICE RowsAndTails(const Context& ctx, const Tile& tile)
        : args(ctx.args), k(ctx, tile), m(GradientBlock<typename T::Tiling>(ctx.args, tile).row) {}

    static MEGAMOE_DEVICE void ready(Context&, const Tile&) {}
    MEGAMOE_DEVICE void load(void* to, uint64_t* full, int slot, int half, bool both) {
        const TensorMap* map = k.is_whole(slot) ? &args.gemm[0].a : &args.grouped.tails_a;
        load_2d(both, to, map, full, m + half * warpgroup_rows, k.row(slot));
    }
};

template <class T>
struct ColumnsAndTails {
    using S = typename T::Tiling;
    const Args& args;
    Halves<S> halves;
    RowsOfK k;
    MEGAMOE_DEVICE ColumnsAndTails(const Context& ctx, const Tile& tile)
        : args(ctx.args), halves(halves_of<T>(tile.gemm, tile.n)), k(ctx, tile) {}
    MEGAMOE_DEVICE void load(uint8_t* to, uint64_t* full, int slot, int half, bool both) {
        const TensorMap* map = k.is_whole(slot) ? &args.gemm[0].b : &args.grouped.tails_b;
        load_columns<S>(both, to, map, full, halves.column(half), k.row(slot), 0, 0);
    }
};

}  // namespace megamoe
