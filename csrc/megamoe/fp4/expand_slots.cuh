// The tall form of packed weights: math warps expand them in the pipeline's slots, a slot ahead of its MMAs.
#pragma once
#include "megamoe/fp4/format.cuh"
#include "megamoe/fp4/steps.cuh"
#include "megamoe/gemm/mainloop.cuh"

namespace megamoe {

// Weights of the tall form are expanded where they arrived, in the pipeline's slots: each warpgroup's half by
// its four warps. They just pass on slots of wide tiles, so that each lap is complete. A launch whose weights
// are expanded in memory has no such laps.
template <class T>
MEGAMOE_DEVICE void pass_half(Context& ctx, const PipelineRing<T>& ring) {
    arch::warp_sync();  // the warp's writes and fences
    if (arch::lane_idx() == 0) ring.commit(ctx.mem, tile_smem<T>().forms.expanded);
}
template <class T>
class Expansion {
  public:
    MEGAMOE_DEVICE Expansion(Context& ctx, const PipelineRing<T>& ring, int slots)
        : ctx_(ctx), ring_(ring), in_slots_(!has_panels<T>()), slots_(in_slots_ ? slots : 0) {}
    MEGAMOE_DEVICE void operator()(int, int) { next(); }  // beside a slot's MMAs
    MEGAMOE_DEVICE void next() {
        if (slots_ == 0) return;
        --slots_;
        await_slot<T>(ctx_, ring_);
        auto& smem = tile_smem<T>();
        int slot = ring_.slot(), half = math_warpgroup();
        using A = typename T::Gemm1::A;
        using B = typename T::Gemm1::B;
        uint8_t* scales = smem.slots[slot].scales + PackedHalf<A, B>::scale_offset(0, half);
        expand_half(smem.slots[slot].b[half], scales, &smem.b_scale[slot][half],
                    [&] { warpgroup_sync(half); });
        pass_half<T>(ctx_, ring_);
        ring_.advance();
    }

    MEGAMOE_DEVICE void await(const PipelineRing<T>& ring) const {
        if (in_slots_) ring.await(ctx_.mem, tile_smem<T>().forms.expanded);
    }

  private:
    Context& ctx_;
    PipelineRing<T> ring_;
    bool in_slots_;
    int slots_;
};

// Behind the expansion.
template <>
struct Multiply<E4m3QuadRows, Mxfp4Weights> : Multiply<E4m3Rows, E4m3Weights> {};

}  // namespace megamoe
