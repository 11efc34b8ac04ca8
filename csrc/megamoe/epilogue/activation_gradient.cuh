// gemm1 of backward: a tile of dh and the pre-activations under it -> dgu = s dh act'(gu) and hs = s h, both
// bf16, and the tile's part of d_s = <dh, h>. s is the row's routing weight; it enters here, so that dy needs
// no second rounding and d_s no division.
//
// The pre-activations come through the pipeline, 64 columns a slot, gate in b[0] and up in b[1] (an ungated
// layer's up in b[0]): they are on their way while the last of K is multiplied.
#pragma once
#include "megamoe/act/policies.h"
#include "megamoe/epilogue/elementwise.cuh"

namespace megamoe {

template <class S, class Activation>
struct ActivationGradientEpilogue {
    static constexpr bool elementwise = false;
    static constexpr int planes = 1, columns = S::columns;  // of dh
    static constexpr int slot_columns = slot_k_bytes / 2, inputs = columns / slot_columns;
    static constexpr int gu_planes = Activation::gated ? 2 : 1;
    static constexpr int batch = gu_planes + 1;  // dgu, hs: of one input slot

    static MEGAMOE_DEVICE int slots(const Args&) { return inputs * batch; }
    static MEGAMOE_DEVICE Destination output(const Context& ctx, const Tile& tile, int slot) {
        int input = slot / batch, which = slot - input * batch;
        const TensorMap* map = which == gu_planes ? &ctx.args.training.hs : &ctx.args.training.dgu[which];
        return {map, tile.n * columns + input * slot_columns, ctx.args.gemm[0].n};
    }

    static MEGAMOE_DEVICE int boxes(const Tile& tile) { return tile.rows() > group_rows ? 2 : 1; }
    static MEGAMOE_DEVICE uint32_t input_bytes(const Tile& tile) {
        return gu_planes * boxes(tile) * box_bytes;
    }
    // One thread. Saved pre-activations are an earlier launch's, others stand where dgu will be since this
    // pass's first phase: neither needs a wait.
    template <class T, int bytes>
    static MEGAMOE_DEVICE void load_input(const Context& ctx, const Tile& tile, int input,
                                          uint8_t (&to)[2][bytes], uint64_t* full) {
        const Training& training = ctx.args.training;
        const TensorMap* maps = is_recomputed(ctx) ? training.dgu : training.gu;
        MEGAMOE_UNROLL_BY(1)
        for (int plane = 0; plane < gu_planes; ++plane) {
            MEGAMOE_UNROLL_BY(1)
            for (int box = 0; box < boxes(tile); ++box)
                arch::tma_load_2d(to[plane] + box * box_bytes, maps + plane, full,
                                  tile.n * columns + input * slot_columns, row0<T>(tile) + box * group_rows);
        }
    }
    static MEGAMOE_DEVICE bool is_recomputed(const Context& ctx) {
        return ctx.smem.plan.chunk_begin != 0 || ctx.args.training.recompute_all != 0;
    }

    template <class T, class Output>
    static MEGAMOE_DEVICE void run(Context& ctx, const Tile& tile, PipelineRing<T>& ring, Output& output,
                                   Sums<T>& sum) {
        const Args& args = ctx.args;
        auto& smem = tile_smem<T>();
        Fragment f;
        int group_row = math_group() * group_rows, row = row0<T>(tile) + group_row + f.row;
        const float s[2] = {args.training.row_weight[row], args.training.row_weight[row + 8]};
        float d_s[2] = {0.0f, 0.0f};
        MEGAMOE_UNROLL
        for (int input = 0; input < inputs; ++input) {
            await_slot<T>(ctx, ring);
            auto& b = smem.slots[ring.slot()].b;
            const uint8_t* gates = b[0] + math_group() * box_bytes;
            const uint8_t* ups = b[1] + math_group() * box_bytes;
            uint8_t* chunk[batch];
            output.claim(chunk);
            MEGAMOE_UNROLL
            for (int g = 0; g < slot_columns / 8; ++g) {
                constexpr int inputs_of_half = inputs / 2;
                float* dh =
                    &sum[input / inputs_of_half][(input % inputs_of_half * (slot_columns / 8) + g) * 4];
                MEGAMOE_UNROLL
                for (int i = 0; i < 2; ++i) {
                    int at = swizzled(f.row, 2 * f.column(g)) + i * 8 * slot_k_bytes;
                    uint32_t gate = *reinterpret_cast<const uint32_t*>(gates + at);
                    uint32_t up = Activation::gated ? *reinterpret_cast<const uint32_t*>(ups + at) : 0;
                    float dgate[2], dup[2], h[2];
                    MEGAMOE_UNROLL
                    for (int j = 0; j < 2; ++j) {
                        float dh_j = dh[2 * i + j];
                        Activation::gradient(args, j ? arch::bf16_hi(gate) : arch::bf16_lo(gate),
                                             j ? arch::bf16_hi(up) : arch::bf16_lo(up), dh_j, dgate[j],
                                             dup[j], h[j]);
                        d_s[i] += dh_j * h[j];
                    }
                    store_pair(chunk[0] + at, s[i] * dgate[0], s[i] * dgate[1]);
                    if (Activation::gated)
                        store_pair(chunk[gu_planes - 1] + at, s[i] * dup[0], s[i] * dup[1]);
                    store_pair(chunk[gu_planes] + at, s[i] * h[0], s[i] * h[1]);
                }
            }
            arch::warp_sync();  // all lanes have read the slot
            ring.release(ctx.mem, smem.pipeline);
            ring.advance();
            // Before the last hand-over, which the tile's release follows.
            if (input == inputs - 1) store_d_s(ctx, tile, d_s, row, f);
            output.template hand_over<batch>();
        }
    }

  private:
    static MEGAMOE_DEVICE void store_pair(uint8_t* to, float a, float b) {
        *reinterpret_cast<uint32_t*>(to) = arch::pack_bf16x2(a, b);
    }
    static MEGAMOE_DEVICE void store_d_s(const Context& ctx, const Tile& tile, float (&d_s)[2], int row,
                                         Fragment f) {
        int parts = ceil_div(ctx.args.gemm[0].n, columns) + 1;
        MEGAMOE_UNROLL
        for (int i = 0; i < 2; ++i) {  // a quad holds one row
            d_s[i] += arch::shfl_xor(d_s[i], 1);
            d_s[i] += arch::shfl_xor(d_s[i], 2);
            if (f.quad == 0) ctx.args.training.d_s[int64_t{row + 8 * i} * parts + tile.n] = d_s[i];
        }
    }
};

}  // namespace megamoe
