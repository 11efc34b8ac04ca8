// dispatch: the transport warps walk the pool in row order. At a token's leader, they pull it from its home
// rank and fan it out to all its rows, with ordinary 16-byte loads and stores. It waits only for the ranks'
// staging.
#pragma once
#include "megamoe/formats/format.h"
#include "megamoe/gemm/operands.cuh"
#include "megamoe/gemm/tiles.cuh"
#include "megamoe/rows/batches.cuh"
#include "megamoe/rows/routes.cuh"

namespace megamoe {

// A transport warp's part of the rows that have to be zeros: zero(row) for each.
template <class T, class Zero>
MEGAMOE_DEVICE void walk_zeros(const Context& ctx, Zero zero) {
    constexpr int rows = 4, batches = rows_at_a_time<T> / rows;  // of one block, at a time
    int lane = arch::lane_idx();
    for (int i = transport_index(ctx); i < ctx.smem.plan.num_blocks * batches; i += num_transports(ctx)) {
        int block = i / batches, used = T::Blocks::entry(ctx, block, T::Tiling::rows).rows();
        int of_block = used + i % batches * rows + lane;
        for (uint32_t left = arch::ballot(lane < rows && of_block < rows_filled<T>(used)); left != 0;
             left &= left - 1)
            zero(block * T::Tiling::rows + arch::shfl(of_block, arch::ffs0(left)));
    }
}

// A transport warp's part of the pool. First zero(row) is called for each row that has to be zeros, which
// waits for nothing; then token(ordered, slice), for each slice at each leader, until it returns false.
// Returns false if token() did. One look covers as many of the warp's batches as there are lanes for their
// rows.
template <class T, class Token, class Zero>
MEGAMOE_DEVICE bool walk_pool(const Context& ctx, int slices, Token token, Zero zero) {
    if constexpr (T::Pool::padded) walk_zeros<T>(ctx, zero);
    const PassPlan& plan = ctx.smem.plan;
    // Read again for each look, from shared memory: there are no registers to hold it while a token is
    // pulled.
    for (int first = transport_index(ctx); first / slices * plan.batch_rows < plan.num_rows;
         first += num_transports(ctx) * (32 / plan.batch_rows)) {
        int rows = plan.batch_rows, batch = first + arch::lane_idx() / rows * num_transports(ctx);
        int row = batch / slices * rows + arch::lane_idx() % rows;
        uint32_t route = row < plan.num_rows ? ctx.args.pool_routes[row] : 0;
        for (uint32_t left = arch::ballot((route & route_leader) != 0); left != 0; left &= left - 1) {
            int from = arch::ffs0(left);
            if (!token(route_token(arch::shfl(route, from)), arch::shfl(batch, from) % slices)) return false;
        }
    }
    return true;
}

// Rows of the pool: one for each bit i of `lanes`, whose number lane i holds.
struct LaneRows {
    int mine;
    uint32_t lanes;
};

// One warp: [begin, end) of the row at `from`, which has so many 16-byte vectors, to these rows of the pool,
// and to `also`, if that is not null.
MEGAMOE_DEVICE void fan_out(const uint4_t* from, uint4_t* pool, int vectors, int begin, int end,
                            LaneRows targets, uint4_t* also) {
    constexpr int in_flight = pulls_in_flight;
    MEGAMOE_UNROLL_BY(1)
    for (int v0 = begin; v0 < end; v0 += in_flight * 32) {
        int v = v0 + arch::lane_idx();
        // No register of `data` may be left unset: an unset one counts as live everywhere before, in math,
        // too.
        uint4_t data[in_flight];
        MEGAMOE_UNROLL
        for (int j = 0; j < in_flight; ++j) data[j] = arch::load_streaming_below(from, v + 32 * j, end);
        for (uint32_t left = targets.lanes; left != 0; left &= left - 1) {
            int64_t row = arch::shfl(targets.mine, arch::ffs0(left));
            uint4_t* to = pool + row * vectors;
            MEGAMOE_UNROLL
            for (int j = 0; j < in_flight; ++j) arch::store_vec_below(to, v + 32 * j, end, data[j]);
        }
        if (also != nullptr) {
            MEGAMOE_UNROLL
            for (int j = 0; j < in_flight; ++j) arch::store_vec_below(also, v + 32 * j, end, data[j]);
        }
    }
}
MEGAMOE_DEVICE void zero_row(uint4_t* row, int vectors) {
    MEGAMOE_UNROLL_BY(1)
    for (int v = arch::lane_idx(); v < vectors; v += 32) arch::store_vec(row + v, {0, 0, 0, 0});
}

// The pool row of a lane's route, -1 where there is none in this pass.
MEGAMOE_DEVICE int row_of_lane(const Args& args, int ordered) {
    int lane = arch::lane_idx();
    return lane < args.top_k ? args.route_rows[int64_t{ordered} * args.top_k + lane] : -1;
}

// Where the state has a token of x, or -1: a rank's own tokens are there only if they have scales, since x
// itself has other values then.
MEGAMOE_DEVICE int64_t saved_token(const Args& args, bool scaled, int home, int token) {
    if (!scaled && home == args.rank) return -1;
    int slot = scaled ? home : home - (home > args.rank ? 1 : 0);
    return int64_t{slot} * args.max_tokens + token;
}

// One warp: a token's row, and its scales if rows have them, to x_pool, and to slot `saved` of the state if
// that is not negative.
template <class T>
MEGAMOE_DEVICE void fill_rows(const Context& ctx, const uint4_t* from, const float* scales, LaneRows targets,
                              int64_t saved, int slice, const Slices& slices) {
    using X = typename T::Gemm1::A;
    const Args& args = ctx.args;
    int vectors = vectors_of_row<X>(args), lane = arch::lane_idx();
    uint4_t* also = nullptr;
    if constexpr (T::Pool::saved)
        also =
            saved >= 0 ? static_cast<uint4_t*>(launch_args<T>(args).state.tokens) + saved * vectors : nullptr;
    fan_out(from, static_cast<uint4_t*>(args.x_pool), vectors, slice * slices.vectors,
            min_of(vectors, (slice + 1) * slices.vectors), targets, also);
    if constexpr (X::scaled) {
        int groups = X::num_scales(args.hidden);
        MEGAMOE_UNROLL_BY(1)
        for (int g = lane + slice * 32; g - lane < groups; g += slices.count * 32) {
            float scale = g < groups ? scales[g] : 0.0f;
            for (uint32_t left = targets.lanes; left != 0; left &= left - 1) {
                int64_t row = arch::shfl(targets.mine, arch::ffs0(left));
                if (g < groups) args.x_pool_scale[int64_t{g} * args.pool_rows + row] = scale;
            }
            if constexpr (T::Pool::saved) {
                if (saved >= 0 && g < groups)
                    launch_args<T>(args).state.tokens_scale[saved * groups + g] = scale;
            }
        }
    }
}

// <dy, b2> of each target's expert, which is a part of the gradient of its routing weight. A lane reads the
// values that it has written to the row, and scales of others.
template <class T>
MEGAMOE_DEVICE void multiply_by_bias(const Context& ctx, int ordered, int lane_row, uint32_t targets) {
    using X = typename T::Gemm1::A;
    const Args& args = ctx.args;
    int parts = ceil_div(args.intermediate, T::Tiling::columns) + 1;
    int vectors = vectors_of_row<X>(args);
    if constexpr (X::scaled) arch::warp_sync();
    for (uint32_t left = targets; left != 0; left &= left - 1) {
        int k = arch::ffs0(left);
        int64_t row = arch::shfl(lane_row, k);
        int expert = args.route_ids[int64_t{ordered} * args.top_k + k];
        const float* bias = own<T>(args).b2 + int64_t{expert} * args.hidden;
        const uint4_t* dy = static_cast<const uint4_t*>(args.x_pool) + row * vectors;
        float sum = 0.0f;
        MEGAMOE_UNROLL_BY(1)
        for (int v = arch::lane_idx(); v < vectors; v += 32) {
            uint4_t data = arch::load_vec(dy + v);
            const uint32_t words[4] = {data.x, data.y, data.z, data.w};
            if constexpr (X::scaled) {
                float scale = args.x_pool_scale[int64_t{v * 16 / scale_group} * args.pool_rows + row];
                MEGAMOE_UNROLL
                for (int w = 0; w < 4; ++w) {
                    float value[4];
                    arch::unpack_e4m3x4(words[w], value);
                    MEGAMOE_UNROLL
                    for (int j = 0; j < 4; ++j) sum += scale * value[j] * bias[16 * v + 4 * w + j];
                }
            } else {
                MEGAMOE_UNROLL
                for (int w = 0; w < 4; ++w) {
                    sum += arch::bf16_lo(words[w]) * bias[8 * v + 2 * w];
                    sum += arch::bf16_hi(words[w]) * bias[8 * v + 2 * w + 1];
                }
            }
        }
        MEGAMOE_UNROLL
        for (int mask = 16; mask > 0; mask /= 2) sum += arch::shfl_xor(sum, mask);
        if (arch::lane_idx() == 0) own<T>(args).d_s[row * parts + parts - 1] = sum;
    }
}

template <class T>
MEGAMOE_DEVICE void pull_token(Context& ctx, int ordered, int slice) {
    using X = typename T::Gemm1::A;
    const Args& args = ctx.args;
    int home = home_of(ordered, args.num_ranks);
    int token = token_of(ordered, args.num_ranks);
    int lane_row = row_of_lane(args, ordered);
    uint32_t targets = arch::ballot(lane_row >= 0);
    int64_t saved = T::Pool::saved ? saved_token(args, X::scaled, home, token) : -1;
    fill_rows<T>(
        ctx, ctx.window<const uint4_t>(home, args.window_x) + int64_t{token} * vectors_of_row<X>(args),
        ctx.window<const float>(home, args.window_x_scale) + int64_t{token} * X::num_scales(args.hidden),
        {lane_row, targets}, saved, slice, ctx.smem.plan.pulls);
    if constexpr (T::Sums::of_gradients) {
        if (own<T>(args).b2 != nullptr) multiply_by_bias<T>(ctx, ordered, lane_row, targets);
    }
    if constexpr (T::WeightTiles::transposed) {
        if (lane_row >= 0) own<T>(args).row_tokens[lane_row] = ordered;
    }
    arch::warp_sync();  // all lanes' stores happen before the release of each target's lane
    if (lane_row >= 0) RowsReady::publish(ctx.mem, args.rows_ready + lane_row / T::Tiling::rows, 1);
}

// A row behind an expert's last: its products are zeros.
template <class T>
MEGAMOE_DEVICE void fill_zero_row(Context& ctx, int64_t row) {
    using X = typename T::Gemm1::A;
    const Args& args = ctx.args;
    int vectors = vectors_of_row<X>(args);
    zero_row(static_cast<uint4_t*>(args.x_pool) + row * vectors, vectors);
    if constexpr (X::scaled) {
        for (int g = arch::lane_idx(); g < X::num_scales(args.hidden); g += 32)
            args.x_pool_scale[int64_t{g} * args.pool_rows + row] = 0.0f;
    }
    if constexpr (T::Sums::of_gradients) {
        // The epilogue of transposed gradients knows such a row by the sign.
        if (arch::lane_idx() == 0) own<T>(args).row_weight[row] = T::WeightTiles::transposed ? -0.0f : 0.0f;
    }
    arch::warp_sync();
    if (arch::lane_idx() == 0)
        RowsReady::publish(ctx.mem, args.rows_ready + row / T::Tiling::rows, ctx.smem.plan.pulls.count);
}

// False after an abort.
template <class T>
MEGAMOE_DEVICE bool dispatch(Context& ctx) {
    const Args& args = ctx.args;
    uint32_t staged = 0;  // home ranks known to have staged x
    Forms<T>::begin_pass(ctx);
    return walk_pool<T>(
        ctx, ctx.smem.plan.pulls.count,
        [&](int ordered, int slice) {
            int home = home_of(ordered, args.num_ranks);
            if ((staged >> home & 1) == 0) {
                bool ok = XReady::await(ctx.mem, ctx.window<uint32_t>(args.rank, args.window_staged) + home,
                                        ctx.epoch(), home);
                // Poisoned: pull nothing more; waits for rows return by themselves.
                if (arch::ballot(ok) != ~0u) return false;
                arch::warp_sync();
                staged |= 1u << home;
                Profile<T>::mark(args, Mark::x_seen);
            }
            if (!Forms<T>::finished(ctx)) Forms<T>::next(ctx);  // tiles wait for both
            pull_token<T>(ctx, ordered, slice);
            Profile<T>::mark(args, Mark::pulled);
            return true;
        },
        [&](int row) { fill_zero_row<T>(ctx, row); });
}

// Who fills the pool. padded: there are zero rows behind an expert's last, since weight gradients read the
// rows that come of them; saved: tokens of other ranks stay in the state; restored: they are brought back
// from there; quantized: x may come quantized.
struct PulledRows {
    static constexpr bool padded = false, saved = false, restored = false, quantized = true;
    template <class T>
    static MEGAMOE_DEVICE void fill(Context& ctx) {
        dispatch<T>(ctx);
    }
};
struct SavedRows : PulledRows {
    static constexpr bool padded = true, saved = true, quantized = false;
};

}  // namespace megamoe
