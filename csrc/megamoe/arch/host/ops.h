// The machine interface (arch/README.md) on a CPU: the fiber machine of csrc/fibers, with the kernel's types.
#pragma once
#include "fibers/launch.h"
#include "fibers/numeric.h"
#include "megamoe/arch/types.h"
#include "megamoe/layout/args.h"

namespace megamoe::arch {

using namespace fibers::ops;

static_assert(sizeof(fibers::EmulatedTensorMap) == sizeof(TensorMap));

constexpr fibers::Major of_fibers(Major major) {
    return major == Major::k ? fibers::Major::k : fibers::Major::mn;
}
template <class Element, Major a_major = Major::k, Major b_major = Major::k, int sums>
inline void wgmma(float (&acc)[sums], Desc a, Desc b, bool accumulate) {
    check_mma<Element, a_major, b_major, sums>();
    fibers::ops::wgmma<sizeof(Element) == 1, of_fibers(a_major), of_fibers(b_major)>(acc, a, b, accumulate);
}
template <class Element, Major b_major = Major::k, int sums>
inline void wgmma(float (&acc)[sums], const uint32_t (&a)[4], Desc b, bool accumulate) {
    check_mma<Element, Major::k, b_major, sums>();
    fibers::ops::wgmma<sizeof(Element) == 1, of_fibers(b_major)>(acc, a, b, accumulate);
}

inline uint4_t load_streaming(const void* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16)
        fibers::machine.fail("load_streaming: %p is not a multiple of 16", pointer);
    fibers::machine.data_access();
    uint4_t v;
    memcpy(&v, pointer, 16);
    return v;
}
inline uint4_t load_vec(const void* pointer) { return load_streaming(pointer); }
inline uint32_t larger_u16x2(uint32_t a, uint32_t b) {
    uint32_t lo = max_of(a & 0xffff, b & 0xffff), hi = max_of(a >> 16, b >> 16);
    return lo | hi << 16;
}
inline void store_transposed(uint8_t* base, int at, const uint32_t (&v)[4]) {
    int lane = lane_idx();
    for (int m = 0; m < 4; ++m)
        for (int j = 0; j < 2; ++j) {
            int to = shfl(at, 8 * m + 2 * (lane % 4) + j);
            uint16_t half = static_cast<uint16_t>(v[m] >> 16 * j);
            memcpy(base + to + lane / 4 * 2, &half, 2);
        }
    warp_sync();
}
inline void unpack_e4m3x4(uint32_t v, float (&to)[4]) {
    for (int i = 0; i < 4; ++i) to[i] = fibers::e4m3_to_float(static_cast<uint8_t>(v >> 8 * i));
}
inline uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t selector) {
    uint64_t bytes = uint64_t{hi} << 32 | lo;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
        uint32_t nibble = selector >> 4 * i & 15;
        uint32_t byte = static_cast<uint8_t>(bytes >> 8 * (nibble & 7));
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << 8 * i;
    }
    return r;
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    return pack_bf16x2(bf16_lo(a) * bf16_lo(b), bf16_hi(a) * bf16_hi(b));
}
inline float mul_rn(float a, float b) { return a * b; }
inline uint4_t load_streaming_below(const uint4_t* v, int i, int limit) {
    return i < limit ? load_streaming(v + i) : uint4_t{0, 0, 0, 0};
}
inline void store_vec(void* pointer, uint4_t v) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16)
        fibers::machine.fail("store_vec: %p is not a multiple of 16", pointer);
    fibers::machine.data_access();
    memcpy(pointer, &v, 16);
}
inline int take_ticket(int32_t* count) {
    fibers::machine.preemption_point();
    return (*count)++;
}
inline int look_at_count(const int32_t* count) {
    fibers::machine.preemption_point();
    return *count;
}
inline void count_shared(uint32_t* count, uint32_t by) { *count += by; }
inline void store_vec_below(uint4_t* v, int i, int limit, uint4_t value) {
    if (i < limit) store_vec(v + i, value);
}
inline void put_float(float* to, float v, bool adds, bool here) {
    if (here) *to = adds ? *to + v : v;
}

}  // namespace megamoe::arch
