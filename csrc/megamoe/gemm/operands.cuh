// Where the operands of a tile lie: what load_a and load_b ask for a pipeline slot. The row of the tile's
// GEMM has the maps; an operand is read by how it lies, K-major, with 128 bytes of K in a row of a box, or
// MN-major, with 128 bytes of M or N in a row and a row for each k. Weight gradients have MN-major rows for
// both operands, and their K are an expert's rows. A launch that has both asks at run time.
//
//   RowsOperand<T>      A: ready(ctx, tile) waits; load(to, full, slot, box, both): 64 rows, or columns
//                       (MN-major); small_boxes(tile): of 16 rows, 0: none; load_small(...) one of these
//   WeightsOperand<T>   B: load(to, full, slot, half, both): one half
//
// `both`: into both CTAs of the pair. Columns at or past the end of a plane, and rows at or past the pool's,
// are zeros (TMA).
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
struct BoxOf4d {  // where it begins, innermost dimension first
    int c0, c1, c2, c3;
};
MEGAMOE_DEVICE void load_4d(bool both, void* to, const TensorMap* map, uint64_t* full, BoxOf4d at) {
    if (both) {
        arch::tma_load_4d_both(to, map, full, at.c0, at.c1, at.c2, at.c3);
    } else {
        arch::tma_load_4d(to, map, full, at.c0, at.c1, at.c2, at.c3);
    }
}

// An MN-major half of B: columns from at.c0 on.
template <class S>
MEGAMOE_DEVICE void load_columns(bool both, uint8_t* to, const TensorMap* map, uint64_t* full, BoxOf4d at) {
    MEGAMOE_UNROLL_BY(1)
    for (int n = 0; n < S::half_columns; n += mma_mn_columns, to += box_bytes)
        load_4d(both, to, map, full, {at.c0 + n, at.c1, at.c2, at.c3});
}

// Rows of a block that dispatch fills, and gemm1 waits for: in a launch that trains, with zero rows behind
// the last, up to a multiple of so many.
template <class T>
constexpr int rows_at_a_time = T::WeightTiles::transposed ? T::Tiling::rows : warpgroup_rows;
template <class T>
MEGAMOE_DEVICE int rows_filled(int rows) {
    return T::Pool::padded ? padded_rows(rows, rows_at_a_time<T>) : rows;
}

// Is each slot of K a transposed block of its own pass, with its own map and scales? Then loaders seek it.
template <class T>
constexpr bool seeks_blocks = T::WeightTiles::transposed && T::Blocks::of_passes;

// Where a slot of K lies if K has planes: in which plane, and where in it.
struct PlaneOfK {
    int plane, k;
    MEGAMOE_DEVICE PlaneOfK(int slot, int plane_slots, int slot_k) {
        plane = slot >= plane_slots ? 1 : 0;
        k = (slot - plane * plane_slots) * slot_k;
    }
};
template <class T>
constexpr bool has_k_planes = T::Gemm1::k_planes == 2 || T::Gemm2::k_planes == 2;
template <class T>
MEGAMOE_DEVICE int slots_of_plane(const Args& args, GemmId id) {  // far away where K has one plane
    bool two = of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::k_planes; }) == 2;
    return two ? Shape<T>::k_slots(args, id) / 2 : 1 << 24;
}

// Is an operand of this tile MN-major, with an expert's rows for K?
template <class T>
MEGAMOE_DEVICE bool has_rows_of_k(const Tile& tile) {
    if constexpr (!T::WeightTiles::any) return false;
    if constexpr (!T::WeightTiles::beside_rows) return true;
    return is_weight_gradient(tile.gemm);
}

template <class T>
struct RowsOperand {
    const TensorMap* map;  // of the first plane
    typename T::Blocks::RowsOfK rows_of_k;
    bool mn_major;  // or, of a gradient, transposed
    int m, plane_slots, slot_k, block_columns;
    const TensorMap* small;
    const TensorMap* block_map;  // with these: of the block that seek() has found
    const float* block_scale;
    int block_m;
    MEGAMOE_DEVICE RowsOperand(const Context& ctx, const Tile& tile) {
        const auto& gemm = gemm_of<T>(ctx.args, tile.gemm);
        mn_major = has_rows_of_k<T>(tile);
        map = T::Blocks::template rows_map<T>(ctx.args, tile.gemm);
        small = &gemm.a_small;
        slot_k = Shape<T>::slot_k(tile.gemm);
        if constexpr (has_k_planes<T>) plane_slots = slots_of_plane<T>(ctx.args, tile.gemm);
        m = 0;
        if constexpr (!T::WeightTiles::any || T::WeightTiles::beside_rows) m = row0<T>(tile);
        if constexpr (T::WeightTiles::any) {
            rows_of_k = T::Blocks::template rows_of_k<T>(ctx, tile, mn_major);
            if constexpr (T::WeightTiles::transposed) {
                block_columns = transposed_columns<T>(ctx.args, tile.gemm);
                // Planes are whole blocks of m.
                if (mn_major) m = tile.block * T::Tiling::rows;
                if constexpr (!seeks_blocks<T>) {
                    if (mn_major) m += rows_of_k.first / T::Tiling::rows * block_columns;
                }
            } else if (mn_major) {
                GradientBlock<T> block(ctx.args, tile);
                m = block.row;
                if (T::Blocks::by_plane) map += block.plane;
            }
        }
    }

    static MEGAMOE_DEVICE void ready(Context& ctx, const Tile& tile) {
        if constexpr (T::Blocks::in_pool) {
            if (has_rows_of_k<T>(tile)) return;
            if (tile.gemm != GemmId::gemm2) {
                RowsReady::await(ctx.mem, ctx.args.rows_ready + tile.block,
                                 rows_filled<T>(tile.rows()) * ctx.smem.plan.pulls.count, tile.block);
            } else {
                HReady::await(ctx.mem, gemm_of<T>(ctx.args, GemmId::gemm1).done + tile.block,
                              Shape<T>::tiles(ctx.args, GemmId::gemm1), tile.block);
            }
        }
    }
    // The scales of the tile's rows in the first slot.
    MEGAMOE_DEVICE const float* scales(const Args& args, const Tile& tile) const {
        const float* scales = gemm_of<T>(args, tile.gemm).a_scale;
        if constexpr (T::WeightTiles::transposed) {
            if (mn_major) return scales + m;
        }
        return scales + scale_row0<T>(tile);
    }
    // Of rows that passes have kept, transposed: finds the slot's block.
    MEGAMOE_DEVICE void seek(const Context& ctx, const Tile& tile, int slot) {
        const auto& kept = own<T>(ctx.args);
        int row = rows_of_k.rows.row_of(slot), pass = rows_of_k.rows.pass;
        int at = (row < 0 ? rows_of_k.past : row) / T::Tiling::rows * block_columns;
        block_m = m + at;
        block_map = T::Blocks::of_pass(map, pass);
        block_scale =
            row < 0 ? kept.zeros + m : kept.passes[pass].a_scale[tile.gemm != GemmId::dw13] + block_m;
    }
    MEGAMOE_DEVICE void load(void* to, uint64_t* full, int slot, int box, bool both) {
        int m0 = m + box * warpgroup_rows, k0 = slot * slot_k;
        const TensorMap* from = map;
        if constexpr (seeks_blocks<T>) {
            load_2d(both, to, block_map, full, 0, block_m + box * warpgroup_rows);
            return;
        } else if constexpr (T::WeightTiles::transposed) {
            if (mn_major) {
                load_2d(both, to, from, full, 0, m0 + slot * block_columns);
                return;
            }
        }
        if constexpr (has_k_planes<T>) {
            PlaneOfK at(slot, plane_slots, slot_k);
            from += at.plane;
            k0 = at.k;
        }
        if constexpr (T::WeightTiles::any && !T::WeightTiles::transposed)
            rows_of_k.at(slot, k0, from, from + 1);
        load_2d(both, to, from, full, mn_major ? m0 : k0, mn_major ? k0 : m0);
    }

    // Of a block that is not full no more rows are fetched than it holds, rounded up to whole small boxes: 64
    // rows in the place of 8 would be an eighth of what tiles read from L2, and take 3 % of the time
    // (docs/tuning.md). Behind them the slot holds data of other tiles. Each row of the output depends on one
    // row of A alone, and nobody reads those that come of such data. Where a launch trains, though, weight
    // gradients read the rows of gu and h behind the last, which have to come of zero rows.
    static MEGAMOE_DEVICE int small_boxes(const Tile& tile) {
        if (T::Pool::padded && T::Gemm1::B::slot_scale_bytes == 0) return 0;
        int boxes = ceil_div(tile.rows(), small_box_rows);
        return boxes * small_box_rows < T::Tiling::rows ? boxes : 0;
    }
    MEGAMOE_DEVICE void load_small(void* to, uint64_t* full, int slot, int box, bool both) {
        load_2d(both, to, small, full, slot * slot_k, m + box * small_box_rows);
    }
};

template <class T>
struct WeightsOperand {
    using S = typename T::Tiling;
    const TensorMap* map;
    const TensorMap* tails;
    Halves<S> halves;
    typename T::Blocks::RowsOfK rows_of_k;
    bool k_major;
    int expert, plane_slots, slot_k, first_block;
    const TensorMap* block_map;  // of the block that seek() has found, first_block
    MEGAMOE_DEVICE WeightsOperand(const Context& ctx, const Tile& tile)
        : halves(halves_of<T>(tile.gemm, tile.n)) {
        k_major = Shape<T>::b_k_major(tile.gemm);
        if constexpr (has_k_planes<T>) plane_slots = slots_of_plane<T>(ctx.args, tile.gemm);
        slot_k = Shape<T>::slot_k(tile.gemm);
        bool is_gradient = has_rows_of_k<T>(tile);
        expert = is_gradient ? 0 : tile.expert();
        if constexpr (T::WeightTiles::any)
            rows_of_k = T::Blocks::template rows_of_k<T>(ctx, tile, is_gradient);
        if constexpr (T::WeightTiles::transposed && !seeks_blocks<T>)
            first_block = is_gradient ? rows_of_k.first / T::Tiling::rows : -1;
        map = T::Blocks::template weights_map<T>(ctx.args, tile.gemm);
        if constexpr (T::WeightTiles::any && T::Blocks::has_tails) tails = &own<T>(ctx.args).tails_b;
    }

    template <class Scales>
    MEGAMOE_DEVICE Scales scales(const Args& args, const Tile& tile) const {
        const auto& gemm = gemm_of<T>(args, tile.gemm);
        if constexpr (T::WeightTiles::transposed && !seeks_blocks<T>) {
            if (first_block >= 0)
                return {gemm.b_scale + first_block, gemm.n, transposed_blocks(args), 0, halves};
        }
        return {gemm.b_scale, gemm.n, Shape<T>::scale_columns(args, tile.gemm, scale_group), tile.expert(),
                halves};
    }
    // As of rows above.
    template <class Scales>
    MEGAMOE_DEVICE void seek(const Context& ctx, const Tile& tile, int slot, Scales& scales) {
        const auto& kept = own<T>(ctx.args);
        int row = rows_of_k.rows.row_of(slot), pass = rows_of_k.rows.pass;
        first_block = (row < 0 ? rows_of_k.past : row) / T::Tiling::rows;
        block_map = T::Blocks::of_pass(map, pass);
        const float* scale = kept.passes[pass].b_scale[tile.gemm != GemmId::dw13] + first_block;
        int n = gemm_of<T>(ctx.args, tile.gemm).n;
        scales = row < 0 ? Scales(kept.zeros, n, 0, 0, halves)
                         : Scales(scale, n, transposed_blocks(ctx.args), 0, halves);
    }
    MEGAMOE_DEVICE void load(uint8_t* to, uint64_t* full, int slot, int half, bool both) {
        int k0 = slot * slot_k, plane = 0;
        if constexpr (seeks_blocks<T>) {
            load_4d(both, to, block_map, full, {0, halves.column(half), 0, first_block});
            return;
        } else if constexpr (T::WeightTiles::transposed) {
            if (first_block >= 0) {
                load_4d(both, to, map, full, {0, halves.column(half), 0, first_block + slot});
                return;
            }
        }
        if constexpr (has_k_planes<T>) {
            PlaneOfK at(slot, plane_slots, slot_k);
            k0 = at.k, plane = at.plane;
        }
        if (k_major) {  // planes are N's or K's
            constexpr int packed = T::Gemm1::B::packed;
            load_4d(both, to, map, full,
                    {k0 / packed, halves.column(half), halves.plane(half) + plane, expert});
            return;
        }
        const TensorMap* from = map;
        if constexpr (T::WeightTiles::any) rows_of_k.at(slot, k0, from, tails);
        if constexpr (T::num_row_gemms == 1) plane += halves.plane(half);  // others have them K-major
        load_columns<S>(both, to, from, full, {halves.column(half), k0, plane, expert});
    }
};

}  // namespace megamoe
