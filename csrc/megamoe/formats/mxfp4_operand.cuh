// MXFP4 weights as the M operand of MMAs, straight from packed halves into registers: the wide form of a tile.
// A warpgroup has 64 rows of either half. Lane (row, quad) of a warp needs rows `row` and row + 8, and of
// each instruction's K (32 bytes of expanded numbers) those that its registers a[2 * p + i] hold: bytes
// 4 * quad + 16 * p of row 8 * i.
#pragma once
#include "megamoe/formats/mxfp4.cuh"

namespace megamoe {

constexpr int slot_mmas = slot_k_bytes / mma_k_bytes;  // of a pipeline slot's K
using WideOperand = uint32_t[slot_mmas][4];            // 64 rows of M, a pipeline slot's K

// Where a thread's rows and their scales are in a half.
template <class Rows>
struct PackedRows {
    using Packed = PackedHalf<Rows>;
    unsigned row, quad;
    MEGAMOE_DEVICE PackedRows() {
        WideFragment f;
        row = static_cast<unsigned>(f.group * group_rows + f.column), quad = static_cast<unsigned>(f.quad);
    }
    // Of 16 bytes; eight rows on, that is the same for the swizzle.
    MEGAMOE_DEVICE unsigned chunk(unsigned c) const { return Packed::swizzled(row * Packed::row_bytes) ^ c * 16; }
    static constexpr int to_next = 8 * Packed::row_bytes;
    // Two scales, 64 columns' or 32 bf16 columns' each.
    static MEGAMOE_DEVICE const uint8_t* scales(const uint8_t* half, unsigned row, int i, int pair) {
        return half + Packed::scale_offset + 2 * row + 16 * i + 2 * scale_group * pair;
    }
};

template <class Rows>
class WideWeights;

// An instruction's K is a group of 32: 16 packed bytes, of which a lane needs two and two.
template <>
class WideWeights<E4m3Rows> {
  public:
    MEGAMOE_DEVICE void expand(WideOperand& a, float* scale, const uint8_t* half) const {
        using To = ExpandTo<E4m3Rows>;
        uint32_t codes[2][slot_mmas][2];
        int s[2 * slot_mmas];
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            MEGAMOE_UNROLL
            for (int k = 0; k < slot_mmas; ++k) {
                const uint8_t* from = half + at_.chunk(k) + 2 * at_.quad + i * at_.to_next;
                MEGAMOE_UNROLL
                for (int p = 0; p < 2; ++p) codes[i][k][p] = *reinterpret_cast<const uint16_t*>(from + 8 * p);
            }
            MEGAMOE_UNROLL
            for (int pair = 0; pair < slot_mmas / 2; ++pair) {
                uint32_t two = *reinterpret_cast<const uint16_t*>(at_.scales(half, at_.row, i, pair));
                s[slot_mmas * i + 2 * pair] = static_cast<int>(two & 0xff);
                s[slot_mmas * i + 2 * pair + 1] = static_cast<int>(two >> 8);
            }
        }
        To::Half of_half(half);
        *scale = of_half.scale();
        To::LookUp look_up[2 * slot_mmas];
        To::look_ups(look_up, of_half, s);
        MEGAMOE_UNROLL
        for (int k = 0; k < slot_mmas; ++k) {
            MEGAMOE_UNROLL
            for (int r = 0; r < 4; ++r)
                To::expand(&a[k][r], Codes(codes[r % 2][k][r / 2]), look_up[slot_mmas * (r % 2) + k], 0);
        }
    }

  private:
    PackedRows<E4m3Rows> at_;
};

// An instruction's K is half a group of 32: eight packed bytes, of which a lane needs one and one.
template <>
class WideWeights<Bf16Rows> {
  public:
    MEGAMOE_DEVICE void expand(WideOperand& a, float*, const uint8_t* half) const {
        using To = ExpandTo<Bf16Rows>;
        To::Half of_half(half);
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            uint32_t two = *reinterpret_cast<const uint16_t*>(at_.scales(half, at_.row, i, 0));
            int s[2] = {static_cast<int>(two & 0xff), static_cast<int>(two >> 8)};
            To::LookUp look_up[2];
            To::look_ups(look_up, of_half, s);
            MEGAMOE_UNROLL
            for (int c = 0; c < 2; ++c) {
                uint4_t v = *reinterpret_cast<const uint4_t*>(half + at_.chunk(c) + i * at_.to_next);
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};
                MEGAMOE_UNROLL
                for (int j = 0; j < 2; ++j) {
                    uint32_t bytes = arch::prmt(words[2 * j], words[2 * j + 1], at_.quad | (4 + at_.quad) << 4);
                    uint32_t out[2];
                    To::expand(out, Codes(bytes), look_up[c], 0);
                    a[2 * c + j][i] = out[0];
                    a[2 * c + j][i + 2] = out[1];
                }
            }
        }
    }

  private:
    PackedRows<Bf16Rows> at_;
};

}  // namespace megamoe
