// The Memory policy of protocol/memory.h on fibers. Flags are plain words (one OS thread, so sequentially
// consistent: orders and scopes are the model checker's business); await blocks the fiber and the machine
// tests the flag once a round.
#pragma once
#include "megamoe/protocol/mbarriers.h"
#include "megamoe/protocol/memory.h"

namespace megamoe {

struct Memory : Mbarriers {
    using Cell = uint32_t*;

    const Args& args;

    explicit Memory(const Args& args) : args(args) {}

    uint32_t load(Cell cell, Order, Scope) const {
        host::machine.preemption_point();
        host::machine.polled();
        return *static_cast<volatile uint32_t*>(cell);
    }
    void store(Cell cell, uint32_t value, Order, Scope) const {
        host::machine.preemption_point();
        if (*cell != value) ++host::machine.progress;
        *static_cast<volatile uint32_t*>(cell) = value;
    }
    void add(Cell cell, uint32_t value, Order) const {
        host::machine.preemption_point();
        if (value) ++host::machine.progress;
        *static_cast<volatile uint32_t*>(cell) = *cell + value;
    }
    uint32_t fetch_add(Cell cell, uint32_t value) const {
        host::machine.preemption_point();
        if (value) ++host::machine.progress;
        uint32_t before = *cell;
        *static_cast<volatile uint32_t*>(cell) = before + value;
        return before;
    }

    // timeout_ns counts emulated time; 0 waits for ever, so that the machine reports the deadlock instead of
    // a fault.
    bool await(Cell cell, Until until, uint32_t target, Scope, Wait wait) const {
        host::machine.preemption_point();
        host::Fiber* self = host::current;
        self->address = cell;
        self->value = target;
        self->at_least = until == Until::at_least;
        self->abort = args.abort;
        self->edge = wait.edge;
        self->peer = wait.peer;
        self->index = wait.index;
        if (host::Machine::flag_satisfied(self)) return true;
        if (aborted()) return false;
        self->deadline = args.timeout_ns ? host::machine.clock_ns + args.timeout_ns : UINT64_MAX;
        if (host::machine.wait_for_flag(self)) return true;
        if (!aborted()) fault(wait, target, *cell);
        return false;
    }

    void fence_proxy_async() const {}
    void async_complete() const { arch::bulk_wait(); }

    bool aborted() const {
        host::machine.polled();
        return *static_cast<volatile uint32_t*>(args.abort) != 0;
    }

    // Gives up: the first thread of this rank to get here writes the record; the rank's abort cell poisons
    // its other waits.
    void fault(Wait wait, uint32_t expected, uint32_t seen) const {
        if (fetch_add(args.fault_ticket, 1) == 0) {
            FaultRecord& record = *args.fault;
            record.peer = wait.peer;
            record.role = static_cast<uint32_t>(arch::warp_idx());
            record.index = wait.index;
            record.expected = expected;
            record.seen = seen;
            record.edge = static_cast<uint32_t>(wait.edge);
            host::machine.note_fault(host::text(
                "fault of rank %d cta %d warp %d: edge %s, index %u, peer %u, expected %u, seen %u",
                args.rank, arch::block_idx(), arch::warp_idx(), host::edge_name(wait.edge), wait.index,
                wait.peer, expected, seen));
        }
        store(args.abort, 1, Order::release, Scope::system);
    }
    void raise_abort(int peer) const {
        store(reinterpret_cast<Cell>(args.window[peer] + static_cast<uint64_t>(args.window_abort)), 1,
              Order::release, Scope::system);
    }

    uint32_t coarse_time() const { return static_cast<uint32_t>(arch::globaltimer_ns() >> 20); }
    uint32_t coarse_timeout() const {
        return args.timeout_ns == 0 ? ~0u : static_cast<uint32_t>(args.timeout_ns >> 20);
    }
};

}  // namespace megamoe
