// A ring of slots in shared memory, between the threads that fill them and those that read them. Each slot
// has two mbarriers. A phase of `full` completes with the arrivals of all producers and the bytes that they
// announced, one of `empty` with the arrivals of all consumers. Like protocol/edges.h, the ring uses only a
// policy, so the model checker runs the kernel's own code.
//
//   producer: acquire, [expect bytes, copies, writes], commit, advance
//   consumer: await, reads, release, advance
//
// A `Mem` policy has, for a barrier of the type B that the ring's `Slots` have in full[] or empty[]:
//
//   void wait(B&, uint32_t parity)      returns when the phase with this parity has completed
//   bool test(B&, uint32_t parity)      returns whether it has; if so, orders like wait
//   void arrive(B&)                     orders what this thread read and wrote before
//   void arrive(B&, uint32_t bytes)     likewise, and announces bytes that the phase also waits for
//   void expect(B&, uint32_t bytes)     announces bytes, without an arrival
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {

// The mbarriers of a ring as they lie in shared memory. A PairBarrier takes the arrivals of both CTAs of the
// pair: a warp arrives at its own CTA's and at the other's.
struct PairBarrier {
    uint64_t bits;
};
// The same of one CTA alone.
struct WarpBarrier {
    uint64_t bits;
};
// From one thread of the pair's CTA 0 to threads of both CTAs. It arrives at the ScheduledBarrier of both,
// and what it wrote in both CTAs before is visible behind a wait. They all arrive at the TakenBarrier of CTA
// 0.
struct ScheduledBarrier {
    uint64_t bits;
};
struct TakenBarrier {
    uint64_t bits;
};
template <bool paired>
struct EmptyBarrier {
    using Type = PairBarrier;
};
template <>
struct EmptyBarrier<false> {
    using Type = WarpBarrier;
};
template <int slots, class Empty, class Full = uint64_t>
struct Slots {
    Full full[slots];
    Empty empty[slots];
};

// A thread's position: a slot, and the parity of its current lap. One register. It lives as long as the
// barriers do, across tiles and passes.
template <int slots>
class Ring {
  public:
    MEGAMOE_DEVICE int slot() const { return next_ < slots ? next_ : next_ - slots; }
    MEGAMOE_DEVICE void advance() { next_ = next_ + 1 == 2 * slots ? 0 : next_ + 1; }

    // Producer: the slot may be written; the first lap finds every slot free. Bytes of the pair's other CTA
    // may land before this CTA announces them, but never in another phase, as that CTA acquires too.
    template <class Mem, class Slots>
    MEGAMOE_DEVICE void acquire(Mem& mem, Slots& s) const {
        mem.wait(s.empty[slot()], parity() ^ 1);
    }
    template <class Mem, class Slots>
    MEGAMOE_DEVICE void expect(Mem& mem, Slots& s, uint32_t bytes) const {
        mem.expect(s.full[slot()], bytes);
    }
    // Hands over what this thread wrote. A producer that only copies announces all bytes here, and then
    // issues the copies.
    template <class Mem, class Slots>
    MEGAMOE_DEVICE void commit(Mem& mem, Slots& s) const {
        mem.arrive(s.full[slot()]);
    }
    template <class Mem, class Slots>
    MEGAMOE_DEVICE void commit(Mem& mem, Slots& s, uint32_t bytes) const {
        mem.arrive(s.full[slot()], bytes);
    }

    // Consumer: all that the producers wrote and copied can be read.
    template <class Mem, class Slots>
    MEGAMOE_DEVICE void await(Mem& mem, Slots& s) const {
        mem.wait(s.full[slot()], parity());
    }
    // Whether all of that can be read already; if not, await() it.
    template <class Mem, class Slots>
    MEGAMOE_DEVICE bool test(Mem& mem, Slots& s) const {
        return mem.test(s.full[slot()], parity());
    }
    // After this, nothing of the slot may be read. Where one lane arrives for a warp, the warp has converged:
    // no lane still reads, and none still awaits a phase that the next lap would overtake.
    template <class Mem, class Slots>
    MEGAMOE_DEVICE void release(Mem& mem, Slots& s) const {
        mem.arrive(s.empty[slot()]);
    }

  private:
    MEGAMOE_DEVICE uint32_t parity() const { return next_ < slots ? 0 : 1; }

    int next_ = 0;  // of two laps
};

}  // namespace megamoe
