// Tensor-core side of the machine interface: CuTe's m64n128 atoms, shared-memory descriptors, register
// budgets.
#pragma once
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/mma_sm90_gmma.hpp>

namespace megamoe::arch {

// PTX ISA "Matrix descriptor": address >> 4 in bits 0-13, leading byte offset (unused for a swizzled K-major
// tile) in 16-29, stride byte offset >> 4 in 32-45: 1024 bytes between groups of 8 rows of 128 bytes; bits
// 62-63 = 1: 128-byte swizzle.
struct Desc {
    uint64_t bits;
};
MEGAMOE_DEVICE Desc make_desc(const void* s_tile) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(s_tile));
    return {(uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
            ((address & 0x3ffff) >> 4)};
}
MEGAMOE_DEVICE Desc desc_advance(Desc d, int bytes) { return {d.bits + static_cast<uint64_t>(bytes >> 4)}; }

namespace detail {
template <class Element>
struct Atom;
template <>
struct Atom<bf16_t> {
    using type = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K,
                                                                cute::SM90::GMMA::Major::K>;
};
template <>
struct Atom<e4m3_t> {
    using type = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>;
};
template <int...>
struct Indices {};
template <int n, int... i>
struct MakeIndices : MakeIndices<n - 1, n - 1, i...> {};
template <int... i>
struct MakeIndices<0, i...> {
    using type = Indices<i...>;
};
template <class Fma, int... i>
MEGAMOE_DEVICE void issue(float (&acc)[64], Desc a, Desc b, bool accumulate, Indices<i...>) {
    Fma::fma(a.bits, b.bits, acc[i]...,
             accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
}  // namespace detail

template <class Element>
MEGAMOE_DEVICE void wgmma(float (&acc)[64], Desc a, Desc b, bool accumulate) {
    detail::issue<typename detail::Atom<Element>::type>(acc, a, b, accumulate,
                                                        typename detail::MakeIndices<64>::type{});
}
MEGAMOE_DEVICE void wgmma_fence() { cute::warpgroup_arrive(); }
MEGAMOE_DEVICE void wgmma_commit() { cute::warpgroup_commit_batch(); }
template <int pending>
MEGAMOE_DEVICE void wgmma_wait() {
    cute::warpgroup_wait<pending>();
}
// Keeps the compiler from moving accumulator reads or writes across; no instruction.
MEGAMOE_DEVICE void fence_accumulator(float (&acc)[64]) {
    MEGAMOE_UNROLL
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

template <int registers>
MEGAMOE_DEVICE void registers_grow() {
    cutlass::arch::warpgroup_reg_alloc<registers>();
}
template <int registers>
MEGAMOE_DEVICE void registers_shrink() {
    cutlass::arch::warpgroup_reg_dealloc<registers>();
}

}  // namespace megamoe::arch
