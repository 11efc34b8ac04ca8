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

template <class T>
MEGAMOE_DEVICE CtaSmem<typename T::Tiling>& cta_smem() {
    return *reinterpret_cast<CtaSmem<typename T::Tiling>*>(arch::dynamic_smem());
}
template <class T>
MEGAMOE_DEVICE TileSmem<typename T::Tiling>& tile_smem() {
    return cta_smem<T>().tiles;
}

MEGAMOE_DEVICE const Gemm& gemm_of(const Args& args, Stage stage) {
    return args.gemm[static_cast<int>(stage)];
}

// One GEMM of a layer: rows of the pool in a format, times weights in another, and an epilogue.
template <class Rows, class Weights, class Epilogue_>
struct GemmOf {
    using A = Rows;
    using B = Weights;
    using Epilogue = Epilogue_;
    static constexpr int slot_k = slot_k_bytes / A::element_bytes;  // values of K in a pipeline slot
};

// Compile-time facts of a layer's GEMMs, asked by stage, and the run-time sizes that follow from them.
template <class T>
class Shape {
    using G1 = typename T::Gemm1;
    using G2 = typename T::Gemm2;
    using E1 = typename G1::Epilogue;
    using E2 = typename G2::Epilogue;

  public:
    static MEGAMOE_DEVICE int tiles(const Args& args, Stage stage) {  // of a block
        return ceil_div(gemm_of(args, stage).n, stage == Stage::gemm1 ? E1::columns : E2::columns);
    }
    static MEGAMOE_DEVICE int slots_of(const Args& args, Stage stage) {  // pipeline slots that a tile fills
        return ceil_div(gemm_of(args, stage).k, slot_k(stage));
    }
    static MEGAMOE_DEVICE int slot_k(Stage stage) { return stage == Stage::gemm1 ? G1::slot_k : G2::slot_k; }
    static MEGAMOE_DEVICE bool a_scaled(Stage stage) {
        return stage == Stage::gemm1 ? G1::A::scaled : G2::A::scaled;
    }
    static MEGAMOE_DEVICE int planes(Stage stage) { return stage == Stage::gemm1 ? E1::planes : E2::planes; }
    static MEGAMOE_DEVICE int output_slots(Stage stage) {
        return stage == Stage::gemm1 ? E1::slots : E2::slots;
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

// The tiles of this CTA, in order; the same stream for every role.
template <class T>
class Tiles {
  public:
    MEGAMOE_DEVICE explicit Tiles(const Context& ctx)
        : args_(ctx.args),
          stream_(ctx.smem.plan.num_blocks, units_of(Shape<T>::tiles(ctx.args, Stage::gemm1)),
                  units_of(Shape<T>::tiles(ctx.args, Stage::gemm2)), step_blocks(ctx.args),
                  arch::block_idx() / pair_ctas, arch::grid_dim() / pair_ctas) {}

    MEGAMOE_DEVICE Tile next() {
        while (!stream_.done()) {
            Position p = stream_.pop();
            int tiles = Shape<T>::tiles(args_, p.stage);
            UnitTile unit;
            if (!unit_in_group(block_group(args_, p.portion), p, tiles, pair_member(), &unit)) continue;
            return {p.stage, unit.shared, unit.block, unit.n < tiles ? unit.n : -1,
                    block_entry(args_, unit.block)};
        }
        return {Stage::gemm1, Shared::b, -1, 0, {0}};
    }

  private:
    // Two gemm1 tiles a CTA and step, or what the caller asked for.
    static MEGAMOE_DEVICE int step_blocks(const Args& args) {
        int blocks = args.step_blocks != 0
                         ? args.step_blocks
                         : ceil_div(2 * arch::grid_dim(), Shape<T>::tiles(args, Stage::gemm1));
        return max_of(blocks, max_group);
    }

    const Args& args_;
    UnitStream stream_;
};

template <class T>
using PipelineRing = Ring<T::Tiling::num_slots>;
template <class T>
using OutputRing = Ring<T::Tiling::num_output_slots>;

// A thread's sums of a tile, by half.
template <class T>
using Sums = float[2][T::Tiling::sums];

// The first row of a tile's block in the pool.
template <class T>
MEGAMOE_DEVICE int row0(const Tile& tile) {
    return tile.block * T::Tiling::rows;
}

}  // namespace megamoe
