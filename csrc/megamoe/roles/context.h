// What every role is given, and the tile stream that all of them walk.
#pragma once
#include "megamoe/act/policies.h"
#include "megamoe/layout/smem.h"
#include "megamoe/protocol/edges.h"
#include "megamoe/roles/profile.h"
#if defined(MEGAMOE_EMULATE)
#include "megamoe/arch/host/memory.h"
#else
#include "megamoe/protocol/ptx_memory.cuh"
#endif

namespace megamoe {

struct Context {
    const Args& args;
    Smem& smem;
    Memory mem;

    template <class V>
    MEGAMOE_DEVICE V* window(int rank, int64_t offset) const {
        return reinterpret_cast<V*>(args.window[rank] + offset);
    }
    MEGAMOE_DEVICE uint32_t epoch() const { return mem.epoch; }
    MEGAMOE_DEVICE int parity() const { return static_cast<int>(mem.epoch & 1); }
};

// Compile-time facts of a variant and the run-time sizes that follow from them.
template <class T>
struct Shape {
    using Precision = typename T::Precision;
    static constexpr bool gated = T::Activation::gated;
    static constexpr int h_columns = gated ? half_columns : tile_columns;  // columns of h a gemm1 tile makes

    static MEGAMOE_DEVICE int tiles1(const Args& args) { return ceil_div(args.intermediate, h_columns); }
    static MEGAMOE_DEVICE int tiles2(const Args& args) { return ceil_div(args.hidden, tile_columns); }
    static MEGAMOE_DEVICE int stages_of(const Args& args, Stage stage) {  // pipeline stages along K
        return ceil_div(stage == Stage::gemm1 ? args.hidden : args.intermediate, Precision::stage_k);
    }
    static MEGAMOE_DEVICE int scale_groups_h(const Args& args) { return ceil_div(args.hidden, scale_group); }
    static MEGAMOE_DEVICE int scale_groups_i(const Args& args) { return ceil_div(args.intermediate, scale_group); }
};

struct BlockEntry {  // one row of args.block_table
    int expert, row0, rows;
    int group;  // first block << 8 | size
};
MEGAMOE_DEVICE BlockEntry block_entry(const Args& args, int block) {
    const int32_t* e = args.block_table + int64_t{4} * block;
    return {e[0], e[1], e[2], e[3]};
}

struct Tile {
    bool valid;
    Stage stage;
    int block, n;
    int expert, row0, rows;
};

// The tiles of this CTA, in order; the same stream for every role.
template <class T>
class Tiles {
  public:
    MEGAMOE_DEVICE explicit Tiles(const Context& ctx)
        : args_(ctx.args),
          order_{ctx.smem.plan.num_blocks, Shape<T>::tiles1(ctx.args), Shape<T>::tiles2(ctx.args), ctx.args.gemm2_lag},
          index_(arch::block_idx()) {}

    MEGAMOE_DEVICE Tile next() {
        if (index_ >= order_.size()) return {false, Stage::gemm1, 0, 0, 0, 0, 0};
        Position p = order_.at(index_);
        index_ += arch::grid_dim();
        int packed = block_entry(args_, p.slot).group;
        Tile tile;
        tile.valid = true;
        tile.stage = p.stage;
        tile_in_group({packed >> 8, packed & 0xff}, p, p.stage == Stage::gemm1 ? order_.tiles1 : order_.tiles2, &tile.block,
                      &tile.n);
        BlockEntry e = block_entry(args_, tile.block);
        tile.expert = e.expert;
        tile.row0 = e.row0;
        tile.rows = e.rows;
        return tile;
    }

  private:
    const Args& args_;
    TileOrder order_;
    int index_;
};

// Position in a shared-memory ring: slot and the parity of its current lap.
struct RingPosition {
    int slot = 0;
    uint32_t parity = 0;
    MEGAMOE_DEVICE void advance() {
        if (++slot == num_stages) {
            slot = 0;
            parity ^= 1;
        }
    }
};

}  // namespace megamoe
