// Formats: how the numbers of x, of the weights and of h are stored, each by itself. A format is a type; a
// precision names three; megamoe/core/table.py has the table.
//
//   rows (x and h)   Element, element_bytes; row_bytes(columns) in memory; scaled: fp32 scales stand beside
//                    them, num_scales(columns) a row, one for each 128 columns or (whole_rows) for all;
//                    quantize() makes one of eight columns a lane; write_half(output, sums, row_scale, f): a
//                    half of a tile -> output slots of 128 bytes a row
//   weights          Element, element_bytes; packed: numbers in an element of the map; scaled: in each slot;
//                    column_scales: one for each column of N, in the epilogue (epilogue/column_scales.cuh);
//                    slot_scale_bytes that come with them, where MMAs do not read them as they arrive
//                    (gemm/forms.cuh); k_major, or as rows of N for each k; Scales(scales, n, columns, tile,
//                    halves): fetch() reads what the next pipeline slot needs, put(slot) hands it to the math
//                    warps
//
// How a pair of formats is multiplied is gemm/mainloop.cuh's Multiply<rows, weights>.
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {

constexpr int scale_group = 128;  // values along K that share a scale: one FP8 pipeline slot, a half of h

template <class Rows, class Weights, class HiddenRows>
struct Precision {
    using X = Rows;
    using W = Weights;
    using H = HiddenRows;
};

}  // namespace megamoe
