// In which order a row of e4m3 has its words, of four numbers each. A place() permutes bits of a column:
// those of disjoint bits add up.
#pragma once
#include "megamoe/formats/format.h"

namespace megamoe {

struct PlainWords {
    static constexpr bool is_plain = true;
    static MEGAMOE_DEVICE int place(int column) { return column; }
    static MEGAMOE_DEVICE int row_bytes(int columns) { return columns; }
};

// Of each 128 columns, word 8 * q + j at 4 * j + q: MMAs whose operand comes from registers give a lane of
// quad q one word of every 16 bytes, which are 32 neighbouring columns then (docs/fp4.md). Rows have whole
// groups, with zeros behind the last column.
struct QuadWords {
    static constexpr bool is_plain = false;
    static MEGAMOE_DEVICE int place(int column) {
        return (column & ~(scale_group - 1)) | (column >> 2 & 7) << 4 | (column >> 5 & 3) << 2 | (column & 3);
    }
    static MEGAMOE_DEVICE int row_bytes(int columns) { return ceil_div(columns, scale_group) * scale_group; }
};

}  // namespace megamoe
