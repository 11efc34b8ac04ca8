// The machine interface of arch/README.md on Hopper: one function per instruction. Comments name the PTX ISA
// section if operands are not obvious. Tensor-core instructions are CuTe's atoms (nvidia-cutlass). The rest
// is short PTX, with a "memory" clobber if it touches memory.
#pragma once
#include "megamoe/arch/sm90/wgmma.cuh"
#include "megamoe/layout/args.h"

namespace megamoe::arch {

// ---- who am I
// Volatile: asked again wherever a role starts, instead of held in a register from the launch on.
#define MEGAMOE_SPECIAL_REGISTER(name, source)               \
    MEGAMOE_DEVICE int name() {                              \
        int i;                                               \
        asm volatile("mov.u32 %0, %%" source ";" : "=r"(i)); \
        return i;                                            \
    }
MEGAMOE_SPECIAL_REGISTER(thread_idx, "tid.x")
MEGAMOE_SPECIAL_REGISTER(lane_idx, "laneid")
MEGAMOE_SPECIAL_REGISTER(block_idx, "ctaid.x")
MEGAMOE_SPECIAL_REGISTER(grid_dim, "nctaid.x")
#undef MEGAMOE_SPECIAL_REGISTER
// Through a shuffle, so that the compiler keeps it (and every descriptor built on it) in uniform registers.
MEGAMOE_DEVICE int warp_idx() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0); }
MEGAMOE_DEVICE uint8_t* dynamic_smem() {
    extern __shared__ __align__(1024) unsigned char megamoe_smem[];
    return megamoe_smem;
}
MEGAMOE_DEVICE uint64_t globaltimer_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
MEGAMOE_DEVICE uint64_t clock_cycles() { return static_cast<uint64_t>(clock64()); }
MEGAMOE_DEVICE void sleep_ns(uint32_t ns) { __nanosleep(ns); }
// Programmatic dependent launch: nothing of the previous kernel's is read before this. Returns at once
// without it.
MEGAMOE_DEVICE void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- threads of a CTA, a warp
MEGAMOE_DEVICE void named_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// All threads of both CTAs of the cluster; their shared memory is alive, and their writes visible, after it.
// Must be called by converged warps: without .aligned the compiler emits 60 instructions at each call for
// warps that may have diverged.
MEGAMOE_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// The same variable in the shared memory of the cluster's CTA `member` (PTX ISA, mapa).
template <class V>
MEGAMOE_DEVICE V* in_member(V* p, int member) {
    uint64_t remote;
    asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(p), "r"(member));
    return reinterpret_cast<V*>(remote);
}
MEGAMOE_DEVICE void warp_sync() { __syncwarp(); }
template <class V>
MEGAMOE_DEVICE V shfl(V v, int lane) {
    return __shfl_sync(~0u, v, lane);
}
template <class V>
MEGAMOE_DEVICE V shfl_xor(V v, int mask) {
    return __shfl_xor_sync(~0u, v, mask);
}
MEGAMOE_DEVICE uint32_t ballot(bool p) { return __ballot_sync(~0u, p); }
MEGAMOE_DEVICE uint32_t match_any(int v) { return __match_any_sync(~0u, v); }
MEGAMOE_DEVICE int popc(uint32_t v) { return __popc(v); }
MEGAMOE_DEVICE int ffs0(uint32_t v) { return __ffs(static_cast<int>(v)) - 1; }
MEGAMOE_DEVICE uint32_t lanes_below() { return (1u << lane_idx()) - 1; }

// ---- mbarriers. Default semantics (release/acquire at CTA scope): the .cluster forms compile to
// MEMBAR.ALL.GPU.
MEGAMOE_DEVICE uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// Counts in shared memory: add one and return the count before; add, without a result; read.
MEGAMOE_DEVICE int32_t take_ticket(int32_t* count) {
    int32_t before;
    asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(smem_address(count))
                 : "memory");
    return before;
}
MEGAMOE_DEVICE void count_shared(uint32_t* count, uint32_t by) {
    asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(smem_address(count)), "r"(by)
                 : "memory");
}
MEGAMOE_DEVICE int32_t look_at_count(const int32_t* count) {
    int32_t now;
    asm volatile("ld.relaxed.cta.shared::cta.s32 %0, [%1];"
                 : "=r"(now)
                 : "r"(smem_address(count))
                 : "memory");
    return now;
}
MEGAMOE_DEVICE void mbar_init(uint64_t* bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals)
                 : "memory");
}
// Before its memory holds anything else. The device also keeps mbarriers outside of shared memory: without
// this, if the GPU was taken from the kernel in between, an old one overwrote later data.
MEGAMOE_DEVICE void mbar_inval(uint64_t* bar) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem_address(bar)) : "memory");
}
MEGAMOE_DEVICE void mbar_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MEGAMOE_DEVICE void mbar_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
// On the same barrier in the cluster's CTA `member`.
MEGAMOE_DEVICE void mbar_arrive_at(uint64_t* bar, int member) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(smem_address(bar)),
        "r"(member)
        : "memory");
}
// The same, but it hands over what this thread wrote in any CTA of the cluster to whoever waits by
// mbar_wait_cluster. Without a scope, both are of CTA scope (PTX ISA, mbarrier.arrive).
MEGAMOE_DEVICE void mbar_arrive_cluster(uint64_t* bar, int member) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(smem_address(bar)),
        "r"(member)
        : "memory");
}
// `arrivals` of them at once.
MEGAMOE_DEVICE void mbar_arrive_at(uint64_t* bar, int member, uint32_t arrivals) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote], %2;\n"
        "}" ::"r"(smem_address(bar)),
        "r"(member), "r"(arrivals)
        : "memory");
}
MEGAMOE_DEVICE void mbar_expect_tx(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)),
                 "r"(bytes)
                 : "memory");
}
MEGAMOE_DEVICE void mbar_arrive_expect_tx(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes)
                 : "memory");
}
MEGAMOE_DEVICE void mbar_wait_cluster(uint64_t* bar, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait_%=:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait_%=;\n"
        "}" ::"r"(smem_address(bar)),
        "r"(parity)
        : "memory");
}
MEGAMOE_DEVICE void mbar_wait(uint64_t* bar, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait_%=;\n"
        "}" ::"r"(smem_address(bar)),
        "r"(parity)
        : "memory");
}
// Does not wait: mbarrier.test_wait.
MEGAMOE_DEVICE bool mbar_test(uint64_t* bar, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(smem_address(bar)), "r"(parity)
        : "memory");
    return done != 0;
}

// ---- TMA (PTX ISA, cp.async.bulk.tensor)
MEGAMOE_DEVICE void tma_load_2d(void* s_dst, const TensorMap* map, uint64_t* bar, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(s_dst)),
        "l"(map), "r"(smem_address(bar)), "r"(c0), "r"(c1)
        : "memory");
}
MEGAMOE_DEVICE void tma_load_4d(void* s_dst, const TensorMap* map, uint64_t* bar, int c0, int c1, int c2,
                                int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(s_dst)),
        "l"(map), "r"(smem_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
// Into both CTAs of the cluster, at the same place of their shared memory, completing on the barrier of each.
MEGAMOE_DEVICE void tma_load_2d_both(void* s_dst, const TensorMap* map, uint64_t* bar, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(s_dst)),
        "l"(map), "r"(smem_address(bar)), "r"(c0), "r"(c1), "h"(uint16_t{0b11})
        : "memory");
}
MEGAMOE_DEVICE void tma_load_4d_both(void* s_dst, const TensorMap* map, uint64_t* bar, int c0, int c1, int c2,
                                     int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(s_dst)),
        "l"(map), "r"(smem_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(uint16_t{0b11})
        : "memory");
}
MEGAMOE_DEVICE void bulk_load(void* s_dst, const void* g_src, uint32_t bytes, uint64_t* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            smem_address(s_dst)),
        "l"(g_src), "r"(bytes), "r"(smem_address(bar))
        : "memory");
}
MEGAMOE_DEVICE void copy_async(void* s_dst, const void* g_src, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(s_dst)), "l"(g_src),
                 "r"(exists ? 16 : 0)
                 : "memory");
}
MEGAMOE_DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
MEGAMOE_DEVICE void tma_store_2d(const TensorMap* map, const void* s_src, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(smem_address(s_src)), "r"(c0), "r"(c1)
                 : "memory");
}
MEGAMOE_DEVICE void tma_store_4d(const TensorMap* map, const void* s_src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(smem_address(s_src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
// The box into L2: a hint.
MEGAMOE_DEVICE void tma_prefetch_4d(const TensorMap* map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
// The map's element type says what is added: bf16 rounded to nearest even, fp32 with subnormals flushed.
MEGAMOE_DEVICE void tma_reduce_add_4d(const TensorMap* map, const void* s_src, int c0, int c1, int c2,
                                      int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
        "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(smem_address(s_src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
MEGAMOE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
MEGAMOE_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
MEGAMOE_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
MEGAMOE_DEVICE void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- 16-byte global access
MEGAMOE_DEVICE uint4_t load_streaming(const void* p) {
    uint4_t v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
MEGAMOE_DEVICE uint4_t load_vec(const void* p) {
    uint4_t v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
// v[i] where i < limit, else zeros. One predicated instruction: a branch for each load would keep the loads
// of an unrolled loop from being in flight together.
MEGAMOE_DEVICE uint4_t load_streaming_below(const uint4_t* v, int i, int limit) {
    uint4_t r = {0, 0, 0, 0};
    asm volatile(
        "{\n"
        ".reg .pred below;\n"
        "setp.lt.s32 below, %5, %6;\n"
        "@below ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
        : "l"(v + i), "r"(i), "r"(limit)
        : "memory");
    return r;
}
MEGAMOE_DEVICE void store_vec_below(uint4_t* v, int i, int limit, uint4_t value) {
    asm volatile(
        "{\n"
        ".reg .pred below;\n"
        "setp.lt.s32 below, %5, %6;\n"
        "@below st.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"l"(v + i),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(i), "r"(limit)
        : "memory");
}
// Writes *to = v, or adds v to it, where `here` holds. This is done by predicates: behind a branch on the
// lane, ptxas takes all the code around it for divergent, and descriptors of MMAs leave the uniform
// registers.
MEGAMOE_DEVICE void put_float(float* to, float v, bool adds, bool here) {
    asm volatile(
        "{\n"
        ".reg .pred here, adds;\n"
        ".reg .f32 v, old;\n"
        "setp.ne.s32 here, %2, 0;\n"
        "setp.ne.and.s32 adds, %3, 0, here;\n"
        "mov.f32 v, %1;\n"
        "mov.f32 old, 0f00000000;\n"  // unset, it would be alive everywhere before
        "@adds ld.global.f32 old, [%0];\n"
        "@adds add.rn.f32 v, old, v;\n"
        "@here st.global.f32 [%0], v;\n"
        "}" ::"l"(to),
        "f"(v), "r"(static_cast<int>(here)), "r"(static_cast<int>(adds))
        : "memory");
}
MEGAMOE_DEVICE void store_vec(void* p, uint4_t v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// ---- conversions
MEGAMOE_DEVICE uint32_t pack_bf16x2(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(lo), "f"(hi));
    return r;
}
MEGAMOE_DEVICE float bf16_lo(uint32_t v) { return __uint_as_float(v << 16); }
MEGAMOE_DEVICE float bf16_hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
MEGAMOE_DEVICE uint32_t larger_u16x2(uint32_t a, uint32_t b) {  // of either half
    uint32_t r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
MEGAMOE_DEVICE void store_transposed(uint8_t* base, int at, const uint32_t (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     smem_address(base + at)),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}
MEGAMOE_DEVICE uint16_t pack_e4m3x2(float lo, float hi) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(r) : "f"(lo), "f"(hi));
    return r;
}
// Four e4m3, the lowest byte first.
MEGAMOE_DEVICE void unpack_e4m3x4(uint32_t v, float (&to)[4]) {
    MEGAMOE_UNROLL
    for (int i = 0; i < 2; ++i) {
        asm("{\n"
            ".reg .b32 halves;\n"
            ".reg .b16 lo, hi;\n"
            "cvt.rn.f16x2.e4m3x2 halves, %2;\n"
            "mov.b32 {lo, hi}, halves;\n"
            "cvt.f32.f16 %0, lo;\n"
            "cvt.f32.f16 %1, hi;\n"
            "}"
            : "=f"(to[2 * i]), "=f"(to[2 * i + 1])
            : "h"(static_cast<uint16_t>(v >> 16 * i)));
    }
}
// One byte for each nibble of `selector`'s lower half: the byte of that number among the eight of `lo` and
// `hi` or, where bit 3 is set, the sign of that byte repeated eight times.
MEGAMOE_DEVICE uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t selector) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lo), "r"(hi), "r"(selector));
    return r;
}
MEGAMOE_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// Never fused with an addition.
MEGAMOE_DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
MEGAMOE_DEVICE float larger_magnitude(float a, float b) { return fmaxf(fabsf(a), fabsf(b)); }
MEGAMOE_DEVICE float fast_exp(float v) { return __expf(v); }
MEGAMOE_DEVICE float fast_div(float a, float b) { return __fdividef(a, b); }
MEGAMOE_DEVICE float smaller_or_nan(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
MEGAMOE_DEVICE float larger_or_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// One instruction each: subnormal operands and results are zeros.
MEGAMOE_DEVICE float ex2(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
MEGAMOE_DEVICE float rcp(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

}  // namespace megamoe::arch
