// reduce: movers walk the pool in row order. At a token's closer, when every block up to there is done, they
// sum its rows, or a slice of each, into its home's window.
#pragma once
#include "megamoe/rows/batches.cuh"
#include "megamoe/rows/routes.cuh"
#include "megamoe/rows/sum.cuh"

namespace megamoe {

// Walks the pool in batches of rows behind gemm2; remembers up to where blocks are known to be done.
template <class T>
class Reducer {
    static constexpr int block_rows = T::Tiling::rows;

  public:
    MEGAMOE_DEVICE explicit Reducer(const Context& ctx) {
        ReducerState& s = mine(ctx);
        s.row = -1;
        s.done = 0;
        s.closers = 0;
    }

    MEGAMOE_DEVICE bool finished(const Context& ctx) const { return mine(ctx).row >= ctx.smem.plan.num_rows; }
    MEGAMOE_DEVICE Wait waits_for(const Context& ctx) const {
        return {Edge::y_rows_ready, max_ranks, static_cast<uint32_t>(mine(ctx).done)};  // a block
    }
    MEGAMOE_DEVICE uint32_t seen(const Context& ctx) const {  // its tiles so far
        return ctx.mem.load(tiles_done(ctx.args) + mine(ctx).done, Order::relaxed, Scope::gpu);
    }

    // Begins the next token's sum, if the blocks of its batch, and all before them, are done. Must not be
    // called when finished.
    MEGAMOE_DEVICE bool next(Context& ctx, int num_tiles) {
        ReducerState& s = mine(ctx);
        while (s.closers == 0) {
            if (s.row < 0) take(ctx);
            if (finished(ctx)) return false;
            load_batch(ctx);
            if (s.closers == 0) s.row = -1;
        }
        if (!blocks_done(ctx, num_tiles)) return false;
        Profile<T>::mark(ctx.args, Mark::y_rows_seen);
        set_partial(ctx, route_token(arch::shfl(s.route, arch::ffs0(s.closers))));
        return true;
    }

    // Called when the job of next() is done. After the last one of a batch, the batch's partials are
    // published.
    MEGAMOE_DEVICE void done(Context& ctx) {
        ReducerState& s = mine(ctx);
        uint32_t left = s.closers & (s.closers - 1u);
        s.closers = static_cast<uint16_t>(left);
        if (left != 0) return;
        const Args& args = ctx.args;
        arch::warp_sync();  // all lanes' stores happen before each lane's release
        if ((s.route & route_closer) != 0 && !sums_into_y<T>(args)) {
            int ordered = route_token(s.route);
            int ranks = args.num_ranks, home = home_of(ordered, ranks);
            PartialsReady::publish(
                ctx.mem, ready_cell(ctx, home, args.rank, token_of(ordered, ranks), s.slice), ctx.epoch());
        }
        s.row = -1;
    }

  private:
    static MEGAMOE_DEVICE uint32_t* tiles_done(const Args& args) {
        return gemm_of<T>(args, reduced_gemm<T>(args)).done;
    }
    // A batch: so many rows, and one slice of their partials.
    static MEGAMOE_DEVICE void take(const Context& ctx) {
        int batch = next_batch(ctx, &ctx.smem.row_batches_taken), slices = ctx.smem.sum_slices.count;
        mine(ctx).row = batch / slices * ctx.smem.plan.batch_rows;
        mine(ctx).slice = static_cast<uint16_t>(batch % slices);
    }

    MEGAMOE_DEVICE bool blocks_done(Context& ctx, int num_tiles) {
        ReducerState& s = mine(ctx);
        if (s.done > s.block) return true;
        for (int first = s.done; first <= s.block; first += 32) {  // 32 blocks a look
            int b = first + arch::lane_idx();
            bool ready = b > s.block || YRowsReady::ready(ctx.mem, tiles_done(ctx.args) + b, num_tiles);
            uint32_t missing = ~arch::ballot(ready);
            if (missing != 0) {
                s.done = first + arch::ffs0(missing);
                return false;
            }
        }
        arch::warp_sync();
        // This is asked after the acquire: in a poisoned launch y_rows may be garbage, so nothing of it is
        // published.
        if (arch::ballot(arch::lane_idx() == 0 && ctx.mem.aborted()) != 0) return false;
        s.done = s.block + 1;
        return true;
    }

    MEGAMOE_DEVICE void load_batch(const Context& ctx) {
        const Args& args = ctx.args;
        ReducerState& s = mine(ctx);
        int lane = arch::lane_idx(), row = s.row + lane;
        bool mine = lane < ctx.smem.plan.batch_rows && row < ctx.smem.plan.num_rows;
        s.route = mine ? args.pool_routes[row] : 0;
        bool closes = (s.route & route_closer) != 0;
        uint32_t closers = arch::ballot(closes);
        s.closers = static_cast<uint16_t>(closers);
        if (closers == 0) return;
        int64_t route = int64_t{route_token(s.route)} * args.top_k + s.route % max_top_k;  // its k
        int block = closes ? args.route_rows[route] / block_rows : 0;
        MEGAMOE_UNROLL
        for (int mask = max_batch_rows / 2; mask > 0; mask /= 2)
            block = max_of(block, arch::shfl_xor(block, mask));
        s.block = arch::shfl(block, 0);
    }

    // A slice of a token's partial: rows in k order times routing weights, into this rank's slot in its
    // home's window. It crosses the link now, while tiles are computed, and not when the home has all
    // partials of the token: half of them come true in the last tenth of a launch. Gradients' rows have their
    // routing weight already.
    MEGAMOE_DEVICE void set_partial(const Context& ctx, int ordered) const {
        const Args& args = ctx.args;
        int lane = arch::lane_idx();
        int64_t route = int64_t{ordered} * args.top_k + lane;
        int row = lane < args.top_k ? args.route_rows[route] : -1;
        int ranks = args.num_ranks, home = home_of(ordered, ranks);
        int64_t row_bytes = int64_t{args.hidden} * 2;
        int64_t slot = int64_t{args.rank} * args.max_tokens + token_of(ordered, ranks);
        float weight = 0.0f;
        if constexpr (T::Sums::of_gradients) {
            weight = 1.0f;
            if (row >= 0 && mine(ctx).slice == 0)
                push_d_weight(ctx, row, home, int64_t{token_of(ordered, ranks)} * args.top_k + lane);
        } else {
            if (row >= 0) weight = args.route_weights[route];
        }
        uint64_t out = sums_into_y<T>(args)
                           ? reinterpret_cast<uint64_t>(args.rows_out) + token_of(ordered, 1) * row_bytes
                           : args.window[home] + args.window_partials + slot * row_bytes;
        set_job(ctx, out, reinterpret_cast<uint64_t>(args.y_rows), row, weight, arch::ballot(row >= 0),
                mine(ctx).slice);
    }

    // One lane: the gradient of a routing weight, the parts of its row in order, to its home.
    static MEGAMOE_DEVICE void push_d_weight(const Context& ctx, int row, int home, int64_t route) {
        const Args& args = ctx.args;
        int tiles = ceil_div(args.intermediate, T::Tiling::columns);
        const float* parts = own<T>(args).d_s + int64_t{row} * (tiles + 1);
        float sum = 0.0f;
        MEGAMOE_UNROLL_BY(1)
        for (int i = 0; i < (own<T>(args).b2 != nullptr ? tiles + 1 : tiles); ++i) sum += parts[i];
        ctx.window<float>(home, own<T>(args).window_d_weights)[route] = sum;
    }

    // Found anew at every use, since no register can hold it across a sum.
    static MEGAMOE_DEVICE ReducerState& mine(const Context& ctx) {
        return ctx.smem.movers.reducer[mover_thread()];
    }
};

}  // namespace megamoe
