// The epilogue of a tile in the wide form (gemm/wide.cuh). It applies scale, bias and transform() like the
// others. Then both warpgroups write the tile's rows into the first one's output slots.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"
#include "megamoe/gemm/wide.cuh"

namespace megamoe {

// Sums of weights with a scale for the whole matrix. The product is rounded by itself: if it were fused with
// what follows for some numbers of rows and not for others, their bits would differ.
template <class T, int n>
MEGAMOE_DEVICE void scale_sums(const Context& ctx, const Tile& tile, float (&sum)[2][n]) {
    using W = typename T::Gemm1::B;
    if constexpr (W::scales_sums) {
        const auto& gemm = gemm_of<T>(ctx.args, tile.gemm);
        int columns = Shape<T>::scale_columns(ctx.args, tile.gemm, scale_group);
        typename W::Scales scales(gemm.b_scale, gemm.n, columns, tile.expert(),
                                  halves_of<T>(tile.gemm, tile.n));
        MEGAMOE_UNROLL
        for (int half = 0; half < 2; ++half) {
            float scale = scales.of_sums(half, columns);
            MEGAMOE_UNROLL
            for (int i = 0; i < n; ++i) sum[half][i] = arch::mul_rn(sum[half][i], scale);
        }
    }
}

template <class T, int n>
MEGAMOE_DEVICE void add_bias_wide(const Context& ctx, const Tile& tile, float (&sum)[2][n], WideFragment f) {
    const auto& gemm = gemm_of<T>(ctx.args, tile.gemm);
    if (gemm.bias == nullptr) return;
    Halves<typename T::Tiling> halves = halves_of<T>(tile.gemm, tile.n);
    const float* bias = gemm.bias + int64_t{tile.expert()} * gemm.n * halves.num_planes();
    MEGAMOE_UNROLL
    for (int half = 0; half < 2; ++half) {
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            int column = halves.column(half) + f.warpgroup * warpgroup_rows + f.column + 8 * i;
            float b = column < gemm.n ? bias[halves.plane(half) * gemm.n + column] : 0.0f;
            MEGAMOE_UNROLL
            for (int g = 0; g < n / 4; ++g) {
                sum[half][4 * g + 2 * i] += b;
                sum[half][4 * g + 2 * i + 1] += b;
            }
        }
    }
}

// A half of the wide form as bf16, by both warpgroups: each fills the box of its columns.
template <class Output, int n>
MEGAMOE_DEVICE void write_columns(Bf16Rows, Output& output, const float (&v)[n], float*, WideFragment f) {
    auto first = output.claim_common(0), second = output.claim_common(1);
    auto mine = f.warpgroup == 0 ? first : second;
    MEGAMOE_UNROLL
    for (int j = 0; j < 2; ++j) {
        int at = swizzled(f.row(0) + j, 2 * f.column), next = swizzled(f.row(0) + j, 2 * (f.column + 8));
        MEGAMOE_UNROLL
        for (int g = 0; g < n / 4; ++g) {  // eight rows further on the swizzle is the same
            uint32_t pair = arch::pack_bf16x2(v[4 * g + j], v[4 * g + 2 + j]);
            uint8_t* box = 8 * g < warpgroup_rows ? mine.slot : mine.beside;
            box += 8 * g % warpgroup_rows * slot_k_bytes;
            *reinterpret_cast<uint16_t*>(box + at) = static_cast<uint16_t>(pair);
            *reinterpret_cast<uint16_t*>(box + next) = static_cast<uint16_t>(pair >> 16);
        }
    }
    output.hand_over_common(2);
}
// A half of the wide form, by both warpgroups: eight warps hold 16 columns of each row, and tell each
// other the largest of theirs.
template <class Words, class Output, int n>
MEGAMOE_DEVICE void write_columns(E4m3RowsIn<Words>, Output& output, const float (&v)[n], float* row_scale,
                                  WideFragment f) {
    auto to = output.claim_common(0);
    auto* amax = reinterpret_cast<float*>(to.beside);  // [warp][row]
    int warp = arch::warp_idx() - first_math_warp;
    bool first_column = arch::lane_idx() < 4;
    MEGAMOE_UNROLL
    for (int g = 0; g < n / 4; ++g) {
        MEGAMOE_UNROLL
        for (int j = 0; j < 2; ++j) {
            E4m3Group group;
            group.include(v[4 * g + j], v[4 * g + 2 + j]);
            group.template join_lanes<8, 4>();
            if (first_column) amax[warp * warpgroup_rows + f.row(g) + j] = group.amax();
        }
    }
    math_sync();  // the largest of all columns
    int own_row = warp * 32 + arch::lane_idx();
    if (own_row < 2 * n) {
        E4m3Group group;
        MEGAMOE_UNROLL
        for (int w = 0; w < math_role.num_warps; w += 2)
            group.include(amax[w * warpgroup_rows + own_row], amax[(w + 1) * warpgroup_rows + own_row]);
        amax[own_row] = group.inverse();  // in place of the first warp's
        if (row_scale != nullptr) row_scale[own_row] = group.scale();
    }
    math_sync();  // the factors of all rows
    MEGAMOE_UNROLL
    for (int g = 0; g < n / 4; ++g) {
        MEGAMOE_UNROLL
        for (int j = 0; j < 2; ++j) {
            int row = f.row(g) + j;
            float inverse = amax[row];
            uint32_t pair = arch::pack_e4m3x2(v[4 * g + j] * inverse, v[4 * g + 2 + j] * inverse);
            int column = f.warpgroup * warpgroup_rows + f.column;
            to.slot[swizzled(row, Words::place(column))] = static_cast<uint8_t>(pair);
            to.slot[swizzled(row, Words::place(column + 8))] = static_cast<uint8_t>(pair >> 8);
        }
    }
    output.hand_over_common(1);
}

template <class T, class Output, int n>
MEGAMOE_DEVICE void finish_wide(const Context& ctx, const Tile& tile, Output& output, float (&sum)[2][n]) {
    Profile<T>::mark(ctx.smem, TileMark::multiplied);
    WideFragment f;
    scale_sums<T>(ctx, tile, sum);
    add_bias_wide<T>(ctx, tile, sum, f);
    of_gemm<T>(tile.gemm, [&](auto gemm) {
        using E = typename decltype(gemm)::Epilogue;
        using Out = typename E::Out;
        if constexpr (E::saves) {
            MEGAMOE_UNROLL
            for (int half = 0; half < 2; ++half)
                write_columns(Bf16Rows{}, output, sum[half], nullptr, WideFragment());
        }
        E::transform(ctx.args, sum);
        MEGAMOE_UNROLL
        for (int half = 0; half < E::halves; ++half) {
            float* scales = nullptr;
            if constexpr (Out::scaled) scales = scales_of_half<T, true>(ctx, tile, half);
            write_columns(Out{}, output, sum[half], scales, E::saves ? WideFragment() : f);
        }
    });
}

// Forms of e4m3 weights: a tile that shares no weights with another, and has few rows, has the wide one.
// A thread of the tall form would compute with 64 rows, and half of the math warps not at all. With more rows
// than these the wide form is slower (docs/tuning.md).
struct TallOrWide : OneForm {
    static constexpr int most_rows = 32;

    template <class T>
    struct Of : OneForm::Of<T> {
        template <class Output>
        static MEGAMOE_DEVICE bool run_wide(Context& ctx, PipelineRing<T>& ring, Output& output,
                                            const Tile& tile) {
            if (tile.shared != Shared::a || tile.rows() > most_rows) return false;
            if (tile.rows() <= 16) {
                run_rows<16>(ctx, ring, output, tile);
            } else {
                run_rows<most_rows>(ctx, ring, output, tile);
            }
            return true;
        }

      private:
        template <int n, class Output>
        static MEGAMOE_DEVICE void run_rows(Context& ctx, PipelineRing<T>& ring, Output& output,
                                            const Tile& tile) {
            WideSums<n> sum;
            multiply_wide<T, n>(sum, ctx, ring, tile.slots);
            finish_wide<T>(ctx, current_tile<T>(), output, sum);
        }
    };
};

}  // namespace megamoe
