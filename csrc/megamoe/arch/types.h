// The types of the machine interface, equal on both machines.
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {
constexpr int max_smem_bytes = 227 * 1024;  // of a CTA, on Hopper

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

// How an operand of a matrix product lies in shared memory: rows along K (A[m][k], B[n][k]), or rows along M
// or N (A[k][m], B[k][n]). Bytes of a row go through the 128-byte swizzle.
enum class Major { k, mn };
constexpr int mma_k_bytes = 32;     // K of one tensor-core instruction: 16 bf16 or 32 e4m3
constexpr int mma_mn_columns = 64;  // M or N of a box of an MN-major operand: 128 bytes of bf16

namespace arch {
// What wgmma() is for: D[64, 2 * sums] += A * B^T over 32 bytes of K, sums in fp32.
template <class Element, Major a_major, Major b_major, int sums>
MEGAMOE_PURE void check_mma() {
    constexpr int n = 2 * sums;
    static_assert(n == 8 || n == 16 || n == 32 || n == 64 || n == 128 || n == 256,
                  "no such instruction here");
    static_assert(sizeof(Element) == 2 || (a_major == Major::k && b_major == Major::k),
                  "operands of 8 bits are K-major on this machine");
    static_assert(b_major == Major::k || n % mma_mn_columns == 0, "an MN-major operand is whole boxes");
}
}  // namespace arch
}  // namespace megamoe
