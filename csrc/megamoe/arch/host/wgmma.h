// Tensor cores: 64 x 128 x 32 bytes by one warpgroup.
//
// wgmma() only notes the instruction: its operands are read when the warpgroup waits for it, the last moment
// the device may read them. There the last of the 128 threads computes whole tiles and deals the results out
// to everybody's accumulators.
#pragma once
#include "megamoe/arch/host/numeric.h"
#include "megamoe/arch/host/warp.h"

namespace megamoe::host {

constexpr int tile_m = 64, tile_n = 128, tile_k_bytes = 32;
constexpr uint32_t max_wgmma_in_flight = 64;

// Decoded operands: a[m][k], b[k][n]. Static: one OS thread.
struct alignas(64) Panels {
    float a[tile_m][tile_k_bytes];
    float b[tile_k_bytes][tile_n];
    float c[tile_m][tile_n];
};
MEGAMOE_HOST_GLOBAL Panels panels;

// c += a * b for `depth` columns of a, in blocks of 4 x 16 held in registers; k is innermost, so the order of
// each sum is fixed.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
inline void multiply(Panels& p, int depth) {
    typedef float Vector __attribute__((vector_size(64)));
    for (int m = 0; m < tile_m; m += 4) {
        for (int n = 0; n < tile_n; n += 16) {
            Vector c0 = *reinterpret_cast<Vector*>(&p.c[m][n]),
                   c1 = *reinterpret_cast<Vector*>(&p.c[m + 1][n]);
            Vector c2 = *reinterpret_cast<Vector*>(&p.c[m + 2][n]),
                   c3 = *reinterpret_cast<Vector*>(&p.c[m + 3][n]);
            for (int k = 0; k < depth; ++k) {
                Vector b = *reinterpret_cast<Vector*>(&p.b[k][n]);
                c0 += p.a[m][k] * b;
                c1 += p.a[m + 1][k] * b;
                c2 += p.a[m + 2][k] * b;
                c3 += p.a[m + 3][k] * b;
            }
            *reinterpret_cast<Vector*>(&p.c[m][n]) = c0;
            *reinterpret_cast<Vector*>(&p.c[m + 1][n]) = c1;
            *reinterpret_cast<Vector*>(&p.c[m + 2][n]) = c2;
            *reinterpret_cast<Vector*>(&p.c[m + 3][n]) = c3;
        }
    }
}

// 32 bytes of a row, from byte `first` of it, through the swizzle, as floats.
inline void decode_row(const uint8_t* tile, int row, uint32_t first, bool is_e4m3, float* out) {
    uint8_t bytes[tile_k_bytes];
    for (uint32_t i = 0; i < tile_k_bytes; i += 16)
        memcpy(bytes + i, tile + swizzle_128b(size_t(row) * 128 + first + i), 16);
    if (is_e4m3) {
        for (int k = 0; k < tile_k_bytes; ++k) out[k] = e4m3_table.value[bytes[k]];
    } else {
        for (int k = 0; k < tile_k_bytes / 2; ++k) {
            uint32_t bits = (uint32_t(bytes[2 * k]) | uint32_t(bytes[2 * k + 1]) << 8) << 16;
            memcpy(out + k, &bits, 4);
        }
    }
}

inline void execute(const Wgmma& op, Panels& p) {
    const int depth = op.is_e4m3 ? tile_k_bytes : tile_k_bytes / 2;
    for (int m = 0; m < tile_m; ++m) decode_row(op.a, m, op.a_byte, op.is_e4m3, p.a[m]);
    for (int n0 = 0; n0 < tile_n; n0 += 16) {  // transposed in strips that stay in the first cache
        float rows[16][tile_k_bytes];
        for (int n = 0; n < 16; ++n) decode_row(op.b, n0 + n, op.b_byte, op.is_e4m3, rows[n]);
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < 16; ++n) p.b[k][n0 + n] = rows[n][k];
    }
    multiply(p, depth);
}

// acc[4*g + 2*i + j] of a thread is row 16*warp + 8*i + lane/4, column 8*g + 2*(lane%4) + j.
template <class Move>
inline void for_each_fragment(const Wgmma& op, Panels& p, Move move) {
    for (int thread = 0; thread < warpgroup_size; ++thread) {
        int lane = thread % warp_size;
        float* acc = op.acc[thread];
        for (int i = 0; i < 2; ++i) {
            float* row = &p.c[16 * (thread / warp_size) + 8 * i + lane / 4][2 * (lane % 4)];
            for (int g = 0; g < tile_n / 8; ++g) {
                move(acc[4 * g + 2 * i], row[8 * g]);
                move(acc[4 * g + 2 * i + 1], row[8 * g + 1]);
            }
        }
    }
}

// Executes the first `count` instructions in flight. Those into the same accumulators follow each other
// without a detour over them.
inline void execute_first(Warpgroup& group, uint32_t count) {
    auto& ops = group.in_flight;
    std::vector<bool> done(count, false);
    for (uint32_t first = 0; first < count; ++first) {
        if (done[first]) continue;
        uint32_t last = first;
        if (ops[first].accumulate)
            for_each_fragment(ops[first], panels, [](float& acc, float& c) { c = acc; });
        for (uint32_t i = first; i < count; ++i) {
            if (ops[i].acc[0] != ops[first].acc[0]) continue;
            if (!ops[i].accumulate) memset(panels.c, 0, sizeof(panels.c));
            execute(ops[i], panels);
            done[i] = true;
            last = i;
        }
        for_each_fragment(ops[last], panels, [](float& acc, float& c) { acc = c; });
    }
    ops.erase(ops.begin(), ops.begin() + count);
    group.executed += count;
    ++machine.progress;
}

inline void issue_wgmma(float* acc, const uint8_t* a, uint32_t a_byte, const uint8_t* b, uint32_t b_byte,
                        bool is_e4m3, bool accumulate) {
    Fiber* self = current;
    if (self->thread / warpgroup_size * warpgroup_size + warpgroup_size > self->cta->threads)
        machine.fail("wgmma: not in a whole warpgroup");
    Warpgroup& group = self->cta->warpgroup(self);
    uint32_t number = self->wgmma_issued++;
    if (number == group.issued) {
        if (group.in_flight.size() >= max_wgmma_in_flight)
            machine.fail("wgmma: more than %u in flight", max_wgmma_in_flight);
        group.in_flight.push_back(
            Wgmma{a, b, a_byte, b_byte, is_e4m3, accumulate, self->wgmma_committed, {}});
        ++group.issued;
    }
    Wgmma& op = group.in_flight[number - group.executed];
    if (op.a != a || op.b != b || op.a_byte != a_byte || op.b_byte != b_byte || op.is_e4m3 != is_e4m3 ||
        op.accumulate != accumulate || op.group != self->wgmma_committed)
        machine.fail("wgmma: the threads of the warpgroup issue different instructions");
    op.acc[self->thread % warpgroup_size] = acc;
}

}  // namespace megamoe::host

namespace megamoe::arch {

struct Desc {
    const uint8_t* tile;
    uint32_t byte;  // within the 128-byte rows
};

inline Desc make_desc(const void* s_tile) {
    host::check_shared(*host::current->cta, s_tile, 1024, 1024, "make_desc");
    return Desc{static_cast<const uint8_t*>(s_tile), 0};
}
inline Desc desc_advance(Desc desc, int bytes) {
    desc.byte += static_cast<uint32_t>(bytes);
    return desc;
}

template <class Element>
inline void wgmma(float (&acc)[64], Desc a, Desc b, bool accumulate) {
    static_assert(sizeof(Element) <= 2, "bf16_t or e4m3_t");
    for (Desc* desc : {&a, &b}) {  // an advance by whole 1024-byte groups of rows moves the tile
        desc->tile += desc->byte / 1024 * 1024;
        desc->byte %= 1024;
        if (desc->byte % 16 || desc->byte + host::tile_k_bytes > 128)
            host::machine.fail("wgmma: a descriptor starts %u bytes into its rows", desc->byte);
    }
    host::check_shared(*host::current->cta, a.tile, host::tile_m * 128, 1024, "wgmma, A");
    host::check_shared(*host::current->cta, b.tile, host::tile_n * 128, 1024, "wgmma, B");
    host::issue_wgmma(acc, a.tile, a.byte, b.tile, b.byte, sizeof(Element) == 1, accumulate);
}
inline void wgmma_fence() {}
inline void wgmma_commit() { ++host::current->wgmma_committed; }

template <int pending>
inline void wgmma_wait() {
    if (!host::meet_at_wgmma_wait(pending)) return;
    host::Fiber* self = host::current;
    host::Warpgroup& group = self->cta->warpgroup(self);
    host::Fiber* first = self - self->thread % host::warpgroup_size;
    for (int i = 0; i < host::warpgroup_size; ++i)
        if (first[i].wgmma_issued != self->wgmma_issued || first[i].wgmma_committed != self->wgmma_committed)
            host::machine.fail(
                "wgmma_wait: the threads of the warpgroup issued different numbers of instructions");
    uint32_t count = 0;
    while (count < group.in_flight.size() &&
           static_cast<int32_t>(self->wgmma_committed - group.in_flight[count].group) > pending)
        ++count;
    if (count) host::execute_first(group, count);
    host::release_warpgroup();
}
inline void fence_accumulator(float (&)[64]) {}

}  // namespace megamoe::arch
