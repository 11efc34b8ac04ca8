// What both compilers need: fixed-width types without <cstdint> under NVRTC, and the function decorations.
// MEGAMOE_EMULATE selects the CPU implementation of arch/ (csrc/megamoe/arch/host).
#pragma once

#if defined(__CUDACC_RTC__)
#include <cuda/std/cstdint>
#else
#include <cstddef>
#include <cstdint>
#endif

#if defined(MEGAMOE_EMULATE)
#define MEGAMOE_DEVICE inline
#define MEGAMOE_PURE inline constexpr
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MEGAMOE_DEVICE __device__ __forceinline__
#define MEGAMOE_PURE __host__ __device__ __forceinline__ constexpr
#else
#define MEGAMOE_DEVICE inline
#define MEGAMOE_PURE inline constexpr
#endif

#define MEGAMOE_PRAGMA(text) _Pragma(#text)
#if defined(MEGAMOE_EMULATE) || !(defined(__CUDACC__) || defined(__CUDACC_RTC__))
#define MEGAMOE_UNROLL
#define MEGAMOE_UNROLL_BY(n)
#else
#define MEGAMOE_UNROLL MEGAMOE_PRAGMA(unroll)
#define MEGAMOE_UNROLL_BY(n) MEGAMOE_PRAGMA(unroll n)
#endif

namespace megamoe {

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

template <class T>
MEGAMOE_PURE T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}
template <class T>
MEGAMOE_PURE T min_of(T a, T b) {
    return a < b ? a : b;
}
template <class T>
MEGAMOE_PURE T max_of(T a, T b) {
    return a > b ? a : b;
}

}  // namespace megamoe
