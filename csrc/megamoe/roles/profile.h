// In-kernel timestamps of a variant with Traits::profile: args.profile[cta][16]. Marks are nanoseconds of %globaltimer,
// except the two clock readings, which give the SM clock: (clock_end - clock_start) / (end - start) GHz.
#pragma once
#include "megamoe/arch/arch.h"
#include "megamoe/layout/args.h"

namespace megamoe {

enum class Mark : int { clock_start, clock_end, start, end, routed, dispatched, math_done, reduced, combined };

template <class T>
class Profile {
  public:
    static MEGAMOE_DEVICE void begin(const Args& args) {
        if (!T::profile || arch::thread_idx() != 0) return;
        at(args, Mark::clock_start) = arch::clock_cycles();
        at(args, Mark::start) = arch::globaltimer_ns();
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
