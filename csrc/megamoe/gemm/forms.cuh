// The forms of a layer's tiles: how weights get from the pipeline's slots to the MMAs. A tile shape names a
// type like OneForm, whose Of<T> the roles ask; fp4/forms.cuh has another.
#pragma once
#include "megamoe/gemm/gemm.cuh"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE void multiply(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring, const Tile& tile, int slots);

template <class T>
using Forms = typename T::Tiling::Forms::template Of<T>;

// Can pairs meet in a launch of this layer (schedule/order.h)? Packed weights are expanded for a few experts
// at a time, in the order by steps; where pairs meet, the order is another.
template <class T>
constexpr bool can_meet = T::Scheduling::in_rounds && !Forms<T>::is_packed;

// MMAs read weights as they arrive: one form, one step of K a slot.
struct OneForm {
    static constexpr int most_steps = 1;
    struct BesideWeights {};  // of a pipeline slot
    template <int num_slots>
    struct Smem {};

    template <class T>
    struct Of {
        static constexpr bool is_packed = false, has_tall = true;
        // Are weights expanded in memory for all tiles? place_of() waits, and says in which room.
        static constexpr bool in_rooms = false;
        static MEGAMOE_DEVICE int slot_steps(const Tile&) { return 1; }
        template <class Visit>
        static MEGAMOE_DEVICE void each_barrier(int, Visit) {}  // visit(mbarrier, arrivals of a phase)
        static MEGAMOE_DEVICE void pass_slot(Context&, const PipelineRing<T>&) {}
        static MEGAMOE_DEVICE void multiply(Sums<T>& sum, Context& ctx, PipelineRing<T>& ring,
                                            const Tile& tile) {
            megamoe::multiply<T>(sum, ctx, ring, tile, tile.slots);
        }
        // Runs the wide form, where the tile has it.
        template <class Output>
        static MEGAMOE_DEVICE bool run_wide(Context&, PipelineRing<T>&, Output&, const Tile&) {
            return false;
        }
        // Work that transport warps do besides: a pass begins; whether all is done; do a piece, if there is
        // one.
        static MEGAMOE_DEVICE void begin_pass(const Context&) {}
        static MEGAMOE_DEVICE bool finished(const Context&) { return true; }
        static MEGAMOE_DEVICE bool next(Context&) { return false; }
        // What is set while a pass is planned: an expert's counters, and what the launch's first pass decides
        // for all passes.
        static MEGAMOE_DEVICE void clear_counters(const Args&, int) {}
        static MEGAMOE_DEVICE void decide(const Context&, const PassPlan&) {}
    };
};

}  // namespace megamoe
