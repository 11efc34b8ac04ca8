// Epilogues: what becomes of the sums of a tile. One type for each GEMM of a layer, which says
//
//   planes     of the weights: with 2, the halves of a tile are the same columns of both (gate and up); with
//              1, neighbouring columns
//   columns    of its output that a tile makes
//   run<T>(ctx, tile, ring, output, sum)
//              the work of a math warpgroup: claim() an output slot, fill it, hand_over()
//   slots<T>(args), output<T>(ctx, tile, slot)
//              how many a warpgroup fills for a tile, in order; where the store warp puts one: several
//              outputs are several maps
//   inputs     pipeline slots behind those of K that it reads, or 0: input_bytes() and load_input() for
//              load_b. reuses_inputs: outputs take their place, claim_input() in run(), store_input();
//              slots_before(input): how many of its output slots are handed over before that
//
// Most are element by element: scale, bias, transform(args, sum), then halves of one output. Those derive
// from Elementwise and write transform() alone; two of them in a layer share bias and writing, which are long
// when unrolled.
#pragma once
#include "megamoe/cta/blocks.cuh"
#include "megamoe/epilogue/column_scales.cuh"
#include "megamoe/epilogue/transposed.cuh"
#include "megamoe/formats/bf16.cuh"
#include "megamoe/formats/format.h"
#include "megamoe/formats/fragment.cuh"
#include "megamoe/gemm/gemm.cuh"

namespace megamoe {

struct Destination {
    const TensorMap* map;
    int column, width;  // of the output; columns at or past its width are not stored
    int transposed_row =
        -1;  // of a map whose rows are columns of 128 rows, which both warpgroups have filled
};

// Columns of the output.
template <class T>
MEGAMOE_DEVICE int output_width(int n) {
    return T::Gemm1::Epilogue::interleaved ? n / 2 : n;
}
// Does a grouped launch leave its e4m3 rows transposed, too?
template <class T, class Out>
constexpr bool transposes_rows = T::WeightTiles::transposed && !T::WeightTiles::any && Out::scaled;

// `halves` halves of a tile, as rows of a format; behind each half maybe its transpose.
template <class S, class Rows, int halves_>
struct Elementwise {
    using Out = Rows;
    static constexpr bool elementwise = true, saves = false, multiplies_rows = false, interleaved = false;
    static constexpr int halves = halves_, inputs = 0;
    static constexpr int columns = halves * S::half_columns;
    static constexpr int slot_columns = slot_k_bytes / Out::element_bytes;

    template <class T>
    static MEGAMOE_DEVICE int slots(const Args&) {
        return columns / slot_columns * (transposes_rows<T, Out> ? 2 : 1);
    }
    template <class T>
    static MEGAMOE_DEVICE Destination output(const Context& ctx, const Tile& tile, int slot) {
        const auto& gemm = gemm_of<T>(ctx.args, tile.gemm);
        if constexpr (transposes_rows<T, Out>) {
            int width = output_width<T>(gemm.n), column = tile.n * columns + slot / 2 * slot_columns;
            int row = tile.block * padded_rows(width, scale_group) + column;
            if (slot % 2 != 0) return {&launch_args<T>(ctx.args).hs, column, width, row};
            return {gemm.out, column, width};
        }
        return {gemm.out, tile.n * columns + slot * slot_columns, output_width<T>(gemm.n)};
    }
};

template <class T>
MEGAMOE_DEVICE int output_slots(const Args& args, GemmId id) {
    return of_gemm<T>(id, [&](auto gemm) { return decltype(gemm)::Epilogue::template slots<T>(args); });
}

// What a warpgroup hands over for a tile, in order: input(i) for each pipeline slot that comes back,
// output(c) for each output slot. Who fills them and who stores them walk alike.
template <class T, class Input, class Output>
MEGAMOE_DEVICE void walk_slots(const Args& args, const Tile& tile, Input input, Output output) {
    int slots = output_slots<T>(args, tile.gemm), c = 0;
    using E = typename T::Gemm1::Epilogue;  // the only one that may have inputs
    if constexpr (E::inputs != 0) {
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; E::reuses_inputs && i < tile.inputs;) {
            if (c < E::slots_before(i)) {
                output(c++);
            } else {
                input(i++);
            }
        }
    }
    MEGAMOE_UNROLL_BY(1)
    for (; c < slots; ++c) output(c);
}

// bias[column], with columns at or past `width` left alone.
template <int n>
MEGAMOE_DEVICE void add_bias(float (&v)[n], const float* bias, int column0, int width, Fragment f) {
    MEGAMOE_UNROLL
    for (int g = 0; g < n / 4; ++g) {
        int column = column0 + f.column(g);
        float b0 = column < width ? bias[column] : 0.0f, b1 = column < width ? bias[column + 1] : 0.0f;
        v[4 * g] += b0;
        v[4 * g + 1] += b1;
        v[4 * g + 2] += b0;
        v[4 * g + 3] += b1;
    }
}

// Scales of a row of the output.
template <class T>
MEGAMOE_DEVICE int scale_groups(int n) {
    return ceil_div(output_width<T>(n), scale_group);
}
// The group of columns that a half is.
template <class T>
MEGAMOE_DEVICE int out_group(const Tile& tile, int half) {
    int group = halves_of<T>(tile.gemm, tile.n).column0 / scale_group + half;
    if constexpr (T::Gemm1::Epilogue::interleaved) group /= 2;  // of h, whose tile has one half
    return group;
}
// Where a warpgroup puts the scales of a half, which is one group; null if there is no such half. `wide`:
// both warpgroups have the first one's rows.
template <class T, bool wide = false>
MEGAMOE_DEVICE float* scales_of_half(const Context& ctx, const Tile& tile, int half) {
    const auto& gemm = gemm_of<T>(ctx.args, tile.gemm);
    int group = out_group<T>(tile, half);
    float* scales = gemm.out_scale + int64_t{group} * ctx.args.pool_rows + scale_row0<T>(tile) +
                    (wide ? 0 : math_warpgroup() * warpgroup_rows);
    return group < scale_groups<T>(gemm.n) ? scales : nullptr;
}

template <class Out, class T, class Output>
MEGAMOE_DEVICE void write_halves(const Context& ctx, const Tile& tile, int count, Output& output,
                                 Sums<T>& sum, Fragment f) {
    MEGAMOE_UNROLL
    for (int half = 0; half < 2; ++half) {
        if (half >= count) break;
        float* scales = nullptr;
        if constexpr (Out::scaled) scales = scales_of_half<T>(ctx, tile, half);
        if constexpr (Out::scaled && !T::Blocks::in_pool) {
            FirstRows rows{rows_used<T>(tile) - math_warpgroup() * warpgroup_rows};
            Out::write_half(output, sum[half], scales, f, rows);
            if constexpr (transposes_rows<T, Out>)
                write_transposed_half<T>(ctx, tile, out_group<T>(tile, half) * scale_group,
                                         output_width<T>(gemm_of<T>(ctx.args, tile.gemm).n), output,
                                         sum[half]);
        } else {
            Out::write_half(output, sum[half], scales, f);
        }
    }
}

// The sums plus the bias of their columns, if there is one.
template <class T>
MEGAMOE_DEVICE void add_bias(const Tile& tile, Sums<T>& sum, const float* bias, int width, Fragment f) {
    Halves<typename T::Tiling> halves = halves_of<T>(tile.gemm, tile.n);
    if (bias == nullptr) return;
    bias += int64_t{tile.expert()} * width * halves.num_planes();
    MEGAMOE_UNROLL
    for (int half = 0; half < 2; ++half)
        add_bias(sum[half], bias + halves.plane(half) * width, halves.column(half), width, f);
}

// Rows of a grouped launch times the caller's factors, if there are any.
template <class T, int halves>
MEGAMOE_DEVICE void multiply_rows(const Context& ctx, Sums<T>& sum) {
    const float* weights = own<T>(ctx.args).row_weight;
    if (weights == nullptr) return;
    int row = row0<T>(current_tile<T>()) + math_warpgroup() * warpgroup_rows + Fragment().row;
    MEGAMOE_UNROLL
    for (int i = 0; i < 2; ++i) {
        float factor = weights[T::Blocks::template at<T>(ctx.args, row + 8 * i)];
        MEGAMOE_UNROLL
        for (int j = 2 * i; j < T::Tiling::sums; j += 4) {
            MEGAMOE_UNROLL
            for (int half = 0; half < halves; ++half) sum[half][j] *= factor, sum[half][j + 1] *= factor;
        }
    }
}

template <class E1, class E2, class T, class Output>
MEGAMOE_DEVICE void run_elementwise(const Context& ctx, const Tile& tile, Output& output, Sums<T>& sum) {
    const Args& args = ctx.args;
    Fragment f;
    bool first = same<E1, E2> || tile.gemm == GemmId::gemm1;
    const auto& gemm = gemm_of<T>(args, tile.gemm);
    if constexpr (T::Gemm1::B::column_scales) ColumnScales<T>::multiply(ctx, sum, f);
    add_bias<T>(tile, sum, gemm.bias, gemm.n, f);
    if (first) {
        if constexpr (E1::saves) write_halves<Bf16Rows, T>(ctx, tile, 2, output, sum, Fragment());
        E1::transform(args, sum);
        if constexpr (E1::multiplies_rows && !T::Blocks::in_pool) multiply_rows<T, E1::halves>(ctx, sum);
    } else {
        E2::transform(args, sum);
    }
    using Out1 = typename E1::Out;
    using Out2 = typename E2::Out;
    if constexpr (!same<Out1, Out2>) {
        if (first) {
            // This is asked again: the halves that were saved before have left no registers for it.
            write_halves<Out1, T>(ctx, E1::saves ? current_tile<T>() : tile, E1::halves, output, sum,
                                  E1::saves ? Fragment() : f);
            return;
        }
    }
    write_halves<Out2, T>(ctx, tile, first ? E1::halves : E2::halves, output, sum, f);
}

// The epilogue of the tile's GEMM.
template <class T, class Output>
MEGAMOE_DEVICE void finish(Context& ctx, const Tile& tile, PipelineRing<T>& ring, Output& output,
                           Sums<T>& sum) {
    Profile<T>::mark(ctx.smem, TileMark::multiplied);
    using E1 = typename T::Gemm1::Epilogue;
    using E2 = typename T::Gemm2::Epilogue;
    if constexpr (E1::elementwise && E2::elementwise) {
        run_elementwise<E1, E2, T>(ctx, tile, output, sum);
    } else if constexpr (T::num_row_gemms == 1 &&
                         T::WeightTiles::transposed) {  // else its code is there twice
        E1::template run<T>(ctx, tile, ring, output, sum);
    } else {
        of_gemm<T>(tile.gemm, [&](auto gemm) {
            decltype(gemm)::Epilogue::template run<T>(ctx, tile, ring, output, sum);
        });
    }
}

}  // namespace megamoe
