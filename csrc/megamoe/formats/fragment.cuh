// A half of a tile as a math warpgroup holds it, and where it goes in shared memory. Fragment map
// (arch/README.md): v[4*g + 2*i + j] is row 16*(warp%4) + lane/4 + 8*i, column 8*g + 2*(lane%4) + j.
#pragma once
#include "megamoe/cta/threads.cuh"
#include "megamoe/schedule/tile_shape.h"

namespace megamoe {

struct Fragment {  // this thread's rows and columns in its warpgroup's half
    int row, quad;
    MEGAMOE_DEVICE Fragment()
        : row((arch::warp_idx() & 3) * 16 + arch::lane_idx() / 4), quad(arch::lane_idx() & 3) {}
    MEGAMOE_DEVICE int column(int g) const { return 8 * g + 2 * quad; }
};

// Which of a warpgroup's rows have scales.
struct AllRows {
    MEGAMOE_DEVICE bool has(int) const { return true; }
};
struct FirstRows {
    int num;
    MEGAMOE_DEVICE bool has(int row) const { return row < num; }
};

// A Fragment where columns are the M of the MMAs, in the wide form of a tile: v[4*g + 2*i + j] is column 64 *
// warpgroup + 16*(warp%4) + lane/4 + 8*i of the half, row 8*g + 2*(lane%4) + j.
struct WideFragment {
    int warpgroup, column, quad;  // `column`: of the warpgroup's 64
    MEGAMOE_DEVICE WideFragment()
        : warpgroup(math_warpgroup()), column(Fragment().row), quad(Fragment().quad) {}
    MEGAMOE_DEVICE int row(int g) const { return 8 * g + 2 * quad; }
};

// Where `byte` of `row` (0..63) lies in a box of 64 rows x 128 bytes with the 128-byte swizzle.
MEGAMOE_DEVICE int swizzled(int row, int byte) { return row * slot_k_bytes + (byte ^ ((row & 7) << 4)); }

}  // namespace megamoe
