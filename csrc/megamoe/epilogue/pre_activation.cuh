// Pre-activations: the sums of x w13 with their bias, rounded once to bf16, one output per plane. A training
// forward saves them before it computes h. Backward recomputes those that were not saved.
#pragma once
#include "megamoe/epilogue/activation.cuh"

namespace megamoe {

// A tile's four output slots of 64 columns.
template <class S, int planes>
struct PreActivations {
    static constexpr int slot_columns = slot_k_bytes / 2;
    static constexpr int slots = S::columns / slot_columns, slots_of_plane = slots / planes;

    static MEGAMOE_DEVICE Destination output(const TensorMap (&maps)[2], int width, int n, int slot) {
        int plane = slot / slots_of_plane;
        int column = (n * slots_of_plane + slot - plane * slots_of_plane) * slot_columns;
        return {&maps[plane], column, width};
    }
};

// gemm1 of a training forward: as ActivationEpilogue, with the pre-activations of the first pass first.
template <class S, class Activation, class Rows>
struct SavingEpilogue : ActivationEpilogue<S, Activation, Rows> {
    using Base = ActivationEpilogue<S, Activation, Rows>;
    using Saved = PreActivations<S, Base::planes>;
    static constexpr bool saves = true;

    template <class T>
    static MEGAMOE_DEVICE int slots(const Args& args) {
        return Saved::slots + Base::template slots<T>(args);
    }
    template <class T>
    static MEGAMOE_DEVICE Destination output(const Context& ctx, const Tile& tile, int slot) {
        if (slot >= Saved::slots) return Base::template output<T>(ctx, tile, slot - Saved::slots);
        int width = ctx.smem.plan.chunk_begin == 0 ? gemm_of<T>(ctx.args, tile.gemm).n : 0;
        return Saved::output(launch_args<T>(ctx.args).gu, width, tile.n, slot);
    }
};

// The same in backward, into the memory of dgu.
template <class S, class Activation>
struct RecomputeEpilogue {
    static constexpr bool elementwise = false;
    static constexpr int planes = Activation::gated ? 2 : 1, columns = S::columns / planes;
    static constexpr int inputs = 0;
    using Saved = PreActivations<S, planes>;

    template <class T>
    static MEGAMOE_DEVICE int slots(const Args&) {
        return Saved::slots;
    }
    template <class T>
    static MEGAMOE_DEVICE Destination output(const Context& ctx, const Tile& tile, int slot) {
        return Saved::output(gemm_of<T>(ctx.args, tile.gemm).out, gemm_of<T>(ctx.args, tile.gemm).n, tile.n,
                             slot);
    }
    template <class T, class Output>
    static MEGAMOE_DEVICE void run(Context& ctx, const Tile& tile, PipelineRing<T>&, Output& output,
                                   Sums<T>& sum) {
        Fragment f;
        add_bias<T>(tile, sum, gemm_of<T>(ctx.args, tile.gemm).bias, gemm_of<T>(ctx.args, tile.gemm).n, f);
        write_halves<Bf16Rows, T>(ctx, tile, 2, output, sum, f);
    }
};

}  // namespace megamoe
