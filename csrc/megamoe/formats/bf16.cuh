// bf16, stored without scales.
#pragma once
#include "megamoe/formats/fragment.cuh"

namespace megamoe {

struct Bf16Rows {
    using Element = bf16_t;
    static constexpr int element_bytes = 2;
    static constexpr bool scaled = false;
    static MEGAMOE_DEVICE int row_bytes(int columns) { return columns * element_bytes; }
    static MEGAMOE_DEVICE int num_scales(int) { return 0; }

    // One half as bf16: two chunks of 64 columns.
    template <class Output, int n>
    static MEGAMOE_DEVICE void write_half(Output& output, const float (&v)[n], float*, Fragment f) {
        MEGAMOE_UNROLL
        for (int c = 0; c < n / 32; ++c) {
            uint8_t* box = output.claim();
            MEGAMOE_UNROLL
            for (int g = 8 * c; g < 8 * c + 8; ++g) {
                int byte = (f.column(g) % 64) * 2;
                *reinterpret_cast<uint32_t*>(box + swizzled(f.row, byte)) =
                    arch::pack_bf16x2(v[4 * g], v[4 * g + 1]);
                *reinterpret_cast<uint32_t*>(box + swizzled(f.row + 8, byte)) =
                    arch::pack_bf16x2(v[4 * g + 2], v[4 * g + 3]);
            }
            output.hand_over();
        }
    }
};

struct Bf16Weights {
    using Element = bf16_t;
    static constexpr int element_bytes = 2, packed = 1;
    static constexpr bool scaled = false, column_scales = false, k_major = true;
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
