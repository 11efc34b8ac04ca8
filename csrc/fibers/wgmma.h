// Tensor cores: 64 x n x 32 bytes by one warpgroup.
//
// wgmma() only notes the instruction: its operands, in shared memory and in registers, are read when the
// warpgroup waits for it, the last moment the device may read them. There the last of the 128 threads
// computes whole tiles and schedules the results out to everybody's accumulators.
#pragma once
#include "fibers/numeric.h"
#include "fibers/warp.h"

namespace fibers {

enum class Major { k, mn };  // rows of an operand lie along K, or along M or N
constexpr int tile_m = 64, max_tile_n = 256;
constexpr int mma_k_bytes = 32, mma_mn_columns = 64;
constexpr uint32_t max_wgmma_in_flight = 64;

Operand check_operand(Operand operand, int rows, Major major, const char* what);
void issue_wgmma(float*, int n, const Operand& a, const uint32_t*, const Operand& b, bool is_e4m3, bool);
void wgmma_wait(int pending);

#if defined(FIBERS_COMPILED)
// Decoded operands: a[m][k], and of n columns b[k][n], c[m][n], without gaps. Static: one OS thread.
struct alignas(64) Panels {
    float a[tile_m][mma_k_bytes];
    float b[mma_k_bytes * max_tile_n];
    float c[tile_m * max_tile_n];
};
Panels panels;

// c += a * b for `depth` columns of a, in blocks of 4 x (8 * vectors) held in registers; k is innermost, so
// the order of each sum is fixed. g++ keeps vectors for which a machine has no registers in memory: 8 are
// AVX2's.
typedef float Vector8 __attribute__((vector_size(32)));
template <int vectors>
__attribute__((always_inline)) inline void multiply_block(Panels& p, int m, int n, int columns, int depth) {
    auto at = [&](int i) { return reinterpret_cast<Vector8*>(&p.c[(m + i) * columns + n]); };
    Vector8 c[4][vectors];
    for (int i = 0; i < 4; ++i) memcpy(c[i], at(i), sizeof(c[i]));
    for (int k = 0; k < depth; ++k) {
        const auto* b = reinterpret_cast<const Vector8*>(&p.b[k * columns + n]);
        for (int i = 0; i < 4; ++i)
            for (int v = 0; v < vectors; ++v) c[i][v] += p.a[m + i][k] * b[v];
    }
    for (int i = 0; i < 4; ++i) memcpy(at(i), c[i], sizeof(c[i]));
}
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void multiply(Panels& p, int columns, int depth) {
    for (int m = 0; m < tile_m; m += 4) {
        if (columns % 16 != 0) multiply_block<1>(p, m, 0, columns, depth);
        for (int n = columns % 16; n < columns; n += 16) multiply_block<2>(p, m, n, columns, depth);
    }
}

float decode_element(const uint8_t* bytes, bool is_e4m3) {
    if (is_e4m3) return e4m3_table.value[*bytes];
    uint32_t bits = (uint32_t(bytes[0]) | uint32_t(bytes[1]) << 8) << 16;
    return __builtin_bit_cast(float, bits);
}

// 32 bytes of K of one row, as floats.
void decode_bytes(const uint8_t* bytes, bool is_e4m3, float* out) {
    int size = is_e4m3 ? 1 : 2;
    for (int k = 0; k < mma_k_bytes / size; ++k) out[k] = decode_element(bytes + k * size, is_e4m3);
}

// Row `row` (of M or N) of an operand in shared memory, through the swizzle.
void decode_row(const Operand& operand, int row, bool is_e4m3, float* out) {
    if (operand.box_bytes == 0) {
        uint8_t bytes[mma_k_bytes];
        for (uint32_t i = 0; i < mma_k_bytes; i += 16)
            memcpy(bytes + i, operand.tile + swizzle_128b(size_t(row) * 128 + operand.byte + i), 16);
        return decode_bytes(bytes, is_e4m3, out);
    }
    const uint8_t* box = operand.tile + size_t(row / mma_mn_columns) * operand.box_bytes;
    for (size_t k = 0; k < mma_k_bytes / 2; ++k)
        out[k] = decode_element(box + swizzle_128b(k * 128 + size_t(row % mma_mn_columns) * 2), is_e4m3);
}

// A in registers: register r of a thread holds the bytes 4 * (lane % 4) + 16 * (r / 2) ... of row 16 * warp +
// lane / 4 + 8 * (r % 2).
void decode_registers(const Wgmma& op, Panels& p) {
    uint8_t rows[tile_m][mma_k_bytes];
    for (int thread = 0; thread < warpgroup_size; ++thread) {
        int lane = thread % warp_size;
        for (int r = 0; r < 4; ++r) {
            int row = 16 * (thread / warp_size) + lane / 4 + 8 * (r % 2);
            memcpy(&rows[row][4 * (lane % 4) + 16 * (r / 2)], op.a_registers[thread] + r, 4);
        }
    }
    for (int m = 0; m < tile_m; ++m) decode_bytes(rows[m], op.is_e4m3, p.a[m]);
}

void execute(const Wgmma& op, Panels& p) {
    const int depth = op.is_e4m3 ? mma_k_bytes : mma_k_bytes / 2;
    if (op.a.tile == nullptr) decode_registers(op, p);
    for (int m = 0; m < tile_m && op.a.tile != nullptr; ++m) decode_row(op.a, m, op.is_e4m3, p.a[m]);
    for (int n0 = 0; n0 < op.n; n0 += 8) {  // transposed in strips that stay in the first cache
        float rows[8][mma_k_bytes];
        for (int n = 0; n < 8; ++n) decode_row(op.b, n0 + n, op.is_e4m3, rows[n]);
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < 8; ++n) p.b[k * op.n + n0 + n] = rows[n][k];
    }
    multiply(p, op.n, depth);
}

// acc[4*g + 2*i + j] of a thread is row 16*warp + 8*i + lane/4, column 8*g + 2*(lane%4) + j.
template <class Move>
void for_each_fragment(const Wgmma& op, Panels& p, Move move) {
    for (int thread = 0; thread < warpgroup_size; ++thread) {
        int lane = thread % warp_size;
        float* acc = op.acc[thread];
        for (int i = 0; i < 2; ++i) {
            float* row = &p.c[(16 * (thread / warp_size) + 8 * i + lane / 4) * op.n + 2 * (lane % 4)];
            for (int g = 0; g < op.n / 8; ++g) {
                move(acc[4 * g + 2 * i], row[8 * g]);
                move(acc[4 * g + 2 * i + 1], row[8 * g + 1]);
            }
        }
    }
}

// Executes the first `count` instructions in flight. Those into the same accumulators follow each other
// without a detour over them.
void execute_first(Warpgroup& group, uint32_t count) {
    auto& ops = group.in_flight;
    std::vector<bool> done(count, false);
    for (uint32_t first = 0; first < count; ++first) {
        if (done[first]) continue;
        uint32_t last = first;
        if (ops[first].accumulate)
            for_each_fragment(ops[first], panels, [](float& acc, float& c) { c = acc; });
        for (uint32_t i = first; i < count; ++i) {
            if (ops[i].acc[0] != ops[first].acc[0]) continue;
            if (!ops[i].accumulate) memset(panels.c, 0, size_t(tile_m * ops[i].n) * sizeof(float));
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

// An operand of `rows` rows as a descriptor names it, checked.
Operand check_operand(Operand operand, int rows, Major major, const char* what) {
    operand.tile += operand.byte / 1024 * 1024;  // an advance by whole groups of 8 rows moves the tile
    operand.byte %= 1024;
    if ((operand.box_bytes != 0) != (major == Major::mn))
        machine.fail("%s: the descriptor is of the other major-ness", what);
    if (operand.byte % 16 || operand.byte + mma_k_bytes > (major == Major::k ? 128 : mma_k_bytes))
        machine.fail("%s: a descriptor starts %u bytes into its rows", what, operand.byte);
    uint32_t boxes = static_cast<uint32_t>(rows / mma_mn_columns), depth = mma_k_bytes / 2;
    size_t bytes =
        major == Major::k ? size_t(rows) * 128 : size_t(boxes - 1) * operand.box_bytes + depth * 128;
    check_shared(*current->cta, operand.tile, bytes, 1024, what);
    return operand;
}

void issue_wgmma(float* acc, int n, const Operand& a, const uint32_t* a_registers, const Operand& b,
                 bool is_e4m3, bool accumulate) {
    Fiber* self = current;
    if (self->thread / warpgroup_size * warpgroup_size + warpgroup_size > self->cta->threads)
        machine.fail("wgmma: not in a whole warpgroup");
    Warpgroup& group = self->cta->warpgroup(self);
    uint32_t number = self->wgmma_issued++;
    if (number == group.issued) {
        if (group.in_flight.size() >= max_wgmma_in_flight)
            machine.fail("wgmma: more than %u in flight", max_wgmma_in_flight);
        group.in_flight.push_back(Wgmma{a, b, n, is_e4m3, accumulate, self->wgmma_committed, {}, {}});
        ++group.issued;
    }
    Wgmma& op = group.in_flight[number - group.executed];
    if (op.a != a || op.b != b || op.n != n || op.is_e4m3 != is_e4m3 || op.accumulate != accumulate ||
        op.group != self->wgmma_committed)
        machine.fail("wgmma: the threads of the warpgroup issue different instructions");
    op.acc[self->thread % warpgroup_size] = acc;
    op.a_registers[self->thread % warpgroup_size] = a_registers;
}

void wgmma_wait(int pending) {
    if (!meet_at_wgmma_wait(pending)) return;
    Fiber* self = current;
    Warpgroup& group = self->cta->warpgroup(self);
    Fiber* first = self - self->thread % warpgroup_size;
    for (int i = 0; i < warpgroup_size; ++i)
        if (first[i].wgmma_issued != self->wgmma_issued || first[i].wgmma_committed != self->wgmma_committed)
            machine.fail("wgmma_wait: the threads of the warpgroup issued different numbers of instructions");
    uint32_t count = 0;
    while (count < group.in_flight.size() &&
           static_cast<int32_t>(self->wgmma_committed - group.in_flight[count].group) > pending)
        ++count;
    if (count) execute_first(group, count);
    release_warpgroup();
}
#endif

}  // namespace fibers

namespace fibers::ops {

struct Desc {
    Operand operand;
};

inline Desc make_desc(const void* s_tile) {
    check_shared(*current->cta, s_tile, 1024, 1024, "make_desc");
    return Desc{{static_cast<const uint8_t*>(s_tile), 0, 0}};
}
inline Desc make_desc_mn(const void* s_tile, int box_bytes) {
    check_shared(*current->cta, s_tile, 1024, 1024, "make_desc_mn");
    if (box_bytes <= 0 || box_bytes % 1024) machine.fail("make_desc_mn: boxes of %d bytes", box_bytes);
    return Desc{{static_cast<const uint8_t*>(s_tile), 0, static_cast<uint32_t>(box_bytes)}};
}
inline Desc desc_advance(Desc desc, int bytes) {
    desc.operand.byte += static_cast<uint32_t>(bytes);
    return desc;
}

// D[64, 2 * sums] += A * B^T, of bf16 or of e4m3 (`is_e4m3`).
template <bool is_e4m3, Major a_major, Major b_major, int sums>
inline void wgmma(float (&acc)[sums], Desc a, Desc b, bool accumulate) {
    issue_wgmma(acc, 2 * sums, check_operand(a.operand, tile_m, a_major, "wgmma, A"), nullptr,
                check_operand(b.operand, 2 * sums, b_major, "wgmma, B"), is_e4m3, accumulate);
}
template <bool is_e4m3, Major b_major, int sums>
inline void wgmma(float (&acc)[sums], const uint32_t (&a)[4], Desc b, bool accumulate) {
    issue_wgmma(acc, 2 * sums, Operand{}, a, check_operand(b.operand, 2 * sums, b_major, "wgmma, B"), is_e4m3,
                accumulate);
}
inline void wgmma_fence() {}
inline void wgmma_commit() { ++current->wgmma_committed; }

template <int pending>
inline void wgmma_wait() {
    fibers::wgmma_wait(pending);
}
template <int sums>
inline void fence_accumulator(float (&)[sums]) {}
inline void fence_operand(uint32_t (&)[4]) {}

}  // namespace fibers::ops
