// Tiles of dw13 and dw2: bf16, or fp32, written or added. One CTA owns a tile over all rows of the expert in
// a pass, so that an element is added to once a pass, and its bits depend on the routing alone.
#pragma once
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class S>
struct WeightGradientEpilogue {
    static constexpr bool elementwise = false;
    static constexpr int planes = 1, columns = S::columns, inputs = 4;

    static MEGAMOE_DEVICE int slot_columns(const Args& args) { return slot_k_bytes / args.training.dw_bytes; }
    static MEGAMOE_DEVICE int slots(const Args& args) { return columns / slot_columns(args); }

    static MEGAMOE_DEVICE Destination output(const Context& ctx, const Tile& tile, int slot) {
        bool first = tile.stage == Stage::dw13;
        const Gemm& gemm = ctx.args.gemm[0];  // n = I, k = H
        return {&ctx.args.training.dw[first ? 0 : 1], tile.n * columns + slot * slot_columns(ctx.args),
                first ? gemm.k : gemm.n};
    }
    // One thread: 64 rows of the matrix, from `row` of the m-block on.
    static MEGAMOE_DEVICE void store(const Context& ctx, const Tile& tile, Destination to, int row,
                                     const void* from) {
        Place at(ctx.args, tile, row);
        if (at.row < at.rows) arch::tma_store_4d(to.map, from, to.column, at.row, at.plane, tile.expert());
    }

    // In place: 64 columns a slot, each box of a warpgroup's 64 rows x 128 bytes.
    static constexpr int input_columns = S::columns / inputs;
    static MEGAMOE_DEVICE int boxes(const Args& args) { return input_columns / slot_columns(args); }
    static MEGAMOE_DEVICE uint32_t input_bytes(const Args& args, const Tile&) {
        return num_math_groups * boxes(args) * box_bytes;
    }
    template <class T, class Slot>
    static MEGAMOE_DEVICE void load_input(const Context& ctx, const Tile& tile, int input, Slot& slot,
                                          uint64_t* full) {
        MEGAMOE_UNROLL_BY(1)
        for (int group = 0; group < num_math_groups; ++group) {
            Place at(ctx.args, tile, group * group_rows);
            MEGAMOE_UNROLL_BY(1)
            for (int box = 0; box < boxes(ctx.args); ++box) {
                Destination from = output(ctx, tile, input * boxes(ctx.args) + box);
                arch::tma_load_4d(slot.b[box] + group * box_bytes, from.map, full, from.column, at.row,
                                  at.plane, tile.expert());
            }
        }
    }
    template <class T, class Slot>
    static MEGAMOE_DEVICE void store_input(const Context& ctx, const Tile& tile, int input,
                                           const Slot& slot) {
        MEGAMOE_UNROLL_BY(1)
        for (int group = 0; group < num_math_groups; ++group) {
            MEGAMOE_UNROLL_BY(1)
            for (int box = 0; box < boxes(ctx.args); ++box) {
                Destination to = output(ctx, tile, input * boxes(ctx.args) + box);
                if (to.column < to.width)
                    store(ctx, tile, to, group * group_rows, slot.b[box] + group * box_bytes);
            }
        }
    }

    template <class T, class Output>
    static MEGAMOE_DEVICE void run(Context& ctx, const Tile& tile, PipelineRing<T>& ring, Output& output,
                                   Sums<T>& sum) {
        Fragment f;
        bool is_fp32 = ctx.args.training.dw_bytes == 4;
        if (tile.inputs != 0) {
            MEGAMOE_UNROLL
            for (int input = 0; input < inputs; ++input) {
                auto& slot = output.claim_input(ring);
                auto& v = sum[input / (inputs / 2)];
                if (is_fp32) {
                    add_fp32(slot.b[0], slot.b[1], v, input % (inputs / 2) * input_columns / 8, f);
                } else {
                    add_bf16(slot.b[0], v, input % (inputs / 2) * input_columns / 8, f);
                }
                output.hand_over();
            }
        } else if (is_fp32) {
            MEGAMOE_UNROLL
            for (int half = 0; half < 2; ++half) write_fp32(output, sum[half], f);
        } else {
            write_halves<Bf16Rows, T>(ctx, tile, 2, output, sum, f);
        }
    }

  private:
    // 64 rows of a matrix: which of a plane's.
    struct Place {
        int plane, row, rows;
        MEGAMOE_DEVICE Place(const Args& args, const Tile& tile, int row_of_block) {
            rows = tile.stage == Stage::dw13 ? args.gemm[0].n : args.gemm[0].k;
            int blocks = ceil_div(rows, S::rows);
            plane = tile.block / blocks;
            row = (tile.block - plane * blocks) * S::rows + row_of_block;
        }
    };
    struct alignas(8) Pair {
        float a, b;
    };
    // 64 columns of the sums, from group g0 of 8 on, into what a slot holds of them.
    template <int n>
    static MEGAMOE_DEVICE void add_fp32(uint8_t* left, uint8_t* right, const float (&v)[n], int g0,
                                        Fragment f) {
        MEGAMOE_UNROLL
        for (int g = 0; g < input_columns / 8; ++g) {
            uint8_t* box = (g < 4 ? left : right) + math_group() * box_bytes;
            int at = swizzled(f.row, 4 * f.column(g % 4));
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) {
                auto* to = reinterpret_cast<Pair*>(box + at + i * 8 * slot_k_bytes);
                *to = {to->a + v[4 * (g0 + g) + 2 * i], to->b + v[4 * (g0 + g) + 2 * i + 1]};
            }
        }
    }
    template <int n>
    static MEGAMOE_DEVICE void add_bf16(uint8_t* slot, const float (&v)[n], int g0, Fragment f) {
        uint8_t* box = slot + math_group() * box_bytes;
        MEGAMOE_UNROLL
        for (int g = 0; g < input_columns / 8; ++g) {
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) {
                auto* to = reinterpret_cast<uint32_t*>(box + swizzled(f.row, 2 * f.column(g)) +
                                                       i * 8 * slot_k_bytes);
                *to = arch::pack_bf16x2(arch::bf16_lo(*to) + v[4 * (g0 + g) + 2 * i],
                                        arch::bf16_hi(*to) + v[4 * (g0 + g) + 2 * i + 1]);
            }
        }
    }
    // One half, 32 columns a slot.
    template <class Output, int n>
    static MEGAMOE_DEVICE void write_fp32(Output& output, const float (&v)[n], Fragment f) {
        constexpr int groups = slot_k_bytes / 4 / 8;  // of 8 columns
        MEGAMOE_UNROLL
        for (int c = 0; c < n / 4 / groups; ++c) {
            uint8_t* chunk = output.claim();
            MEGAMOE_UNROLL
            for (int g = groups * c; g < groups * (c + 1); ++g) {
                int at = swizzled(f.row, 4 * f.column(g - groups * c));
                *reinterpret_cast<Pair*>(chunk + at) = {v[4 * g], v[4 * g + 1]};
                *reinterpret_cast<Pair*>(chunk + at + 8 * slot_k_bytes) = {v[4 * g + 2], v[4 * g + 3]};
            }
            output.hand_over();
        }
    }
};

}  // namespace megamoe
