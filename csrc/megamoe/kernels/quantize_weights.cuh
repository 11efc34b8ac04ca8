// Quantize bf16 or fp32 weights [L, P * I, H] to e4m3 with one fp32 scale per 128 x 128 block, in one pass
// over memory. For a layer that trains, the same pass makes the transposes; it can also transpose e4m3
// weights alone. Blocks restart at each of the P planes, so the last block of a plane may be ragged. One CTA
// has one block. The formula is that of docs/numerics.md, so bits equal those of
// megamoe/formats/quantization.py. The file also quantizes bf16 rows in groups of 1 x 128, and dequantizes
// them.
#pragma once
#include "megamoe/formats/e4m3_group.cuh"
#include "megamoe/layout/passes.h"
#include "megamoe/rows/experts.cuh"

namespace megamoe {

// Each has 8 rows x 8 columns of a block; of rows that are quantized by themselves 8 columns of a group.
constexpr int quantize_threads = 256;
constexpr int quantize_edge = 8;

// Eight weights of a row: their part in the block's maximum, and four of them as e4m3.
struct alignas(16) Bf16x8 {
    using Element = uint16_t;
    static constexpr bool is_quantized = false;
    uint32_t pairs[4];
    MEGAMOE_DEVICE void join(E4m3Group& group) const {
        MEGAMOE_UNROLL
        for (uint32_t pair : pairs) group.include(arch::bf16_lo(pair), arch::bf16_hi(pair));
    }
    MEGAMOE_DEVICE uint32_t quad(int i, float inverse) const {
        return e4m3_of_bf16(pairs[2 * i], pairs[2 * i + 1], inverse);
    }
};
struct alignas(16) Fp32x8 {
    using Element = float;
    static constexpr bool is_quantized = false;
    float values[8];
    MEGAMOE_DEVICE void join(E4m3Group& group) const {
        MEGAMOE_UNROLL
        for (int i = 0; i < 8; i += 2) group.include(values[i], values[i + 1]);
    }
    MEGAMOE_DEVICE uint32_t quad(int i, float inverse) const {
        const float* v = values + 4 * i;
        return arch::pack_e4m3x2(v[0] * inverse, v[1] * inverse) |
               arch::pack_e4m3x2(v[2] * inverse, v[3] * inverse) << 16;
    }
};
struct alignas(8) E4m3x8 {
    using Element = uint8_t;
    static constexpr bool is_quantized = true;
    uint32_t quads[2];
    MEGAMOE_DEVICE void join(E4m3Group&) const {}
    MEGAMOE_DEVICE uint32_t quad(int i, float) const { return quads[i]; }
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
struct TransposedBlock {
    E4m3x8 pieces[scale_group][scale_group / quantize_edge];
    MEGAMOE_DEVICE E4m3x8& at(int column, int piece) {
        return pieces[column][piece ^ column / quantize_edge];
    }
};

// gridDim: ceil(H/128), P * ceil(I/128), L
template <class Eight>
MEGAMOE_DEVICE void quantize_weights(const QuantizeWeightsArgs& args) {
    constexpr int edge = quantize_edge, lanes = scale_group / edge;
    __shared__ E4m3Group s_groups[quantize_threads / 32];
    __shared__ TransposedBlock s_transposed;
    int blocks_in_plane = ceil_div(args.rows, scale_group);
    int plane = blockIdx.y / blocks_in_plane, block = blockIdx.y % blocks_in_plane;
    int thread = static_cast<int>(threadIdx.x);
    int column = blockIdx.x * scale_group + thread % lanes * edge;
    int row0 = block * scale_group + thread / lanes * edge;
    int64_t of_plane = static_cast<int64_t>(blockIdx.z) * args.planes + plane;
    const auto* w = static_cast<const typename Eight::Element*>(args.w) + blockIdx.z * args.expert_stride +
                    plane * args.plane_stride + column;
    auto is_inside = [&](int row) { return row < args.rows && column < args.columns; };

    Eight v[edge];
    E4m3Group group;
    MEGAMOE_UNROLL
    for (int i = 0; i < edge; ++i) {
        int row = row0 + i;
        v[i] = is_inside(row) ? *reinterpret_cast<const Eight*>(w + row * args.row_stride) : Eight{};
        v[i].join(group);
    }
    float inverse = 0.0f;
    if constexpr (!Eight::is_quantized) {
        group.join_lanes<32>();
        if (thread % 32 == 0) s_groups[thread / 32] = group;
        __syncthreads();
        MEGAMOE_UNROLL
        for (int warp = 0; warp < quantize_threads / 32; ++warp) group.include(s_groups[warp]);
        inverse = group.inverse();
    }
    uint32_t quads[2][edge];  // 4 columns, by row
    MEGAMOE_UNROLL
    for (int i = 0; i < edge; ++i) {
        E4m3x8 out;
        MEGAMOE_UNROLL
        for (int quad = 0; quad < 2; ++quad) out.quads[quad] = quads[quad][i] = v[i].quad(quad, inverse);
        if (Eight::is_quantized || !is_inside(row0 + i)) continue;
        int64_t at = (of_plane * args.rows + row0 + i) * args.columns + column;
        *reinterpret_cast<E4m3x8*>(static_cast<uint8_t*>(args.q) + at) = out;
    }
    if (thread == 0) {
        int64_t at = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        float scale = Eight::is_quantized ? args.scale[at] : group.scale();
        if constexpr (!Eight::is_quantized) args.scale[at] = scale;
        at = static_cast<int64_t>(blockIdx.z) * gridDim.x + blockIdx.x;
        if (args.transposed != nullptr) args.transposed_scale[at * gridDim.y + blockIdx.y] = scale;
    }
    if (args.transposed == nullptr) return;

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
            s_transposed.at(thread % lanes * edge + quad * 4 + i, thread / lanes) = {{upper[i], lower[i]}};
    }
    __syncthreads();
    // A thread writes 16 bytes of a row of the transpose, so that 8 threads write a line.
    constexpr int vectors = lanes / 2;
    MEGAMOE_UNROLL
    for (int pass = 0; pass < scale_group * vectors / quantize_threads; ++pass) {
        int i = pass * quantize_threads + thread, of_block = i / vectors, piece = i % vectors * 2;
        int to = blockIdx.x * scale_group + of_block, from = block * scale_group + piece * edge;
        if (to >= args.columns || from >= args.rows) continue;
        E4m3x8 first = s_transposed.at(of_block, piece), second = s_transposed.at(of_block, piece + 1);
        int64_t at = (of_plane * args.columns + to) * args.rows + from;
        *reinterpret_cast<Bf16x8*>(static_cast<uint8_t*>(args.transposed) +
                                   at) = {{first.quads[0], first.quads[1], second.quads[0], second.quads[1]}};
    }
}

// Vectors of a thread that are in flight together: a warp has 8 groups of a row.
constexpr int quantize_loads = 4;
constexpr int quantize_lanes = scale_group / quantize_edge;  // that have a group
constexpr int quantize_step = 32 * quantize_edge;            // columns of a warp's vectors

// Which columns a lane has: a vector of each pair of groups. gridDim: ceil(M/8), with scales by block and
// ceil(E/8) for experts; ceil(H/1024)
struct RowPlace {
    int row, lane, first_column;
    int64_t at;  // of the first column

    explicit MEGAMOE_DEVICE RowPlace(const QuantizeRowsArgs& args) {
        row = static_cast<int>(blockIdx.x) * (quantize_threads / 32) + arch::warp_idx();
        lane = arch::lane_idx();
        first_column = (static_cast<int>(blockIdx.y) * quantize_loads * 32 + lane) * quantize_edge;
        at = static_cast<int64_t>(row) * args.columns + first_column;
    }
};

// Which of the scales by block is that of a row, -1 of a row of no expert. For a whole warp.
MEGAMOE_DEVICE int place_by_block(const QuantizeRowsArgs& args, int row) {
    SortedExperts experts{args.ends, args.num_experts, args.rows, args.alignment, scale_group};
    MEGAMOE_UNROLL_BY(1)
    for (int e0 = 0; e0 < args.num_experts && experts.end_before <= row; e0 += 32) {
        SortedExperts::Own own = experts.next(e0);
        int ended = arch::popc(arch::ballot(own.end <= row));
        int mine = own.begin <= row ? own.first_block * scale_group + row - own.begin : -1;
        int found = arch::shfl(mine, min_of(ended, 31));
        if (ended < 32) return found;
    }
    return -1;
}

// Zeros where no row's scales are: in an expert's last block, and in its part of what is behind all blocks.
MEGAMOE_DEVICE void clear_places(const QuantizeRowsArgs& args, int expert, int first_group) {
    SortedExperts experts{args.ends, args.num_experts, args.rows, args.alignment, scale_group};
    int begin = 0;
    MEGAMOE_UNROLL_BY(1)
    for (int e0 = 0; e0 < args.num_experts; e0 += 32) {
        SortedExperts::Own own = experts.next(e0);
        int end = own.first_block * scale_group + own.end - own.begin;
        if (expert / 32 * 32 == e0) begin = arch::shfl(end, expert % 32);
    }
    int behind = experts.blocks_before * scale_group;
    int part = ceil_div(args.places - behind, args.num_experts), first = behind + expert * part;
    int last_group = min_of(ceil_div(args.columns, scale_group), first_group + 2 * quantize_loads);
    for (int group = first_group; group < last_group; ++group) {
        float* scales = args.scale + static_cast<int64_t>(group) * args.places;
        auto clear = [&](int from, int to) {
            for (int i = from + arch::lane_idx(); i < to; i += 32) scales[i] = 0.0f;
        };
        clear(begin, ceil_div(begin, scale_group) * scale_group);
        clear(first, min_of(first + part, args.places));
    }
}

MEGAMOE_DEVICE void quantize_rows(const QuantizeRowsArgs& args) {
    constexpr int warps = quantize_threads / 32;
    RowPlace place(args);
    if (place.row >= args.rows) {
        int expert = place.row - ceil_div(args.rows, warps) * warps;
        if (args.places != 0 && expert >= 0 && expert < args.num_experts)
            clear_places(args, expert, static_cast<int>(blockIdx.y) * 2 * quantize_loads);
        return;
    }
    const auto* x = static_cast<const uint16_t*>(args.x) + place.at;
    auto* q = static_cast<uint8_t*>(args.q) + place.at;
    auto is_inside = [&](int i) { return place.first_column + i * quantize_step < args.columns; };
    Bf16x8 v[quantize_loads];
    MEGAMOE_UNROLL
    for (int i = 0; i < quantize_loads; ++i)
        v[i] = is_inside(i) ? *reinterpret_cast<const Bf16x8*>(x + i * quantize_step) : Bf16x8{};
    int by_block = args.places == 0 ? 0 : place_by_block(args, place.row);  // while v is on its way
    // A lane divides for one group of its half of the warp, the others take the quotient from there.
    int mine = place.lane % quantize_lanes;
    E4m3Group divided;
    MEGAMOE_UNROLL
    for (int i = 0; i < quantize_loads; ++i) {
        E4m3Group group;
        v[i].join(group);
        group.join_lanes<quantize_lanes>();
        if (mine == i) divided = group;
    }
    float inverse = divided.inverse();
    MEGAMOE_UNROLL
    for (int i = 0; i < quantize_loads; ++i) {
        float of_group = arch::shfl(inverse, place.lane - mine + i);
        E4m3x8 out = {{v[i].quad(0, of_group), v[i].quad(1, of_group)}};
        if (is_inside(i)) *reinterpret_cast<E4m3x8*>(q + i * quantize_step) = out;
    }
    int groups = ceil_div(args.columns, scale_group),
        group = (place.first_column + mine * quantize_step) / scale_group;
    if (mine >= quantize_loads || group >= groups || by_block < 0) return;
    int64_t at = static_cast<int64_t>(place.row) * groups + group;
    if (args.places != 0) at = static_cast<int64_t>(group) * args.places + by_block;
    args.scale[at] = divided.scale();
}

// Back to bf16, on the grid of scales by row.
MEGAMOE_DEVICE void dequantize_rows(const QuantizeRowsArgs& args) {
    RowPlace place(args);
    if (place.row >= args.rows) return;
    const float* scales = args.scale + static_cast<int64_t>(place.row) * ceil_div(args.columns, scale_group);
    MEGAMOE_UNROLL
    for (int n = 0; n < quantize_loads; ++n) {
        if (place.first_column + n * quantize_step >= args.columns) return;
        int64_t at = place.at + n * quantize_step;
        E4m3x8 q = *reinterpret_cast<const E4m3x8*>(static_cast<const uint8_t*>(args.q) + at);
        float scale = scales[(place.first_column + n * quantize_step) / scale_group];
        Bf16x8 out;
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {
            float v[4];
            arch::unpack_e4m3x4(q.quads[i], v);
            out.pairs[2 * i] = arch::pack_bf16x2(v[0] * scale, v[1] * scale);
            out.pairs[2 * i + 1] = arch::pack_bf16x2(v[2] * scale, v[3] * scale);
        }
        *reinterpret_cast<Bf16x8*>(static_cast<uint16_t*>(args.x) + at) = out;
    }
}

// gridDim: E, ceil(N/256), 2. A warp has a row, a lane 8 columns.
MEGAMOE_DEVICE void copy_tails(const CopyTailsArgs& args) {
    constexpr int group_rows = 64;
    int expert = static_cast<int>(blockIdx.x), of = static_cast<int>(blockIdx.z), lane = arch::lane_idx();
    int columns = args.columns[of], column = (static_cast<int>(blockIdx.y) * 32 + lane) * quantize_edge;
    int before = 0;
    for (int e = lane; e < expert; e += 32) before = max_of(before, min_of(args.ends[e], args.rows));
    MEGAMOE_UNROLL
    for (int mask = 16; mask != 0; mask >>= 1) before = max_of(before, arch::shfl_xor(before, mask));
    if (column >= columns) return;
    int end = args.ends == nullptr ? args.rows : max_of(before, min_of(args.ends[expert], args.rows));
    int begin = min_of((before + args.alignment - 1) & -args.alignment, end);
    int first = end - (end - begin) % group_rows;
    const auto* from = static_cast<const uint16_t*>(args.x[of]) + column;
    auto* to = static_cast<uint16_t*>(args.out[of]) + column;
    MEGAMOE_UNROLL
    for (int i = static_cast<int>(threadIdx.x) / 32; i < group_rows; i += quantize_threads / 32) {
        int64_t row = first + i;
        Bf16x8 v{};
        if (row < end) v = *reinterpret_cast<const Bf16x8*>(from + row * args.row_stride[of]);
        row = expert * group_rows + i;
        *reinterpret_cast<Bf16x8*>(to + row * columns) = v;
    }
}

}  // namespace megamoe
