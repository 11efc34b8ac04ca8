// How a tile of packed weights is computed: its form, and the steps of K per slot.
#pragma once
#include "megamoe/gemm/gemm.cuh"

namespace megamoe {

// A tile's K comes in steps of 128 bytes of a row. A pipeline slot holds one, or two where weights are packed
// and the tile is short, so that as many bytes are on their way as without packing. There is one step where B
// is shared, since the pair's other tile may be tall.
template <class T>
MEGAMOE_DEVICE int slot_steps(const Tile& tile) {
    return tile.shared == Shared::a && tile.rows() <= warpgroup_rows ? 2 : 1;
}
// Which steps of K the slot i of a tile holds.
template <class T>
struct SlotSteps {
    int first, num;
    MEGAMOE_DEVICE SlotSteps(const Args& args, const Tile& tile, int i) {
        first = i * slot_steps<T>(tile);
        num = min_of(slot_steps<T>(tile), Shape<T>::k_slots(args, tile.gemm) - first);
    }
};

// Which forms tiles of weights that are expanded have (fp4/wide.cuh). BF16 has only the wide one: 128 sums
// and an operand fit into a thread's registers. In FP8 there would be 64 products besides, which do not fit,
// so tiles of more than 64 rows have the tall form, whose weights are expanded in the pipeline's slots.
template <class T>
constexpr bool expands_slots = T::Gemm1::A::scaled;
template <class T>
constexpr bool has_tall = expands_slots<T>;
// Are weights of the tall form expanded in memory instead, once for all tiles of an expert (fp4/expand.cuh)?
// A launch has one answer, that of its first pass, which has most rows. Kernels that cannot do it are faster
// with few rows.
template <class T>
MEGAMOE_DEVICE bool has_panels() {
    if constexpr (T::Tiling::Forms::panels) return tile_smem<T>().forms.has_panels != 0;
    return false;
}
// Then a short block that shares B with a full one has the tall form, too.
template <class T>
MEGAMOE_DEVICE bool is_wide(const Tile& tile) {
    bool with_panel = has_panels<T>() && tile.shared == Shared::b;
    return !has_tall<T> || (tile.rows() <= warpgroup_rows && !with_panel);
}

// Where weights are expanded in memory (fp4/expand.cuh): how far a transport warp has come, by GEMM, and what
// it is working on.
struct ExpandedTo {
    int expert, block;  // the next one, where its blocks begin,
    int block_before;   // and those of the expert that had its room before
};
struct ExpanderState {
    ExpandedTo at[2];
    GemmId gemm;
    int expert, patch, patches;  // the next patch of an expert's; all are made: patch >= patches
};
template <bool panels>
struct PanelSmem {
    ExpanderState expander[num_transport_warps];
    int has_panels;  // the launch
};
template <>
struct PanelSmem<false> {};

}  // namespace megamoe
