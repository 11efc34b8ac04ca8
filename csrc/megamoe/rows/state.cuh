// What a launch writes to the header of its call's state.
#pragma once
#include "megamoe/cta/context.cuh"

namespace megamoe {

struct StateUnchanged {  // or there is none
    template <class T>
    static MEGAMOE_DEVICE void invalidate(const Args&) {}
    template <class T>
    static MEGAMOE_DEVICE void begin(const Context&) {}
    template <class T>
    static MEGAMOE_DEVICE void complete(const Context&) {}
};
// The header of a training forward: it says whose it is once the launch's counts are known, and at the end
// that it is complete.
struct StateSaved {
    template <class T>
    static MEGAMOE_DEVICE void invalidate(const Args& args) {  // one thread
        if (arch::block_idx() == 0) launch_args<T>(args).state.header->complete = 0;
    }
    template <class T>
    static MEGAMOE_DEVICE void begin(const Context& ctx) {
        if (cta_idx(ctx) != 0 || crew_thread() != 0) return;
        StateHeader& header = *launch_args<T>(ctx.args).state.header;
        header.begun = ctx.epoch();
        header.pool_rows = static_cast<uint32_t>(ctx.args.pool_rows);
        header.config_hash = ctx.args.config_hash;
        for (int r = 0; r < max_ranks; ++r)
            header.tokens_of_rank[r] = r < ctx.args.num_ranks ? ctx.smem.tokens_of_rank[r] : 0;
    }
    template <class T>
    static MEGAMOE_DEVICE void complete(const Context& ctx) {  // one thread
        launch_args<T>(ctx.args).state.header->complete = ctx.epoch();
    }
};

}  // namespace megamoe
