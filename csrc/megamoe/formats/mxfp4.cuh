// MXFP4 weights: e2m1, two a byte, and a power of two for 32 of them along K (megamoe/formats/mxfp4.py).
// Tensor cores take e4m3 or bf16: math warps expand a half in place, between its arrival and its MMAs
// (docs/fp4.md).
#pragma once
#include "megamoe/formats/bf16.cuh"
#include "megamoe/formats/e4m3.cuh"

namespace megamoe {

// The scales of 128 x 128 numbers: a header, and exponents, [2, 128 rows, 2].
struct ScaleHeader {
    uint8_t largest;   // exponent
    uint8_t is_plain;  // all others are at most eleven binades below
    uint8_t unused[14];
};
constexpr int block_scales = 512, block_bytes = sizeof(ScaleHeader) + block_scales;

// What stands in the place of a half of B until it is expanded, for a step of K: its rows, `row_bytes` each,
// with the swizzle of that width. Its scales, [slot_k / 64, 128 rows, 2], are in the slot's own place for
// them, behind the block's header where e4m3 is made of them. A thread of the warpgroup that expands it takes every 128th unit: 32 numbers with their scale. All of
// a thread's stand at the same place of rows that are alike for the swizzles.
template <class Rows>
struct PackedHalf {
    static constexpr int slot_k = slot_k_bytes / Rows::element_bytes;
    static constexpr int group = 32;                           // numbers that share a scale
    static constexpr int row_units = slot_k / group;           // of 16 bytes
    static constexpr int num_units = scale_group * row_units;  // in a half
    static constexpr int unit_bytes = group / 2, row_bytes = row_units * unit_bytes;  // packed
    static constexpr int num_bytes = num_units * unit_bytes;
    static constexpr int header_bytes = Rows::element_bytes == 1 ? sizeof(ScaleHeader) : 0;
    static constexpr int scale_bytes = header_bytes + num_units;
    static constexpr int scale_offset(int step, int half) { return (2 * step + half) * scale_bytes; }
    // Where those of a step of K begin among the blocks'.
    static MEGAMOE_DEVICE int64_t scales_at(int step) {
        constexpr int steps = block_scales / num_units, first = sizeof(ScaleHeader) - header_bytes;
        return int64_t{step / steps} * block_bytes + first + step % steps * num_units;
    }

    static constexpr unsigned threads = 128, rows_apart = threads / row_units;
    static constexpr int num_shares = num_units / threads;  // units of a thread
    static_assert(rows_apart % 8 == 0, "the swizzle repeats every eight rows");
    static MEGAMOE_DEVICE unsigned thread() { return static_cast<unsigned>(arch::thread_idx()) % threads; }
    // Where the 16-byte chunk that holds `byte` of the plain rows is.
    static MEGAMOE_DEVICE unsigned swizzled(unsigned byte) {
        return byte ^ (byte >> 3 & (row_bytes - unit_bytes));
    }
    static MEGAMOE_DEVICE unsigned packed_at() { return swizzled(thread() * unit_bytes); }
    static MEGAMOE_DEVICE unsigned scale_at() {
        unsigned row = thread() / row_units, k = thread() % row_units;
        return header_bytes + k / 2 * (2 * scale_group) + 2 * row + k % 2;
    }
    static MEGAMOE_DEVICE unsigned expanded_at(unsigned chunk) {  // 16 bytes of a unit
        unsigned row = thread() / row_units, k = thread() % row_units;
        return row * slot_k_bytes + ((k * (slot_k_bytes / row_units) + chunk * 16) ^ (row % 8 << 4));
    }
};

struct Mxfp4Weights {
    static constexpr int packed = 2;
    static constexpr bool expanded = true, k_major = true;
    static constexpr bool scaled = false;    // by the math warps: its scales come with the numbers
    static constexpr int slot_scale_bytes = 4 * block_bytes;  // two steps of two halves

    // Where a tile's scales are.
    class Scales {
      public:
        template <class Halves>
        MEGAMOE_DEVICE Scales(const float* scale, int n, int columns, const Tile& tile,
                              const Halves& halves) {
            ScaleRows rows(n, tile, halves);
            half0_ = reinterpret_cast<const uint8_t*>(scale) + rows.first * columns * block_bytes;
            to_half1_ = rows.to_half1 * columns * block_bytes;
        }
        MEGAMOE_DEVICE void fetch() {}
        MEGAMOE_DEVICE void put(float (&)[2]) const {}
        // Those of both halves and a step of K.
        template <class Packed>
        MEGAMOE_DEVICE void load(uint8_t* to, uint64_t* full, int step) const {
            const uint8_t* from = half0_ + Packed::scales_at(step);
            arch::bulk_load(to, from, Packed::scale_bytes, full);
            arch::bulk_load(to + Packed::scale_bytes, from + to_half1_, Packed::scale_bytes, full);
        }

      private:
        const uint8_t* half0_;
        int to_half1_;
    };
};

// Bytes of eight e2m1 magnitudes, by code: what PRMT looks up for four codes at a time.
struct Magnitudes {
    uint32_t lo, hi;
    MEGAMOE_DEVICE uint32_t of(uint32_t codes) const { return arch::prmt(lo, hi, codes); }
};
// Eight codes of a word: their magnitudes, and signs at the highest bit of a byte each.
struct Codes {
    uint32_t magnitudes, odd, even;  // bytes of `odd` and `even` have a sign on top
    MEGAMOE_DEVICE explicit Codes(uint32_t word)
        : magnitudes(word & 0x77777777), odd(word), even(word << 4) {}
    MEGAMOE_DEVICE uint32_t magnitudes_of(int half) const { return magnitudes >> 16 * half; }
    MEGAMOE_DEVICE uint32_t signs_of(int half) const {
        return arch::prmt(even, odd, half == 0 ? 0x5140 : 0x7362) & 0x80808080;
    }
};

// How a unit is expanded: Half(half) is what its units share, Unit(half, s) what its scale makes of them.
template <class Rows>
struct ExpandTo;

// e4m3 times a power of two that the whole half shares, the largest scale's: 6 becomes 384.
template <>
struct ExpandTo<E4m3Rows> {
    using Packed = PackedHalf<E4m3Rows>;
    static constexpr int headroom = 6;
    static constexpr int words = 1;  // that four numbers become

    struct Half {
        int largest;
        bool is_plain;
        MEGAMOE_DEVICE explicit Half(const uint8_t* scales) {
            auto* header = reinterpret_cast<const ScaleHeader*>(scales);
            largest = max_of(int{header->largest}, headroom + 1);
            is_plain = header->is_plain != 0;
        }
        // The half's power of two; NaN where a scale is.
        MEGAMOE_DEVICE float scale() const {
            return arch::bf16_hi(largest == 255 ? 0x7fc00000u : uint32_t(largest - headroom) << 23);
        }
    };

    using LookUp = Magnitudes;

    // Then a power of two is an exponent more for all codes but zero's.
    template <int num>
    static MEGAMOE_DEVICE bool plain(const Half& half, const int (&)[num]) {
        return half.is_plain;
    }
    // Magnitudes times powers of two in e4m3. Where not all are `plain`, numbers are rounded one by one.
    template <bool all_plain, int num>
    static MEGAMOE_DEVICE void look_ups(LookUp (&to)[num], const Half& half, const int (&scales)[num]) {
        int to_exponent = headroom - half.largest;
        constexpr uint32_t lo = 0x08080800, hi = 0x08080808;  // an exponent
        uint32_t lo0 = 0x3c383000 + static_cast<uint32_t>(to_exponent) * lo;
        uint32_t hi0 = 0x4c484440 + static_cast<uint32_t>(to_exponent) * hi;
        MEGAMOE_UNROLL
        for (int i = 0; i < num; ++i) {
            uint32_t s = static_cast<uint32_t>(scales[i]);
            to[i] = all_plain ? LookUp{s * lo + lo0, s * hi + hi0} : rounded(scales[i] + to_exponent);
        }
    }
    static MEGAMOE_DEVICE LookUp rounded(int exponent) {
        float one = arch::bf16_hi(uint32_t(127 + max_of(exponent, -20)) << 23);  // 0 from -13 on
        return {arch::pack_e4m3x2(0, 0.5f * one) | uint32_t{arch::pack_e4m3x2(one, 1.5f * one)} << 16,
                arch::pack_e4m3x2(2 * one, 3 * one) | uint32_t{arch::pack_e4m3x2(4 * one, 6 * one)} << 16};
    }

    // Four numbers, those of a word's lower or upper half.
    static MEGAMOE_DEVICE void expand(uint32_t* out, const Codes& codes, const LookUp& look_up, int half) {
        out[0] = look_up.of(codes.magnitudes_of(half)) | codes.signs_of(half);
    }
};

// bf16: both bytes of the magnitude, times the scale.
template <>
struct ExpandTo<Bf16Rows> {
    static constexpr int words = 2;

    struct Half {
        MEGAMOE_DEVICE explicit Half(const uint8_t*) {}
        MEGAMOE_DEVICE float scale() const { return 1.0f; }
    };
    using LookUp = uint32_t;  // the scale, twice
    template <int num>
    static MEGAMOE_DEVICE bool plain(const Half&, const int (&scales)[num]) {  // neither subnormal nor NaN
        int least = scales[0], most = scales[0];
        MEGAMOE_UNROLL
        for (int i = 1; i < num; ++i) {
            least = min_of(least, scales[i]);
            most = max_of(most, scales[i]);
        }
        return least > 0 && most < 255;
    }
    template <bool all_plain, int num>
    static MEGAMOE_DEVICE void look_ups(LookUp (&to)[num], const Half&, const int (&scales)[num]) {
        MEGAMOE_UNROLL
        for (int i = 0; i < num; ++i) {
            bool odd = !all_plain && (scales[i] == 0 || scales[i] == 255);  // 2^-127 is half of 2^-126
            to[i] = static_cast<uint32_t>(scales[i]) * 0x00800080 | (odd ? 0x00400040 : 0);
        }
    }
    static MEGAMOE_DEVICE void expand(uint32_t* out, const Codes& codes, LookUp power, int half) {
        constexpr Magnitudes upper = {0x3f3f3f00, 0x40404040}, lower = {0xc0800000, 0xc0804000};
        uint32_t high = upper.of(codes.magnitudes_of(half)) | codes.signs_of(half);
        uint32_t low = lower.of(codes.magnitudes_of(half));
        out[0] = arch::mul_bf16x2(arch::prmt(low, high, 0x5140), power);
        out[1] = arch::mul_bf16x2(arch::prmt(low, high, 0x7362), power);
    }
};

// Expands a half in place, by the 128 threads of a math warpgroup, which `meet` when all have read it. Its
// power of two goes to `scale`.
template <class Rows, class Meet>
MEGAMOE_DEVICE void expand_half(uint8_t* half, const uint8_t* scales, float* scale, Meet meet) {
    using Packed = PackedHalf<Rows>;
    using To = ExpandTo<Rows>;
    constexpr int num = Packed::num_shares, chunks = 2 * To::words;  // of 16 bytes, in a unit
    uint32_t packed[num][4];
    int s[num];
    MEGAMOE_UNROLL
    for (int i = 0; i < num; ++i) {
        s[i] = scales[Packed::scale_at() + i * 2 * Packed::rows_apart];
        uint4_t v = *reinterpret_cast<const uint4_t*>(half + Packed::packed_at() +
                                                      i * Packed::threads * Packed::unit_bytes);
        packed[i][0] = v.x, packed[i][1] = v.y, packed[i][2] = v.z, packed[i][3] = v.w;
    }
    typename To::Half of_half(scales);
    typename To::LookUp look_up[num];
    if (arch::ballot(!To::plain(of_half, s)) == 0) {
        To::template look_ups<true>(look_up, of_half, s);
    } else {
        To::template look_ups<false>(look_up, of_half, s);
    }
    if (Packed::thread() == 0) *scale = of_half.scale();
    meet();
    MEGAMOE_UNROLL
    for (int i = 0; i < num; ++i) {
        MEGAMOE_UNROLL
        for (int c = 0; c < chunks; ++c) {
            uint32_t out[4];
            MEGAMOE_UNROLL
            for (int four = 0; four < 4 / To::words; ++four) {
                Codes codes(packed[i][(4 / To::words * c + four) / 2]);
                To::expand(out + To::words * four, codes, look_up[i], four % 2);
            }
            uint8_t* to = half + Packed::expanded_at(c) + i * Packed::rows_apart * slot_k_bytes;
            *reinterpret_cast<uint4_t*>(to) = {out[0], out[1], out[2], out[3]};
        }
    }
    arch::fence_proxy_async_shared();  // MMAs read it, and TMA will overwrite it
}

}  // namespace megamoe
