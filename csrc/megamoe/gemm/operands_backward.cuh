// Where the operands of backward's tiles lie.
//
//   GEMM        A                        B
//   gemm1       dy rows, K-major         bf16: w2 [L, H, I], MN-major: read as it lies; fp8: w2^T, K-major
//   gemm2       dgu, K-major, P planes   bf16: w13 [L, P, I, H], MN-major; fp8: w13^T [L, P, H, I], K-major
//   dw13        dgu, MN-major            x rows, MN-major: both with K = rows of the expert
//   dw2         dy rows, MN-major        hs, MN-major
//   recompute   x rows, K-major          w13, K-major
//
// Columns at or past the end of a plane, and rows at or past the pool's, are zeros (TMA).
#pragma once
#include "megamoe/gemm/operands.cuh"

namespace megamoe {

// First row of a weight tile's expert; past the pool for an expert without rows.
MEGAMOE_DEVICE int first_row_of_expert(const Context& ctx, int expert, int block_rows) {
    const int32_t* entry = ctx.args.training.expert_rows + 2 * expert;
    return ctx.smem.plan.num_blocks == 0 || entry[1] == 0 ? ctx.args.pool_rows : entry[0] * block_rows;
}

// A slot of K in planes: which plane, and where in it.
struct PlaneOfK {
    int plane, k;
    MEGAMOE_DEVICE PlaneOfK(int slot, int plane_slots, int slot_k) {
        plane = slot >= plane_slots ? 1 : 0;
        k = (slot - plane * plane_slots) * slot_k;
    }
};
template <class T>
MEGAMOE_DEVICE int slots_of_plane(const Args& args, GemmId id) {  // far away where K has one plane
    return id == GemmId::gemm2 && T::Gemm2::k_planes == 2 ? Shape<T>::k_slots(args, id) / 2 : 1 << 24;
}

template <class T>
struct GradientRows : NoSmallBoxes {
    const TensorMap* map;  // of the first plane
    bool mn_major;
    int m, k, plane_slots, slot_k;  // m and k: first of either
    MEGAMOE_DEVICE GradientRows(const Context& ctx, const Tile& tile) {
        const Args& args = ctx.args;
        constexpr int block_rows = T::Tiling::rows;
        mn_major = is_weight_gradient(tile.gemm);
        plane_slots = slots_of_plane<T>(args, tile.gemm);
        slot_k = Shape<T>::slot_k(tile.gemm);
        m = row0<T>(tile);
        k = mn_major ? first_row_of_expert(ctx, tile.expert(), block_rows) : 0;
        map = &args.gemm[0].a;
        if (tile.gemm == GemmId::recompute) map = &args.training.x_rows_map;
        if (tile.gemm == GemmId::gemm2) map = &args.training.dgu_rows[0];
        if (tile.gemm == GemmId::dw2) map = &args.training.dy_rows_map;
        if (mn_major) {
            GradientBlock<typename T::Tiling> block(args, tile);
            if (tile.gemm == GemmId::dw13) map = &args.training.dgu[block.plane];
            m = block.row;
        }
    }

    static MEGAMOE_DEVICE void ready(Context& ctx, const Tile& tile) {
        if (!is_weight_gradient(tile.gemm)) RowsOfPool<T>::ready(ctx, tile);
    }
    MEGAMOE_DEVICE void load(void* to, uint64_t* full, int slot, int half, bool both) {
        PlaneOfK at(slot, plane_slots, slot_k);
        int m0 = m + half * warpgroup_rows, k0 = k + at.k;
        load_2d(both, to, map + at.plane, full, mn_major ? m0 : k0, mn_major ? k0 : m0);
    }
};

template <class T>
struct GradientWeights {
    using S = typename T::Tiling;
    const TensorMap* map;
    Halves<S> halves;
    bool k_major;
    int expert, k, plane_slots, slot_k;
    MEGAMOE_DEVICE GradientWeights(const Context& ctx, const Tile& tile)
        : halves(halves_of<T>(tile.gemm, tile.n)) {
        const Args& args = ctx.args;
        k_major = Shape<T>::b_k_major(tile.gemm);
        plane_slots = slots_of_plane<T>(args, tile.gemm);
        slot_k = Shape<T>::slot_k(tile.gemm);
        bool is_gradient = is_weight_gradient(tile.gemm);
        expert = is_gradient ? 0 : tile.expert();
        k = is_gradient ? first_row_of_expert(ctx, tile.expert(), S::rows) : 0;
        map = &gemm_of(args, tile.gemm).b;
        if (tile.gemm == GemmId::recompute) map = &args.training.w13;
        if (is_gradient) map = &args.training.b[tile.gemm == GemmId::dw13 ? 0 : 1];
    }

    MEGAMOE_DEVICE void load(uint8_t* to, uint64_t* full, int slot, int half, bool both) {
        PlaneOfK at(slot, plane_slots, slot_k);
        if (k_major) {  // planes are N's or K's
            load_4d(both, to, map, full, at.k, halves.column(half), halves.plane(half) + at.plane, expert);
            return;
        }
        load_columns<S>(both, to, map, full, halves.column(half), k + at.k, at.plane, expert);
    }
};

}  // namespace megamoe
