// Tensor-core side of the machine interface: CuTe's m64nNkK atoms, shared-memory descriptors, register
// budgets.
#pragma once
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "megamoe/arch/types.h"

namespace megamoe::arch {

// PTX ISA, "Matrix descriptor". Bits 0-13: address >> 4; 16-29: leading byte offset >> 4; 32-45: stride byte
// offset >> 4, here 1024 bytes between eight rows of 128 bytes and the next; 62-63: 1, the 128-byte swizzle.
struct Desc {
    uint64_t bits;
};
namespace detail {
MEGAMOE_DEVICE Desc make_desc(const void* s_tile, uint32_t leading_bytes) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(s_tile));
    return {(uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{leading_bytes >> 4} << 16) |
            ((address & 0x3ffff) >> 4)};
}
}  // namespace detail
// K-major: rows of 128 bytes; the leading offset has no meaning.
MEGAMOE_DEVICE Desc make_desc(const void* s_tile) { return detail::make_desc(s_tile, 16); }
// MN-major: boxes of 64 columns, `box_bytes` apart, each with 128 bytes for one k.
MEGAMOE_DEVICE Desc make_desc_mn(const void* s_tile, int box_bytes) {
    return detail::make_desc(s_tile, static_cast<uint32_t>(box_bytes));
}
MEGAMOE_DEVICE Desc desc_advance(Desc d, int bytes) { return {d.bits + static_cast<uint64_t>(bytes >> 4)}; }

namespace detail {
namespace gmma = cute::SM90::GMMA;
constexpr gmma::Major cute_major(Major major) { return major == Major::k ? gmma::Major::K : gmma::Major::MN; }
// CuTe's atoms: A from shared memory, A from registers.
template <class Element, int n>
struct Atom;
#define MEGAMOE_ATOMS(n)                                                                       \
    template <>                                                                                \
    struct Atom<bf16_t, n> {                                                                   \
        template <Major a, Major b>                                                            \
        using Shared = gmma::MMA_64x##n##x16_F32BF16BF16_SS<cute_major(a), cute_major(b)>;     \
        template <Major b>                                                                     \
        using Registers = gmma::MMA_64x##n##x16_F32BF16BF16_RS<gmma::Major::K, cute_major(b)>; \
    };                                                                                         \
    template <>                                                                                \
    struct Atom<e4m3_t, n> {                                                                   \
        template <Major, Major>                                                                \
        using Shared = gmma::MMA_64x##n##x32_F32E4M3E4M3_SS_TN<>;                              \
        template <Major>                                                                       \
        using Registers = gmma::MMA_64x##n##x32_F32E4M3E4M3_RS_TN<>;                           \
    };
MEGAMOE_ATOMS(8)
MEGAMOE_ATOMS(16)
MEGAMOE_ATOMS(32)
MEGAMOE_ATOMS(64)
MEGAMOE_ATOMS(128)
MEGAMOE_ATOMS(256)
#undef MEGAMOE_ATOMS

template <int...>
struct Indices {};
template <int n, int... i>
struct MakeIndices : MakeIndices<n - 1, n - 1, i...> {};
template <int... i>
struct MakeIndices<0, i...> {
    using type = Indices<i...>;
};
MEGAMOE_DEVICE gmma::ScaleOut scale_out(bool accumulate) {
    return accumulate ? gmma::ScaleOut::One : gmma::ScaleOut::Zero;
}
template <class Fma, int sums, int... i>
MEGAMOE_DEVICE void issue(float (&acc)[sums], Desc a, Desc b, bool accumulate, Indices<i...>) {
    Fma::fma(a.bits, b.bits, acc[i]..., scale_out(accumulate));
}
template <class Fma, int sums, int... i>
MEGAMOE_DEVICE void issue(float (&acc)[sums], const uint32_t (&a)[4], Desc b, bool accumulate,
                          Indices<i...>) {
    Fma::fma(a[0], a[1], a[2], a[3], b.bits, acc[i]..., scale_out(accumulate));
}
}  // namespace detail

template <class Element, Major a_major = Major::k, Major b_major = Major::k, int sums>
MEGAMOE_DEVICE void wgmma(float (&acc)[sums], Desc a, Desc b, bool accumulate) {
    check_mma<Element, a_major, b_major, sums>();
    using Fma = typename detail::Atom<Element, 2 * sums>::template Shared<a_major, b_major>;
    detail::issue<Fma>(acc, a, b, accumulate, typename detail::MakeIndices<sums>::type{});
}
template <class Element, Major b_major = Major::k, int sums>
MEGAMOE_DEVICE void wgmma(float (&acc)[sums], const uint32_t (&a)[4], Desc b, bool accumulate) {
    check_mma<Element, Major::k, b_major, sums>();
    using Fma = typename detail::Atom<Element, 2 * sums>::template Registers<b_major>;
    detail::issue<Fma>(acc, a, b, accumulate, typename detail::MakeIndices<sums>::type{});
}
MEGAMOE_DEVICE void wgmma_fence() { cute::warpgroup_arrive(); }
MEGAMOE_DEVICE void wgmma_commit() { cute::warpgroup_commit_batch(); }
template <int pending>
MEGAMOE_DEVICE void wgmma_wait() {
    cute::warpgroup_wait<pending>();
}
// Keep the compiler from moving reads or writes of accumulators, or of an operand in registers, across; no
// instruction.
template <int sums>
MEGAMOE_DEVICE void fence_accumulator(float (&acc)[sums]) {
    MEGAMOE_UNROLL
    for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
MEGAMOE_DEVICE void fence_operand(uint32_t (&a)[4]) {
    MEGAMOE_UNROLL
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i])::"memory");
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
