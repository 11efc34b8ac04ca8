// Tile shapes: the sizes of a block of rows and of a tile, and the numbers of slots. A layer names one (its
// Tiling), and everything that depends on it reads it there. jit/abi.py reads these numbers for Python (rows
// of a block, boxes of TMA).
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {

constexpr int warpgroup_rows = 64;  // rows of one math warpgroup
constexpr int slot_k_bytes = 128;   // of K in a pipeline slot: one row of the 128-byte swizzle
constexpr int box_bytes = warpgroup_rows * slot_k_bytes;  // what TMA moves of A and of outputs at a time
constexpr int small_box_rows = 16;                        // and of A of a block that is not full
constexpr int small_box_bytes = small_box_rows * slot_k_bytes;

struct OneForm;  // gemm/forms.cuh

// paired: pairs of CTAs share operands, so that a pipeline slot is free when both have used it.
template <int rows_, int half_columns_, int num_slots_, int num_output_slots_, class Forms_ = OneForm,
          bool paired_ = true>
struct TileShape {
    static constexpr int rows = rows_;                  // of a block
    static constexpr int half_columns = half_columns_;  // one accumulator, one group of scales
    static constexpr int columns = 2 * half_columns;
    static constexpr int num_slots = num_slots_;                    // of the pipeline
    static constexpr int num_output_slots = num_output_slots_;      // of a warpgroup, a box each
    static constexpr int step_rows = min_of(rows, warpgroup_rows);  // of one of several steps of K in a slot
    static constexpr int output_bytes = step_rows * slot_k_bytes;
    static constexpr bool paired = paired_;
    using Forms = Forms_;                          // how weights get from slots to MMAs
    static constexpr int sums = half_columns / 2;  // of a half, in a thread
};

using Tile128x256 = TileShape<128, 128, 3, 4>;

}  // namespace megamoe
