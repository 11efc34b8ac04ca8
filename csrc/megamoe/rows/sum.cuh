// Weighted sums of rows: one job of a mover, for reduce and for combine.
#pragma once
#include "megamoe/cta/context.cuh"
#include "megamoe/rows/vectors.cuh"

namespace megamoe {

MEGAMOE_DEVICE SumJob& current_job(const Context& ctx) { return ctx.smem.movers.job[mover_warp()]; }

// What slice number `slice` of a partial, or of a row of y, holds.
struct VectorRange {
    int begin, end;
};
MEGAMOE_DEVICE VectorRange slice_range(const Context& ctx, int slice) {
    int begin = slice * ctx.smem.sum_slices.vectors;
    return {begin, min_of(begin + ctx.smem.sum_slices.vectors, ctx.args.hidden / sum_vector)};
}

// All lanes together; lane i brings row and weight of source i.
MEGAMOE_DEVICE void set_job(const Context& ctx, uint64_t out, uint64_t from, int row, float weight,
                            uint32_t sources, int slice) {
    SumJob& job = current_job(ctx);
    int lane = arch::lane_idx();
    arch::warp_sync();  // no lane reads the last job any more
    job.row[lane] = row;
    job.weight[lane] = weight;
    if (lane == 0) {
        VectorRange range = slice_range(ctx, slice);
        job.out = out;
        job.from = from;
        job.begin = range.begin;
        job.end = range.end;
        job.sources = sources;
    }
    arch::warp_sync();
}

// One warp does its job, in fp32. It takes two sources at a time, and of each two vectors a lane, 32 apart.
// So each lane has four loads in flight, 1 MB on the device, which is what NVLink needs; more would not fit
// into the registers that FP8 math leaves.
MEGAMOE_DEVICE void sum_rows(const Context& ctx) {
    constexpr int width = 2, positions = sum_step / 32;
    const SumJob& job = current_job(ctx);
    int vectors = ctx.args.hidden / sum_vector, end = job.end;
    MEGAMOE_UNROLL_BY(1)
    for (int v = job.begin + arch::lane_idx(); v < end; v += sum_step) {
        float sum[positions][8] = {};
        MEGAMOE_UNROLL_BY(1)
        for (uint32_t left = job.sources; left != 0;) {
            uint4_t data[width][positions];
            float weight[width];
            MEGAMOE_UNROLL
            for (int s = 0; s < width; ++s) {
                int source = left != 0 ? arch::ffs0(left) : 0, limit = left != 0 ? end : 0;
                auto* from = reinterpret_cast<const uint4_t*>(job.from) + int64_t{job.row[source]} * vectors;
                weight[s] = left != 0 ? job.weight[source] : 0.0f;
                MEGAMOE_UNROLL
                for (int p = 0; p < positions; ++p)
                    data[s][p] = arch::load_streaming_below(from, v + 32 * p, limit);
                left &= left - 1;
            }
            MEGAMOE_UNROLL
            for (int s = 0; s < width; ++s) {
                MEGAMOE_UNROLL
                for (int p = 0; p < positions; ++p) add_vector(sum[p], data[s][p], weight[s]);
            }
        }
        MEGAMOE_UNROLL
        for (int p = 0; p < positions; ++p) {
            arch::store_vec_below(reinterpret_cast<uint4_t*>(job.out), v + 32 * p, end, pack_vector(sum[p]));
        }
    }
}

// What a token's partial sums: its rows times their routing weights; or rows of gradients, which have these
// already, and beside them go the gradients of the weights. of_rows: the gradient's epilogue multiplies rows.
struct WeightedSums {
    static constexpr bool of_gradients = false, of_rows = false;
};
struct GradientSums {
    static constexpr bool of_gradients = true, of_rows = true;
};
struct NoSums : WeightedSums {};
struct RowSums : NoSums {
    static constexpr bool of_rows = true;
};

// At one rank a token's only partial is its y: reduce writes it there, and combine only zeros, for tokens
// without routes.
template <class T>
MEGAMOE_DEVICE bool sums_into_y(const Args& args) {
    return !T::Sums::of_gradients && args.num_ranks == 1;
}

}  // namespace megamoe
