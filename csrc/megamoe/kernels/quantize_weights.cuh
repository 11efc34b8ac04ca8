// bf16 weights -> e4m3 and one fp32 scale per 128 x 128 block, and for a layer that trains the transposes of
// both, in one pass over memory. [L, P * I, H]; blocks restart at each of the P planes, so the last block of
// a plane may be ragged. One CTA a block. Same formula as everywhere (docs/numerics.md), so the bits equal
// those of megamoe/formats/quantization.py. Below, bf16 rows -> e4m3 and a scale per 1 x 128 group.
#pragma once
#include "megamoe/formats/e4m3_group.cuh"

namespace megamoe {

struct QuantizeWeightsArgs {
    const void* w;                                    // [L, P, I, H] bf16, strided
    void* q;                                          // [L, P * I, H] e4m3
    float* scale;                                     // [L, P * ceil(I/128), ceil(H/128)]
    void* turned;                                     // [L, P, H, I] e4m3 or null
    float* turned_scale;                              // [L, ceil(H/128), P * ceil(I/128)]
    int planes, rows, columns;                        // P, I, H; multiples of 8, I of 16 with `turned`
    int64_t expert_stride, plane_stride, row_stride;  // of w, in elements; multiples of 8
};

struct QuantizeRowsArgs {
    const void* x;      // [M, H] bf16
    void* q;            // [M, H] e4m3
    float* scale;       // [M, ceil(H/128)]
    int rows, columns;  // M, H; H a multiple of 8
};

// Each has 8 rows x 8 columns of a block; of rows that are quantized by themselves 8 columns of a group.
constexpr int quantize_threads = 256;
constexpr int quantize_edge = 8;

struct alignas(16) Bf16x8 {
    uint32_t pairs[4];
};
struct alignas(8) E4m3x8 {
    uint32_t quads[2];
};

// 4 x 4 bytes, transposed.
MEGAMOE_DEVICE void transpose_bytes(uint32_t (&v)[4]) {
    uint32_t a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
    uint32_t c = __byte_perm(v[0], v[1], 0x7362), d = __byte_perm(v[2], v[3], 0x7362);
    v[0] = __byte_perm(a, b, 0x5410);
    v[1] = __byte_perm(a, b, 0x7632);
    v[2] = __byte_perm(c, d, 0x5410);
    v[3] = __byte_perm(c, d, 0x7632);
}

// The block on its way to its transpose: pieces of 8 rows of a column, 16 a column, swizzled so that neither
// side meets bank conflicts.
struct TurnedBlock {
    E4m3x8 pieces[scale_group][scale_group / quantize_edge];
    MEGAMOE_DEVICE E4m3x8& at(int column, int piece) {
        return pieces[column][piece ^ column / quantize_edge];
    }
};

// gridDim: ceil(H/128), P * ceil(I/128), L
MEGAMOE_DEVICE void quantize_weights(const QuantizeWeightsArgs& args) {
    constexpr int edge = quantize_edge, lanes = scale_group / edge;
    __shared__ E4m3Group s_groups[quantize_threads / 32];
    __shared__ TurnedBlock s_turned;
    int blocks_in_plane = ceil_div(args.rows, scale_group);
    int plane = blockIdx.y / blocks_in_plane, block = blockIdx.y % blocks_in_plane;
    int thread = static_cast<int>(threadIdx.x);
    int column = blockIdx.x * scale_group + thread % lanes * edge;
    int row0 = block * scale_group + thread / lanes * edge;
    int64_t of_plane = static_cast<int64_t>(blockIdx.z) * args.planes + plane;
    const auto* w = static_cast<const uint16_t*>(args.w) + blockIdx.z * args.expert_stride +
                    plane * args.plane_stride + column;
    auto is_inside = [&](int row) { return row < args.rows && column < args.columns; };

    Bf16x8 v[edge];
    E4m3Group group;
    MEGAMOE_UNROLL
    for (int i = 0; i < edge; ++i) {
        int row = row0 + i;
        v[i] = is_inside(row) ? *reinterpret_cast<const Bf16x8*>(w + row * args.row_stride) : Bf16x8{};
        MEGAMOE_UNROLL
        for (uint32_t pair : v[i].pairs) group.include(arch::bf16_lo(pair), arch::bf16_hi(pair));
    }
    group.join_lanes<32>();
    if (thread % 32 == 0) s_groups[thread / 32] = group;
    __syncthreads();
    MEGAMOE_UNROLL
    for (int warp = 0; warp < quantize_threads / 32; ++warp) group.include(s_groups[warp]);

    float inverse = group.inverse();
    uint32_t quads[2][edge];  // 4 columns, by row
    MEGAMOE_UNROLL
    for (int i = 0; i < edge; ++i) {
        E4m3x8 out;
        MEGAMOE_UNROLL
        for (int quad = 0; quad < 2; ++quad)
            out.quads[quad] = quads[quad][i] =
                e4m3_of_bf16(v[i].pairs[2 * quad], v[i].pairs[2 * quad + 1], inverse);
        if (!is_inside(row0 + i)) continue;
        int64_t at = (of_plane * args.rows + row0 + i) * args.columns + column;
        *reinterpret_cast<E4m3x8*>(static_cast<uint8_t*>(args.q) + at) = out;
    }
    if (thread == 0) {
        int64_t at = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
        args.scale[at * gridDim.x + blockIdx.x] = group.scale();
        at = static_cast<int64_t>(blockIdx.z) * gridDim.x + blockIdx.x;
        if (args.turned != nullptr) args.turned_scale[at * gridDim.y + blockIdx.y] = group.scale();
    }
    if (args.turned == nullptr) return;

    MEGAMOE_UNROLL
    for (int quad = 0; quad < 2; ++quad) {
        uint32_t upper[4], lower[4];  // rows 0 to 3, and 4 to 7
        MEGAMOE_UNROLL
        for (int i = 0; i < 4; ++i) {
            upper[i] = quads[quad][i];
            lower[i] = quads[quad][4 + i];
        }
        transpose_bytes(upper);
        transpose_bytes(lower);
        MEGAMOE_UNROLL
        for (int i = 0; i < 4; ++i)
            s_turned.at(thread % lanes * edge + quad * 4 + i, thread / lanes) = {{upper[i], lower[i]}};
    }
    __syncthreads();
    // A thread writes 16 bytes of a row of the transpose, so that 8 threads write a line.
    constexpr int vectors = lanes / 2;
    MEGAMOE_UNROLL
    for (int pass = 0; pass < scale_group * vectors / quantize_threads; ++pass) {
        int i = pass * quantize_threads + thread, of_block = i / vectors, piece = i % vectors * 2;
        int to = blockIdx.x * scale_group + of_block, from = block * scale_group + piece * edge;
        if (to >= args.columns || from >= args.rows) continue;
        E4m3x8 first = s_turned.at(of_block, piece), second = s_turned.at(of_block, piece + 1);
        int64_t at = (of_plane * args.columns + to) * args.rows + from;
        *reinterpret_cast<Bf16x8*>(static_cast<uint8_t*>(args.turned) +
                                   at) = {{first.quads[0], first.quads[1], second.quads[0], second.quads[1]}};
    }
}

// gridDim.x: ceil(M * ceil(H/128) / 16), since 16 threads have a group
MEGAMOE_DEVICE void quantize_rows(const QuantizeRowsArgs& args) {
    constexpr int edge = quantize_edge, lanes = scale_group / edge;
    int thread = static_cast<int>(threadIdx.x), groups = ceil_div(args.columns, scale_group);
    int64_t index = static_cast<int64_t>(blockIdx.x) * (quantize_threads / lanes) + thread / lanes;
    int64_t row = index / groups;
    int column = static_cast<int>(index % groups) * scale_group + thread % lanes * edge;
    bool is_inside = row < args.rows && column < args.columns;
    int64_t at = row * args.columns + column;

    Bf16x8 v =
        is_inside ? *reinterpret_cast<const Bf16x8*>(static_cast<const uint16_t*>(args.x) + at) : Bf16x8{};
    E4m3Group group;
    MEGAMOE_UNROLL
    for (uint32_t pair : v.pairs) group.include(arch::bf16_lo(pair), arch::bf16_hi(pair));
    group.join_lanes<lanes>();
    if (!is_inside) return;
    float inverse = group.inverse();
    E4m3x8 out = {
        {e4m3_of_bf16(v.pairs[0], v.pairs[1], inverse), e4m3_of_bf16(v.pairs[2], v.pairs[3], inverse)}};
    *reinterpret_cast<E4m3x8*>(static_cast<uint8_t*>(args.q) + at) = out;
    if (thread % lanes == 0) args.scale[index] = group.scale();
}

}  // namespace megamoe
