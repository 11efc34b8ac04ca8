// restore: the transport warps fan x out again, from the tokens that forward saved and this rank's own x.
// They make rows of gemm1 for pre-activations that were not saved, and bf16 rows, x_rows, for weight
// gradients. If dy in the pool is e4m3, they also make its bf16 rows. restore waits for nothing.
#pragma once
#include "megamoe/rows/dispatch.cuh"

namespace megamoe {

// A row of e4m3 with scales, one every `stride` floats.
struct ScaledRow {
    const uint4_t* values;
    const float* scales;
    int stride;
};

// Does what fan_out does, for such a row, whose words have this order: bf16(value * scale) goes to the pool.
template <class Words>
MEGAMOE_DEVICE void fan_out_dequantized(ScaledRow from, uint4_t* pool, int vectors, LaneRows targets) {
    auto* row = reinterpret_cast<const uint8_t*>(from.values);
    constexpr int in_flight = pulls_in_flight;
    MEGAMOE_UNROLL_BY(1)
    for (int v0 = arch::lane_idx(); v0 - arch::lane_idx() < vectors; v0 += 32 * in_flight) {
        float scale[in_flight];
        uint32_t words[in_flight][2];
        MEGAMOE_UNROLL
        for (int j = 0; j < in_flight; ++j) {
            int column = 8 * min_of(v0 + 32 * j, vectors - 1);
            scale[j] = from.scales[int64_t{column / scale_group} * from.stride];
            MEGAMOE_UNROLL
            for (int w = 0; w < 2; ++w)
                words[j][w] = *reinterpret_cast<const uint32_t*>(row + Words::place(column + 4 * w));
        }
        MEGAMOE_UNROLL
        for (int j = 0; j < in_flight; ++j) {
            float value[2][4];
            uint32_t pairs[4];
            MEGAMOE_UNROLL
            for (int w = 0; w < 2; ++w) arch::unpack_e4m3x4(words[j][w], value[w]);
            MEGAMOE_UNROLL
            for (int i = 0; i < 4; ++i)
                pairs[i] = arch::pack_bf16x2(value[i / 2][i % 2 * 2] * scale[j],
                                             value[i / 2][i % 2 * 2 + 1] * scale[j]);
            for (uint32_t left = targets.lanes; left != 0; left &= left - 1) {
                int64_t to = arch::shfl(targets.mine, arch::ffs0(left));
                arch::store_vec_below(pool + to * vectors, v0 + 32 * j, vectors,
                                      {pairs[0], pairs[1], pairs[2], pairs[3]});
            }
        }
    }
}

// x of a token, as the state of a layer whose x has scales holds it.
template <class T>
MEGAMOE_DEVICE ScaledRow saved_row(const Args& args, int ordered) {
    int home = home_of(ordered, args.num_ranks), token = token_of(ordered, args.num_ranks);
    int64_t saved = saved_token(args, true, home, token);
    return {static_cast<const uint4_t*>(launch_args<T>(args).state.tokens) +
                saved * vectors_of_row<typename T::SavedX>(args),
            launch_args<T>(args).state.tokens_scale + saved * ceil_div(args.hidden, scale_group), 1};
}

// x of a token, to x_rows.
template <class T>
MEGAMOE_DEVICE void restore_x(const Context& ctx, int ordered, int lane_row, uint32_t targets) {
    const Args& args = ctx.args;
    auto* pool = static_cast<uint4_t*>(own<T>(args).x_rows);
    int vectors = vectors_of_row<Bf16Rows>(args);
    if constexpr (T::SavedX::scaled) {
        fan_out_dequantized<typename T::SavedX::Words>(saved_row<T>(args, ordered), pool, vectors,
                                                       {lane_row, targets});
    } else {
        int home = home_of(ordered, args.num_ranks), token = token_of(ordered, args.num_ranks);
        int64_t saved = saved_token(args, false, home, token);
        const void* from = saved < 0 ? own<T>(args).x : launch_args<T>(args).state.tokens;
        fan_out(static_cast<const uint4_t*>(from) + (saved < 0 ? token : saved) * vectors, pool, vectors, 0,
                vectors, {lane_row, targets}, nullptr);
    }
}

// dy of a token, to dy_rows: the row of its first target, which this warp filled, is read again.
template <class T>
MEGAMOE_DEVICE void restore_dy(const Args& args, int lane_row, uint32_t targets) {
    int64_t row = arch::shfl(lane_row, arch::ffs0(targets));
    ScaledRow from = {static_cast<const uint4_t*>(args.x_pool) + row * vectors_of_row<E4m3Rows>(args),
                      args.x_pool_scale + row, args.pool_rows};
    fan_out_dequantized<E4m3Rows::Words>(from, static_cast<uint4_t*>(own<T>(args).dy_rows),
                                         vectors_of_row<Bf16Rows>(args), {lane_row, targets});
}

// A phase of its own, before dispatch: the rows that recompute multiplies, published block by block.
template <class T>
MEGAMOE_DEVICE void restore_for_recompute(Context& ctx) {
    const Args& args = ctx.args;
    auto publish = [&](int row) { RowsReady::publish(ctx.mem, args.rows_ready + row / T::Tiling::rows, 1); };
    walk_pool<T>(
        ctx, 1,
        [&](int ordered, int) {
            int lane_row = row_of_lane(args, ordered);
            uint32_t targets = arch::ballot(lane_row >= 0);
            if constexpr (T::Gemm1::A::scaled) {
                ScaledRow from = saved_row<T>(args, ordered);
                fill_rows<T>(ctx, from.values, from.scales, {lane_row, targets}, -1, 0, ctx.smem.plan.pulls);
            } else {
                restore_x<T>(ctx, ordered, lane_row, targets);
            }
            arch::warp_sync();
            if (lane_row >= 0) publish(lane_row);
            return true;
        },
        [&](int row) {
            if constexpr (T::Gemm1::A::scaled) {
                fill_zero_row<T>(ctx, row);
            } else {
                int vectors = vectors_of_row<Bf16Rows>(args);
                zero_row(static_cast<uint4_t*>(own<T>(args).x_rows) + int64_t{row} * vectors, vectors);
                arch::warp_sync();
                if (arch::lane_idx() == 0) publish(row);
            }
        });
}

// After dispatch: the bf16 rows that weight gradients need. Without scales those of dy are there, and those
// of x if it was restored for recompute.
template <class T>
MEGAMOE_DEVICE void restore_for_weights(Context& ctx) {
    constexpr bool scaled = T::Gemm1::A::scaled;
    const Args& args = ctx.args;
    bool x = gemm_of<T>(args, GemmId::dw13).m != 0 && (scaled || !is_recomputed(ctx));
    bool dy = scaled && gemm_of<T>(args, GemmId::dw2).m != 0;
    if (!x && !dy) return;
    walk_pool<T>(
        ctx, 1,
        [&](int ordered, int) {
            int lane_row = row_of_lane(args, ordered);
            uint32_t targets = arch::ballot(lane_row >= 0);
            if (x) restore_x<T>(ctx, ordered, lane_row, targets);
            if constexpr (scaled) {
                if (dy) restore_dy<T>(args, lane_row, targets);
            }
            return true;
        },
        [&](int row) {
            int vectors = vectors_of_row<Bf16Rows>(args);
            int64_t at = int64_t{row} * vectors;
            if (x) zero_row(static_cast<uint4_t*>(own<T>(args).x_rows) + at, vectors);
            if (dy) zero_row(static_cast<uint4_t*>(own<T>(args).dy_rows) + at, vectors);
        });
}

// Backward's pool: dy is pulled, and behind it ForWeights::restore() makes what weight gradients multiply,
// which tiles wait for first; where pre-activations have to be made again, x in a phase of its own before.
template <class ForWeights>
struct RestoredPool {
    static constexpr bool padded = true, saved = false, restored = true, quantized = false;
    template <class T>
    static MEGAMOE_DEVICE void fill(Context& ctx) {
        const Args& args = ctx.args;
        if (ctx.smem.plan.phase == Phase::recompute) {
            Forms<T>::begin_pass(ctx);
            restore_for_recompute<T>(ctx);
            while (!Forms<T>::finished(ctx) && arch::ballot(ctx.mem.aborted()) == 0) {
                if (!Forms<T>::next(ctx)) arch::sleep_ns(256);
            }
            return;
        }
        if (!dispatch<T>(ctx)) return;
        ForWeights::template restore<T>(ctx);
        arch::warp_sync();
        // Rows of a launch that was given up may be missing.
        if (arch::lane_idx() == 0 && !ctx.mem.aborted())
            GradsReady::publish(ctx.mem, own<T>(args).grads_ready);
    }
};
struct Bf16ForWeights {
    template <class T>
    static MEGAMOE_DEVICE void restore(Context& ctx) {
        restore_for_weights<T>(ctx);
    }
};
using RestoredRows = RestoredPool<Bf16ForWeights>;

}  // namespace megamoe
