// e4m3 with fp32 scales: rows have one per 128 columns, weights one per 128 x 128 (along K: a pipeline
// stage).
#pragma once
#include "megamoe/formats/copy.cuh"
#include "megamoe/formats/e4m3_group.h"
#include "megamoe/formats/fragment.h"
#include "megamoe/formats/words.h"

namespace megamoe {

// The pieces of x that a warp quantizes: 256 columns of a token each, every stride-th piece of the rank's.
// Two divisions a launch: with two for each piece they were a tenth of the kernel's code.
class Pieces {
  public:
    MEGAMOE_DEVICE Pieces(int first, int stride, int per_token)
        : token_(first / per_token),
          piece_(first % per_token),
          tokens_ahead_(stride / per_token),
          pieces_ahead_(stride % per_token),
          per_token_(per_token) {}
    MEGAMOE_DEVICE int token() const { return token_; }
    // This lane's first.
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

struct alignas(8) TwoWords {  // eight columns
    uint32_t first, second;
};

template <class Words>
struct E4m3RowsIn {
    using Element = e4m3_t;
    static constexpr int element_bytes = 1;
    static constexpr bool scaled = true;
    static MEGAMOE_DEVICE int row_bytes(int columns) { return Words::row_bytes(columns); }

    // 8 columns a lane, so 16 lanes hold one group of 128 (docs/numerics.md).
    static MEGAMOE_DEVICE void stage(Context& ctx, int num_tokens) {
        const Args& args = ctx.args;
        int groups = ceil_div(args.hidden, scale_group);
        auto* rows = ctx.window<uint8_t>(args.rank, args.window_x);
        auto* scales = ctx.window<float>(args.rank, args.window_x_scale);
        each_piece<uint4_t>(ctx, num_tokens, [&](const uint4_t& v, int64_t token, int column) {
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
            E4m3Group group;
            MEGAMOE_UNROLL
            for (int w = 0; w < 4; ++w) group.include(arch::bf16_lo(words[w]), arch::bf16_hi(words[w]));
            group.join_lanes<16>();
            float inverse = group.inverse();
            if (column < row_bytes(args.hidden)) {
                put(rows + token * row_bytes(args.hidden), column,
                    {e4m3_of_bf16(words[0], words[1], inverse), e4m3_of_bf16(words[2], words[3], inverse)});
                if (arch::lane_idx() % 16 == 0) scales[token * groups + column / scale_group] = group.scale();
            }
        });
    }

    // x that was quantized before, with its scales.
    static MEGAMOE_DEVICE void stage_quantized(Context& ctx, int num_tokens) {
        const Args& args = ctx.args;
        auto* rows = ctx.window<uint8_t>(args.rank, args.window_x);
        auto* scales = ctx.window<float>(args.rank, args.window_x_scale);
        if constexpr (Words::is_plain) {
            copy_by_crews(ctx, reinterpret_cast<uint4_t*>(rows), static_cast<const uint4_t*>(args.x),
                          int64_t{num_tokens} * args.hidden / 16);
        } else {
            each_piece<TwoWords>(ctx, num_tokens, [&](const TwoWords& v, int64_t token, int column) {
                if (column < row_bytes(args.hidden)) put(rows + token * row_bytes(args.hidden), column, v);
            });
        }
        int64_t total = int64_t{num_tokens} * ceil_div(args.hidden, scale_group);
        MEGAMOE_UNROLL_BY(1)
        for (int64_t i = int64_t{cta_idx(ctx)} * crew_threads + crew_thread(); i < total;
             i += int64_t{num_ctas(ctx)} * crew_threads) {
            scales[i] = args.x_scale[i];
        }
    }

    // One half as e4m3: one chunk, quantized per row (a half is exactly one group of 128), and its scales if
    // the half exists.
    template <class Output, int n>
    static MEGAMOE_DEVICE void write_half(Output& output, const float (&v)[n], float* row_scale, Fragment f) {
        write_group<n / 4>(
            output, row_scale, f, [&](int i, int g) { return v[4 * g + 2 * i]; },
            [&](int i, int g) { return v[4 * g + 2 * i + 1]; });
    }
    // The same of 8 * groups columns of bf16: a thread's pairs[i][g] are those at f.column(g) of its row i.
    template <class Output, int groups>
    static MEGAMOE_DEVICE void write_bf16(Output& output, const uint32_t (&pairs)[2][groups],
                                          float* row_scale, Fragment f) {
        write_group<groups>(
            output, row_scale, f, [&](int i, int g) { return arch::bf16_lo(pairs[i][g]); },
            [&](int i, int g) { return arch::bf16_hi(pairs[i][g]); });
    }

    // A half of the wide form, by both warpgroups: eight warps hold 16 columns of each row, and tell each
    // other the largest of theirs.
    template <class Output, int n>
    static MEGAMOE_DEVICE void write_columns(Output& output, const float (&v)[n], float* row_scale,
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
                if (first_column) amax[warp * group_rows + f.row(g) + j] = group.amax();
            }
        }
        math_sync();  // the largest of all columns
        int own_row = warp * 32 + arch::lane_idx();
        if (own_row < 2 * n) {
            E4m3Group group;
            MEGAMOE_UNROLL
            for (int w = 0; w < math_role.num_warps; w += 2)
                group.include(amax[w * group_rows + own_row], amax[(w + 1) * group_rows + own_row]);
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
                int column = f.group * group_rows + f.column;
                to.slot[swizzled(row, Words::place(column))] = static_cast<uint8_t>(pair);
                to.slot[swizzled(row, Words::place(column + 8))] = static_cast<uint8_t>(pair >> 8);
            }
        }
        output.hand_over_common(1);
    }

  private:
    // Of x, eight columns of a token a lane: take(v, token, column), zeros behind the last column.
    template <class From, class Take>
    static MEGAMOE_DEVICE void each_piece(Context& ctx, int num_tokens, Take take) {
        const Args& args = ctx.args;
        Pieces pieces(cta_idx(ctx) * crew_warps + crew_warp(), num_ctas(ctx) * crew_warps,
                      ceil_div(args.hidden, Pieces::piece_columns));
        constexpr int batch = 8;  // loads in flight
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
                    load_piece(v[j], static_cast<const uint8_t*>(args.x) +
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
    static MEGAMOE_DEVICE void put(uint8_t* row, int column, const TwoWords& words) {
        uint8_t* to = row + Words::place(column);
        *reinterpret_cast<uint32_t*>(to) = words.first;
        *reinterpret_cast<uint32_t*>(to + Words::place(4)) = words.second;
    }
    static MEGAMOE_DEVICE void load_piece(uint4_t& v, const void* from) { v = arch::load_streaming(from); }
    static MEGAMOE_DEVICE void load_piece(TwoWords& v, const void* from) {
        v = *static_cast<const TwoWords*>(from);
    }

    template <int groups, class Output, class Even, class Odd>
    static MEGAMOE_DEVICE void write_group(Output& output, float* row_scale, Fragment f, Even even, Odd odd) {
        uint8_t* chunk = output.claim();
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            E4m3Group group;
            MEGAMOE_UNROLL
            for (int g = 0; g < groups; ++g) group.include(even(i, g), odd(i, g));
            group.join_lanes<4>();  // a quad holds one row
            float inverse = group.inverse();
            MEGAMOE_UNROLL
            for (int g = 0; g < groups; ++g) {
                *reinterpret_cast<uint16_t*>(chunk + swizzled(f.row + 8 * i, Words::place(f.column(g)))) =
                    arch::pack_e4m3x2(even(i, g) * inverse, odd(i, g) * inverse);
            }
            if (f.quad == 0 && row_scale != nullptr) row_scale[f.row + 8 * i] = group.scale();
        }
        output.hand_over();
    }
};
using E4m3Rows = E4m3RowsIn<PlainWords>;
using E4m3QuadRows = E4m3RowsIn<QuadWords>;

// Where the scales of a tile's halves lie, in rows of blocks of 128 x 128. A half past the last column has
// none of its own and takes the first half's: its products are zero.
struct ScaleRows {
    int64_t first;
    int to_half1;
    template <class Halves>
    MEGAMOE_DEVICE ScaleRows(int n, int expert, const Halves& halves) {
        int rows = ceil_div(n, scale_group);  // of a plane
        int row0 = halves.column(0) / scale_group;
        int row1 = halves.plane(1) * rows + halves.column(1) / scale_group;
        first = int64_t{expert} * halves.num_planes() * rows + row0;
        to_half1 = row1 < halves.num_planes() * rows ? row1 - row0 : 0;
    }
};

struct E4m3Weights {
    using Element = e4m3_t;
    static constexpr int element_bytes = 1, packed = 1;
    static constexpr bool scaled = true, k_major = true, expanded = false, scales_sums = false;
    static constexpr int slot_scale_bytes = 0;

    // One float a pipeline slot and half.
    class Scales {
      public:
        // `columns`: of the scales, one every 128 of K.
        template <class Halves>
        MEGAMOE_DEVICE Scales(const float* scale, int n, int columns, int expert, const Halves& halves) {
            ScaleRows rows(n, expert, halves);
            half0_ = scale + rows.first * columns;
            to_half1_ = rows.to_half1 * columns;
        }
        MEGAMOE_DEVICE void fetch() {
            scale_[0] = half0_[0];
            scale_[1] = half0_[to_half1_];
            ++half0_;
        }
        MEGAMOE_DEVICE void put(float (&slot)[2]) const {
            slot[0] = scale_[0];
            slot[1] = scale_[1];
        }

      private:
        const float* half0_;
        int to_half1_;
        float scale_[2];
    };
};

}  // namespace megamoe
