// What a role must know about its tile.
#pragma once
#include "megamoe/schedule/order.h"

namespace megamoe {

// args.block_table holds two words a block, each packed so that a tile costs few registers: expert << 8 |
// rows (at most 128), and the run's first block << 8 | its size.
struct BlockEntry {
    int packed;
    MEGAMOE_PURE int expert() const { return packed >> 8; }
    MEGAMOE_PURE int rows() const { return packed & 0xff; }
};

struct alignas(16) Tile {
    GemmId gemm;
    Shared shared;
    int block;  // -1: no more tiles, see none(); of a weight matrix the m-block
    int n;      // -1: none for this CTA, which only loads its half of the A that its partner multiplies
    BlockEntry entry;
    int slots;       // of the pipeline that its K fills, see slot_steps(),
    int inputs;      // and those behind them that its epilogue reads and writes
    int gemm1_done;  // not 0: the pair has no unit of gemm1 behind this one, nor of what takes its place
    static MEGAMOE_PURE Tile none() { return {GemmId::gemm1, Shared::b, -1, 0, {0}, 0, 0, 1}; }
    MEGAMOE_PURE bool valid() const { return block >= 0; }
    MEGAMOE_PURE bool absent() const { return n < 0; }
    MEGAMOE_PURE int expert() const { return entry.expert(); }
    MEGAMOE_PURE int rows() const { return entry.rows(); }
};

}  // namespace megamoe
