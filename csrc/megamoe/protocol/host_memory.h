// The Memory policy of protocol/memory.h on fibers. Flags are plain words: one OS thread makes them
// sequentially consistent, and the model checker checks orders and scopes. await blocks the fiber, and the
// machine tests the flag once per round.
#pragma once
#include <utility>

#include "megamoe/protocol/mbarriers.cuh"
#include "megamoe/protocol/memory.h"

namespace megamoe {

// The enumerator as the compiler spells it: the enumeration is the only list of names.
template <Edge edge>
constexpr const char* spelled_edge() {
    return __PRETTY_FUNCTION__;
}
template <uint32_t... i>
inline const char* edge_name(Edge edge, std::integer_sequence<uint32_t, i...>) {
    static constexpr const char* spelled[] = {spelled_edge<Edge(i)>()...};
    return static_cast<uint32_t>(edge) < sizeof...(i) ? spelled[static_cast<uint32_t>(edge)] : "?";
}
inline const char* edge_name(Edge edge) {
    return edge_name(edge, std::make_integer_sequence<uint32_t, 32>());
}

struct Memory : Mbarriers {
    using Cell = uint32_t*;

    const Args& args;

    explicit Memory(const Args& args) : args(args) {}

    uint32_t load(Cell cell, Order, Scope) const {
        fibers::machine.preemption_point();
        fibers::machine.polled();
        return *static_cast<volatile uint32_t*>(cell);
    }
    void store(Cell cell, uint32_t value, Order, Scope) const {
        fibers::machine.preemption_point();
        if (*cell != value) ++fibers::machine.progress;
        *static_cast<volatile uint32_t*>(cell) = value;
    }
    void add(Cell cell, uint32_t value, Order) const {
        fibers::machine.preemption_point();
        if (value) ++fibers::machine.progress;
        *static_cast<volatile uint32_t*>(cell) = *cell + value;
    }
    uint32_t fetch_add(Cell cell, uint32_t value) const {
        fibers::machine.preemption_point();
        if (value) ++fibers::machine.progress;
        uint32_t before = *cell;
        *static_cast<volatile uint32_t*>(cell) = before + value;
        return before;
    }

    // timeout_ns counts emulated time; with 0 a wait lasts for ever, so that the machine reports a deadlock
    // instead of a fault.
    bool await(Cell cell, Until until, uint32_t target, Scope, Wait wait) const {
        fibers::machine.preemption_point();
        fibers::Fiber* self = fibers::current;
        self->address = cell;
        self->value = target;
        self->at_least = until == Until::at_least;
        self->abort = args.abort;
        self->what = edge_name(wait.edge);
        self->numbers[0] = wait.index;
        self->numbers[1] = wait.peer < max_ranks ? wait.peer : fibers::no_peer;
        if (fibers::Machine::flag_satisfied(self)) return true;
        if (aborted()) return false;
        self->deadline = args.timeout_ns ? fibers::machine.clock_ns + args.timeout_ns : UINT64_MAX;
        if (fibers::machine.wait_for_flag(self)) return true;
        if (!aborted()) fault(wait, target, *cell);
        return false;
    }

    uint64_t load_word(const uint64_t* word) const {
        fibers::machine.preemption_point();
        fibers::machine.polled();
        return *static_cast<const volatile uint64_t*>(word);
    }
    void store_word(uint64_t* word, uint64_t v) const {
        fibers::machine.preemption_point();
        ++fibers::machine.progress;
        *static_cast<volatile uint64_t*>(word) = v;
    }

    bool await_for(Cell cell, uint32_t target, uint32_t ns) const {
        uint64_t start = arch::globaltimer_ns();
        while (load(cell, Order::relaxed, Scope::system) != target) {
            if (arch::globaltimer_ns() - start >= ns) return false;
        }
        return true;
    }

    bool linger(Cell cell, uint32_t target, uint32_t cycles) const {
        uint64_t start = arch::clock_cycles();
        while (static_cast<int32_t>(load(cell, Order::relaxed, Scope::gpu) - target) < 0) {
            if (arch::clock_cycles() - start > cycles) return false;
        }
        return true;
    }

    void fence_proxy_async() const {}
    void async_complete() const { arch::bulk_wait(); }

    bool aborted() const {
        fibers::machine.polled();
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
            fibers::machine.note(
                "fault of rank %d cta %d warp %d: edge %s, index %u, peer %u, expected %u, seen %u",
                args.rank, arch::block_idx(), arch::warp_idx(), fibers::enumerator(edge_name(wait.edge)),
                wait.index, wait.peer, expected, seen);
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
