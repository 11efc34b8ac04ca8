// e4m3 with fp32 scales. Rows have one per 128 columns, weights one per 128 x 128 (along K: a pipeline slot).
// Or rows have one per token, and weights one per channel, a column of N.
#pragma once
#include "megamoe/formats/bf16.cuh"
#include "megamoe/formats/e4m3_group.cuh"
#include "megamoe/formats/fragment.cuh"

namespace megamoe {

// In which order a row of e4m3 has its words, of four numbers each. A place() permutes bits of a column:
// those of disjoint bits add up.
struct PlainWords {
    static constexpr bool is_plain = true;
    static MEGAMOE_DEVICE int place(int column) { return column; }
    static MEGAMOE_DEVICE int row_bytes(int columns) { return columns; }
};

struct alignas(8) TwoWords {  // eight columns
    uint32_t first, second;
};

template <class Words_>
struct E4m3RowsIn {
    using Words = Words_;
    using Element = e4m3_t;
    static constexpr int element_bytes = 1;
    static constexpr bool scaled = true, whole_rows = false;
    static MEGAMOE_DEVICE int row_bytes(int columns) { return Words::row_bytes(columns); }
    static MEGAMOE_DEVICE int num_scales(int columns) { return ceil_div(columns, scale_group); }

    // Eight columns of bf16 a lane, from `column` of a row on, so that 16 lanes hold one group of 128
    // (docs/numerics.md): the row's words, and by the first lane of a group its scale. `columns`: of the row.
    static MEGAMOE_DEVICE void quantize(const uint4_t& v, uint8_t* row, float* scales, int column,
                                        int columns) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        E4m3Group group;
        MEGAMOE_UNROLL
        for (int w = 0; w < 4; ++w) group.include(arch::bf16_lo(words[w]), arch::bf16_hi(words[w]));
        group.join_lanes<16>();
        float inverse = group.inverse();
        if (column >= row_bytes(columns)) return;
        put(row, column,
            {e4m3_of_bf16(words[0], words[1], inverse), e4m3_of_bf16(words[2], words[3], inverse)});
        if (arch::lane_idx() % 16 == 0) scales[column / scale_group] = group.scale();
    }
    // Eight columns to their places in a row.
    static MEGAMOE_DEVICE void put(uint8_t* row, int column, const TwoWords& words) {
        uint8_t* to = row + Words::place(column);
        *reinterpret_cast<uint32_t*>(to) = words.first;
        *reinterpret_cast<uint32_t*>(to + Words::place(4)) = words.second;
    }

    // One half as e4m3: one box, quantized per row (a half is exactly one group of 128), and its scales if
    // the half exists, of `rows`.
    template <class Output, int n, class Rows = AllRows>
    static MEGAMOE_DEVICE void write_half(Output& output, const float (&v)[n], float* row_scale, Fragment f,
                                          Rows rows = {}) {
        write_group<n / 4>(
            output, row_scale, f, [&](int i, int g) { return v[4 * g + 2 * i]; },
            [&](int i, int g) { return v[4 * g + 2 * i + 1]; }, rows);
    }
    // The same for 8 * groups columns of bf16: pairs[i][g] of a thread are those at f.column(g) of its row i.
    template <class Output, int groups>
    static MEGAMOE_DEVICE void write_bf16(Output& output, const uint32_t (&pairs)[2][groups],
                                          float* row_scale, Fragment f) {
        write_group<groups>(
            output, row_scale, f, [&](int i, int g) { return arch::bf16_lo(pairs[i][g]); },
            [&](int i, int g) { return arch::bf16_hi(pairs[i][g]); }, AllRows{});
    }

  private:
    template <int groups, class Output, class Even, class Odd, class Rows>
    static MEGAMOE_DEVICE void write_group(Output& output, float* row_scale, Fragment f, Even even, Odd odd,
                                           Rows rows) {
        uint8_t* box = output.claim();
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            E4m3Group group;
            MEGAMOE_UNROLL
            for (int g = 0; g < groups; ++g) group.include(even(i, g), odd(i, g));
            group.join_lanes<4>();  // a quad holds one row
            float inverse = group.inverse();
            MEGAMOE_UNROLL
            for (int g = 0; g < groups; ++g) {
                *reinterpret_cast<uint16_t*>(box + swizzled(f.row + 8 * i, Words::place(f.column(g)))) =
                    arch::pack_e4m3x2(even(i, g) * inverse, odd(i, g) * inverse);
            }
            arch::put_float(row_scale + f.row + 8 * i, group.scale(), false,
                            f.quad == 0 && row_scale != nullptr && rows.has(f.row + 8 * i));
        }
        output.hand_over();
    }
};
using E4m3Rows = E4m3RowsIn<PlainWords>;

// Only for x: a tile of gemm1 has 128 columns of h, so it cannot compute the maximum of a whole row.
struct E4m3TokenRows {
    using Words = PlainWords;
    using Element = e4m3_t;
    static constexpr int element_bytes = 1;
    static constexpr bool scaled = true, whole_rows = true;
    static MEGAMOE_DEVICE int row_bytes(int columns) { return columns; }
    static MEGAMOE_DEVICE int num_scales(int) { return 1; }
};

// Where the scales of a tile's halves lie, in rows of blocks of 128 x 128. A half past the last column has no
// scales and takes the first half's, since its products are zero.
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
    static constexpr bool scaled = true, column_scales = false, k_major = true, scales_sums = false;
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

// No slot brings a scale, as with bf16.
struct E4m3ChannelWeights : Bf16Weights {
    using Element = e4m3_t;
    static constexpr int element_bytes = 1;
    static constexpr bool column_scales = true;
};

}  // namespace megamoe
