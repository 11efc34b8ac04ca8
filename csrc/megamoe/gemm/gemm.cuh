// The GEMMs of a layer: their compile-time properties, and the sizes that follow.
#pragma once
#include "megamoe/cta/context.cuh"
#include "megamoe/formats/format.h"

namespace megamoe {

// For which weight gradients a kind of launch makes tiles, after those of rows. asked_ahead: how many output
// slots ahead of an addition what it adds to is asked into L2; 0: all of a tile at once, before its first.
// transposed: their operands are blocks of 128 rows as [columns, 128] in e4m3 (docs/backward.md), not bf16
// rows.
struct NoWeightTiles {
    static constexpr bool any = false, beside_rows = false, transposed = false;
    static constexpr int asked_ahead = 0;
};
struct TransposedOutputs : NoWeightTiles {  // of rows alone, for a launch of weight gradients
    static constexpr bool transposed = true;
};
struct WeightTilesBehindRows {  // they wait for all rows
    static constexpr bool any = true, beside_rows = true, transposed = false;
    static constexpr int asked_ahead = 0;
};
struct TransposedWeightTiles : WeightTilesBehindRows {
    static constexpr bool transposed = true;
};
// dw13 of DeepSeek-V3 with 576 rows an expert, added to fp32, takes 6761 us one slot ahead, 8841 two ahead
// and 10042 a tile at once: what is asked for early has left L2 again (H100, 2026-11-26).
struct WeightTilesAlone {
    static constexpr bool any = true, beside_rows = false, transposed = false;
    static constexpr int asked_ahead = 1;
};
struct TransposedTilesAlone : WeightTilesAlone {
    static constexpr bool transposed = true;
};

// One GEMM of a layer: rows of the pool in one format, times weights in another, and an epilogue. Its K is
// `k_planes` planes of the k of the launch's row.
template <class Rows, class Weights, class Epilogue_, int k_planes_ = 1>
struct GemmOf {
    using A = Rows;
    using B = Weights;
    using Epilogue = Epilogue_;
    static constexpr int slot_k = slot_k_bytes / A::element_bytes;  // values of K in a pipeline slot
    static constexpr int k_planes = k_planes_;
};

MEGAMOE_PURE bool is_weight_gradient(GemmId id) { return id == GemmId::dw13 || id == GemmId::dw2; }

// f(the layer's GEMM of this name), a GemmOf.
template <class T, class F>
MEGAMOE_DEVICE auto of_gemm(GemmId id, F f) {
    if constexpr (T::WeightTiles::beside_rows) {
        if (is_weight_gradient(id)) return f(typename T::WeightGemm{});
        if (id == GemmId::recompute) return f(typename T::RecomputeGemm{});
    }
    return id == GemmId::gemm1 ? f(typename T::Gemm1{}) : f(typename T::Gemm2{});
}

// Planes of w13, whose gradient has as many: those that backward's gemm2 has of K.
template <class T>
constexpr int w13_planes() {
    if constexpr (T::num_row_gemms == 0) {
        return T::planes;
    } else {
        return T::Gemm2::k_planes;
    }
}
// Columns of a block of a weight gradient's transposed A: of all planes, each rounded up to whole groups.
template <class T>
MEGAMOE_DEVICE int transposed_columns(const Args& args, GemmId id) {
    return (id == GemmId::dw13 ? w13_planes<T>() : 1) * padded_rows(gemm_of<T>(args, id).m, scale_group);
}
// Blocks of the scales of a transposed operand: of the pool, and one more, whose scales an expert without
// rows multiplies zeros by.
MEGAMOE_DEVICE int transposed_blocks(const Args& args) { return args.pool_rows / scale_group + 1; }

// RankConfig about a layer's GEMMs, by GEMM: those of compile time, and the run-time sizes that follow from
// them.
template <class T>
struct Shape {
    static MEGAMOE_DEVICE int tiles(const Args& args, GemmId id) {  // of a block
        return ceil_div(gemm_of<T>(args, id).n,
                        of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::Epilogue::columns; }));
    }
    // Pipeline slots of a tile of rows.
    static MEGAMOE_DEVICE int k_slots(const Args& args, GemmId id) {
        return of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::k_planes; }) *
               ceil_div(gemm_of<T>(args, id).k, slot_k(id));
    }
    // Columns of B's scales: one every `group` of all its K.
    static MEGAMOE_DEVICE int scale_columns(const Args& args, GemmId id, int group) {
        return of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::k_planes; }) *
               ceil_div(gemm_of<T>(args, id).k, group);
    }
    static MEGAMOE_DEVICE int input_slots(GemmId id) {
        return of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::Epilogue::inputs; });
    }
    static MEGAMOE_DEVICE int slot_k(GemmId id) {
        return of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::slot_k; });
    }
    static MEGAMOE_DEVICE bool a_scaled(GemmId id) {
        return of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::A::scaled; });
    }
    // Floats from A's scales of a slot to the next one's: a scale of whole rows is every slot's.
    static MEGAMOE_DEVICE int a_scale_stride(const Args& args, GemmId id) {
        if constexpr (T::WeightTiles::transposed) {
            if (is_weight_gradient(id)) return transposed_columns<T>(args, id);
        }
        return of_gemm<T>(id, [&](auto gemm) {
            using A = typename decltype(gemm)::A;
            if constexpr (A::scaled) return A::whole_rows ? 0 : args.pool_rows;
            return args.pool_rows;
        });
    }
    static MEGAMOE_DEVICE bool b_scaled(GemmId id) {
        return of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::B::scaled; });
    }
    static MEGAMOE_DEVICE bool b_k_major(GemmId id) {
        return of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::B::k_major; });
    }
    static MEGAMOE_DEVICE int planes(GemmId id) {
        return of_gemm<T>(id, [](auto gemm) { return decltype(gemm)::Epilogue::planes; });
    }
};

// What the two halves of a tile are: gate and up of the same columns (in planes of w13), or neighbouring
// columns.
template <class S>
struct Halves {
    bool planes;
    int column0;  // of the first half, in its plane
    MEGAMOE_DEVICE int num_planes() const { return planes ? 2 : 1; }
    MEGAMOE_DEVICE int plane(int half) const { return planes ? half : 0; }
    MEGAMOE_DEVICE int column(int half) const { return column0 + (planes ? 0 : half * S::half_columns); }
};
template <class T>
MEGAMOE_DEVICE Halves<typename T::Tiling> halves_of(GemmId id, int n) {
    using S = typename T::Tiling;
    bool planes = Shape<T>::planes(id) == 2;
    return {planes, n * (planes ? S::half_columns : S::columns)};
}

// Were this pass's pre-activations made again in the phase before, where dgu will be? Forward saves those of
// the first pass.
MEGAMOE_DEVICE bool is_recomputed(const Context& ctx) { return ctx.smem.plan.chunk_begin != 0; }
// Are dx and d_topk_weights left out? Then reduce and combine hand over flags alone: a home still has to
// learn that its rows were pulled.
template <class T>
MEGAMOE_DEVICE bool only_weights(const Args& args) {
    if constexpr (T::Sums::of_gradients) return own<T>(args).only_weights != 0;
    return false;
}
// The last tiles that rows wait for before they are reduced.
template <class T>
MEGAMOE_DEVICE GemmId reduced_gemm(const Args& args) {
    return only_weights<T>(args) ? GemmId::gemm1 : GemmId::gemm2;
}
// Are weight gradients of this pass added to what is there?
template <class T>
MEGAMOE_DEVICE bool adds_weight_gradients(const Context& ctx) {
    return ctx.smem.plan.chunk_begin != 0 || own<T>(ctx.args).accumulate != 0;
}
// Where the m-block of a weight tile begins. A matrix has at most two planes: no division.
template <class T>
struct GradientBlock {
    int plane, row;
    MEGAMOE_DEVICE GradientBlock(const Args& args, const Tile& tile) {
        int blocks = ceil_div(gemm_of<T>(args, tile.gemm).m, T::Tiling::rows);
        plane = tile.block < blocks ? 0 : 1;
        row = (tile.block - plane * blocks) * T::Tiling::rows;
    }
};

}  // namespace megamoe
