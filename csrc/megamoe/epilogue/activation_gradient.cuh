// gemm1 of backward: from a tile of dh and its pre-activations, compute dgu = s dh act'(gu) and hs = s h,
// both bf16, and the tile's part of d_s = <dh, h>. s is the row's routing weight. It is multiplied in here,
// so that dy needs no second rounding and d_s no division.
//
// The pre-activations arrive through the pipeline, 64 columns per slot: gate in b[0] and up in b[1] (without
// a gate, up in b[0]). They are in flight while the last of K is multiplied. dgu replaces them in the slot,
// and hs replaces A.
//
// `Rows`: gemm2's A. If it has scales, each half of dgu is also written there, one output slot per plane,
// from the values rounded to bf16. They reuse the registers of their sums.
//
// Interleaved<>: b has the 128 columns of a slot's 64 of h in their order, and so have gu and dgu in memory.
#pragma once
#include "megamoe/act/policies.cuh"
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class S, class Activation, class Rows>
struct ActivationGradientEpilogue {
    static constexpr bool elementwise = false;
    static constexpr int planes = 1, columns = S::columns;  // of dh
    static constexpr int slot_columns = slot_k_bytes / 2, inputs = columns / slot_columns;
    static constexpr int gu_planes = Activation::gated ? 2 : 1;
    static constexpr bool interleaved = is_interleaved<Activation>;

    static constexpr int inputs_of_half = inputs / 2;
    static constexpr bool reuses_inputs = true;

    template <class T>
    static MEGAMOE_DEVICE int slots(const Args&) {
        return Rows::scaled ? 2 * gu_planes : 0;
    }
    static MEGAMOE_DEVICE int slots_before(int input) {
        return Rows::scaled ? input / inputs_of_half * gu_planes : 0;
    }
    template <class T>
    static MEGAMOE_DEVICE Destination output(const Context& ctx, const Tile& tile, int slot) {
        int half = slot / gu_planes;
        return {&gemm_of<T>(ctx.args, GemmId::gemm2).a[slot - half * gu_planes],
                tile.n * columns + half * S::half_columns, gemm_of<T>(ctx.args, tile.gemm).n};
    }

    static MEGAMOE_DEVICE int boxes(const Tile& tile) { return tile.rows() > warpgroup_rows ? 2 : 1; }
    static MEGAMOE_DEVICE uint32_t input_bytes(const Tile& tile) {
        return gu_planes * boxes(tile) * box_bytes;
    }
    // One thread. Saved pre-activations were written by an earlier launch, the others by the first phase of
    // this pass, where dgu will be: neither needs a wait.
    template <class T, class Slot>
    static MEGAMOE_DEVICE void load_input(const Context& ctx, const Tile& tile, int input, Slot& slot,
                                          uint64_t* full) {
        const auto& args = launch_args<T>(ctx.args);
        const TensorMap* maps = is_recomputed(ctx) ? gemm_of<T>(ctx.args, tile.gemm).out : args.gu;
        MEGAMOE_UNROLL_BY(1)
        for (int plane = 0; plane < gu_planes; ++plane) {
            MEGAMOE_UNROLL_BY(1)
            for (int box = 0; box < boxes(tile); ++box)
                arch::tma_load_2d(slot.b[plane] + box * box_bytes, maps + (interleaved ? 0 : plane), full,
                                  gu_column(tile, input, plane), row0<T>(tile) + box * warpgroup_rows);
        }
    }
    // One thread stores what run() has left in the slot.
    template <class T, class Slot>
    static MEGAMOE_DEVICE void store_input(const Context& ctx, const Tile& tile, int input,
                                           const Slot& slot) {
        const auto& gemm = gemm_of<T>(ctx.args, tile.gemm);
        int column = tile.n * columns + input * slot_columns;
        if (column >= gemm.n) return;
        MEGAMOE_UNROLL_BY(1)
        for (int box = 0; box < boxes(tile); ++box) {
            int row = box * warpgroup_rows;
            MEGAMOE_UNROLL_BY(1)
            for (int plane = 0; plane < gu_planes; ++plane) {
                int to = gu_column(tile, input, plane);
                if (interleaved && to >= 2 * gemm.n) continue;
                store_rows<T>(&gemm.out[interleaved ? 0 : plane], slot.b[plane] + box * box_bytes, to, tile,
                              row);
            }
            store_rows<T>(&launch_args<T>(ctx.args).hs, slot.a + box * box_bytes, column, tile, row);
        }
    }

    template <class T, class Output>
    static MEGAMOE_DEVICE void run(Context& ctx, const Tile& tile, PipelineRing<T>& ring, Output& output,
                                   Sums<T>& sum) {
        const Args& args = ctx.args;
        Fragment f;
        int group_row = math_warpgroup() * warpgroup_rows, row = row0<T>(tile) + group_row + f.row;
        constexpr bool weighted = T::Sums::of_rows;
        float s[2] = {1.0f, 1.0f};
        if constexpr (weighted) {
            const float* row_weight = own<T>(args).row_weight;
            s[0] = row_weight[T::Blocks::template at<T>(args, row)];
            s[1] = row_weight[T::Blocks::template at<T>(args, row + 8)];
        }
        float d_s[2] = {0.0f, 0.0f};
        // Halves and their inputs are loops, not copies: a tile fetches this code anew, and above 42 KB it
        // waits for it (docs/tuning.md, "The compiler"). The loops have no branch on the lane and a ring of
        // their own: with either, descriptors of MMAs would leave the uniform registers.
        PipelineRing<T> inputs_ring = ring;
        MEGAMOE_UNROLL
        for (int input = 0; input < inputs; ++input) ring.advance();
        MEGAMOE_UNROLL_BY(1)
        for (int half = 0; half < 2; ++half) {
            MEGAMOE_UNROLL_BY(1)
            for (int input = 0; input < inputs_of_half; ++input) {
                Fragment f;
                auto& slot = output.claim_input(inputs_ring);
                uint8_t* gates = slot.b[0] + math_warpgroup() * box_bytes;
                uint8_t* ups = slot.b[1] + math_warpgroup() * box_bytes;
                uint8_t* hs = slot.a + math_warpgroup() * box_bytes;
                uint32_t made[gu_planes][2][pairs_of_slot];
                MEGAMOE_UNROLL
                for (int g = 0; g < pairs_of_slot; ++g) {
                    MEGAMOE_UNROLL
                    for (int i = 0; i < 2; ++i) {
                        int at = swizzled(f.row, 2 * f.column(g)) + i * 8 * slot_k_bytes;
                        auto* gate = reinterpret_cast<uint32_t*>(gates + at);
                        auto* up = reinterpret_cast<uint32_t*>(ups + at);
                        if constexpr (interleaved) {
                            constexpr int of_box = pairs_of_slot / 2;
                            int there = swizzled(f.row, 4 * f.column(g % of_box)) + i * 8 * slot_k_bytes;
                            gate = reinterpret_cast<uint32_t*>((g < of_box ? gates : ups) + there);
                            up = gate + 1;
                        }
                        uint32_t first = *gate, second = Activation::gated ? *up : 0;
                        Pair pair = differentiate(args, first, second, &sum[0][4 * g + 2 * i], s[i], d_s[i]);
                        *gate = made[0][i][g] = pair.dgu[0];
                        if constexpr (Activation::gated) *up = made[1][i][g] = pair.dgu[1];
                        *reinterpret_cast<uint32_t*>(hs + at) = pair.hs;
                    }
                }
                replace_sums(sum[0], made);
                // This comes before the last hand-over, since the tile's release follows that.
                if constexpr (weighted)
                    put_d_s<T>(ctx, current_tile<T>(), d_s, half == 1 && input == inputs_of_half - 1);
                output.hand_over();
            }
            if constexpr (Rows::scaled)
                write_rows<T>(ctx, current_tile<T>(), output, dgu_of(sum[0], pairs_of_slot), half,
                              Fragment());
            MEGAMOE_UNROLL
            for (int i = 0; i < S::sums; ++i) sum[0][i] = sum[1][i];
        }
    }

  protected:
    // Of gu and dgu: where an input's gate or up columns begin, or its first or second 64 of both.
    static MEGAMOE_DEVICE int gu_column(const Tile& tile, int input, int plane) {
        int column = tile.n * columns + input * slot_columns;
        return interleaved ? 2 * column + plane * slot_columns : column;
    }
    // Of columns that a thread has in a row.
    static constexpr int pairs = S::half_columns / 8, pairs_of_slot = slot_columns / 8;
    struct Dgu {
        uint32_t of[gu_planes][2][pairs];
    };
    // Where dgu stands when a half is done, `step` pairs of a row at a time: in the registers of the sums
    // that it is made of, since there are no others. Each step's part goes behind those of the steps before
    // it, as the sums move up.
    static MEGAMOE_DEVICE int place_in_sums(int step, int plane, int i, int g) {
        return g / step * 4 * step + (2 * plane + i) * step + g % step;
    }
    template <int step>
    static MEGAMOE_DEVICE void replace_sums(float (&sum)[S::sums],
                                            const uint32_t (&made)[gu_planes][2][step]) {
        MEGAMOE_UNROLL
        for (int j = 0; j + 4 * step < S::sums; ++j) sum[j] = sum[j + 4 * step];
        MEGAMOE_UNROLL
        for (int p = 0; p < gu_planes; ++p) {
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) {
                MEGAMOE_UNROLL
                for (int g = 0; g < step; ++g)
                    sum[place_in_sums(step, p, i, pairs - step + g)] =
                        __builtin_bit_cast(float, made[p][i][g]);
            }
        }
        arch::fence_accumulator(sum);  // else ptxas spills in the main loop
    }
    static MEGAMOE_DEVICE Dgu dgu_of(const float (&sum)[S::sums], int step) {
        Dgu dgu;
        MEGAMOE_UNROLL
        for (int p = 0; p < gu_planes; ++p) {
            MEGAMOE_UNROLL
            for (int i = 0; i < 2; ++i) {
                MEGAMOE_UNROLL
                for (int g = 0; g < pairs; ++g)
                    dgu.of[p][i][g] = __builtin_bit_cast(uint32_t, sum[place_in_sums(step, p, i, g)]);
            }
        }
        return dgu;
    }
    struct Pair {  // of neighbouring columns, in bf16; interleaved, dgu is gate and up of each
        uint32_t dgu[gu_planes], hs;
    };
    static MEGAMOE_DEVICE Pair differentiate(const Args& args, uint32_t gate, uint32_t up, const float* dh,
                                             float s, float& d_s) {
        float dgate[2], dup[2], h[2];
        MEGAMOE_UNROLL
        for (int j = 0; j < 2; ++j) {
            bool gate_hi = !interleaved && j, up_hi = interleaved || j;
            uint32_t of_gate = interleaved && j ? up : gate, of_up = interleaved && !j ? gate : up;
            Activation::gradient(args, gate_hi ? arch::bf16_hi(of_gate) : arch::bf16_lo(of_gate),
                                 up_hi ? arch::bf16_hi(of_up) : arch::bf16_lo(of_up), dh[j], dgate[j], dup[j],
                                 h[j]);
            d_s += dh[j] * h[j];
        }
        Pair pair;
        if constexpr (interleaved) {
            for (int j = 0; j < 2; ++j) pair.dgu[j] = arch::pack_bf16x2(s * dgate[j], s * dup[j]);
        } else {
            pair.dgu[0] = arch::pack_bf16x2(s * dgate[0], s * dgate[1]);
            if constexpr (Activation::gated) pair.dgu[1] = arch::pack_bf16x2(s * dup[0], s * dup[1]);
        }
        pair.hs = arch::pack_bf16x2(s * h[0], s * h[1]);
        return pair;
    }
    template <class T>
    static MEGAMOE_DEVICE void put_d_s(const Context& ctx, const Tile& tile, const float (&d_s)[2],
                                       bool here) {
        Fragment f;
        int row = row0<T>(tile) + math_warpgroup() * warpgroup_rows + f.row;
        int parts = ceil_div(gemm_of<T>(ctx.args, tile.gemm).n, columns) + 1;
        float* to = own<T>(ctx.args).d_s + int64_t{row} * parts + tile.n;
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {  // a quad holds one row
            float all = d_s[i] + arch::shfl_xor(d_s[i], 1);
            all += arch::shfl_xor(all, 2);
            bool puts = here && f.quad == 0;
            if constexpr (!T::Blocks::in_pool)  // there, rows behind a block's are another's
                puts = puts && row + 8 * i < row0<T>(tile) + rows_used<T>(tile);
            arch::put_float(to + int64_t{8 * i} * parts, all, false, puts);
        }
    }

  private:
    // A half of all planes; the scales of a plane stand behind those of the one before.
    template <class T, class Output>
    static MEGAMOE_DEVICE void write_rows(const Context& ctx, const Tile& tile, Output& output,
                                          const Dgu& dgu, int half, Fragment f) {
        const Args& args = ctx.args;
        float* scales = scales_of_half<T>(ctx, tile, half);
        MEGAMOE_UNROLL
        for (int plane = 0; plane < gu_planes; ++plane) {
            Rows::write_bf16(output, dgu.of[plane], scales, f);
            if (scales != nullptr)
                scales += int64_t{ceil_div(gemm_of<T>(args, tile.gemm).n, scale_group)} * args.pool_rows;
        }
    }
};

}  // namespace megamoe
