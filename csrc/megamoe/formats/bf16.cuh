// bf16, as it is: no scales.
#pragma once
#include "megamoe/formats/copy.cuh"
#include "megamoe/formats/fragment.h"

namespace megamoe {

struct Bf16Rows {
    using Element = bf16_t;
    static constexpr int element_bytes = 2;
    static constexpr bool scaled = false;
    static MEGAMOE_DEVICE int row_bytes(int columns) { return columns * element_bytes; }

    static MEGAMOE_DEVICE void stage(Context& ctx, int num_tokens) {
        const Args& args = ctx.args;
        auto* to = ctx.window<uint4_t>(args.rank, args.window_x);
        auto* from = static_cast<const uint4_t*>(args.x);
        copy_by_crews(ctx, to, from, int64_t{num_tokens} * args.hidden / 8);
    }

    // One half as bf16: two chunks of 64 columns.
    template <class Output, int n>
    static MEGAMOE_DEVICE void write_half(Output& output, const float (&v)[n], float*, Fragment f) {
        MEGAMOE_UNROLL
        for (int c = 0; c < n / 32; ++c) {
            uint8_t* chunk = output.claim();
            MEGAMOE_UNROLL
            for (int g = 8 * c; g < 8 * c + 8; ++g) {
                int byte = (f.column(g) % 64) * 2;
                *reinterpret_cast<uint32_t*>(chunk + swizzled(f.row, byte)) =
                    arch::pack_bf16x2(v[4 * g], v[4 * g + 1]);
                *reinterpret_cast<uint32_t*>(chunk + swizzled(f.row + 8, byte)) =
                    arch::pack_bf16x2(v[4 * g + 2], v[4 * g + 3]);
            }
            output.hand_over();
        }
    }

    // The same of the wide form, by both warpgroups: each fills the chunk of its columns.
    template <class Output, int n>
    static MEGAMOE_DEVICE void write_columns(Output& output, const float (&v)[n], float*, WideFragment f) {
        auto first = output.claim_common(0), second = output.claim_common(1);
        auto mine = f.group == 0 ? first : second;
        MEGAMOE_UNROLL
        for (int g = 0; g < n / 4; ++g) {
            MEGAMOE_UNROLL
            for (int j = 0; j < 2; ++j) {
                uint32_t pair = arch::pack_bf16x2(v[4 * g + j], v[4 * g + 2 + j]);
                uint8_t* chunk = 8 * g < group_rows ? mine.slot : mine.beside;
                auto put = [&](int column, uint32_t bits) {
                    *reinterpret_cast<uint16_t*>(chunk + swizzled(f.row(g) % group_rows + j, 2 * column)) =
                        static_cast<uint16_t>(bits);
                };
                put(f.column, pair);
                put(f.column + 8, pair >> 16);
            }
        }
        output.hand_over_common(2);
    }
};

struct Bf16Weights {
    using Element = bf16_t;
    static constexpr int element_bytes = 2, packed = 1;
    static constexpr bool scaled = false, k_major = true, expanded = false, scales_sums = false;
    static constexpr int slot_scale_bytes = 0;

    struct Scales {
        template <class Halves>
        MEGAMOE_DEVICE Scales(const float*, int, int, int, const Halves&) {}
        MEGAMOE_DEVICE void fetch() {}
        MEGAMOE_DEVICE void put(float (&)[2]) const {}
    };
};

// Either operand as it lies when memory has a row of M or N for each k: MN-major.
struct Bf16Columns : Bf16Weights {
    static constexpr bool k_major = false;
};

}  // namespace megamoe
