// In-kernel timestamps of a variant with Traits::profile: args.profile[cta][16]. Marks are nanoseconds of
// %globaltimer, except the clock readings, which give the SM clock: (clock_end - clock_start) / (end -
// start) GHz, and the waits, which are cycles summed over the launch. The sums stand in shared memory until
// the end: added up in memory, they made FP8 8 to 13 % slower.
#pragma once
#include "megamoe/arch/arch.cuh"
#include "megamoe/cta/smem.h"

namespace megamoe {

enum class Mark : int {
    clock_start,
    clock_end,
    start,
    end,
    routed,
    dispatched,
    math_done,
    combined,
    rows_wait,
    h_wait,
    slot_wait,
    staged,
    clock_data,  // at data_done
    data_done,   // math's first tile of weight gradients
    planned,     // the pass's plan
    first_slot   // math has seen the first slot of the pass filled
};

template <class T>
class Profile {
  public:
    static MEGAMOE_DEVICE void begin(const Args& args, Smem& smem) {
        if constexpr (T::profile) {
            if (arch::thread_idx() != 0) return;
            for (int i = 0; i < num_wait_marks; ++i) smem.waits[i] = 0;
            at(args, Mark::clock_start) = arch::clock_cycles();
            at(args, Mark::start) = arch::globaltimer_ns();
        }
    }
    // Adds the cycles spent in `body` to the mark, in the thread for which `mine` holds. Nothing is held in a
    // register meanwhile, since FP8 math has none left.
    template <class Mine, class Body>
    static MEGAMOE_DEVICE void timed(Smem& smem, Mark m, Mine mine, Body body) {
        if constexpr (T::profile) {
            uint32_t now = static_cast<uint32_t>(arch::clock_cycles());
            if (mine()) arch::count_shared(wait(smem, m), -now);
        }
        body();
        if constexpr (T::profile) {
            uint32_t now = static_cast<uint32_t>(arch::clock_cycles());
            if (mine()) arch::count_shared(wait(smem, m), now);
        }
    }
    // One thread of a role marks: lane 0 of any warp; a later warp overwrites an earlier one.
    static MEGAMOE_DEVICE void mark(const Args& args, Mark m) {
        if constexpr (T::profile) {
            if (arch::lane_idx() != 0) return;
            if (m == Mark::data_done) at(args, Mark::clock_data) = arch::clock_cycles();
            at(args, m) = arch::globaltimer_ns();
        }
    }
    static MEGAMOE_DEVICE void end(const Args& args, const Smem& smem) {
        if constexpr (T::profile) {
            if (arch::thread_idx() != 0) return;
            at(args, Mark::clock_end) = arch::clock_cycles();
            at(args, Mark::end) = arch::globaltimer_ns();
            for (int i = 0; i < num_wait_marks; ++i)
                at(args, static_cast<Mark>(first_wait + i)) = smem.waits[i];
        }
    }

  private:
    static constexpr int first_wait = static_cast<int>(Mark::rows_wait);
    static MEGAMOE_DEVICE uint32_t* wait(Smem& smem, Mark m) {
        return &smem.waits[static_cast<int>(m) - first_wait];
    }
    static MEGAMOE_DEVICE uint64_t& at(const Args& args, Mark m) {
        return args.profile[int64_t{16} * arch::block_idx() + static_cast<int>(m)];
    }
};

}  // namespace megamoe
