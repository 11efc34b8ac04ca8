// Chooses the machine: PTX on Hopper, fibers on a CPU. arch/README.md says what both have in common.
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {
// Storage types; arithmetic is fp32.
struct bf16_t {
    uint16_t bits;
};
struct e4m3_t {
    uint8_t bits;
};
struct alignas(16) uint4_t {
    uint32_t x, y, z, w;
};
}  // namespace megamoe

#if defined(MEGAMOE_EMULATE)
#include "megamoe/arch/host/ops.h"
#else
#include "megamoe/arch/sm90/ops.cuh"
#endif
