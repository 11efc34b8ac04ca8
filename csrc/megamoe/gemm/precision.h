// Precision policies: what an element is and how much of K one pipeline stage (128 bytes) holds.
#pragma once
#include "megamoe/arch/arch.h"

namespace megamoe {

constexpr int stage_k_bytes = 128;  // one 128-byte swizzle row
constexpr int mma_k_bytes = 32;     // K of one wgmma instruction: 16 bf16 or 32 e4m3

struct Bf16 {
    using Element = bf16_t;
    static constexpr bool scaled = false;
    static constexpr int math_registers = 184;  // of a thread: 128 sums
    static constexpr int element_bytes = 2;
    static constexpr int stage_k = stage_k_bytes / element_bytes;
};

// e4m3 with fp32 scales: activations per 1x128, weights per 128x128 (along K: one stage).
struct Fp8 {
    using Element = e4m3_t;
    static constexpr bool scaled = true;
    static constexpr int math_registers = 208;  // of a thread: 128 sums and 64 of one promotion
    static constexpr int element_bytes = 1;
    static constexpr int stage_k = stage_k_bytes / element_bytes;
};

constexpr int scale_group = 128;
constexpr float e4m3_max = 448.0f;
constexpr float amax_floor = 1e-10f;

}  // namespace megamoe
