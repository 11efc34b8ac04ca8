// What every role is given, and the tile stream that all of them walk.
#pragma once
#include "megamoe/cta/profile.h"
#include "megamoe/cta/smem.h"
#include "megamoe/protocol/edges.h"
#include "megamoe/protocol/ring.h"
#if defined(MEGAMOE_EMULATE)
#include "megamoe/protocol/host_memory.h"
#else
#include "megamoe/protocol/ptx_memory.cuh"
#endif

namespace megamoe {

struct Context {
    const Args& args;
    Smem& smem;
    RoutingSmem& routing;
    Memory mem;

    template <class V>
    MEGAMOE_DEVICE V* window(int rank, int64_t offset) const {
        return reinterpret_cast<V*>(args.window[rank] + offset);
    }
    MEGAMOE_DEVICE uint32_t epoch() const { return smem.epoch; }
    MEGAMOE_DEVICE int parity() const { return static_cast<int>(smem.epoch & 1); }
};

// What rank `of` says of this launch, in rank `at`'s window.
MEGAMOE_DEVICE RouteCell* route_cell(const Context& ctx, int at, int of) {
    const Args& args = ctx.args;
    return ctx.window<RouteCell>(at, args.window_routes) + ctx.parity() * args.num_ranks + of;
}

// Which CTA this is of those that take part in the launch, and how many do. Volatile for the reason that
// special registers are.
MEGAMOE_DEVICE int cta_idx(const Context& ctx) { return *static_cast<volatile int32_t*>(&ctx.smem.cta); }
MEGAMOE_DEVICE int num_ctas(const Context& ctx) {
    return *static_cast<volatile int32_t*>(&ctx.smem.num_ctas);
}
MEGAMOE_DEVICE int transport_index(const Context& ctx) {
    return cta_idx(ctx) * num_transport_warps + transport_warp();
}
MEGAMOE_DEVICE int num_transports(const Context& ctx) { return num_ctas(ctx) * num_transport_warps; }

template <class T>
MEGAMOE_DEVICE CtaSmem<typename T::Tiling>& cta_smem() {
    return *reinterpret_cast<CtaSmem<typename T::Tiling>*>(arch::dynamic_smem());
}
template <class T>
MEGAMOE_DEVICE TileSmem<typename T::Tiling>& tile_smem() {
    return cta_smem<T>().tiles;
}

// A math warp's copy of its tile: the slot that it began in may hold another before its epilogue.
template <class T>
MEGAMOE_DEVICE Tile& current_tile() {
    return tile_smem<T>().math_tile[arch::warp_idx() - first_math_warp];
}

// What a launch does. `train` is forward, and saves what `backward` needs.
enum class Direction { forward, train, backward };

// Stage::recompute has the sizes of backward's gemm1, dy w2: both make columns of the intermediate.
MEGAMOE_DEVICE const Gemm& gemm_of(const Args& args, Stage stage) {
    return args.gemm[stage == Stage::gemm2 ? 1 : 0];
}

template <class T>
MEGAMOE_DEVICE const float* b_scale_of(const Args& args, Stage stage) {
    if (T::direction == Direction::backward && stage == Stage::recompute) return args.training.w13_scale;
    return gemm_of(args, stage).b_scale;
}

// One GEMM of a layer: rows of the pool in a format, times weights in another, and an epilogue. Its K are
// `k_planes` planes of gemm_of().k.
template <class Rows, class Weights, class Epilogue_, int k_planes_ = 1>
struct GemmOf {
    using A = Rows;
    using B = Weights;
    using Epilogue = Epilogue_;
    static constexpr int slot_k = slot_k_bytes / A::element_bytes;  // values of K in a pipeline slot
    static constexpr int k_planes = k_planes_;
};

MEGAMOE_PURE bool is_weight_gradient(Stage stage) { return stage == Stage::dw13 || stage == Stage::dw2; }

// f(the layer's GEMM of a stage), a GemmOf.
template <class T, class F>
MEGAMOE_DEVICE auto of_stage(Stage stage, F f) {
    if constexpr (T::direction == Direction::backward) {
        if (is_weight_gradient(stage)) return f(typename T::WeightGemm{});
        if (stage == Stage::recompute) return f(typename T::RecomputeGemm{});
    }
    return stage == Stage::gemm1 ? f(typename T::Gemm1{}) : f(typename T::Gemm2{});
}

// Compile-time facts of a layer's GEMMs, asked by stage, and the run-time sizes that follow from them.
template <class T>
struct Shape {
    static MEGAMOE_DEVICE int tiles(const Args& args, Stage stage) {  // of a block
        return ceil_div(gemm_of(args, stage).n,
                        of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::Epilogue::columns; }));
    }
    // Pipeline slots of a tile of rows.
    static MEGAMOE_DEVICE int k_slots(const Args& args, Stage stage) {
        return of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::k_planes; }) *
               ceil_div(gemm_of(args, stage).k, slot_k(stage));
    }
    // Of B's scales, one every `group` of all its K.
    static MEGAMOE_DEVICE int scale_columns(const Args& args, Stage stage, int group) {
        return of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::k_planes; }) *
               ceil_div(gemm_of(args, stage).k, group);
    }
    static MEGAMOE_DEVICE int input_slots(Stage stage) {
        return of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::Epilogue::inputs; });
    }
    static MEGAMOE_DEVICE int slot_k(Stage stage) {
        return of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::slot_k; });
    }
    static MEGAMOE_DEVICE bool a_scaled(Stage stage) {
        return of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::A::scaled; });
    }
    static MEGAMOE_DEVICE bool b_scaled(Stage stage) {
        return of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::B::scaled; });
    }
    static MEGAMOE_DEVICE bool b_k_major(Stage stage) {
        return of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::B::k_major; });
    }
    static MEGAMOE_DEVICE int planes(Stage stage) {
        return of_stage<T>(stage, [](auto gemm) { return decltype(gemm)::Epilogue::planes; });
    }
};

// What the two halves of a tile are: gate and up of the same columns (in planes of w13), or neighbouring
// columns.
template <class S>
struct Halves {
    bool planes;
    int column0;  // of the first half, in its plane
    MEGAMOE_DEVICE int num_planes() const { return planes ? 2 : 1; }
    MEGAMOE_DEVICE int plane(int half) const { return planes ? half : 0; }
    MEGAMOE_DEVICE int column(int half) const { return column0 + (planes ? 0 : half * S::half_columns); }
};
template <class T>
MEGAMOE_DEVICE Halves<typename T::Tiling> halves_of(Stage stage, int n) {
    using S = typename T::Tiling;
    bool planes = Shape<T>::planes(stage) == 2;
    return {planes, n * (planes ? S::half_columns : S::columns)};
}

MEGAMOE_DEVICE BlockEntry block_entry(const Args& args, int block) {
    return {args.block_table[int64_t{2} * block]};
}
MEGAMOE_DEVICE Group block_group(const Args& args, int block) {
    int packed = args.block_table[int64_t{2} * block + 1];
    return {packed >> 8, packed & 0xff};
}

MEGAMOE_DEVICE int pair_member() { return arch::block_idx() % pair_ctas; }

// Were this pass's pre-activations made again, in the phase before, where dgu will be? Forward saves the
// first pass's.
MEGAMOE_DEVICE bool is_recomputed(const Context& ctx) { return ctx.smem.plan.chunk_begin != 0; }
// Are dx and d_topk_weights left out? Then reduce and combine hand over flags alone: a home still has to
// learn that its rows were pulled.
template <class T>
MEGAMOE_DEVICE bool only_weights(const Args& args) {
    return T::direction == Direction::backward && args.training.only_weights != 0;
}
// The last tiles that rows wait for before they are reduced.
template <class T>
MEGAMOE_DEVICE Stage reduced_stage(const Args& args) {
    return only_weights<T>(args) ? Stage::gemm1 : Stage::gemm2;
}
// Are weight gradients of this pass added to what is there?
MEGAMOE_DEVICE bool adds_weight_gradients(const Context& ctx) {
    return ctx.smem.plan.chunk_begin != 0 || ctx.args.training.accumulate != 0;
}
// dw13 or dw2: the rows of a plane, and columns.
MEGAMOE_DEVICE int gradient_rows(const Args& args, Stage stage) {
    return stage == Stage::dw13 ? args.gemm[0].n : args.gemm[0].k;
}
MEGAMOE_DEVICE int gradient_columns(const Args& args, Stage stage) {
    return stage == Stage::dw13 ? args.gemm[0].k : args.gemm[0].n;
}
// Where the m-block of a weight tile begins.
template <class S>
struct GradientBlock {
    int plane, row;
    MEGAMOE_DEVICE GradientBlock(const Args& args, const Tile& tile) {
        int blocks = ceil_div(gradient_rows(args, tile.stage), S::rows);
        plane = tile.block / blocks;
        row = (tile.block - plane * blocks) * S::rows;
    }
};
template <class T>
MEGAMOE_DEVICE WeightMatrix weight_matrix(const Args& args, Stage stage) {
    using S = typename T::Tiling;
    bool first = stage == Stage::dw13;
    if ((args.training.weights_wanted & (first ? 1 : 2)) == 0) return {0, 0};
    return {(first ? T::Gemm2::k_planes : 1) * ceil_div(gradient_rows(args, stage), S::rows),
            ceil_div(gradient_columns(args, stage), S::columns)};
}

// The tiles of this CTA, in order; the same stream for every role.
template <class T>
class Tiles {
  public:
    // `all_weights`: nothing but the tiles of weight gradients, those of experts without rows too.
    MEGAMOE_DEVICE explicit Tiles(const Context& ctx, bool all_weights = false)
        : ctx_(ctx),
          all_weights_(all_weights),
          stream_(ctx.smem.plan.num_blocks, units_of(Shape<T>::tiles(ctx.args, first_stage())),
                  units_of(Shape<T>::tiles(ctx.args, Stage::gemm2)), step_blocks(ctx),
                  cta_idx(ctx) / pair_ctas, num_ctas(ctx) / pair_ctas) {
        if (recomputes() || all_weights || only_weights<T>(ctx.args))
            stream_.next2 = stream_.num_blocks * stream_.units2;
        if (all_weights) stream_.next1 = stream_.num_blocks * stream_.units1;
    }

    MEGAMOE_DEVICE Tile next() {
        while (!stream_.done()) {
            Position p = stream_.pop();
            Stage stage = p.stage == Stage::gemm1 ? first_stage() : p.stage;
            int tiles = Shape<T>::tiles(ctx_.args, stage);
            UnitTile unit;
            if (!unit_in_group(block_group(ctx_.args, p.portion), p, tiles, pair_member(), &unit)) continue;
            return {stage,
                    unit.shared,
                    unit.block,
                    unit.n < tiles ? unit.n : -1,
                    block_entry(ctx_.args, unit.block),
                    Shape<T>::k_slots(ctx_.args, stage),
                    Shape<T>::input_slots(stage)};
        }
        if constexpr (T::direction == Direction::backward) {
            if (!recomputes()) return next_weights();
        }
        return {Stage::gemm1, Shared::b, -1, 0, {0}, 0, 0};
    }
    // No tile of gemm1 is to come.
    MEGAMOE_DEVICE bool gemm1_done() const { return !recomputes() && stream_.gemm1_done(); }

  private:
    MEGAMOE_DEVICE bool recomputes() const {
        return T::direction == Direction::backward && ctx_.smem.plan.phase == Phase::recompute;
    }
    MEGAMOE_DEVICE Stage first_stage() const { return recomputes() ? Stage::recompute : Stage::gemm1; }

    // An expert without rows has one slot, of zeros, unless zeros would be added.
    MEGAMOE_DEVICE Tile next_weights() {
        using S = typename T::Tiling;
        const Args& args = ctx_.args;
        WeightMatrix w13 = weight_matrix<T>(args, Stage::dw13), w2 = weight_matrix<T>(args, Stage::dw2);
        int num_units = num_weight_units(args.num_local_experts, w13, w2);
        while (next_weight_ * stride() + pair() < num_units) {
            WeightUnit w = weight_unit(next_weight_++ * stride() + pair(), w13, w2);
            int rows = ctx_.smem.plan.num_blocks != 0 ? args.training.expert_rows[2 * w.expert + 1] : 0;
            if (rows == 0 && adds_weight_gradients(ctx_) && !all_weights_) continue;
            WeightMatrix matrix = w.stage == Stage::dw13 ? w13 : w2;
            UnitTile unit;
            if (!unit_in_group(group_of(0, matrix.m_blocks, w.position.portion), w.position, matrix.n_tiles,
                               pair_member(), &unit))
                continue;
            return {w.stage,
                    unit.shared,
                    unit.block,
                    unit.n < matrix.n_tiles ? unit.n : -1,
                    {w.expert << 8 | S::rows},
                    max_of(1, ceil_div(rows, group_rows)),
                    0};
        }
        return {Stage::gemm1, Shared::b, -1, 0, {0}, 0, 0};
    }

    // Two gemm1 tiles a CTA and step, or what the caller asked for.
    static MEGAMOE_DEVICE int step_blocks(const Context& ctx) {
        const Args& args = ctx.args;
        int blocks = args.step_blocks != 0 ? args.step_blocks
                                           : ceil_div(2 * num_ctas(ctx), Shape<T>::tiles(args, Stage::gemm1));
        return max_of(blocks, max_group);
    }
    MEGAMOE_DEVICE int pair() const { return cta_idx(ctx_) / pair_ctas; }
    MEGAMOE_DEVICE int stride() const { return num_ctas(ctx_) / pair_ctas; }

    const Context& ctx_;
    bool all_weights_;
    UnitStream stream_;
    int next_weight_ = 0;  // of this pair
};

template <class T>
using PipelineRing = Ring<T::Tiling::num_slots>;
template <class T>
using OutputRing = Ring<T::Tiling::num_output_slots>;

// Math: the slot can be read.
template <class T>
MEGAMOE_DEVICE void await_slot(Context& ctx, PipelineRing<T> ring) {
    Profile<T>::timed(
        ctx.smem, Mark::slot_wait, [] { return arch::thread_idx() == first_math_warp * 32; },
        [&] { ring.await(ctx.mem, tile_smem<T>().pipeline); });
}

// A thread's sums of a tile, by half.
template <class T>
using Sums = float[2][T::Tiling::sums];

// The first row of a tile's block in the pool.
template <class T>
MEGAMOE_DEVICE int row0(const Tile& tile) {
    return tile.block * T::Tiling::rows;
}

}  // namespace megamoe
