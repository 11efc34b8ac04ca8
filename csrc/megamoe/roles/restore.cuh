// restore: the transport warps fan x out again, from the tokens that forward saved and this rank's own x, to
// x_rows: for the weight gradients, and for pre-activations that were not saved. It waits for nothing.
#pragma once
#include "megamoe/roles/dispatch.cuh"

namespace megamoe {

// As fan_out, for a row of e4m3 with scales: bf16(value * scale) goes to the pool.
MEGAMOE_DEVICE void fan_out_dequantized(const uint4_t* from, const float* scales, uint4_t* pool, int vectors,
                                        int lane_row, uint32_t targets) {
    MEGAMOE_UNROLL_BY(1)
    for (int v = arch::lane_idx(); v - arch::lane_idx() < vectors; v += 32) {
        uint4_t data = arch::load_streaming_below(from, v, vectors);  // 16 values
        float scale = v < vectors ? scales[v * 16 / scale_group] : 0.0f;
        const uint32_t words[4] = {data.x, data.y, data.z, data.w};
        uint32_t pairs[8];
        MEGAMOE_UNROLL
        for (int w = 0; w < 4; ++w) {
            float value[4];
            arch::unpack_e4m3x4(words[w], value);
            pairs[2 * w] = arch::pack_bf16x2(value[0] * scale, value[1] * scale);
            pairs[2 * w + 1] = arch::pack_bf16x2(value[2] * scale, value[3] * scale);
        }
        for (uint32_t left = targets; left != 0; left &= left - 1) {
            int64_t row = arch::shfl(lane_row, arch::ffs0(left));
            uint4_t* to = pool + row * 2 * vectors;
            arch::store_vec_below(to, 2 * v, 2 * vectors, {pairs[0], pairs[1], pairs[2], pairs[3]});
            arch::store_vec_below(to, 2 * v + 1, 2 * vectors, {pairs[4], pairs[5], pairs[6], pairs[7]});
        }
    }
}

template <class T>
MEGAMOE_DEVICE void restore_token(const Context& ctx, int ordered, int lane_row) {
    const Args& args = ctx.args;
    const Training& training = args.training;
    int home = home_of(ordered, args.num_ranks), token = token_of(ordered, args.num_ranks);
    uint32_t targets = arch::ballot(lane_row >= 0);
    auto* pool = static_cast<uint4_t*>(training.x_rows);
    bool scaled = training.tokens_scale != nullptr;
    int64_t saved = saved_token(args, scaled, home, token);
    if (scaled) {
        int vectors = vectors_of_row<E4m3Rows>(args), groups = ceil_div(args.hidden, scale_group);
        fan_out_dequantized(static_cast<const uint4_t*>(training.tokens) + saved * vectors,
                            training.tokens_scale + saved * groups, pool, vectors, lane_row, targets);
        return;
    }
    int vectors = vectors_of_row<Bf16Rows>(args);
    const void* from = saved < 0 ? training.x : training.tokens;
    fan_out(static_cast<const uint4_t*>(from) + (saved < 0 ? token : saved) * vectors, pool, vectors, 0,
            vectors, lane_row, targets, nullptr);
}

// `publishes`: a GEMM waits for the rows of each block.
template <class T>
MEGAMOE_DEVICE void restore(Context& ctx, bool publishes) {
    const Args& args = ctx.args;
    auto publish = [&](int row) {
        if (publishes) RowsReady::publish(ctx.mem, args.rows_ready + row / T::Tiling::rows, 1);
    };
    walk_pool<T>(
        ctx, 1,
        [&](int ordered, int) {
            int lane_row = row_of_lane(args, ordered);
            restore_token<T>(ctx, ordered, lane_row);
            arch::warp_sync();
            if (lane_row >= 0) publish(lane_row);
            return true;
        },
        [&](int row) {
            int vectors = vectors_of_row<Bf16Rows>(args);
            zero_row(static_cast<uint4_t*>(args.training.x_rows) + int64_t{row} * vectors, vectors);
            arch::warp_sync();
            if (arch::lane_idx() == 0) publish(row);
        });
}

}  // namespace megamoe
