// The only entry to fp4/: what roles and plan ask of a layer with packed weights. OneForm in gemm/forms.cuh
// explains each answer.
#pragma once
#include "megamoe/epilogue/wide.cuh"
#include "megamoe/fp4/expand.cuh"
#include "megamoe/fp4/load.cuh"
#include "megamoe/fp4/wide.cuh"

namespace megamoe {

// A tile in the wide form, as wide as its rows need. Each form runs to its own end, since the sums of two
// forms that meet would spill.
template <class T, int n, class Output>
MEGAMOE_DEVICE void run_wide_rows(Context& ctx, PipelineRing<T>& ring, Output& output, const Tile& tile) {
    WideSums<n> sum;
    multiply_wide<T, n>(sum, ctx, ring, Shape<T>::k_slots(ctx.args, tile.gemm), slot_steps<T>(tile));
    finish_wide<T>(ctx, current_tile<T>(), output, sum);
}
template <class T, class Output>
MEGAMOE_DEVICE void run_wide(Context& ctx, PipelineRing<T>& ring, Output& output, const Tile& tile) {
    constexpr int least = T::Pool::padded ? warpgroup_rows : 0, most = T::Tiling::rows;  // rows of a tile
    if (least < 16 && tile.rows() <= 16) {
        run_wide_rows<T, 16>(ctx, ring, output, tile);
    } else if (least < 32 && (most <= 32 || tile.rows() <= 32)) {
        run_wide_rows<T, 32>(ctx, ring, output, tile);
    } else if constexpr (most > 32) {
        if (has_tall<T> || tile.rows() <= 64) {
            run_wide_rows<T, 64>(ctx, ring, output, tile);
        } else if constexpr (!has_tall<T>) {
            run_wide_rows<T, 128>(ctx, ring, output, tile);
        }
    }
}

template <int scale_bytes, bool panels_>
struct PackedForms {
    static constexpr bool panels = panels_;  // may weights be expanded in memory, too?
    static constexpr int most_steps = 2;
    struct BesideWeights {
        uint8_t scales[scale_bytes];
    };
    template <int num_slots>
    struct Smem : PanelSmem<panels> {
        struct {
            uint64_t full[num_slots];
        } expanded;  // weights that math warps expand in their slots, before the MMAs
    };

    template <class T>
    struct Of {
        static constexpr bool is_packed = true, has_tall = megamoe::has_tall<T>, in_rooms = false;

        static MEGAMOE_DEVICE int slot_steps(const Tile& tile) { return megamoe::slot_steps<T>(tile); }
        template <class Visit>
        static MEGAMOE_DEVICE void each_barrier(int slot, Visit visit) {
            if constexpr (expands_slots<T>)  // of either half the four warps of a warpgroup
                visit(&tile_smem<T>().forms.expanded.full[slot], math_role.num_warps);
        }
        template <class Rows>
        static MEGAMOE_DEVICE void load_a(Context& ctx, PipelineRing<T>& ring, const Tile& tile, Rows& rows,
                                          int small, const float* scale) {
            load_a_steps<T>(ctx, ring, tile, rows, small, scale);
        }
        template <class Weights, class Scales>
        static MEGAMOE_DEVICE void load_b(Context& ctx, PipelineRing<T>& ring, const Tile& tile,
                                          Weights& weights, Scales& scales) {
            load_packed_b<T>(ctx, ring, tile, weights, scales);
        }
        static MEGAMOE_DEVICE void pass_slot(Context& ctx, const PipelineRing<T>& ring) {
            if constexpr (expands_slots<T>) pass_half<T>(ctx, ring);
        }
        static MEGAMOE_DEVICE void multiply(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring,
                                            const Tile& tile) {
            using M = MultiplyOf<typename T::Gemm1>;
            static_assert(same<M, MultiplyOf<typename T::Gemm2>>, "both GEMMs' rows have one format");
            Expansion<T> ahead(ctx, ring, tile.slots);
            ahead.next();
            M::template run<T>(sum, ctx, ring, tile.slots, ahead);
        }
        template <class Output>
        static MEGAMOE_DEVICE bool run_wide(Context& ctx, PipelineRing<T>& ring, Output& output,
                                            const Tile& tile) {
            if (!is_wide<T>(tile)) return false;
            megamoe::run_wide<T>(ctx, ring, output, tile);
            return true;
        }

        static MEGAMOE_DEVICE void begin_pass(const Context& ctx) {
            if constexpr (panels) Expander<T, TallPanels<T>>::begin_pass(ctx);
        }
        static MEGAMOE_DEVICE bool finished(const Context& ctx) {
            if constexpr (panels) return Expander<T, TallPanels<T>>::finished(ctx);
            return true;
        }
        static MEGAMOE_DEVICE bool next(Context& ctx) {
            if constexpr (panels) return Expander<T, TallPanels<T>>::next(ctx);
            return false;
        }
        static MEGAMOE_DEVICE void clear_counters(const Args& args, int expert) {
            if constexpr (panels) {
                int num = panels_of_expert<T>(args);
                MEGAMOE_UNROLL_BY(1)
                for (int i = arch::lane_idx(); i < num; i += 32)
                    launch_args<T>(args).expanded.ready[expert * num + i] = 0;
            }
        }
        static MEGAMOE_DEVICE void decide(const Context& ctx, const PassPlan& plan) {
            if constexpr (panels) {
                int& has = tile_smem<T>().forms.has_panels;
                has = *arch::in_member(&has, 1) = plan.num_rows > launch_args<T>(ctx.args).expanded.above;
            }
        }
    };
};

// A tile shape with packed weights: their scales take the place of an output slot.
template <class S, int scale_bytes, bool panels>
using WithPackedWeights = TileShape<S::rows, S::half_columns, S::num_slots, S::num_output_slots - 1,
                                    PackedForms<scale_bytes, panels>>;

}  // namespace megamoe
