// One group of values that share a scale, in e4m3: the formula of docs/numerics.md, "Quantization".
#pragma once
#include "megamoe/arch/arch.cuh"
#include "megamoe/formats/format.h"

namespace megamoe {

// A NaN leaves the group's maximum alone and stays a NaN.
class E4m3Group {
  public:
    static constexpr float largest = 448.0f, least_amax = 1e-10f;

    MEGAMOE_DEVICE void include(float a, float b) {
        amax_ = arch::larger_magnitude(arch::larger_magnitude(amax_, a), b);
    }
    MEGAMOE_DEVICE void include(const E4m3Group& other) {
        amax_ = arch::larger_magnitude(amax_, other.amax_);
    }
    // The group is spread over `lanes` lanes, neighbours or every `stride`th.
    template <int lanes, int stride = 1>
    MEGAMOE_DEVICE void join_lanes() {
        MEGAMOE_UNROLL
        for (int mask = lanes / 2 * stride; mask >= stride; mask >>= 1)
            amax_ = arch::larger_magnitude(amax_, arch::shfl_xor(amax_, mask));
    }
    MEGAMOE_DEVICE float amax() const { return amax_; }
    MEGAMOE_DEVICE float inverse() const { return largest / amax_; }
    MEGAMOE_DEVICE float scale() const { return amax_ / largest; }

  private:
    float amax_ = least_amax;
};

// The least power of two that is not below amax / 448, and its inverse, without a division.
struct PowerOfTwo {
    float scale, inverse;
    explicit MEGAMOE_DEVICE PowerOfTwo(float amax) {
        uint32_t bits = __builtin_bit_cast(uint32_t, amax);
        uint32_t exponent = (bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);  // 448 is 1.75 * 2^8
        scale = __builtin_bit_cast(float, exponent << 23);
        inverse = __builtin_bit_cast(float, (254 - exponent) << 23);
    }
};

// Four values, in the order of two words of bf16, times `inverse`.
MEGAMOE_DEVICE uint32_t e4m3_of_bf16(uint32_t first, uint32_t second, float inverse) {
    uint32_t lo = arch::pack_e4m3x2(arch::bf16_lo(first) * inverse, arch::bf16_hi(first) * inverse);
    uint32_t hi = arch::pack_e4m3x2(arch::bf16_lo(second) * inverse, arch::bf16_hi(second) * inverse);
    return lo | hi << 16;
}

}  // namespace megamoe
