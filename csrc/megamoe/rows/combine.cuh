// combine: movers sum the partials of each of this rank's own tokens, when all expert ranks have sent theirs.
#pragma once
#include "megamoe/rows/batches.cuh"
#include "megamoe/rows/routes.cuh"
#include "megamoe/rows/sum.cuh"

namespace megamoe {

// A warp has up to four of the rank's own tokens at a time, and a lane for each (token, expert rank).
template <class T>
class Combiner {
  public:
    MEGAMOE_DEVICE explicit Combiner(const Context& ctx) { mine(ctx).token = -1; }

    MEGAMOE_DEVICE bool finished(const Context& ctx) const { return !has_tokens(ctx) && all_taken(ctx); }
    MEGAMOE_DEVICE bool waiting(const Context& ctx) const {  // this lane
        return mine(ctx).token >= 0 && (mine(ctx).owed & waits_bit) != 0;
    }

    // Sums a token whose partials are all there, if there is one: a slice of y[token] becomes their sum in
    // rank order, or zero without routes.
    MEGAMOE_DEVICE bool next(Context& ctx) {
        CombinerState& s = mine(ctx);
        if (!has_tokens(ctx)) {
            take(ctx);
            s.owed = owes(ctx.args, s.token) ? owed_bit | waits_bit : 0;
            if (sums_into_y<T>(ctx.args) && owed_by_any(s.owed)) s.token = -1;  // reduce writes y
        }
        if (waiting(ctx) &&
            PartialsReady::ready(ctx.mem, ready_cell(ctx, ctx.args.rank, expert_rank(), s.token, s.slice),
                                 ctx.epoch()))
            s.owed = owed_bit;
        uint32_t missing = arch::ballot(waiting(ctx)), owed = arch::ballot(s.owed != 0);
        uint32_t ready = arch::ballot(s.token >= 0 && lanes_of_token(missing, arch::lane_idx()) == 0);
        if (ready == 0) return false;
        arch::warp_sync();  // the lanes' acquires cover the whole warp's loads
        int chosen = arch::ffs0(ready), lane = arch::lane_idx();
        int token = arch::shfl(s.token, chosen);
        int64_t row_bytes = int64_t{ctx.args.hidden} * 2;
        if constexpr (T::Sums::of_gradients) {
            if (s.slice == 0) take_d_weights(ctx.args, token, false);
        }
        set_job(ctx, reinterpret_cast<uint64_t>(ctx.args.rows_out) + token * row_bytes,
                ctx.args.window[ctx.args.rank] + ctx.args.window_partials, lane * ctx.args.max_tokens + token,
                1.0f,  // the partial of rank `lane`
                lanes_of_token(owed, chosen), s.slice);
        if (lane / max_ranks == chosen / max_ranks) s.token = -1;
        return true;
    }

    // For a fault record: the token and the rank whose partial this lane waits for.
    MEGAMOE_DEVICE Wait waits_for(const Context& ctx) const {
        return {Edge::partials_ready, static_cast<uint32_t>(expert_rank()),
                static_cast<uint32_t>(mine(ctx).token)};
    }

    // Poisoned launch: no partial can be trusted, y becomes NaN.
    MEGAMOE_DEVICE void poison(Context& ctx) {
        CombinerState& s = mine(ctx);
        while (!finished(ctx)) {
            if (!has_tokens(ctx)) take(ctx);
            MEGAMOE_UNROLL_BY(1)
            for (int first = 0; first < 32; first += max_ranks) {
                int token = arch::shfl(s.token, first);
                uint8_t* out =
                    static_cast<uint8_t*>(ctx.args.rows_out) + int64_t{token} * ctx.args.hidden * 2;
                if (token < 0) continue;
                VectorRange range = slice_range(ctx, s.slice);
                MEGAMOE_UNROLL_BY(1)
                for (int v = range.begin + arch::lane_idx(); v < range.end; v += 32)
                    arch::store_vec(out + int64_t{v} * sizeof(uint4_t), {~0u, ~0u, ~0u, ~0u});
                if constexpr (T::Sums::of_gradients) {
                    if (s.slice == 0) take_d_weights(ctx.args, token, true);
                }
            }
            s.token = -1;
        }
    }

  private:
    static constexpr uint32_t owed_bit = 1, waits_bit = 2;  // CombinerState::owed
    static_assert(32 % max_ranks == 0, "a token's lanes stand in one warp");
    static MEGAMOE_DEVICE int expert_rank() { return arch::lane_idx() % max_ranks; }
    static MEGAMOE_DEVICE uint32_t lanes_of_token(uint32_t lanes, int lane) {  // bit i is expert rank i
        return lanes >> (lane / max_ranks * max_ranks) & ((1u << max_ranks) - 1);
    }
    static MEGAMOE_DEVICE bool owed_by_any(uint32_t owed) {  // of the ranks, to this lane's token
        return lanes_of_token(arch::ballot(owed != 0), arch::lane_idx()) != 0;
    }
    // The gradients of a token's routing weights, which their expert ranks have left in this rank's window.
    static MEGAMOE_DEVICE void take_d_weights(const Args& args, int token, bool poisoned) {
        int64_t route = int64_t{token} * args.top_k + arch::lane_idx();
        if (arch::lane_idx() >= args.top_k) return;
        const auto& own_args = own<T>(args);
        const auto* found =
            reinterpret_cast<const float*>(args.window[args.rank] + own_args.window_d_weights);
        float d_weight = topk_id(args, route) >= 0 ? found[route] : 0.0f;
        own_args.d_topk_weights[route] = poisoned ? arch::bf16_hi(0x7fc00000u) : d_weight;
    }

    static MEGAMOE_DEVICE bool has_tokens(const Context& ctx) {
        return arch::ballot(mine(ctx).token >= 0) != 0;
    }

    // Tokens of a batch, of which it has one slice: few enough that every mover has some.
    static MEGAMOE_DEVICE int tokens_per_batch(const Context& ctx) {
        int tokens = 32 / max_ranks;
        while (tokens > 1 && ctx.smem.own_tokens < tokens * num_movers * num_ctas(ctx)) tokens /= 2;
        return tokens;
    }
    static MEGAMOE_DEVICE int first_token(const Context& ctx, int batch) {
        return batch / ctx.smem.sum_slices.count * tokens_per_batch(ctx);
    }
    // Looks at a count that others add to: an old value costs one empty batch.
    static MEGAMOE_DEVICE bool all_taken(const Context& ctx) {
        int taken = arch::look_at_count(&ctx.smem.token_batches_taken);
        int next = arch::shfl(taken, 0) * num_ctas(ctx) + cta_idx(ctx);
        return first_token(ctx, next) >= ctx.smem.own_tokens;
    }
    static MEGAMOE_DEVICE void take(const Context& ctx) {
        int batch = next_batch(ctx, &ctx.smem.token_batches_taken), i = arch::lane_idx() / max_ranks;
        int token = first_token(ctx, batch) + i;
        mine(ctx).token = i < tokens_per_batch(ctx) && token < ctx.smem.own_tokens ? token : -1;
        mine(ctx).slice = batch % ctx.smem.sum_slices.count;
    }

    // Does this lane's expert rank owe the token a partial? A token's lanes look at its routes together.
    static MEGAMOE_DEVICE bool owes(const Args& args, int token) {
        uint32_t ranks = 0;
        MEGAMOE_UNROLL_BY(1)
        for (int k = expert_rank(); k < args.top_k && token >= 0; k += max_ranks) {
            int id = topk_id(args, int64_t{token} * args.top_k + k);
            if (id >= 0) ranks |= 1u << rank_of_expert(args.num_experts, args.num_ranks, id);
        }
        MEGAMOE_UNROLL
        for (int mask = max_ranks / 2; mask > 0; mask /= 2) ranks |= arch::shfl_xor(ranks, mask);
        return (ranks >> expert_rank() & 1) != 0;
    }

    // Found anew at every use, since no register can hold it across a sum.
    static MEGAMOE_DEVICE CombinerState& mine(const Context& ctx) {
        return ctx.smem.movers.combiner[mover_thread()];
    }
};

}  // namespace megamoe
