// The main loop of one tile: 64 rows (one warpgroup) x 256 columns as two halves, over all of K. Measured
// (H200, 2026-11-21): fp32 promotion every 128 of K costs about 7 points of utilization. One accumulator of
// 64 registers is enough, because the other warpgroup's MMAs fill the tensor cores meanwhile.
#pragma once
#include "megamoe/formats/bf16.cuh"
#include "megamoe/formats/e4m3.cuh"
#include "megamoe/gemm/bias_gradient.cuh"
#include "megamoe/gemm/forms.cuh"

namespace megamoe {

// Descriptors of a warpgroup's operands in slot 0. Other slots are a fixed distance away, so that little
// arithmetic stands between a slot's barrier and its first MMA.
template <Major a_major, Major b_major>
struct Operands {
    arch::Desc a, b;
    template <class TileSmem>
    MEGAMOE_DEVICE Operands(TileSmem& smem, int warpgroup)
        : a(desc<a_major>(smem.slots[0].a + warpgroup * box_bytes)), b(desc<b_major>(smem.slots[0].b[0])) {}

    // `instruction`: which one of the slot, each for mma_k_bytes of K. MN-major, these are as many rows of
    // 128 bytes.
    static MEGAMOE_DEVICE arch::Desc a_at(arch::Desc d, int instruction) {
        return arch::desc_advance(d, instruction * k_distance(a_major));
    }
    static MEGAMOE_DEVICE arch::Desc b_at(arch::Desc d, int instruction) {
        return arch::desc_advance(d, instruction * k_distance(b_major));
    }

  private:
    static MEGAMOE_DEVICE int k_distance(Major major) {
        return major == Major::k ? mma_k_bytes : mma_k_bytes / 2 * slot_k_bytes;
    }
    template <Major major>
    static MEGAMOE_DEVICE arch::Desc desc(const void* tile) {
        return major == Major::k ? arch::make_desc(tile) : arch::make_desc_mn(tile, box_bytes);
    }
};

// What goes on beside a tile's slots: operator()(slot, i) for each, await(ring) before its MMAs.
struct NothingBeside {
    MEGAMOE_DEVICE void operator()(int, int) const {}
    template <class Ring>
    MEGAMOE_DEVICE void await(const Ring&) const {}
};

// How rows of one format are multiplied by weights of another: run(sum, ..., beside) over so many pipeline
// slots, with so many registers of a thread. `beside` is called for each slot: in BF16 while its MMAs run, in
// FP8 before them, as registers do not suffice for both.
template <class Rows, class Weights>
struct Multiply;
template <class G>
using MultiplyOf = Multiply<typename G::A, typename G::B>;

// Does one GEMM of rows sum in place and the other promote? Then they have sums apart, up to their ends:
// where the two meet, ptxas finds no registers for promoted products beside sums in place.
template <class T>
constexpr bool sums_apart = T::num_row_gemms == 2 && MultiplyOf<typename T::Gemm1>::in_place !=
                                                         MultiplyOf<typename T::Gemm2>::in_place;

// In place: both halves accumulate over all of K. A slot goes back to the loaders as soon as its own MMAs are
// done. Issuing the next slot's before that wait keeps one of three slots from being filled: 6 % slower.
template <class Element, Major a_major, Major b_major>
struct MultiplyInPlace {
    static constexpr bool in_place = true;
    static constexpr int registers = 184;  // 128 sums
    template <class T, class Beside>
    static MEGAMOE_DEVICE void run(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring, int slots,
                                   Beside beside) {
        using S = typename T::Tiling;
        using Ops = Operands<a_major, b_major>;
        TileSmem<S>& smem = tile_smem<T>();
        Ops operands(smem, math_warpgroup());
        if constexpr (T::WeightTiles::beside_rows || sums_apart<T>) {
            // Zeros, because there are sums of other forms beside these: while undefined they would be alive
            // there, too, and ptxas would spill.
            MEGAMOE_UNROLL
            for (int i = 0; i < S::sums; ++i) sum[0][i] = sum[1][i] = 0.0f;
        }
        for (int i = 0; i < slots; ++i) {
            int at = ring.slot() * static_cast<int>(sizeof(smem.slots[0]));
            arch::Desc a = arch::desc_advance(operands.a, at), b0 = arch::desc_advance(operands.b, at);
            arch::Desc b1 = arch::desc_advance(b0, S::half_columns * slot_k_bytes);
            await_slot<T>(ctx, ring);
            arch::fence_accumulator(sum[0]);
            arch::fence_accumulator(sum[1]);
            arch::wgmma_fence();
            MEGAMOE_UNROLL
            for (int k = 0; k < slot_k_bytes / mma_k_bytes; ++k) {
                arch::wgmma<Element, a_major, b_major>(sum[0], Ops::a_at(a, k), Ops::b_at(b0, k),
                                                       (i | k) != 0);
                arch::wgmma<Element, a_major, b_major>(sum[1], Ops::a_at(a, k), Ops::b_at(b1, k),
                                                       (i | k) != 0);
            }
            arch::wgmma_commit();
            beside(ring.slot(), i);
            arch::wgmma_wait<0>();
            arch::fence_accumulator(sum[0]);
            arch::fence_accumulator(sum[1]);
            ring.release(ctx.mem, smem.pipeline);
            ring.advance();
        }
    }
    template <class T>
    static MEGAMOE_DEVICE void run(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring, int slots) {
        run<T>(sum, ctx, ring, slots, NothingBeside{});
    }
};
template <>
struct Multiply<Bf16Rows, Bf16Weights> : MultiplyInPlace<bf16_t, Major::k, Major::k> {};
template <>
struct Multiply<Bf16Rows, Bf16Columns> : MultiplyInPlace<bf16_t, Major::k, Major::mn> {};
template <>
struct Multiply<Bf16Columns, Bf16Columns> : MultiplyInPlace<bf16_t, Major::mn, Major::mn> {};

// FP8 by token and channel: the row's scale, equal in all slots, is multiplied in behind K, that of the
// column in the epilogue.
template <>
struct Multiply<E4m3TokenRows, E4m3ChannelWeights> : MultiplyInPlace<e4m3_t, Major::k, Major::k> {
    template <class T>
    static MEGAMOE_DEVICE void run(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring, int slots) {
        int row = math_warpgroup() * warpgroup_rows + Fragment().row;
        float scale[2] = {};  // of rows `row` and `row` + 8
        MultiplyInPlace::run<T>(sum, ctx, ring, slots, [&](int slot, int) {
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) scale[i] = tile_smem<T>().a_scale[slot][row + 8 * i];
            arch::warp_sync();  // before one lane releases the slot for all
        });
        MEGAMOE_UNROLL
        for (int j = 0; j < T::Tiling::sums; ++j) {
            sum[0][j] *= scale[j / 2 % 2];
            sum[1][j] *= scale[j / 2 % 2];
        }
    }
};

// FP8 in groups of K: each half of each slot is multiplied into a fresh accumulator and promoted, times its
// scales, into fp32 sums. What stands between two MMAs of a warpgroup costs time (docs/tuning.md, "The FP8
// loop"): so scales are read once a slot, behind the first half's MMAs, their row stays in a register, and
// beside the promotion of the second half the next slot's barrier is looked at.
template <class Weights>
struct MultiplyPromoted {
    static constexpr bool in_place = false;
    static constexpr int registers = 208;  // 128 sums and 64 of one promotion
    template <class T, class Beside>
    static MEGAMOE_DEVICE void run(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring, int slots,
                                   Beside beside) {
        using S = typename T::Tiling;
        TileSmem<S>& smem = tile_smem<T>();
        Operands<Major::k, Major::k> operands(smem, math_warpgroup());
        MEGAMOE_UNROLL
        for (int i = 0; i < S::sums; ++i) sum[0][i] = sum[1][i] = 0.0f;
        constexpr int slot_bytes = sizeof(smem.slots[0]);
        int at = ring.slot() * slot_bytes;
        bool has_arrived = false;
        int row = math_warpgroup() * warpgroup_rows + Fragment().row;
        for (; slots > 0; --slots) {
            arch::Desc a = arch::desc_advance(operands.a, at), b0 = arch::desc_advance(operands.b, at);
            beside(ring.slot(), 0);
            if (!has_arrived) await_slot<T>(ctx, ring);
            beside.await(ring);
            float scale[2][2];  // of a half, of rows `row` and `row` + 8
            MEGAMOE_UNROLL
            for (int half = 0; half < 2; ++half) {
                arch::Desc b = arch::desc_advance(b0, half * S::half_columns * slot_k_bytes);
                float acc[S::sums];
                arch::fence_accumulator(acc);
                arch::wgmma_fence();
                MEGAMOE_UNROLL
                for (int k = 0; k < slot_k_bytes; k += mma_k_bytes) {
                    arch::wgmma<e4m3_t>(acc, arch::desc_advance(a, k), arch::desc_advance(b, k), k != 0);
                }
                arch::wgmma_commit();
                if (half == 0) {
                    const float* of_rows = smem.a_scale[ring.slot()] + row;
                    const float* of_halves = smem.b_scale[ring.slot()];
                    MEGAMOE_UNROLL
                    for (int h = 0; h < 2; ++h) {
                        scale[h][0] = of_rows[0];
                        scale[h][1] = of_rows[8];
                        if constexpr (Weights::scaled) {
                            scale[h][0] *= of_halves[h];
                            scale[h][1] *= of_halves[h];
                        }
                    }
                }
                arch::wgmma_wait<0>();
                arch::fence_accumulator(acc);
                if (half == 1) {
                    arch::warp_sync();  // all lanes have read the scales
                    ring.release(ctx.mem, smem.pipeline);
                    ring.advance();
                    has_arrived = ring.test(ctx.mem, smem.pipeline);
                    at = ring.slot() == 0 ? 0 : at + slot_bytes;
                }
                MEGAMOE_UNROLL
                for (int j = 0; j < S::sums; j += 4) {
                    sum[half][j] += scale[half][0] * acc[j];
                    sum[half][j + 1] += scale[half][0] * acc[j + 1];
                    sum[half][j + 2] += scale[half][1] * acc[j + 2];
                    sum[half][j + 3] += scale[half][1] * acc[j + 3];
                }
            }
        }
    }
    template <class T>
    static MEGAMOE_DEVICE void run(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring, int slots) {
        run<T>(sum, ctx, ring, slots, NothingBeside{});
    }
};
template <>
struct Multiply<E4m3Rows, E4m3Weights> : MultiplyPromoted<E4m3Weights> {};
template <>
struct Multiply<E4m3Rows, E4m3ChannelWeights> : MultiplyPromoted<E4m3ChannelWeights> {};

template <class T>
constexpr int math_registers =
    max_of(MultiplyOf<typename T::Gemm1>::registers, MultiplyOf<typename T::Gemm2>::registers);

// The K of a tile, its first `slots` pipeline slots.
template <class T>
MEGAMOE_DEVICE void multiply(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring, const Tile& tile, int slots) {
    using M1 = MultiplyOf<typename T::Gemm1>;
    using M2 = MultiplyOf<typename T::Gemm2>;
    if constexpr (T::WeightTiles::beside_rows) {
        using Again = MultiplyOf<typename T::RecomputeGemm>;
        if (!same<Again, M1> && tile.gemm == GemmId::recompute) {
            Again::template run<T>(sum, ctx, ring, slots);
            return;
        }
    }
    if (same<M1, M2> || tile.gemm == GemmId::gemm1) {
        M1::template run<T>(sum, ctx, ring, slots);
    } else {
        M2::template run<T>(sum, ctx, ring, slots);
    }
}

// The K of a weight tile, with the gradient of its bias beside it. It has sums of its own, as where
// sums_apart.
template <class T>
MEGAMOE_DEVICE void multiply_gradient(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring, const Tile& tile) {
    using M = MultiplyOf<typename T::WeightGemm>;
    BiasGradient<T> bias(ctx, tile);
    if (!bias.wanted()) {  // a loop of its own: a question in each slot would be a branch on what is no
                           // constant
        M::template run<T>(sum, ctx, ring, tile.slots);
        return;
    }
    M::template run<T, BiasGradient<T>&>(sum, ctx, ring, tile.slots, bias);
    bias.store(ctx, tile);
}

// A warpgroup without rows keeps the pipeline's arrivals complete and computes nothing.
template <class T>
MEGAMOE_DEVICE void skip_slots(Context& ctx, PipelineRing<T>& ring, int slots) {
    MEGAMOE_UNROLL_BY(1)
    for (int i = 0; i < slots; ++i) {
        ring.await(ctx.mem, tile_smem<T>().pipeline);
        Forms<T>::pass_slot(ctx, ring);
        arch::warp_sync();
        ring.release(ctx.mem, tile_smem<T>().pipeline);
        ring.advance();
    }
}

}  // namespace megamoe
