// The wide form (gemm/wide.cuh) of packed weights, for blocks of at most 64 rows in FP8. The expanded weights
// are the M of the MMAs and come from registers.
#pragma once
#include "megamoe/fp4/expand_slots.cuh"
#include "megamoe/fp4/operand.cuh"
#include "megamoe/gemm/wide.cuh"

namespace megamoe {

// BF16 has this form alone.
template <>
struct Multiply<Bf16Rows, Mxfp4Weights> {
    static constexpr int registers = 192;  // 128 sums, 32 of an operand
};
template <>
struct Multiply<Bf16Rows, Nvfp4Weights> : Multiply<Bf16Rows, Mxfp4Weights> {};

// Begins both halves of a slot. `accumulates`: adds to what is there.
template <class Element, int n>
MEGAMOE_DEVICE void issue_wide(WideSums<n>& acc, WideOperand (&a)[2], arch::Desc rows, bool accumulates) {
    MEGAMOE_UNROLL
    for (int half = 0; half < 2; ++half) {
        arch::fence_accumulator(acc[half]);
        MEGAMOE_UNROLL
        for (int k = 0; k < slot_mmas; ++k) arch::fence_operand(a[half][k]);
    }
    arch::wgmma_fence();
    MEGAMOE_UNROLL
    for (int k = 0; k < slot_mmas; ++k) {
        arch::Desc b = arch::desc_advance(rows, k * mma_k_bytes);
        arch::wgmma<Element>(acc[0], a[0][k], b, accumulates || k != 0);
        arch::wgmma<Element>(acc[1], a[1][k], b, accumulates || k != 0);
    }
    arch::wgmma_commit();
}
template <int n>
MEGAMOE_DEVICE void await_wide(WideSums<n>& acc, WideOperand (&a)[2]) {
    arch::wgmma_wait<0>();
    MEGAMOE_UNROLL
    for (int half = 0; half < 2; ++half) {
        arch::fence_accumulator(acc[half]);
        MEGAMOE_UNROLL
        for (int k = 0; k < slot_mmas; ++k) arch::fence_operand(a[half][k]);  // read until here
    }
}

// A step of K in flight: its operand, until its MMAs are done.
template <class T, int n>
struct WideStep {
    using Rows = typename T::Gemm1::A;
    using Packed = PackedRows<Rows, typename T::Gemm1::B>;
    using Slot = typename TileSmem<typename T::Tiling>::PipelineSlot;
    WideOperand a[2];
    float weight_scale[2];

    MEGAMOE_DEVICE void expand(const Slot& slot, int step, const Packed& at) {
        expand_wide(a, weight_scale, slot, step, at);
    }
    MEGAMOE_DEVICE void issue(WideSums<n>& sum, WideSums<n>& product, arch::Desc rows, bool first) {
        if constexpr (Rows::scaled) {
            issue_wide<typename Rows::Element, n>(product, a, rows, false);
        } else {
            issue_wide<typename Rows::Element, n>(sum, a, rows, !first);
        }
    }
    MEGAMOE_DEVICE void finish(WideSums<n>& sum, WideSums<n>& product, const float* row_scales, int quad) {
        if constexpr (Rows::scaled) {
            WideScales<n> scales(row_scales, quad);
            await_wide<n>(product, a);
            scales.promote(sum, product, weight_scale);
        } else {
            await_wide<n>(sum, a);
        }
    }
};

// `steps` of K, of which a pipeline slot holds `slot_steps`. Where registers suffice for both, the weights of
// the second are expanded while the first is multiplied.
template <class T, int n>
MEGAMOE_DEVICE void multiply_wide(WideSums<n>& sum, Context& ctx, PipelineRing<T>& ring, int steps,
                                  int slot_steps) {
    auto& smem = tile_smem<T>();
    constexpr int step_bytes = T::Tiling::step_rows * slot_k_bytes;
    arch::Desc rows = arch::make_desc(smem.slots[0].a);
    typename WideStep<T, n>::Packed at;
    int quad = WideFragment().quad;
    WideSums<n> product;
    clear<n>(sum);
    clear<n>(product);
    for (int i = 0; i < steps; i += slot_steps) {
        auto& slot = smem.slots[ring.slot()];
        const float* row_scales = smem.a_scale[ring.slot()];
        arch::Desc b = arch::desc_advance(rows, ring.slot() * static_cast<int>(sizeof(slot)));
        bool second = slot_steps == 2 && i + 1 < steps;
        await_slot<T>(ctx, ring);
        if constexpr (n <= 32) {
            WideStep<T, n> first;
            first.expand(slot, 0, at);
            first.issue(sum, product, b, i == 0);
            if (second) {
                WideStep<T, n> next;
                next.expand(slot, 1, at);
                first.finish(sum, product, row_scales, quad);
                next.issue(sum, product, arch::desc_advance(b, step_bytes), false);
                next.finish(sum, product, row_scales + T::Tiling::step_rows, quad);
            } else {
                first.finish(sum, product, row_scales, quad);
            }
        } else {
            MEGAMOE_UNROLL_BY(1)
            for (int s = 0; s < 1 + second; ++s) {
                WideStep<T, n> step;
                step.expand(slot, s, at);
                step.issue(sum, product, arch::desc_advance(b, s * step_bytes), i + s == 0);
                step.finish(sum, product, row_scales + s * T::Tiling::step_rows, quad);
            }
        }
        if constexpr (expands_slots<T>) {
            pass_half<T>(ctx, ring);  // all lanes have read
        } else {
            arch::warp_sync();
        }
        ring.release(ctx.mem, smem.pipeline);
        ring.advance();
    }
}

}  // namespace megamoe
