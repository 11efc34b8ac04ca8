// Scales of weights by column of N: after K, a tile's sums are multiplied by them. A math warpgroup fetches
// them itself when its tile begins, so no other role has to know when they were read.
#pragma once
#include "megamoe/cta/blocks.cuh"
#include "megamoe/formats/fragment.cuh"
#include "megamoe/gemm/gemm.cuh"

namespace megamoe {

// Of both halves of a warpgroup's tile, in the memory that its own threads have as movers when no tiles are
// left: there is no other room. Grouped launches have no movers.
template <class T>
struct ColumnScales {
    static constexpr int columns = T::Tiling::half_columns;
    alignas(16) float of_half[2][columns];

    static MEGAMOE_DEVICE ColumnScales& own(const Context& ctx) {
        if constexpr (!T::Blocks::in_pool) {
            auto& scales = ctx.smem.experts.column_scales[math_warpgroup()];
            static_assert(sizeof(ColumnScales) == sizeof(scales), "of tiles as wide as these");
            return reinterpret_cast<ColumnScales&>(scales);
        } else {
            constexpr int size = 128 * sizeof(ReducerState);  // of a warpgroup
            static_assert(sizeof(ColumnScales) <= size && size % alignof(ColumnScales) == 0 &&
                              alignof(MoverSmem) % alignof(ColumnScales) == 0,
                          "others may be movers already; copies of 16 bytes");
            auto* first = ctx.smem.movers.reducer + num_transport_warps * 32;
            return *reinterpret_cast<ColumnScales*>(first + math_warpgroup() * 128);
        }
    }

    // All threads of the warpgroup; the first warp copies those of the first half, the second of the second.
    static MEGAMOE_DEVICE void fetch(const Context& ctx, const Tile& tile) {
        constexpr int of_lane = columns / 32;
        static_assert(of_lane * sizeof(float) == 16, "a copy");
        const auto& gemm = gemm_of<T>(ctx.args, tile.gemm);
        Halves<typename T::Tiling> halves = halves_of<T>(tile.gemm, tile.n);
        warpgroup_sync(math_warpgroup());  // those of the tile before were read
        int half = arch::warp_idx() & 3, mine = arch::lane_idx() * of_lane;
        if (half >= 2) return;
        int plane = tile.expert() * halves.num_planes() + halves.plane(half);
        int column = halves.column(half) + mine;
        bool exists = column < gemm.n;
        const float* from = gemm.b_scale + int64_t{plane} * gemm.n + (exists ? column : 0);
        arch::copy_async(own(ctx).of_half[half] + mine, from, exists);
    }
    // Behind the last tile: before a thread is a mover, all others have read them.
    static MEGAMOE_DEVICE void end() { warpgroup_sync(math_warpgroup()); }
    static MEGAMOE_DEVICE void multiply(const Context& ctx, Sums<T>& sum, Fragment f) {
        struct alignas(8) Pair {
            float first, second;
        };
        arch::copies_wait();
        warpgroup_sync(math_warpgroup());
        MEGAMOE_UNROLL
        for (int half = 0; half < 2; ++half) {
            MEGAMOE_UNROLL
            for (int g = 0; g < T::Tiling::sums / 4; ++g) {
                auto scale = *reinterpret_cast<const Pair*>(own(ctx).of_half[half] + f.column(g));
                MEGAMOE_UNROLL
                for (int i = 4 * g; i < 4 * g + 4; i += 2) {
                    sum[half][i] *= scale.first;
                    sum[half][i + 1] *= scale.second;
                }
            }
        }
    }
};

}  // namespace megamoe
