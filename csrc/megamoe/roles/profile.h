// In-kernel timestamps of a variant with Traits::profile: args.profile[cta][16]. Marks are nanoseconds of
// %globaltimer, except the two clock readings, which give the SM clock: (clock_end - clock_start) / (end -
// start) GHz, and the waits, which are cycles summed over the launch.
#pragma once
#include "megamoe/arch/arch.h"
#include "megamoe/layout/args.h"

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
    stage_wait,
    output_wait
};

template <class T>
class Profile {
  public:
    static MEGAMOE_DEVICE void begin(const Args& args) {
        if constexpr (T::profile) {
            if (arch::thread_idx() != 0) return;
            for (int m = static_cast<int>(Mark::rows_wait); m < 16; ++m) at(args, static_cast<Mark>(m)) = 0;
            at(args, Mark::clock_start) = arch::clock_cycles();
            at(args, Mark::start) = arch::globaltimer_ns();
        }
    }
    // Cycles spent in `body`, added to the mark; only the thread for which `mine` holds.
    template <class Body>
    static MEGAMOE_DEVICE void timed(const Args& args, Mark m, bool mine, Body body) {
        uint64_t before = T::profile ? arch::clock_cycles() : 0;
        body();
        if (T::profile && mine) at(args, m) += arch::clock_cycles() - before;
    }
    // One thread of a role marks: lane 0 of any warp; a later warp overwrites an earlier one.
    static MEGAMOE_DEVICE void mark(const Args& args, Mark m) {
        if (T::profile && arch::lane_idx() == 0) at(args, m) = arch::globaltimer_ns();
    }
    static MEGAMOE_DEVICE void end(const Args& args) {
        if (!T::profile || arch::thread_idx() != 0) return;
        at(args, Mark::clock_end) = arch::clock_cycles();
        at(args, Mark::end) = arch::globaltimer_ns();
    }

  private:
    static MEGAMOE_DEVICE uint64_t& at(const Args& args, Mark m) {
        return args.profile[int64_t{16} * arch::block_idx() + static_cast<int>(m)];
    }
};

}  // namespace megamoe
