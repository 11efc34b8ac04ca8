// One GEMM over rows that the caller has sorted by expert, without expert parallelism: megamoe.ops. The
// roles, main loops, epilogues and tile order are the layer's; docs/ops.md says what is different. No CTA
// waits for another but its partner, so a launch takes the SMs that it gets.
#pragma once
#include "megamoe/epilogue/activation_gradient.cuh"
#include "megamoe/epilogue/plain.cuh"
#include "megamoe/epilogue/pre_activation.cuh"
#include "megamoe/epilogue/weight_gradient.cuh"
#include "megamoe/kernels/cta.cuh"
#include "megamoe/kernels/kinds.cuh"
#include "megamoe/roles/load.cuh"
#include "megamoe/roles/math.cuh"
#include "megamoe/roles/store.cuh"
#include "megamoe/rows/sorted.cuh"

namespace megamoe {

// A row of output for each row.
template <class S, class Rows, class Weights, class Epilogue, int k_planes = 1>
struct GroupedLayer : GroupedKind {
    static constexpr bool profile = false;
    using Tiling = S;
    using Gemm1 = GemmOf<Rows, Weights, Epilogue, k_planes>;
    using Gemm2 = Gemm1;
};

// out = A B, plus a bias.
template <class S, class Rows, class Weights, int k_planes = 1>
using GroupedProduct = GroupedLayer<S, Rows, Weights, PlainEpilogue<S, Bf16Rows>, k_planes>;
// h = activation(x w13); the second saves the pre-activations.
template <class S, class Rows, class Weights, class Activation, class HiddenRows>
using GroupedActivation = GroupedLayer<S, Rows, Weights, ActivationEpilogue<S, Activation, HiddenRows>>;
template <class S, class Activation>
using GroupedSaving = GroupedLayer<S, Bf16Rows, Bf16Weights, SavingEpilogue<S, Activation, Bf16Rows>>;
// dgu = (dy w2) act'(gu), and h = act(gu).
template <class S, class Activation>
using GroupedGradient =
    GroupedLayer<S, Bf16Rows, Bf16Columns, ActivationGradientEpilogue<S, Activation, Bf16Rows>>;

// A^T B of each expert's rows, in two forms whose sums have one order (K ascending, 16 a step), and so the
// same bits. One has the 16 warps of a layer. The other has no transport warps, which do nothing here: the
// four of one thread each and math, 384 threads. An MMA then takes all 256 columns of a tile, four a slot: a
// slot's A is read from shared memory once and not once a half, so that MMAs read 80 KB of it where they
// read 96. Slots and epilogue are the same: three pipeline slots, four output slots a math warpgroup, stores
// in bf16 or fp32 or additions by TMA. A prototype took 6.2 to 6.5 us a tile of 8 slots, with three slots as
// with four, where the tile of a layer's backward takes 9.1 (H200, 2026-11-23);
// megamoe/launch/weight_tiles.py chooses.
template <class S, class Kind_ = GroupedWeightsKind>
struct GroupedWeightGradient : Kind_ {
    static constexpr bool profile = false;
    using Tiling = S;
    using WeightGemm = GemmOf<Bf16Columns, Bf16Columns, WeightGradientEpilogue<S>>;
    using Gemm1 = WeightGemm;
    using Gemm2 = WeightGemm;
};

// Registers of a thread. Math gets what the others do not need: transport warps need fewer here than in the
// layer, and math's epilogues would spill with 184. What a launch begins with is all there is to deal out: 4
// warpgroups x 128 = 2 x 208 + 2 x 48, and 3 x 168 = 2 x 232 + 40.
template <class T>
constexpr int grouped_math_registers = T::Warps::whole_mmas ? 232 : 208;
template <class T>
constexpr int grouped_other_registers =
    (T::Warps::count / 4 * T::Warps::registers - num_math_warpgroups * grouped_math_registers<T>) /
    (T::Warps::count / 4 - num_math_warpgroups);

// Who does what: every warp is here once, in the order of cta/warps.h.
template <class T>
MEGAMOE_DEVICE void run_grouped_role(Context& ctx, int warp) {
    if (warp >= T::Warps::first_math) {
        arch::registers_grow<grouped_math_registers<T>>();
        PipelineRing<T> ring;
        OutputRing<T> output;
        math<T>(ctx, ring, output);
        return;
    }
    arch::registers_shrink<grouped_other_registers<T>>();
    if (warp >= first_transport_warp) {
        if constexpr (T::num_row_gemms != 0) clear_rest<T>(ctx);
    } else if (arch::lane_idx() == 0) {
        PipelineRing<T> ring;
        OutputRing<T> output;
        DealRing dealt;
        if (warp == load_a_role.first_warp) load_a<T>(ctx, ring, dealt);
        if (warp == load_b_role.first_warp) load_b<T>(ctx, ring, dealt);
        if (warp == store_role.first_warp) store<T>(ctx, output, dealt);
        if (warp == deal_role.first_warp) deal<T>(ctx, dealt);
    }
}

// The first one behind those of one thread, which have no role yet.
constexpr int table_warp = first_transport_warp;

template <class T>
MEGAMOE_DEVICE void grouped(const Args& args) {
    Smem& smem = cta_smem<T>().common;
    Context ctx{args, smem, cta_smem<T>().routing, Memory(args)};
    arch::wait_for_previous_grid();
    if (arch::thread_idx() == 0) {
        smem.cta = arch::block_idx();
        smem.num_ctas = arch::grid_dim();
    }
    if (arch::warp_idx() == table_warp) make_expert_table<T>(ctx);
    init_barriers<T>();  // and a barrier of the pair, behind the table
    run_grouped_role<T>(ctx, arch::warp_idx());
    arch::warp_sync();
    arch::cluster_sync();  // a CTA stays until its partner has sent it the last arrival on its barriers
}

}  // namespace megamoe
