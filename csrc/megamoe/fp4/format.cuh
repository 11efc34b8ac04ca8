// FP4 weights: two e2m1 numbers per byte, and a scale per group along K. MXFP4 has a power of two per 32
// numbers (megamoe/formats/mxfp4.py). NVFP4 has an e4m3 per 16, and an fp32 per matrix (nvfp4.py). Tensor
// cores take e4m3 or bf16, so math warps expand a half between its arrival and its MMAs (docs/fp4.md).
#pragma once
#include "megamoe/formats/bf16.cuh"
#include "megamoe/formats/e4m3.cuh"

namespace megamoe {

// Word 8 * q + j of every 128 columns stands at 4 * j + q: MMAs whose operand comes from registers give a
// lane of quad q one word of every 16 bytes, which are 32 neighbouring columns then (docs/fp4.md). Rows have
// whole groups, with zeros behind the last column.
struct QuadWords {
    static constexpr bool is_plain = false;
    static MEGAMOE_DEVICE int place(int column) {
        return (column & ~(scale_group - 1)) | (column >> 2 & 7) << 4 | (column >> 5 & 3) << 2 | (column & 3);
    }
    static MEGAMOE_DEVICE int row_bytes(int columns) { return ceil_div(columns, scale_group) * scale_group; }
};
using E4m3QuadRows = E4m3RowsIn<QuadWords>;

// What stands before the scales of 128 x 128 numbers.
struct ScaleHeader {
    uint8_t largest;   // MXFP4: exponent
    uint8_t is_plain;  // MXFP4: all others are at most eleven binades below
    uint8_t unused[2];
    float of_sums;  // NVFP4: what the matrix's sums are multiplied by, in the epilogue
    uint8_t padding[8];

    // MXFP4 as e4m3: relative to the largest scale, 6 becomes 384. NaN where a scale is.
    static constexpr int headroom = 6;
    static MEGAMOE_DEVICE int exponent_of(int largest) { return max_of(largest, headroom + 1); }
    static MEGAMOE_DEVICE float power_of(int exponent) {
        return arch::bf16_hi(exponent == 255 ? 0x7fc00000u : uint32_t(exponent - headroom) << 23);
    }
};
static_assert(sizeof(ScaleHeader) == 16, "what bulk copies move");

// What stands in the place of a half of B until it is expanded, for a step of K: its rows, `row_bytes` each,
// with the swizzle of that width. Its scales, [slot_k / 64, 128 rows, 64 / group], are in the slot's own
// place for them, behind the block's header where e4m3 is made of them. A thread of the warpgroup that
// expands it takes every 128th unit: 32 numbers with their scales. All units of a thread stand at the same
// place of rows that the swizzles treat alike.
template <class Rows, class Weights>
struct PackedHalf {
    static constexpr int slot_k = slot_k_bytes / Rows::element_bytes;
    static constexpr int unit = 32;                            // numbers in 16 bytes
    static constexpr int unit_scales = unit / Weights::group;  // of a unit, beside each other
    static constexpr int row_units = slot_k / unit;
    static constexpr int num_units = scale_group * row_units;                        // in a half
    static constexpr int unit_bytes = unit / 2, row_bytes = row_units * unit_bytes;  // packed
    static constexpr int num_bytes = num_units * unit_bytes;
    static constexpr int num_scales = num_units * unit_scales;
    static constexpr int header_bytes = Rows::element_bytes == 1 ? sizeof(ScaleHeader) : 0;
    static constexpr int scale_bytes = header_bytes + num_scales;
    static constexpr int scale_offset(int step, int half) { return (2 * step + half) * scale_bytes; }
    // Where the scales of a step of K begin among those of the blocks.
    static MEGAMOE_DEVICE int64_t scales_at(int step) {
        constexpr int steps = Weights::block_scales / num_scales;
        constexpr int first = sizeof(ScaleHeader) - header_bytes;
        return int64_t{step / steps} * Weights::block_bytes + first + step % steps * num_scales;
    }

    static constexpr unsigned threads = 128, rows_apart = threads / row_units;
    static constexpr int units_of_thread = num_units / threads;  // units of a thread
    static_assert(rows_apart % 8 == 0, "the swizzle repeats every eight rows");
    static MEGAMOE_DEVICE unsigned thread() { return static_cast<unsigned>(arch::thread_idx()) % threads; }
    // Where the 16 bytes that hold `byte` of the plain rows is.
    static MEGAMOE_DEVICE unsigned swizzled(unsigned byte) {
        return byte ^ (byte >> 3 & (row_bytes - unit_bytes));
    }
    static MEGAMOE_DEVICE unsigned packed_at() { return swizzled(thread() * unit_bytes); }
    static MEGAMOE_DEVICE unsigned scale_at() {
        unsigned row = thread() / row_units, k = thread() % row_units;
        return header_bytes + k / 2 * (2 * scale_group) + 2 * row + k % 2;
    }
    // A word of a unit where rows lie by quads. No two lanes read from the same bank.
    static MEGAMOE_DEVICE unsigned word_at(unsigned word) {
        unsigned row = thread() / row_units, k = thread() % row_units;
        return row * slot_k_bytes + ((word * 16) ^ (row % 8 << 4)) + k * 4;
    }
};

// What the formats share. `group` numbers of K have one scale of a byte. Scales stand in blocks, each of 128
// x 128 numbers.
template <int group_, bool scales_sums_>
struct Fp4Weights {
    static constexpr int packed = 2, group = group_;
    static constexpr bool k_major = true;
    static constexpr bool column_scales = false;
    static constexpr bool scaled = false;  // by the math warps: its scales come with the numbers
    static constexpr bool scales_sums = scales_sums_;
    static constexpr int block_scales = scale_group * scale_group / group;
    static constexpr int block_bytes = sizeof(ScaleHeader) + block_scales;
    // Two steps of two halves: 128 x 4 scales of e4m3's 128 of K, or at most as many of bf16's 64.
    static constexpr int slot_scale_bytes = 4 * (sizeof(ScaleHeader) + 512);

    // Where a tile's scales are.
    class Scales {
      public:
        template <class Halves>
        MEGAMOE_DEVICE Scales(const float* scale, int n, int columns, int expert, const Halves& halves) {
            ScaleRows rows(n, expert, halves);
            half0_ = reinterpret_cast<const uint8_t*>(scale) + rows.first * columns * block_bytes;
            to_half1_ = rows.to_half1 * columns * block_bytes;
        }
        // Where weights were expanded in memory: the scales of the next 128 of K.
        MEGAMOE_DEVICE void fetch() {
            largest_[0] = *half0_;
            largest_[1] = half0_[to_half1_];
            half0_ += block_bytes;
        }
        MEGAMOE_DEVICE void put(float (&slot)[2]) const {
            MEGAMOE_UNROLL
            for (int half = 0; half < 2; ++half)
                slot[half] = ScaleHeader::power_of(ScaleHeader::exponent_of(largest_[half]));
        }
        // The block of a half at 128 * k.
        MEGAMOE_DEVICE const uint8_t* block(int half, int k) const {
            return half0_ + half * to_half1_ + k * block_bytes;
        }
        // The scales of both halves and a step of K.
        template <class Packed>
        MEGAMOE_DEVICE void load(uint8_t* to, uint64_t* full, int step) const {
            const uint8_t* from = half0_ + Packed::scales_at(step);
            arch::bulk_load(to, from, Packed::scale_bytes, full);
            arch::bulk_load(to + Packed::scale_bytes, from + to_half1_, Packed::scale_bytes, full);
        }
        // What the sums of a half are multiplied by. It is read from the last of its blocks, which loads of
        // scales have just brought into L2.
        MEGAMOE_DEVICE float of_sums(int half, int columns) const {
            return reinterpret_cast<const ScaleHeader*>(block(half, columns - 1))->of_sums;
        }

      private:
        const uint8_t* half0_;
        int to_half1_;
        int largest_[2];
    };
};

// The bytes of the eight e2m1 magnitudes, by code: PRMT looks them up for four codes at a time.
struct Magnitudes {
    uint32_t lo, hi;
    MEGAMOE_DEVICE uint32_t of(uint32_t codes) const { return arch::prmt(lo, hi, codes); }
};
// Eight codes of a word: their magnitudes, and signs at the highest bit of a byte each.
struct Codes {
    uint32_t magnitudes, odd, even;  // bytes of `odd` and `even` have a sign on top
    MEGAMOE_DEVICE explicit Codes(uint32_t word)
        : magnitudes(word & 0x77777777), odd(word), even(word << 4) {}
    MEGAMOE_DEVICE uint32_t magnitudes_of(int part) const { return magnitudes >> 16 * part; }
    MEGAMOE_DEVICE uint32_t signs_of(int part) const {
        return arch::prmt(even, odd, part == 0 ? 0x5140 : 0x7362) & 0x80808080;
    }
};

// A power of two for 32: E8M0, the exponent plus 127.
struct Mxfp4Weights : Fp4Weights<32, false> {
    // Scales that are read together, one in each word.
    static constexpr int word_scales = 1;
    // bf16: a magnitude's upper bytes, and what a number is multiplied by, twice in a word.
    static constexpr Magnitudes upper = {0x3f3f3f00, 0x40404040};
    template <int num>
    static MEGAMOE_DEVICE bool plain(const int (&scales)[num]) {  // neither subnormal nor NaN
        int least = scales[0], most = scales[0];
        MEGAMOE_UNROLL
        for (int i = 1; i < num; ++i) {
            least = min_of(least, scales[i]);
            most = max_of(most, scales[i]);
        }
        return least > 0 && most < 255;
    }
    template <bool all_plain>
    static MEGAMOE_DEVICE uint32_t factor(int scale, int) {
        bool odd = !all_plain && (scale == 0 || scale == 255);  // 2^-127 is half of 2^-126
        return static_cast<uint32_t>(scale) * 0x00800080 | (odd ? 0x00400040 : 0);
    }
};

// An e4m3 for 16, with its sign, and an fp32 in each block's header. Shifted up by four bits, an e4m3 is the
// bf16 of its value times 2^-120, subnormal ones too, and NaN is 480 times that. The magnitudes have the
// factor 2^120.
struct Nvfp4Weights : Fp4Weights<16, true> {
    static constexpr int word_scales = 4;  // at most
    static constexpr Magnitudes upper = {0x7b7b7b00, 0x7c7c7c7c};
    template <int num>
    static MEGAMOE_DEVICE bool plain(const int (&words)[num]) {  // no NaN
        uint32_t nan = 0;
        MEGAMOE_UNROLL
        for (int i = 0; i < num; ++i) nan |= (static_cast<uint32_t>(words[i]) & 0x7f7f7f7f) + 0x01010101;
        return (nan & 0x80808080) == 0;
    }
    template <bool all_plain>
    static MEGAMOE_DEVICE uint32_t factor(int word, int i) {
        // Each half of a word: the scale, and above it its sign, eight times.
        uint32_t twice =
            arch::prmt(static_cast<uint32_t>(word), 0, 0x8080 + 0x1111 * static_cast<uint32_t>(i));
        if (!all_plain && (twice & 0x7f) == 0x7f) return 0x7fc07fc0;
        return twice << 4 & 0x87f087f0;
    }
};

// How a unit is expanded. Half(half) is what the units of a half share; look_ups() is what their scales make
// of it.
template <class Rows, class Weights>
struct ExpandTo;

// e4m3, times a power of two that the whole half shares. That of the largest scale makes 384 of 6.
template <>
struct ExpandTo<E4m3QuadRows, Mxfp4Weights> {
    using Packed = PackedHalf<E4m3QuadRows, Mxfp4Weights>;

    struct Half {
        int exponent;
        bool is_plain;
        MEGAMOE_DEVICE explicit Half(const uint8_t* scales) {
            auto* header = reinterpret_cast<const ScaleHeader*>(scales);
            exponent = ScaleHeader::exponent_of(header->largest);
            is_plain = header->is_plain != 0;
        }
        // The half's power of two; NaN where a scale is.
        MEGAMOE_DEVICE float scale() const { return ScaleHeader::power_of(exponent); }
    };

    using LookUp = Magnitudes;

    // Then a power of two is added to the exponents of all codes but zero's.
    template <int num>
    static MEGAMOE_DEVICE bool plain(const Half& half, const int (&)[num]) {
        return half.is_plain;
    }
    // Magnitudes times powers of two in e4m3. Where not all are `plain`, numbers are rounded one by one.
    template <bool all_plain, int num>
    static MEGAMOE_DEVICE void look_ups(LookUp (&to)[num], const Half& half, const int (&scales)[num]) {
        int to_exponent = ScaleHeader::headroom - half.exponent;
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

    // Four numbers, those of a word's lower or upper 16 bits.
    static MEGAMOE_DEVICE void expand(uint32_t* out, const Codes& codes, const LookUp& look_up, int part) {
        out[0] = look_up.of(codes.magnitudes_of(part)) | codes.signs_of(part);
    }
};

// bf16: both bytes of the magnitude, times the scale.
template <class Weights>
struct ExpandTo<Bf16Rows, Weights> {
    struct Half {
        MEGAMOE_DEVICE explicit Half(const uint8_t*) {}
        MEGAMOE_DEVICE float scale() const { return 1.0f; }
    };
    using LookUp = uint32_t;  // the scale, twice
    template <int num>
    static MEGAMOE_DEVICE bool plain(const Half&, const int (&scales)[num]) {
        return Weights::plain(scales);
    }
    template <bool all_plain, int num, int num_words>
    static MEGAMOE_DEVICE void look_ups(LookUp (&to)[num], const Half&, const int (&scales)[num_words]) {
        constexpr int of_word = num / num_words;
        MEGAMOE_UNROLL
        for (int i = 0; i < num; ++i)
            to[i] = Weights::template factor<all_plain>(scales[i / of_word], i % of_word);
    }
    static MEGAMOE_DEVICE void expand(uint32_t* out, const Codes& codes, LookUp factor, int part) {
        constexpr Magnitudes upper = Weights::upper, lower = {0xc0800000, 0xc0804000};
        uint32_t high = upper.of(codes.magnitudes_of(part)) | codes.signs_of(part);
        uint32_t low = lower.of(codes.magnitudes_of(part));
        out[0] = arch::mul_bf16x2(arch::prmt(low, high, 0x5140), factor);
        out[1] = arch::mul_bf16x2(arch::prmt(low, high, 0x7362), factor);
    }
};

// Two or four scales that stand beside each other, the first one lowest.
template <int num>
MEGAMOE_DEVICE int read_scales(const uint8_t* from) {
    if constexpr (num == 2) return *reinterpret_cast<const uint16_t*>(from);
    if constexpr (num == 4) return *reinterpret_cast<const int*>(from);
}

// The tall form: a half is expanded in place by the 128 threads of a math warpgroup, which `meet` when all
// have read it. Its power of two goes to `scale`.
template <class Meet>
MEGAMOE_DEVICE void expand_half(uint8_t* half, const uint8_t* scales, float* scale, Meet meet) {
    using Packed = PackedHalf<E4m3QuadRows, Mxfp4Weights>;
    using To = ExpandTo<E4m3QuadRows, Mxfp4Weights>;
    constexpr int num = Packed::units_of_thread;
    uint32_t packed[num][4];
    int s[num];
    MEGAMOE_UNROLL
    for (int i = 0; i < num; ++i) {
        s[i] = scales[Packed::scale_at() + i * 2 * Packed::rows_apart];
        uint4_t v = *reinterpret_cast<const uint4_t*>(half + Packed::packed_at() +
                                                      i * Packed::threads * Packed::unit_bytes);
        packed[i][0] = v.x, packed[i][1] = v.y, packed[i][2] = v.z, packed[i][3] = v.w;
    }
    To::Half of_half(scales);
    To::LookUp look_up[num];
    if (arch::ballot(!To::plain(of_half, s)) == 0) {
        To::look_ups<true>(look_up, of_half, s);
    } else {
        To::look_ups<false>(look_up, of_half, s);
    }
    if (Packed::thread() == 0) *scale = of_half.scale();
    meet();
    MEGAMOE_UNROLL
    for (int i = 0; i < num; ++i) {
        MEGAMOE_UNROLL
        for (unsigned c = 0; c < 2; ++c) {
            uint32_t out[4];
            MEGAMOE_UNROLL
            for (int w = 0; w < 4; ++w)
                To::expand(out + w, Codes(packed[i][2 * c + w / 2]), look_up[i], w % 2);
            MEGAMOE_UNROLL
            for (unsigned w = 0; w < 4; ++w) {
                uint8_t* to = half + Packed::word_at(4 * c + w) + i * Packed::rows_apart * slot_k_bytes;
                *reinterpret_cast<uint32_t*>(to) = out[w];
            }
        }
    }
    arch::fence_proxy_async_shared();  // MMAs read it, and TMA will overwrite it
}

}  // namespace megamoe
