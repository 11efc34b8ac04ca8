// The epilogue of a tile in the wide form (gemm/wide.cuh): scale, bias and transform() as they are, then both
// warpgroups write the tile's rows into the first one's output slots.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

// Sums of weights with a scale for the whole matrix. The product is rounded by itself: fused with what
// follows for some numbers of rows and not for others, their bits would differ.
template <class T, int n>
MEGAMOE_DEVICE void scale_sums(const Context& ctx, const Tile& tile, float (&sum)[2][n]) {
    using W = typename T::Gemm1::B;
    if constexpr (W::scales_sums) {
        const Gemm& gemm = gemm_of(ctx.args, tile.stage);
        int columns = Shape<T>::scale_columns(ctx.args, tile.stage, scale_group);
        typename W::Scales scales(gemm.b_scale, gemm.n, columns, tile.expert(),
                                  halves_of<T>(tile.stage, tile.n));
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
    const Gemm& gemm = gemm_of(ctx.args, tile.stage);
    if (gemm.bias == nullptr) return;
    Halves<typename T::Tiling> halves = halves_of<T>(tile.stage, tile.n);
    const float* bias = gemm.bias + int64_t{tile.expert()} * gemm.n * halves.num_planes();
    MEGAMOE_UNROLL
    for (int half = 0; half < 2; ++half) {
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            int column = halves.column(half) + f.group * group_rows + f.column + 8 * i;
            float b = column < gemm.n ? bias[halves.plane(half) * gemm.n + column] : 0.0f;
            MEGAMOE_UNROLL
            for (int g = 0; g < n / 4; ++g) {
                sum[half][4 * g + 2 * i] += b;
                sum[half][4 * g + 2 * i + 1] += b;
            }
        }
    }
}

template <class T, class Output, int n>
MEGAMOE_DEVICE void finish_wide(const Context& ctx, const Tile& tile, Output& output, float (&sum)[2][n]) {
    WideFragment f;
    scale_sums<T>(ctx, tile, sum);
    add_bias_wide<T>(ctx, tile, sum, f);
    of_stage<T>(tile.stage, [&](auto gemm) {
        using E = typename decltype(gemm)::Epilogue;
        using Out = typename E::Out;
        static_assert(!E::saves, "formats that are expanded are for inference");
        E::transform(ctx.args, sum);
        MEGAMOE_UNROLL
        for (int half = 0; half < E::halves; ++half) {
            float* scales = nullptr;
            if constexpr (Out::scaled) scales = scales_of_half<T, true>(ctx, tile, half);
            Out::write_columns(output, sum[half], scales, f);
        }
    });
}

}  // namespace megamoe
