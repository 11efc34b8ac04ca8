// The part of a Memory policy that protocol/ring.h uses, on both machines.
#pragma once
#include "megamoe/arch/arch.cuh"
#include "megamoe/protocol/ring.h"

namespace megamoe {

struct Mbarriers {
    MEGAMOE_DEVICE void wait(uint64_t& bar, uint32_t parity) const { arch::mbar_wait(&bar, parity); }
    MEGAMOE_DEVICE void wait(PairBarrier& bar, uint32_t parity) const { wait(bar.bits, parity); }
    MEGAMOE_DEVICE bool test(uint64_t& bar, uint32_t parity) const { return arch::mbar_test(&bar, parity); }
    MEGAMOE_DEVICE void arrive(uint64_t& bar) const { arch::mbar_arrive(&bar); }
    MEGAMOE_DEVICE void arrive(uint64_t& bar, uint32_t bytes) const {
        arch::mbar_arrive_expect_tx(&bar, bytes);
    }
    MEGAMOE_DEVICE void expect(uint64_t& bar, uint32_t bytes) const { arch::mbar_expect_tx(&bar, bytes); }
    // One thread arrives for so many warps, at the barriers of both CTAs.
    MEGAMOE_DEVICE void arrive(PairBarrier& bar, int warps) const {
        arch::mbar_arrive_at(&bar.bits, 0, warps);
        arch::mbar_arrive_at(&bar.bits, 1, warps);
    }
    MEGAMOE_DEVICE void wait(ScheduledBarrier& bar, uint32_t parity) const {
        arch::mbar_wait_cluster(&bar.bits, parity);
    }
    MEGAMOE_DEVICE void wait(TakenBarrier& bar, uint32_t parity) const {
        arch::mbar_wait_cluster(&bar.bits, parity);
    }
    MEGAMOE_DEVICE void arrive(ScheduledBarrier& bar) const {
        arch::mbar_arrive_cluster(&bar.bits, 0);
        arch::mbar_arrive_cluster(&bar.bits, 1);
    }
    MEGAMOE_DEVICE void arrive(TakenBarrier& bar) const { arch::mbar_arrive_cluster(&bar.bits, 0); }
    MEGAMOE_DEVICE void wait(WarpBarrier& bar, uint32_t parity) const { wait(bar.bits, parity); }
    // The warp arrives once.
    MEGAMOE_DEVICE void arrive(WarpBarrier& bar) const {
        if (arch::lane_idx() == 0) arch::mbar_arrive(&bar.bits);
    }
    // The warp arrives once at the barrier of each CTA.
    MEGAMOE_DEVICE void arrive(PairBarrier& bar) const {
        if (arch::lane_idx() < 2) arch::mbar_arrive_at(&bar.bits, arch::lane_idx());
    }
};

}  // namespace megamoe
