// stage: crew 1 of all CTAs writes x into the window, from where peers pull it. If the precision has rows in
// e4m3, it quantizes x.
#pragma once
#include "megamoe/formats/bf16.cuh"
#include "megamoe/formats/e4m3.cuh"
#include "megamoe/rows/crews.cuh"

namespace megamoe {

// Copies so many pieces of 16 bytes, one a thread.
MEGAMOE_DEVICE void copy_by_crews(Context& ctx, uint4_t* to, const uint4_t* from, int64_t total) {
    int64_t stride = int64_t{num_ctas(ctx)} * crew_threads;
    MEGAMOE_UNROLL_BY(1)
    for (int64_t i = int64_t{cta_idx(ctx)} * crew_threads + crew_thread(); i < total; i += 4 * stride) {
        uint4_t v[4];  // four loads in flight
        MEGAMOE_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (i + j * stride < total) v[j] = arch::load_streaming(from + i + j * stride);
        }
        MEGAMOE_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (i + j * stride < total) arch::store_vec(to + i + j * stride, v[j]);
        }
    }
}

// The pieces of x that a warp quantizes, each 256 columns of a token: every stride-th piece of the rank.
// There are two divisions a launch: two for each piece were a tenth of the kernel's code.
class Pieces {
  public:
    MEGAMOE_DEVICE Pieces(int first, int stride, int per_token)
        : token_(first / per_token),
          piece_(first % per_token),
          tokens_ahead_(stride / per_token),
          pieces_ahead_(stride % per_token),
          per_token_(per_token) {}
    MEGAMOE_DEVICE int token() const { return token_; }
    // This lane's first column.
    MEGAMOE_DEVICE int column() const { return piece_ * piece_columns + arch::lane_idx() * 8; }
    MEGAMOE_DEVICE void advance() {
        token_ += tokens_ahead_;
        piece_ += pieces_ahead_;
        if (piece_ >= per_token_) {
            piece_ -= per_token_;
            ++token_;
        }
    }
    static constexpr int piece_columns = 256;

  private:
    int token_, piece_, tokens_ahead_, pieces_ahead_, per_token_;
};

MEGAMOE_DEVICE void load_piece(uint4_t& v, const void* from) { v = arch::load_streaming(from); }
MEGAMOE_DEVICE void load_piece(TwoWords& v, const void* from) { v = *static_cast<const TwoWords*>(from); }

// Eight columns of a token of x a lane: take(v, token, column), with zeros behind the last column. batch:
// loads in flight.
template <class From, int batch, class Take>
MEGAMOE_DEVICE void each_piece(Context& ctx, int num_tokens, Take take) {
    const Args& args = ctx.args;
    Pieces pieces(cta_idx(ctx) * crew_warps + crew_warp(), num_ctas(ctx) * crew_warps,
                  ceil_div(args.hidden, Pieces::piece_columns));
    MEGAMOE_UNROLL_BY(1)
    while (pieces.token() < num_tokens) {
        From v[batch];
        int64_t token[batch];
        int column[batch];
        MEGAMOE_UNROLL
        for (int j = 0; j < batch; ++j, pieces.advance()) {
            token[j] = pieces.token();
            column[j] = pieces.column();
            v[j] = {};
            if (token[j] < num_tokens && column[j] < args.hidden) {
                constexpr int size = sizeof(From) / 8;
                load_piece(v[j], static_cast<const uint8_t*>(args.rows_in) +
                                     (token[j] * args.hidden + column[j]) * size);
            }
        }
        MEGAMOE_UNROLL
        for (int j = 0; j < batch; ++j) {
            if (token[j] >= num_tokens) break;  // uniform in the warp
            take(v[j], token[j], column[j]);
        }
    }
}

// Eight columns a lane of a token that one warp takes: take(v, column).
template <class Take>
MEGAMOE_DEVICE void each_part(const Args& args, int64_t token, Take take) {
    constexpr int batch = 8;  // loads in flight
    const auto* row = static_cast<const uint4_t*>(args.rows_in) + token * (args.hidden / 8);
    MEGAMOE_UNROLL_BY(1)
    for (int i = arch::lane_idx(); i < args.hidden / 8; i += 32 * batch) {
        uint4_t v[batch];
        MEGAMOE_UNROLL
        for (int j = 0; j < batch; ++j) v[j] = arch::load_streaming_below(row, i + 32 * j, args.hidden / 8);
        MEGAMOE_UNROLL
        for (int j = 0; j < batch; ++j) {
            if (i + 32 * j < args.hidden / 8) take(v[j], (i + 32 * j) * 8);
        }
    }
}

// One scale a token: a warp reads its row for the largest value, and again, from L2, for the numbers.
template <class X>
MEGAMOE_DEVICE void stage_tokens(Context& ctx, int num_tokens) {
    const Args& args = ctx.args;
    auto* rows = ctx.window<uint8_t>(args.rank, args.window_x);
    auto* scales = ctx.window<float>(args.rank, args.window_x_scale);
    MEGAMOE_UNROLL_BY(1)
    for (int64_t token = cta_idx(ctx) * crew_warps + crew_warp(); token < num_tokens;
         token += num_ctas(ctx) * crew_warps) {
        E4m3Group group;
        each_part(args, token, [&](const uint4_t& v, int) {
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
            MEGAMOE_UNROLL
            for (int w = 0; w < 4; ++w) group.include(arch::bf16_lo(words[w]), arch::bf16_hi(words[w]));
        });
        group.join_lanes<32>();
        float inverse = group.inverse();
        each_part(args, token, [&](const uint4_t& v, int column) {
            auto* to = reinterpret_cast<TwoWords*>(rows + token * X::row_bytes(args.hidden) + column);
            *to = {e4m3_of_bf16(v.x, v.y, inverse), e4m3_of_bf16(v.z, v.w, inverse)};
        });
        if (arch::lane_idx() == 0) scales[token] = group.scale();
    }
}

template <class X, int batch>
MEGAMOE_DEVICE void stage_rows(Context& ctx, int num_tokens) {
    const Args& args = ctx.args;
    if constexpr (!X::scaled) {
        auto* to = ctx.window<uint4_t>(args.rank, args.window_x);
        copy_by_crews(ctx, to, static_cast<const uint4_t*>(args.rows_in),
                      int64_t{num_tokens} * args.hidden / 8);
    } else if constexpr (X::whole_rows) {
        stage_tokens<X>(ctx, num_tokens);
    } else {
        int groups = X::num_scales(args.hidden);
        auto* rows = ctx.window<uint8_t>(args.rank, args.window_x);
        auto* scales = ctx.window<float>(args.rank, args.window_x_scale);
        each_piece<uint4_t, batch>(ctx, num_tokens, [&](const uint4_t& v, int64_t token, int column) {
            X::quantize(v, rows + token * X::row_bytes(args.hidden), scales + token * groups, column,
                        args.hidden);
        });
    }
}

// Copies x that was quantized before, with its scales.
template <class X, int batch>
MEGAMOE_DEVICE void stage_quantized(Context& ctx, int num_tokens) {
    using Words = typename X::Words;
    const Args& args = ctx.args;
    auto* rows = ctx.window<uint8_t>(args.rank, args.window_x);
    auto* scales = ctx.window<float>(args.rank, args.window_x_scale);
    if constexpr (Words::is_plain) {
        copy_by_crews(ctx, reinterpret_cast<uint4_t*>(rows), static_cast<const uint4_t*>(args.rows_in),
                      int64_t{num_tokens} * args.hidden / 16);
    } else {
        each_piece<TwoWords, batch>(ctx, num_tokens, [&](const TwoWords& v, int64_t token, int column) {
            if (column < X::row_bytes(args.hidden))
                X::put(rows + token * X::row_bytes(args.hidden), column, v);
        });
    }
    int64_t total = int64_t{num_tokens} * X::num_scales(args.hidden);
    MEGAMOE_UNROLL_BY(1)
    for (int64_t i = int64_t{cta_idx(ctx)} * crew_threads + crew_thread(); i < total;
         i += int64_t{num_ctas(ctx)} * crew_threads) {
        scales[i] = args.in_scale[i];
    }
}

template <class T, int batch = 8>
MEGAMOE_DEVICE void stage_x(Context& ctx, int num_tokens) {
    using X = typename T::Gemm1::A;
    if constexpr (T::Pool::quantized && X::scaled) {
        if (ctx.args.in_scale != nullptr) return stage_quantized<X, batch>(ctx, num_tokens);
    }
    stage_rows<X, batch>(ctx, num_tokens);
}

// Tells all ranks, when all CTAs have come.
MEGAMOE_DEVICE void announce_x(Context& ctx) {
    if (!last_to_arrive(ctx, ctx.args.x_ticket)) return;
    int peer = crew_thread();
    if (peer < ctx.args.num_ranks) {
        XReady::publish(ctx.mem, ctx.window<uint32_t>(peer, ctx.args.window_staged) + ctx.args.rank,
                        ctx.epoch());
    }
}

template <class T>
MEGAMOE_DEVICE void stage(Context& ctx) {
    stage_x<T>(ctx, own_tokens<T>(ctx.args));
    announce_x(ctx);
}

}  // namespace megamoe
