// The movers: the transport warps after dispatch, and the math warps when they have no tiles left. Most
// closers are near the end of the pool; four warps alone would sum them long after the last tile.
#pragma once
#include "megamoe/gemm/forms.cuh"
#include "megamoe/rows/combine.cuh"
#include "megamoe/rows/reduce.cuh"

namespace megamoe {

// How long a mover pauses at most. Hundreds of warps asking for one line keep an L2 slice busy that the tiles
// need too: about 1 us. But where few tokens go to small experts, that is felt behind the last tile, and
// tiles do not feel so few us of asking (30b, 8 tokens, H200: 82.9 -> 81.8 us; V4-Flash, 64: 451 -> 469).
template <class T>
MEGAMOE_DEVICE uint32_t longest_pause(const Context& ctx) {
    bool small = int64_t{ctx.args.hidden} * ctx.args.intermediate <= 1 << 21;
    return sums_into_y<T>(ctx.args) && small && ctx.smem.num_tokens <= 64 ? 64 : 1024;
}

// Work on weights comes first, because tiles wait for it; then comes reduce, for which peers wait. Returns
// when the pass is reduced and, in the last pass, all own tokens are combined.
template <class T>
MEGAMOE_DEVICE void reduce_and_combine(Context& ctx) {
    Reducer<T> reducer(ctx);
    Combiner<T> combiner(ctx);
    uint32_t idle_since = 0;  // set before it is read
    MEGAMOE_UNROLL_BY(1)
    for (uint32_t polls = 0;;) {
        bool reduced = reducer.finished(ctx), combined = ctx.smem.plan.is_last == 0 || combiner.finished(ctx);
        bool prepared = Forms<T>::finished(ctx);
        if (reduced && combined && prepared) return;
        if (!prepared && Forms<T>::next(ctx)) {
            polls = 0;
            continue;
        }
        bool reduces = !reduced && reducer.next(ctx, Shape<T>::tiles(ctx.args, reduced_gemm<T>(ctx.args)));
        if (reduces || (!combined && combiner.next(ctx))) {
            if (!only_weights<T>(ctx.args)) sum_rows(ctx);
            if (reduces) reducer.done(ctx);
            polls = 0;
            continue;
        }
        arch::sleep_ns(min_of(32u << min_of(polls, 5u), longest_pause<T>(ctx)));
        if (++polls % 16 != 0) continue;
        uint32_t now = arch::shfl(ctx.mem.coarse_time(), 0);  // one verdict of the warp
        if (polls == 16) idle_since = now;
        bool give_up = ctx.mem.aborted();
        if (now - idle_since > ctx.mem.coarse_timeout()) {  // no progress for the whole time-out
            give_up = true;
            reduced = reducer.finished(ctx);  // since the look above the last batches may have been empty
            if (!reduced && arch::lane_idx() == 0) {
                ctx.mem.fault(reducer.waits_for(ctx), Shape<T>::tiles(ctx.args, reduced_gemm<T>(ctx.args)),
                              reducer.seen(ctx));
            } else if (reduced && combiner.waiting(ctx)) {
                ctx.mem.fault(combiner.waits_for(ctx), ctx.epoch(), 0);
            }
        }
        if (arch::ballot(give_up) != 0) break;
    }
    if (ctx.smem.plan.is_last != 0) combiner.poison(ctx);
}

}  // namespace megamoe
