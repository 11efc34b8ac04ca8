// Conversions, exact; elementary functions, from the C library.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace fibers {

constexpr float bf16_to_float(uint16_t bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

constexpr uint16_t float_to_bf16(float v) {  // round to nearest even
    if (v != v) return 0x7fff;
    uint32_t bits = __builtin_bit_cast(uint32_t, v);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float e4m3_to_float(uint8_t bits) {
    uint32_t sign = uint32_t(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    if (magnitude == 0x7f) return __builtin_bit_cast(float, 0x7fc00000u);
    if (magnitude >= 8) return __builtin_bit_cast(float, sign | ((magnitude << 20) + ((127u - 7u) << 23)));
    float subnormal = static_cast<float>(magnitude) / 512.0f;  // 2^-6 / 8
    return sign ? -subnormal : subnormal;
}

constexpr uint8_t float_to_e4m3(float v) {  // round to nearest even, saturating at 448
    if (v != v) return 0x7f;
    uint32_t bits = __builtin_bit_cast(uint32_t, v);
    uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
    bits &= 0x7fffffffu;
    if (bits >= 0x43e00000u) return sign | 0x7e;  // 448
    if (bits < 0x3c800000u) {  // below 2^-6: a multiple of 2^-9. Adding 1.5 * 2^14 rounds to one.
        float sum = __builtin_bit_cast(float, bits) + 24576.0f;
        return sign | static_cast<uint8_t>(__builtin_bit_cast(uint32_t, sum) & 0xfu);
    }
    bits += 0x7ffffu + ((bits >> 20) & 1u);  // keep 3 bits of the mantissa
    uint32_t magnitude = (bits >> 20) - ((127u - 7u) << 3);
    return sign | static_cast<uint8_t>(magnitude > 0x7e ? 0x7e : magnitude);
}

struct E4m3Table {
    float value[256];
    constexpr E4m3Table() : value() {
        for (int i = 0; i < 256; ++i) value[i] = e4m3_to_float(static_cast<uint8_t>(i));
    }
};
inline constexpr E4m3Table e4m3_table;

inline float flushed(float v) { return fabsf(v) < 0x1p-126f ? copysignf(0.0f, v) : v; }  // subnormals

}  // namespace fibers

namespace fibers::ops {

inline uint32_t pack_bf16x2(float lo, float hi) {
    return float_to_bf16(lo) | uint32_t(float_to_bf16(hi)) << 16;
}
inline float bf16_lo(uint32_t v) { return bf16_to_float(static_cast<uint16_t>(v)); }
inline float bf16_hi(uint32_t v) { return bf16_to_float(static_cast<uint16_t>(v >> 16)); }
inline uint16_t pack_e4m3x2(float lo, float hi) {
    return static_cast<uint16_t>(float_to_e4m3(lo) | float_to_e4m3(hi) << 8);
}
inline float larger_magnitude(float a, float b) { return fmaxf(fabsf(a), fabsf(b)); }
inline float fast_exp(float v) { return expf(v); }
inline float fast_div(float a, float b) { return a / b; }
inline float smaller_or_nan(float a, float b) { return a != a || a < b ? a : b; }
inline float larger_or_nan(float a, float b) { return a != a || a > b ? a : b; }
inline float ex2(float v) { return flushed(exp2f(v)); }
inline float rcp(float v) { return flushed(1.0f / flushed(v)); }

}  // namespace fibers::ops
