// Arguments of the kernels of one pass over memory, one field per line: jit/quantize.py reads them.
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {

struct QuantizeWeightsArgs {
    const void* w;            // [L, P, I, H], strided
    void* q;                  // [L, P * I, H] e4m3; of e4m3 weights not used
    float* scale;             // [L, P * ceil(I/128), ceil(H/128)]; of e4m3 weights read
    void* transposed;         // [L, P, H, I] e4m3 or null
    float* transposed_scale;  // [L, ceil(H/128), P * ceil(I/128)]
    int64_t expert_stride;    // of w, in elements; multiples of 8
    int64_t plane_stride;
    int64_t row_stride;
    int32_t planes;   // P
    int32_t rows;     // I, a multiple of 8, of 16 with `transposed`
    int32_t columns;  // H, a multiple of 8
};

struct QuantizeRowsArgs {
    void* x;              // [M, H] bf16: read, or to dequantize written
    void* q;              // [M, H] e4m3
    float* scale;         // [M, ceil(H/128)], or by block [ceil(H/128), places]
    int32_t rows;         // M
    int32_t columns;      // H, a multiple of 8
    int32_t places;       // not 0: experts' scales begin at multiples of 128, megamoe/ops/scales.py
    int32_t num_experts;  // E
    int32_t alignment;
    const int32_t* ends;  // [E]; null: one expert has all rows
};

// For weight gradients: each expert's rows after its last whole group of 64, and zeros.
struct CopyTailsArgs {
    const void* x[2];       // [M, N] bf16, strided
    void* out[2];           // [E, 64, N]
    const int32_t* ends;    // [E]; null: one expert has all rows
    int64_t row_stride[2];  // of x
    int32_t columns[2];     // N, a multiple of 8
    int32_t rows;           // M
    int32_t alignment;
};

struct DequantizeMxfp4Args {
    const uint8_t* packed;  // [L, P, I, K/2], strided
    const uint8_t* scale;   // [L, P * ceil(I/128), ceil(K/128), 528]
    void* out;              // [L, P * I, K] bf16, strided
    int64_t expert_bytes;   // strides of `packed`; multiples of 4
    int64_t plane_bytes;
    int64_t row_bytes;
    int64_t out_expert_stride;  // in elements; multiples of 8
    int64_t out_row_stride;
    int32_t planes;   // P
    int32_t rows;     // I
    int32_t columns;  // K, a multiple of 32
};

struct SumRowsArgs {
    const void* rows;       // [R, H] bf16; row 0 is nothing
    const int64_t* places;  // [T, N] rows of a token; 0: none
    void* out;              // [T, H] bf16
    int32_t num;            // N
    int32_t columns;        // H, a multiple of 8
};

}  // namespace megamoe
