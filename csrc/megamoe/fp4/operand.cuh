// FP4 weights as the M operand of MMAs, from packed halves into registers: the wide form of a tile. A
// warpgroup has 64 rows of each half. Lane (row, quad) of a warp needs rows `row` and row + 8. Of an
// instruction's K (32 bytes of expanded numbers), its register a[2 * p + i] holds bytes 4 * quad + 16 * p of
// row 8 * i.
#pragma once
#include "megamoe/fp4/format.cuh"

namespace megamoe {

constexpr int slot_mmas = slot_k_bytes / mma_k_bytes;  // of a pipeline slot's K
using WideOperand = uint32_t[slot_mmas][4];            // 64 rows of M, a pipeline slot's K

// Where a thread's rows and their scales are in a half.
template <class Rows, class Weights>
struct PackedRows {
    using Packed = PackedHalf<Rows, Weights>;
    unsigned row, quad;
    MEGAMOE_DEVICE PackedRows() {
        WideFragment f;
        row = static_cast<unsigned>(f.warpgroup * warpgroup_rows + f.column),
        quad = static_cast<unsigned>(f.quad);
    }
    // Where 16 bytes of this thread's row are. Eight rows further on the swizzle is the same.
    MEGAMOE_DEVICE unsigned vector(unsigned c) const {
        return Packed::swizzled(row * Packed::row_bytes) ^ c * 16;
    }
    static constexpr int to_next = 8 * Packed::row_bytes;
    // The scales of 64 numbers, of row 8 * i.
    static constexpr int row_scales = 64 / Weights::group;
    MEGAMOE_DEVICE uint32_t scales_of(const uint8_t* scales, int i, int pair) const {
        const uint8_t* from =
            scales + Packed::header_bytes + row_scales * row + (8 * i + scale_group * pair) * row_scales;
        return static_cast<uint32_t>(read_scales<row_scales>(from));
    }
    // The scale of a group for each quad, of row 8 * i.
    MEGAMOE_DEVICE int scale_of(const uint8_t* scales, int i) const {
        return scales[Packed::header_bytes + 2 * (row + 8 * i) + quad / 2 * (2 * scale_group) + quad % 2];
    }
};

// What a thread reads of a half to make its registers: codes, four numbers each, and scales.
template <class Rows, class Weights>
struct WideHalf;

// In the order of QuadWords a slot's K has 32 numbers for a lane, one group: 16 packed bytes and one scale of
// each of its rows. A word of eight codes makes two registers.
template <>
struct WideHalf<E4m3QuadRows, Mxfp4Weights> {
    using To = ExpandTo<E4m3QuadRows, Mxfp4Weights>;
    using At = PackedRows<E4m3QuadRows, Mxfp4Weights>;
    static constexpr int num_scales = 2;  // of two rows
    uint4_t codes[2];
    int scales[num_scales];
    To::Half of_half;

    MEGAMOE_DEVICE WideHalf(const uint8_t* half, const uint8_t* from_scales, const At& at)
        : of_half(from_scales) {
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            codes[i] = *reinterpret_cast<const uint4_t*>(half + at.vector(at.quad) + i * at.to_next);
            scales[i] = at.scale_of(from_scales, i);
        }
    }
    MEGAMOE_DEVICE void expand(WideOperand& a, const To::LookUp (&look_up)[num_scales]) const {
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            const uint32_t words[slot_mmas] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
            MEGAMOE_UNROLL
            for (int k = 0; k < slot_mmas; ++k) {
                Codes eight(words[k]);
                MEGAMOE_UNROLL
                for (int p = 0; p < 2; ++p) To::expand(&a[k][2 * p + i], eight, look_up[i], p);
            }
        }
    }
};

// An instruction's K is half a group of 32: eight packed bytes, of which a lane needs two, four bytes apart.
// A quad reads 16 together.
template <class Weights>
struct WideHalf<Bf16Rows, Weights> {
    using To = ExpandTo<Bf16Rows, Weights>;
    using At = PackedRows<Bf16Rows, Weights>;
    static constexpr int row_scales = At::row_scales, num_scales = 2 * row_scales;
    static constexpr int row_words = ceil_div(row_scales, Weights::word_scales);
    uint32_t codes[slot_mmas][2];
    int scales[2 * row_words];
    typename To::Half of_half;

    MEGAMOE_DEVICE WideHalf(const uint8_t* half, const uint8_t* from_scales, const At& at)
        : of_half(from_scales) {
        uint32_t mine = at.quad | (4 + at.quad) << 4;
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            MEGAMOE_UNROLL
            for (int c = 0; c < 2; ++c) {
                uint4_t v = *reinterpret_cast<const uint4_t*>(half + at.vector(c) + i * at.to_next);
                codes[2 * c][i] = arch::prmt(v.x, v.y, mine);
                codes[2 * c + 1][i] = arch::prmt(v.z, v.w, mine);
            }
            uint32_t read = at.scales_of(from_scales, i, 0);
            if constexpr (row_words == 1) {
                scales[i] = static_cast<int>(read);
            } else {
                scales[2 * i] = static_cast<int>(read & 0xff);
                scales[2 * i + 1] = static_cast<int>(read >> 8);
            }
        }
    }
    MEGAMOE_DEVICE void expand(WideOperand& a, const typename To::LookUp (&look_up)[num_scales]) const {
        MEGAMOE_UNROLL
        for (int k = 0; k < slot_mmas; ++k) {
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) {
                uint32_t out[2];
                To::expand(out, Codes(codes[k][i]), look_up[(i * slot_mmas + k) * row_scales / slot_mmas], 0);
                a[k][i] = out[0];
                a[k][i + 2] = out[1];
            }
        }
    }
};

// Both halves of a slot, a step of K: their registers and their powers of two.
template <class Rows, class Weights>
struct WideStepAt {
    const uint8_t *codes[2], *scales[2];
    PackedRows<Rows, Weights> at;
    template <class Slot>
    MEGAMOE_DEVICE WideStepAt(const Slot& slot, int step, const PackedRows<Rows, Weights>& at_) : at(at_) {
        using Packed = PackedHalf<Rows, Weights>;
        MEGAMOE_UNROLL
        for (int h = 0; h < 2; ++h) {
            codes[h] = slot.b[h] + step * Packed::num_bytes;
            scales[h] = slot.scales + Packed::scale_offset(step, h);
        }
    }
    // Are both halves plain, as far as this thread's go?
    template <bool all_plain>
    MEGAMOE_DEVICE bool expand(WideOperand (&a)[2], float (&scale)[2]) const {
        using Half = WideHalf<Rows, Weights>;
        const Half halves[2] = {{codes[0], scales[0], at}, {codes[1], scales[1], at}};
        bool plain = true;
        MEGAMOE_UNROLL
        for (int h = 0; h < 2; ++h) {
            typename Half::To::LookUp look_up[Half::num_scales];
            Half::To::template look_ups<all_plain>(look_up, halves[h].of_half, halves[h].scales);
            halves[h].expand(a[h], look_up);
            scale[h] = halves[h].of_half.scale();
            plain = plain && Half::To::plain(halves[h].of_half, halves[h].scales);
        }
        return plain;
    }
};
// Registers are made as if all scales were plain, as they nearly always are. A look at that first would stand
// between a thread's reads and what it makes of them. Where they are not, it is done once more.
template <class Rows, class Weights, class Slot>
MEGAMOE_DEVICE void expand_wide(WideOperand (&a)[2], float (&scale)[2], const Slot& slot, int step,
                                const PackedRows<Rows, Weights>& at) {
    WideStepAt<Rows, Weights> from(slot, step, at);
    bool plain = from.template expand<true>(a, scale);
    if (arch::ballot(!plain) == 0) return;
    arch::warp_sync();  // reads anew: no register keeps the codes until here
    from.template expand<false>(a, scale);
}

}  // namespace megamoe
