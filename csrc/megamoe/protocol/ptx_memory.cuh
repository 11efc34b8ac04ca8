// The Memory policy on Hopper: every flag operation and fence between CTAs or ranks, as PTX. See "Memory
// Consistency Model" in the PTX ISA. Releases are cumulative over what the thread has observed. So a barrier
// among the writers, then one release, publishes the writes of all of them.
#pragma once
#include "megamoe/protocol/mbarriers.cuh"
#include "megamoe/protocol/memory.h"

namespace megamoe {

struct Memory : Mbarriers {
    using Cell = uint32_t*;
    const Args& args;

    MEGAMOE_DEVICE explicit Memory(const Args& args) : args(args) {}

    MEGAMOE_DEVICE uint32_t load(Cell cell, Order order, Scope scope) const {
        uint32_t v;
        if (order == Order::relaxed) {
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(cell) : "memory");
        } else if (scope == Scope::gpu) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(cell) : "memory");
        } else {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(cell) : "memory");
        }
        return v;
    }
    MEGAMOE_DEVICE void store(Cell cell, uint32_t v, Order order, Scope scope) const {
        if (order == Order::relaxed) {
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(cell), "r"(v) : "memory");
        } else if (scope == Scope::gpu) {
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(cell), "r"(v) : "memory");
        } else {
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(cell), "r"(v) : "memory");
        }
    }
    MEGAMOE_DEVICE void add(Cell cell, uint32_t v, Order order) const {
        if (order == Order::relaxed) {
            asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(cell), "r"(v) : "memory");
        } else {
            asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(cell), "r"(v) : "memory");
        }
    }
    MEGAMOE_DEVICE uint32_t fetch_add(Cell cell, uint32_t v) const {
        uint32_t old;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                     : "=r"(old)
                     : "l"(cell), "r"(v)
                     : "memory");
        return old;
    }
    MEGAMOE_DEVICE void fence_proxy_async() const { asm volatile("fence.proxy.async;" ::: "memory"); }
    MEGAMOE_DEVICE void async_complete() const { arch::bulk_wait(); }

    MEGAMOE_DEVICE bool await(Cell cell, Until until, uint32_t target, Scope scope, Wait wait) const {
        auto reached = [&](uint32_t seen) {
            return until == Until::equal ? seen == target : static_cast<int32_t>(seen - target) >= 0;
        };
        uint32_t seen = load(cell, Order::acquire, scope);
        if (reached(seen)) return true;
        uint32_t start = coarse_time();
        MEGAMOE_UNROLL_BY(1)
        for (uint32_t polls = 1;; ++polls) {
            seen = load(cell, Order::acquire, scope);
            if (reached(seen)) return true;
            if (polls % 16 == 0) {  // the rare questions, off the fast path
                if (aborted()) return false;
                if (coarse_time() - start > coarse_timeout()) {
                    fault(wait, target, seen);
                    return false;
                }
            }
        }
    }

    MEGAMOE_DEVICE uint64_t load_word(const uint64_t* word) const {
        uint64_t v;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
        return v;
    }
    MEGAMOE_DEVICE void store_word(uint64_t* word, uint64_t v) const {
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
    }

    MEGAMOE_DEVICE bool await_for(Cell cell, uint32_t target, uint32_t ns) const {
        uint64_t start = arch::globaltimer_ns();
        MEGAMOE_UNROLL_BY(1)
        while (load(cell, Order::relaxed, Scope::system) != target) {
            if (arch::globaltimer_ns() - start >= ns) return false;
        }
        return true;
    }

    MEGAMOE_DEVICE bool linger(Cell cell, uint32_t target, uint32_t cycles) const {
        uint32_t start = static_cast<uint32_t>(arch::clock_cycles());
        MEGAMOE_UNROLL_BY(1)
        while (static_cast<int32_t>(load(cell, Order::relaxed, Scope::gpu) - target) < 0) {
            if (static_cast<uint32_t>(arch::clock_cycles()) - start > cycles) return false;
        }
        return true;
    }

    // True once any rank has given up on a launch of this window: from then on waits return at once (abort =
    // poison).
    MEGAMOE_DEVICE bool aborted() const { return load(args.abort, Order::relaxed, Scope::system) != 0; }

    // Gives up: the first thread of this rank to get here writes the record; the rank's abort cell poisons
    // its other waits. The last CTA out raises the peers' cells (raise_abort), so that this cold path stays a
    // handful of stores.
    MEGAMOE_DEVICE void fault(Wait wait, uint32_t expected, uint32_t seen) const {
        if (fetch_add(args.fault_ticket, 1) == 0) {
            volatile FaultRecord* record = args.fault;
            record->peer = wait.peer;
            record->role = static_cast<uint32_t>(arch::thread_idx() / 32);
            record->index = wait.index;
            record->expected = expected;
            record->seen = seen;
            store(const_cast<uint32_t*>(&record->edge), static_cast<uint32_t>(wait.edge), Order::release,
                  Scope::system);
        }
        store(args.abort, 1, Order::release, Scope::system);
    }
    MEGAMOE_DEVICE void raise_abort(int peer) const {
        auto* cell = reinterpret_cast<Cell>(args.window[peer] + args.window_abort);
        store(cell, 1, Order::release, Scope::system);
    }

    // Units of 2^20 ns, about a millisecond: one register. A timeout of 0 is none.
    MEGAMOE_DEVICE uint32_t coarse_time() const {
        return static_cast<uint32_t>(arch::globaltimer_ns() >> 20);
    }
    MEGAMOE_DEVICE uint32_t coarse_timeout() const {
        return args.timeout_ns == 0 ? ~0u : static_cast<uint32_t>(args.timeout_ns >> 20);
    }
};

}  // namespace megamoe
