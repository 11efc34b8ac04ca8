// GEMMs without expert parallelism: one over rows that the caller has sorted by expert (megamoe.ops), or
// weight gradients over stashed rows. Roles, main loops, epilogues and tile order are the layer's;
// docs/ops.md lists the differences. A CTA waits only for its partner, so a launch may get any number of SMs.
#pragma once
#include "megamoe/epilogue/activation_gradient.cuh"
#include "megamoe/epilogue/plain.cuh"
#include "megamoe/epilogue/pre_activation.cuh"
#include "megamoe/epilogue/transposed_gradient.cuh"
#include "megamoe/epilogue/weight_gradient.cuh"
#include "megamoe/kernels/cta.cuh"
#include "megamoe/kernels/kinds.cuh"
#include "megamoe/roles/load.cuh"
#include "megamoe/roles/math.cuh"
#include "megamoe/roles/store.cuh"

namespace megamoe {

// A row of output for each row.
template <class S, class Rows, class Weights, class Epilogue, class Kind = GroupedKind>
struct GroupedLayer : Kind {
    static constexpr bool profile = false;
    using Tiling = S;
    using Gemm1 = GemmOf<Rows, Weights, Epilogue>;
    using Gemm2 = Gemm1;
};

// out = A B, plus a bias.
template <class S, class Rows, class Weights, class Out = Bf16Rows>
using GroupedProduct = GroupedLayer<S, Rows, Weights, PlainEpilogue<S, Out>>;
// h = activation(x w13); the second saves the pre-activations.
template <class S, class Rows, class Weights, class Activation, class HiddenRows, class Kind>
using GroupedActivation = GroupedLayer<S, Rows, Weights, ActivationEpilogue<S, Activation, HiddenRows>, Kind>;
template <class S, class Rows, class Weights, class Activation, class HiddenRows, class Kind>
using GroupedSaving = GroupedLayer<S, Rows, Weights, SavingEpilogue<S, Activation, HiddenRows>, Kind>;
// dgu = (dy w2) act'(gu), and h = act(gu); with GroupedScalingKind both times a factor for each row.
template <class S, class Rows, class Weights, class Activation, class Kind>
using GroupedGradient =
    GroupedLayer<S, Rows, Weights, ActivationGradientEpilogue<S, Activation, Bf16Rows>, Kind>;
// The same in e4m3: dgu by row and transposed, and h transposed.
template <class S, class Rows, class Weights, class Activation, class Kind>
using GroupedTransposedGradient =
    GroupedLayer<S, Rows, Weights, TransposedGradientEpilogue<S, Activation, E4m3Rows>, Kind>;

// A^T B of each expert's rows; or dw13 and dw2 over the rows that backward launches of several passes have
// kept, bf16 or transposed e4m3.
template <class S, int planes_, class A, class B, class Kind>
struct GroupedWeightGradients : Kind {
    static constexpr bool profile = false;
    static constexpr int planes = planes_;
    using Tiling = S;
    using WeightGemm = GemmOf<A, B, WeightGradientEpilogue<S>>;
    using Gemm1 = WeightGemm;
    using Gemm2 = WeightGemm;
};

// Registers of a thread. Transport warps need fewer here than in the layer; math gets the rest, since its
// epilogues would spill with 184.
constexpr int grouped_math_registers = 208;
constexpr int grouped_other_registers = (512 - 2 * grouped_math_registers) / 2;

// Who does what: every warp is here once, in the order of cta/warps.h.
template <class T>
MEGAMOE_DEVICE void run_grouped_role(Context& ctx, int warp) {
    if (warp >= first_math_warp) {
        arch::registers_grow<grouped_math_registers>();
        PipelineRing<T> ring;
        OutputRing<T> output;
        math<T>(ctx, ring, output);
        return;
    }
    arch::registers_shrink<grouped_other_registers>();
    if (warp >= first_transport_warp) {
        if constexpr (T::num_row_gemms != 0) {
            clear_rest<T>(ctx);
            const auto& gemm = gemm_of<T>(ctx.args, GemmId::gemm1);
            int groups = scale_groups<T>(gemm.n);
            if constexpr (T::WeightTiles::transposed) {
                int of_h = groups;
                if constexpr (!T::Gemm1::Epilogue::elementwise) groups *= T::Gemm1::Epilogue::gu_planes;
                clear_blocks<T>(ctx, of_h, groups);
            }
            if (gemm.out_scale != nullptr) clear_scales<T>(ctx, gemm.out_scale, groups);
        }
    } else if (arch::lane_idx() == 0) {
        PipelineRing<T> ring;
        OutputRing<T> output;
        TileRing scheduled;
        if (warp == load_a_role.first_warp) load_a<T>(ctx, ring, scheduled);
        if (warp == load_b_role.first_warp) load_b<T>(ctx, ring, scheduled);
        if (warp == store_role.first_warp) store<T>(ctx, output, scheduled);
        if (warp == scheduler_role.first_warp) schedule<T>(ctx, scheduled);
    }
}

template <class T>
MEGAMOE_DEVICE void grouped(const Args& args) {
    Smem& smem = cta_smem<T>().common;
    Context ctx{args, smem, cta_smem<T>().routing, Memory(args)};
    arch::wait_for_previous_grid();
    if (arch::thread_idx() == 0) {
        smem.cta = arch::block_idx();
        smem.num_ctas = arch::grid_dim();
    }
    if (arch::warp_idx() == first_transport_warp) T::Routes::template make_table<T>(ctx);
    init_barriers<T>();  // and a barrier of the pair, behind the table
    run_grouped_role<T>(ctx, arch::warp_idx());
    arch::warp_sync();
    arch::cluster_sync();  // a CTA stays until its partner has sent it the last arrival on its barriers
}

}  // namespace megamoe
