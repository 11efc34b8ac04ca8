// Addresses of expanded weights. A panel is the weights of a tile (expert, GEMM, n): its slots of K in a row,
// each with both halves of 128 rows x 128 bytes. A room holds all panels of one expert, w13's before w2's.
// Expert e uses room e % rooms.
#pragma once
#include "megamoe/gemm/operands.cuh"

namespace megamoe {

constexpr int patch_rows = 64;
template <class T>
struct PanelShape {
    int panels, slots;  // of an expert; of a panel
    MEGAMOE_DEVICE PanelShape(const Args& args, GemmId id)
        : panels(Shape<T>::tiles(args, id)), slots(Shape<T>::k_slots(args, id)) {}
    // A patch: 64 rows of a slot's half, what a warp makes at a time.
    MEGAMOE_DEVICE int patches() const { return T::Tiling::columns / patch_rows * slots; }
};

// Where a panel begins among all rooms, counted in slots of K.
template <class T>
MEGAMOE_DEVICE int panel_slot(const Args& args, GemmId id, int expert, int n) {
    PanelShape<T> first(args, GemmId::gemm1), second(args, GemmId::gemm2);
    int slots1 = first.panels * first.slots, slots2 = second.panels * second.slots;
    int room = expert % launch_args<T>(args).expanded.rooms * (slots1 + slots2);
    return room + (id == GemmId::gemm1 ? n * first.slots : slots1 + n * second.slots);
}
template <class T>
MEGAMOE_DEVICE int panels_of_expert(const Args& args) {
    return Shape<T>::tiles(args, GemmId::gemm1) + Shape<T>::tiles(args, GemmId::gemm2);
}
template <class T>
MEGAMOE_DEVICE uint32_t* panel_ready(const Args& args, GemmId id, int expert, int n) {
    int first = id == GemmId::gemm1 ? 0 : Shape<T>::tiles(args, GemmId::gemm1);
    return launch_args<T>(args).expanded.ready + expert * panels_of_expert<T>(args) + first + n;
}

// B of a tall tile, for load_b.
template <class T>
struct PanelRows {
    using S = typename T::Tiling;
    const TensorMap* map;
    int row;
    MEGAMOE_DEVICE PanelRows(Context& ctx, const Tile& tile)
        : map(&launch_args<T>(ctx.args).expanded.map),
          row(panel_slot<T>(ctx.args, tile.gemm, tile.expert(), tile.n) * S::columns) {
        PanelReady::await(ctx.mem, panel_ready<T>(ctx.args, tile.gemm, tile.expert(), tile.n),
                          PanelShape<T>(ctx.args, tile.gemm).patches(), tile.expert());
    }
    MEGAMOE_DEVICE void load(void* to, uint64_t* full, int slot, int half, bool both) {
        load_2d(both, to, map, full, 0, row + slot * S::columns + half * S::half_columns);
    }
};

}  // namespace megamoe
