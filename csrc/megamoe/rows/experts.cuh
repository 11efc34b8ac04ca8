// Which rows each expert has, where rows are sorted by expert.
#pragma once
#include "megamoe/cta/threads.cuh"

namespace megamoe {

// 32 experts at a time, one for each lane of a warp. Ends are taken as never smaller than the one before and
// never past the rows: bad ones lose rows, and touch nothing else.
struct SortedExperts {
    const int32_t* ends;  // [num]; null: one expert has all rows
    int num, num_rows, alignment, block_rows;
    int end_before = 0, blocks_before = 0;  // of the experts so far

    struct Own {
        int end_before, begin, end, first_block;
    };
    MEGAMOE_DEVICE Own next(int e0) {
        int lane = arch::lane_idx(), end = end_before;
        if (e0 + lane < num) end = ends != nullptr ? ends[e0 + lane] : num_rows;
        end = max_of(end_before, min_of(end, num_rows));
        MEGAMOE_UNROLL_BY(1)
        for (int step = 1; step < 32; step <<= 1) end = max_of(end, arch::shfl(end, max_of(lane - step, 0)));
        int before = arch::shfl(end, max_of(lane - 1, 0));
        if (lane == 0) before = end_before;
        int begin = min_of((before + alignment - 1) & -alignment, end);
        int blocks = ceil_div(end - begin, block_rows), all = inclusive_sum(blocks);
        Own own{before, begin, end, blocks_before + all - blocks};
        end_before = arch::shfl(end, 31);
        blocks_before += arch::shfl(all, 31);
        return own;
    }
};

}  // namespace megamoe
