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
    MEGAMOE_DEVICE uint32_t epoch() const { return smem.epoch; }
    MEGAMOE_DEVICE int parity() const { return static_cast<int>(smem.epoch & 1); }
};

// Compile-time facts of a variant and the run-time sizes that follow from them.
template <class T>
struct Shape {
    using Precision = typename T::Precision;
    static constexpr bool gated = T::Activation::gated;
    static constexpr int h_columns = gated ? half_columns : tile_columns;  // columns of h a gemm1 tile makes

    // Output chunks of 64 rows x 128 bytes that a warpgroup hands to the store warp for one tile.
    static MEGAMOE_DEVICE int output_chunks(Stage stage) {
        return stage == Stage::gemm1 ? h_columns * Precision::element_bytes / stage_k_bytes
                                     : tile_columns * 2 / stage_k_bytes;
    }
    static MEGAMOE_DEVICE int tiles1(const Args& args) { return ceil_div(args.intermediate, h_columns); }
    static MEGAMOE_DEVICE int tiles2(const Args& args) { return ceil_div(args.hidden, tile_columns); }
    static MEGAMOE_DEVICE int stages_of(const Args& args, Stage stage) {  // pipeline stages along K
        return ceil_div(stage == Stage::gemm1 ? args.hidden : args.intermediate, Precision::stage_k);
    }
    static MEGAMOE_DEVICE int scale_groups_h(const Args& args) { return ceil_div(args.hidden, scale_group); }
    static MEGAMOE_DEVICE int scale_groups_i(const Args& args) {
        return ceil_div(args.intermediate, scale_group);
    }
};

// args.block_table holds two words a block, each packed so that a tile costs few registers: expert << 8 |
// rows (at most 128), and the group's first block << 8 | its size.
struct BlockEntry {
    int packed;
    MEGAMOE_DEVICE int expert() const { return packed >> 8; }
    MEGAMOE_DEVICE int rows() const { return packed & 0xff; }
};
MEGAMOE_DEVICE BlockEntry block_entry(const Args& args, int block) {
    return {args.block_table[int64_t{2} * block]};
}
MEGAMOE_DEVICE Group block_group(const Args& args, int block) {
    int packed = args.block_table[int64_t{2} * block + 1];
    return {packed >> 8, packed & 0xff};
}

struct Tile {
    Stage stage;
    int block;  // -1: no more tiles
    int n;
    BlockEntry entry;
    MEGAMOE_DEVICE bool valid() const { return block >= 0; }
    MEGAMOE_DEVICE int expert() const { return entry.expert(); }
    MEGAMOE_DEVICE int rows() const { return entry.rows(); }
    MEGAMOE_DEVICE int row0() const { return block * block_rows; }
};

// The tiles of this CTA, in order; the same stream for every role.
template <class T>
class Tiles {
  public:
    MEGAMOE_DEVICE explicit Tiles(const Context& ctx)
        : args_(ctx.args),
          stream_(ctx.smem.plan.num_blocks, Shape<T>::tiles1(ctx.args), Shape<T>::tiles2(ctx.args),
                  step_blocks(ctx.args), arch::block_idx(), arch::grid_dim()) {}

    MEGAMOE_DEVICE Tile next() {
        if (stream_.done()) return {Stage::gemm1, -1, 0, {0}};
        Position p = stream_.pop();
        Tile tile;
        tile.stage = p.stage;
        tile_in_group(block_group(args_, p.slot), p,
                      p.stage == Stage::gemm1 ? stream_.tiles1 : stream_.tiles2, &tile.block, &tile.n);
        tile.entry = block_entry(args_, tile.block);
        return tile;
    }

  private:
    // Two gemm1 tiles a CTA and step, or what the caller asked for.
    static MEGAMOE_DEVICE int step_blocks(const Args& args) {
        int blocks =
            args.step_blocks != 0 ? args.step_blocks : ceil_div(2 * arch::grid_dim(), Shape<T>::tiles1(args));
        return max_of(blocks, max_group);
    }

    const Args& args_;
    TileStream stream_;
};

// Position in a shared-memory ring: slot and the parity of its current lap.
template <int slots>
struct RingPosition {
    int slot = 0;
    uint32_t parity = 0;
    MEGAMOE_DEVICE void advance() {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};
using StageRing = RingPosition<num_stages>;
using OutputRing = RingPosition<num_output_slots>;

}  // namespace megamoe
