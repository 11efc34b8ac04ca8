// What every role is given, and what it may ask of a tile. The stream of tiles is cta/tiles.h.
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

// What a launch does. `train` is forward, and saves what `backward` needs. The grouped ones run one GEMM over
// rows that the caller has sorted by expert: a row of output for each, or a matrix for each expert.
enum class Direction { forward, train, backward, grouped, grouped_weights };
template <class T>
constexpr bool is_grouped = T::direction == Direction::grouped || T::direction == Direction::grouped_weights;
template <class T>
constexpr bool has_weight_tiles =
    T::direction == Direction::backward || T::direction == Direction::grouped_weights;

// Stage::recompute has the n and k of backward's gemm1, dy w2: both make columns of the intermediate. Not its
// tiles: those of recompute have two planes, of half as many columns.
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
// Where the m-block of a weight tile begins. A matrix has at most two planes: no division.
template <class S>
struct GradientBlock {
    int plane, row;
    MEGAMOE_DEVICE GradientBlock(const Args& args, const Tile& tile) {
        int blocks = ceil_div(gradient_rows(args, tile.stage), S::rows);
        plane = tile.block < blocks ? 0 : 1;
        row = (tile.block - plane * blocks) * S::rows;
    }
};
// A tile's K comes in steps of 128 bytes of a row. A pipeline slot holds one, or two where weights are packed
// and the tile is short, so that as many bytes are on their way as without packing. Not where B is shared:
// the pair's other tile may be tall.
template <class T>
MEGAMOE_DEVICE int slot_steps(const Tile& tile) {
    if constexpr (!T::Gemm1::B::expanded) return 1;
    return tile.shared == Shared::a && tile.rows() <= group_rows ? 2 : 1;
}
// Of the tile's slot i, and which is its first.
template <class T>
struct SlotSteps {
    int first, num;
    MEGAMOE_DEVICE SlotSteps(const Args& args, const Tile& tile, int i) : first(i), num(1) {
        if constexpr (T::Gemm1::B::expanded) {
            first = i * slot_steps<T>(tile);
            num = min_of(slot_steps<T>(tile), Shape<T>::k_slots(args, tile.stage) - first);
        }
    }
};

// Which forms tiles of weights that are expanded have (gemm/wide.cuh). In BF16 the wide one alone: 128 sums
// and an operand fit a thread's registers. In FP8 64 products besides do not, and tiles of more than 64 rows
// have the tall form, whose weights are expanded in the pipeline's slots.
template <class T>
constexpr bool expands_slots = T::Gemm1::B::expanded && T::Gemm1::A::scaled;
template <class T>
constexpr bool has_tall = !T::Gemm1::B::expanded || expands_slots<T>;
// Are weights of the tall form expanded in memory instead, once for all tiles of an expert
// (roles/expand.cuh)? A launch has one answer, its first pass', which has most rows. Kernels that cannot are
// faster with few.
template <class T>
MEGAMOE_DEVICE bool has_panels() {
    if constexpr (T::Tiling::panels) return tile_smem<T>().expanded.has_panels != 0;
    return false;
}
// Then a short block that shares B with a full one has the tall form, too.
template <class T>
MEGAMOE_DEVICE bool is_wide(const Tile& tile) {
    bool with_panel = has_panels<T>() && tile.shared == Shared::b;
    return T::Gemm1::B::expanded && (!has_tall<T> || (tile.rows() <= group_rows && !with_panel));
}

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

// The first row of a tile's block: in the pool, or of the caller's rows.
template <class T>
MEGAMOE_DEVICE int row0(const Tile& tile) {
    if constexpr (is_grouped<T>) {
        const ExpertTable& table = cta_smem<T>().common.experts;
        int expert = tile.expert();
        return table.first_row[expert] + (tile.block - table.first_block[expert]) * T::Tiling::rows;
    } else {
        return tile.block * T::Tiling::rows;
    }
}

// Where the scales of a tile's rows stand: by block, also where the rows of experts follow each other.
template <class T>
MEGAMOE_DEVICE int scale_row0(const Tile& tile) {
    return tile.block * T::Tiling::rows;
}

// One thread: 64 rows of a tile, from its row `row` on, to an output that has the launch's rows. Where
// experts' rows follow each other the map is ragged: its dimensions are (columns, 64, rows + 1, 1), with one
// distance between rows in both, and it begins 64 rows early. A box at 64 - n, first + n is `first` and the n
// - 1 rows behind it, as TMA clips the others. docs/ops.md has the picture, and why loads do not do it.
template <class T>
MEGAMOE_DEVICE void store_rows(const TensorMap* map, const void* from, int column, const Tile& tile,
                               int row) {
    if constexpr (is_grouped<T>) {
        int first = row0<T>(tile) + row, n = min_of(group_rows, tile.rows() - row);
        arch::tma_store_4d(map, from, column, group_rows - n, first + n, 0);
    } else {
        arch::tma_store_2d(map, from, column, row0<T>(tile) + row);
    }
}

}  // namespace megamoe
