// MXFP4 weights: e2m1, two a byte, and a power of two for 32 of them along K (megamoe/formats/mxfp4.py).
// Tensor cores take e4m3 or bf16: math warps expand a half in place, between its arrival and its MMAs
// (docs/fp4.md).
#pragma once
#include "megamoe/formats/bf16.cuh"
#include "megamoe/formats/e4m3.cuh"

namespace megamoe {

// What stands in the place of a half of B until it is expanded: its rows, `row_bytes` each, then their
// scales, [slot_k / 64, 128 rows, 2].
template <class Rows>
struct PackedHalf {
    static constexpr int slot_k = slot_k_bytes / Rows::element_bytes;
    static constexpr int group = 32;                             // numbers that share a scale
    static constexpr int row_units = slot_k / group;             // of 16 bytes
    static constexpr int num_units = scale_group * row_units;    // in a half
    static constexpr int unit_bytes = group / 2;                 // packed
    static constexpr int row_bytes = row_units * unit_bytes;     //
    static constexpr int scale_offset = num_units * unit_bytes;  // bytes of all rows
    static constexpr int scale_bytes = num_units;
    static constexpr int bytes = scale_offset + scale_bytes;
    static MEGAMOE_DEVICE int scale_at(int unit) {
        int row = unit / row_units, k = unit % row_units;
        return scale_offset + k / 2 * (2 * scale_group) + 2 * row + k % 2;
    }
};

struct Mxfp4Weights {
    static constexpr int packed = 2;
    static constexpr bool expanded = true;
    static constexpr int block_bytes = 512;  // scales of 128 x 128 numbers

    // Where a tile's scales are. A half past the last column takes the first half's: its numbers are zero.
    class Scales {
      public:
        template <class Halves>
        MEGAMOE_DEVICE Scales(const Gemm& gemm, const Tile& tile, const Halves& halves) {
            int rows = ceil_div(gemm.n, scale_group), columns = ceil_div(gemm.k, scale_group);  // of a plane
            int row0 = halves.column(0) / scale_group;
            int row1 = halves.plane(1) * rows + halves.column(1) / scale_group;
            int64_t row = int64_t{tile.expert()} * halves.num_planes() * rows + row0;
            half0_ = reinterpret_cast<const uint8_t*>(gemm.b_scale) + row * columns * block_bytes;
            to_half1_ = row1 < halves.num_planes() * rows ? (row1 - row0) * columns * block_bytes : 0;
        }
        MEGAMOE_DEVICE void fetch() {}
        MEGAMOE_DEVICE void put(float (&)[2]) const {}
        // Those of a slot, behind the packed halves.
        template <class Packed, class Halves>
        MEGAMOE_DEVICE void load(Halves& b, uint64_t* full, int slot) const {
            const uint8_t* from = half0_ + int64_t{slot} * Packed::scale_bytes;
            arch::bulk_load(b[0] + Packed::scale_offset, from, Packed::scale_bytes, full);
            arch::bulk_load(b[1] + Packed::scale_offset, from + to_half1_, Packed::scale_bytes, full);
        }

      private:
        const uint8_t* half0_;
        int to_half1_;
    };
};

// Bytes of eight e2m1 magnitudes, by code: what PRMT looks up.
struct Magnitudes {
    uint32_t lo, hi;
    MEGAMOE_DEVICE uint32_t of(uint32_t codes) const { return arch::prmt(lo, hi, codes & 0x7777); }
};
// The signs of four codes, at the highest bit of each byte.
MEGAMOE_DEVICE uint32_t signs_of(uint32_t codes) {
    return arch::prmt(0x80808080, 0x80808080, codes) << 7 & 0x80808080;  // a byte is 0xff or 0x80
}

// e4m3 times a power of two that the whole half shares.
template <class Rows>
struct ExpandTo;

template <>
struct ExpandTo<E4m3Rows> {
    using Packed = PackedHalf<E4m3Rows>;
    static constexpr int headroom = 6;  // 6 * 2^6 = 384
    int largest;                        // scale of the half

    MEGAMOE_DEVICE explicit ExpandTo(const uint8_t* half) {
        static_assert(Packed::scale_bytes == 32 * sizeof(uint4_t));
        uint4_t v = reinterpret_cast<const uint4_t*>(half + Packed::scale_offset)[arch::lane_idx()];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        uint32_t most = 0;
        MEGAMOE_UNROLL
        for (int i = 0; i < 4; ++i) {
            most = arch::larger_u16x2(most, words[i] & 0x00ff00ff);
            most = arch::larger_u16x2(most, words[i] >> 8 & 0x00ff00ff);
        }
        most = arch::largest_of_warp(arch::larger_u16x2(most, most >> 16) & 0xff);
        largest = max_of(static_cast<int>(most), headroom + 1);
    }
    // The half's power of two; NaN where a scale is.
    MEGAMOE_DEVICE float scale() const {
        return arch::bf16_hi(largest == 255 ? 0x7fc00000u : uint32_t(largest - headroom) << 23);
    }

    // Magnitudes times 2^d, d at most 6: from -5 on, an exponent added to all codes but zero's. Smaller ones
    // reach e4m3's subnormal numbers, where they are rounded from -9 on.
    static MEGAMOE_DEVICE Magnitudes scaled(int d) {
        if (d >= -5) {
            uint32_t by = static_cast<uint32_t>(d);
            return {0x3c383000 + by * 0x08080800, 0x4c484440 + by * 0x08080808};
        }
        switch (d) {
            case -6:
                return {0x0c080400, 0x1c181410};
            case -7:
                return {0x06040200, 0x14100c08};
            case -8:
                return {0x03020100, 0x0c080604};
            case -9:
                return {0x02010000, 0x06040302};
            case -10:
                return {0x01000000, 0x03020201};
            case -11:
                return {0, 0x02010100};
            case -12:
                return {0, 0x01000000};
            default:
                return {0, 0};
        }
    }
    // 32 numbers with scale s, to 32 bytes of a row.
    template <class Store>
    MEGAMOE_DEVICE void unit(const uint32_t (&packed)[4], int s, Store store) const {
        Magnitudes magnitudes = scaled(s - largest + headroom);
        MEGAMOE_UNROLL
        for (int i = 0; i < 4; i += 2) {
            uint32_t out[4];
            MEGAMOE_UNROLL
            for (int j = 0; j < 4; ++j) {
                uint32_t codes = packed[i + j / 2] >> 16 * (j % 2);
                out[j] = magnitudes.of(codes) | signs_of(codes);
            }
            store(i / 2, uint4_t{out[0], out[1], out[2], out[3]});
        }
    }
};

template <>
struct ExpandTo<Bf16Rows> {
    using Packed = PackedHalf<Bf16Rows>;
    MEGAMOE_DEVICE explicit ExpandTo(const uint8_t*) {}
    MEGAMOE_DEVICE float scale() const { return 1.0f; }

    template <class Store>
    MEGAMOE_DEVICE void unit(const uint32_t (&packed)[4], int s, Store store) const {
        constexpr Magnitudes high = {0x3f3f3f00, 0x40404040},
                             low = {0xc0800000, 0xc0804000};  // bytes of bf16
        uint32_t bits = s == 0 ? 0x40u : s == 255 ? 0x7fc0u : static_cast<uint32_t>(s) << 7;
        uint32_t power = bits << 16 | bits;
        MEGAMOE_UNROLL
        for (int i = 0; i < 4; ++i) {
            uint32_t out[4];
            MEGAMOE_UNROLL
            for (int j = 0; j < 2; ++j) {
                uint32_t codes = packed[i] >> 16 * j;
                uint32_t upper = high.of(codes) | signs_of(codes), lower = low.of(codes);
                out[2 * j] = arch::mul_bf16x2(arch::prmt(lower, upper, 0x5140), power);
                out[2 * j + 1] = arch::mul_bf16x2(arch::prmt(lower, upper, 0x7362), power);
            }
            store(i, uint4_t{out[0], out[1], out[2], out[3]});
        }
    }
};

// Expands a half in place, by the 128 threads of a math warpgroup, which `meet` when all have read it.
template <class Rows, class Meet>
MEGAMOE_DEVICE void expand_half(uint8_t* half, float* scale, Meet meet) {
    using Packed = PackedHalf<Rows>;
    constexpr int threads = 128, num = Packed::num_units / threads;
    int thread = arch::thread_idx() % threads;
    uint32_t packed[num][4];
    int s[num];
    MEGAMOE_UNROLL
    for (int i = 0; i < num; ++i) {
        int unit = thread + i * threads;
        uint4_t v = reinterpret_cast<const uint4_t*>(half)[unit];
        packed[i][0] = v.x, packed[i][1] = v.y, packed[i][2] = v.z, packed[i][3] = v.w;
        s[i] = half[Packed::scale_at(unit)];
    }
    ExpandTo<Rows> expand(half);
    meet();
    if (thread == 0) *scale = expand.scale();
    MEGAMOE_UNROLL
    for (int i = 0; i < num; ++i) {
        int unit = thread + i * threads, row = unit / Packed::row_units, k = unit % Packed::row_units;
        expand.unit(packed[i], s[i], [&](int chunk, uint4_t v) {
            int byte = k * (slot_k_bytes / Packed::row_units) + chunk * static_cast<int>(sizeof(v));
            *reinterpret_cast<uint4_t*>(half + swizzled(row, byte)) = v;
        });
    }
    arch::fence_proxy_async_shared();  // MMAs read it, and TMA will overwrite it
}

}  // namespace megamoe
