// MXFP4 weights -> bf16, for the operators of megamoe.ops: the numbers of megamoe/formats/mxfp4.py.
#pragma once
#include "megamoe/fp4/format.cuh"
#include "megamoe/layout/passes.h"
#include "megamoe/rows/vectors.cuh"

namespace megamoe {

constexpr int dequantize_threads = 256;

// Eight numbers, two a byte. An e2m1's bits are the top of an fp32 that is 2^126 too small.
MEGAMOE_DEVICE uint4_t mxfp4_vector(uint32_t codes, int exponent) {
    uint32_t bits = exponent == 255 ? 0x7fc00000u : exponent == 0 ? 1u << 22 : uint32_t(exponent) << 23;
    float power = arch::bf16_hi(bits), numbers[8];
    MEGAMOE_UNROLL
    for (float& number : numbers) {
        number = arch::bf16_hi((codes & 7) << 22 | (codes & 8) << 28) * 0x1p126f * power;
        codes >>= 4;
    }
    return pack_vector(numbers);
}

// gridDim: for P * ceil(I/8) * K/8 threads, 1, L. A thread has 8 columns of 8 rows, whose loads are on their
// way together.
MEGAMOE_DEVICE void dequantize_mxfp4(const DequantizeMxfp4Args& args) {
    constexpr int num = 8, block_scales = scale_group * scale_group / 32, half_scales = block_scales / 2;
    int words = args.columns / 8, row_groups = ceil_div(args.rows, num);
    int index = static_cast<int>(blockIdx.x * dequantize_threads + threadIdx.x);
    int column = index % words * 8, row = index / words % row_groups * num;
    int plane = index / words / row_groups, expert = static_cast<int>(blockIdx.z);
    if (plane >= args.planes) return;
    const uint8_t* from = args.packed + expert * args.expert_bytes + plane * args.plane_bytes +
                          row * args.row_bytes + column / 2;
    int64_t blocks = int64_t{expert * args.planes + plane} * ceil_div(args.rows, scale_group);
    int64_t block = (blocks + row / scale_group) * ceil_div(args.columns, scale_group) + column / scale_group;
    // [2, 128 rows, scales of 64 numbers]
    const uint8_t* scale = args.scale + block * int(sizeof(ScaleHeader) + block_scales) +
                           sizeof(ScaleHeader) + column % scale_group / 64 * half_scales +
                           row % scale_group * 2 + column % 64 / 32;
    auto* to = static_cast<uint16_t*>(args.out) + expert * args.out_expert_stride +
               (int64_t{plane} * args.rows + row) * args.out_row_stride + column;
    uint32_t codes[num];
    int exponents[num];
    MEGAMOE_UNROLL
    for (int j = 0; j < num; ++j) {
        bool exists = row + j < args.rows;
        codes[j] = exists ? *reinterpret_cast<const uint32_t*>(from + j * args.row_bytes) : 0;
        exponents[j] = exists ? scale[2 * j] : 0;
    }
    MEGAMOE_UNROLL
    for (int j = 0; j < num; ++j) {
        if (row + j < args.rows)
            *reinterpret_cast<uint4_t*>(to + j * args.out_row_stride) = mxfp4_vector(codes[j], exponents[j]);
    }
}

}  // namespace megamoe
