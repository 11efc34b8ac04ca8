// The two Memory policies of the checker, model::Memory and MutantMemory, and what a scenario is. The search
// is in world.h.
#pragma once
#include "world.h"

namespace model {

// An mbarrier with its phases, where it matters in which one an arrival or a byte is counted: `arrivals`, and
// as many halves of an operand as they expect, complete a phase. Its cell: phase, whether anything happened
// in it, arrivals, halves expected less halves landed.
struct PhaseBarrier {
    static constexpr uint32_t phase_shift = 16, begun = 1 << 15, arrivals_shift = 8, no_bytes = 128;
    int cell;
    uint32_t arrivals;
    PhaseBarrier() = default;
    PhaseBarrier(World& w, std::string name, uint32_t count)
        : cell(w.cell(std::move(name), no_bytes)), arrivals(count) {}
};

// The same barrier of both CTAs of a pair, as the thread of one CTA sees it: it waits at its own and arrives
// at both.
struct PairPhaseBarrier {
    std::array<PhaseBarrier, 2> member;
    int own;
};

// The policy that protocol/edges.h and protocol/ring.h are compiled against, exactly their interfaces; the
// rest is what scenarios need around them.
class Memory {
  public:
    using Cell = int;
    Memory(World& world, int thread) : world_(world), thread_(thread) {}

    uint32_t load(Cell c, Order order, Scope scope) { return world_.load(thread_, c, order, scope); }
    void store(Cell c, uint32_t v, Order order, Scope scope) {
        world_.store(thread_, c, v, order, static_cast<int>(scope));
    }
    void add(Cell c, uint32_t v, Order order) {
        world_.fetch_add(thread_, c, v, false, order == Order::release, Scope::gpu);
    }
    uint32_t fetch_add(Cell c, uint32_t v) { return world_.fetch_add(thread_, c, v, true, true, Scope::gpu); }
    bool await(Cell c, Until until, uint32_t target, Scope scope, Wait) {
        return await_ordered(c, until, target, scope, /*acquire=*/true);
    }
    void fence_proxy_async() { world_.fence_proxy_async(thread_); }
    void async_complete() { world_.async_complete(thread_); }
    bool aborted() const { return world_.poisoned(); }
    void fault(Wait, uint32_t, uint32_t) { world_.poison(); }
    void raise_abort(int) {}  // poison reaches every rank at once here
    uint32_t coarse_time() const { return 0; }
    uint32_t coarse_timeout() const { return 1; }

    void fence_proxy_async_shared() { world_.fence_proxy_async_shared(thread_); }

    // A word is a cell of 32 bits here: the epoch above 16 bits of value.
    uint64_t load_word(Cell c) {
        uint64_t v = load(c, Order::relaxed, Scope::system);
        return v >> 16 << 32 | (v & 0xffff);
    }
    void store_word(Cell c, uint64_t v) {
        store(c, static_cast<uint32_t>(v >> 32 << 16 | (v & 0xffff)), Order::relaxed, Scope::system);
    }

    // Impatient with ns = 0, otherwise as patient as can be.
    bool await_for(Cell c, uint32_t target, uint32_t ns) {
        if (ns == 0) return load(c, Order::relaxed, Scope::system) == target;
        return await_ordered(c, Until::equal, target, Scope::system, false);
    }
    // Impatient with 0 cycles, otherwise as patient as can be.
    bool linger(Cell c, uint32_t target, uint32_t cycles) {
        if (cycles == 0) return static_cast<int32_t>(load(c, Order::relaxed, Scope::gpu) - target) >= 0;
        return await_ordered(c, Until::at_least, target, Scope::gpu, false);
    }
    bool await_ordered(Cell c, Until until, uint32_t target, Scope scope, bool acquire) {
        auto satisfied = [=](uint32_t v) {
            return until == Until::equal ? v == target : static_cast<int32_t>(v - target) >= 0;
        };
        std::string wanted = (until == Until::equal ? "== " : ">= ") + std::to_string(target);
        return world_.wait_until(thread_, c, satisfied, std::move(wanted), acquire, scope);
    }
    // Read-modify-writes of litmus tests, whose threads are of several ranks; no edge has these.
    uint32_t add_across_ranks(Cell c, uint32_t v, bool acquire, bool release) {
        return world_.fetch_add(thread_, c, v, acquire, release, Scope::system);
    }
    // Payload, by ordinary instructions and by TMA. `expected` is the value that the protocol promises.
    void write(int payload, uint32_t value = 1) { world_.access(thread_, payload, false, true, value, -1); }
    uint32_t read(int payload, int64_t expected = 1) {
        return world_.access(thread_, payload, false, false, 0, expected);
    }
    void tma_store(int payload, uint32_t value = 1) {
        world_.access(thread_, payload, true, true, value, -1);
    }
    void tma_load(int payload, int64_t expected = 1) {
        world_.access(thread_, payload, true, false, 0, expected);
    }
    void plain_store(Cell c, uint32_t v) { world_.store(thread_, c, v, Order::relaxed, World::plain); }
    // Threads of one CTA: mbarriers, bar.sync, __syncwarp. arrive_tma: the barrier also counts this thread's
    // TMA loads.
    void arrive(int barrier) { world_.arrive(thread_, barrier, false); }
    void arrive_tma(int barrier) { world_.arrive(thread_, barrier, true); }
    void wait(int barrier) { world_.wait(thread_, barrier, false); }
    void sync(int barrier) { arrive(barrier), wait(barrier); }
    // For protocol/ring.h, with halves of an operand for bytes. They may land before they are expected.
    void arrive(const PhaseBarrier& b, uint32_t halves = 0) { count(b, 1, static_cast<int>(halves)); }
    void expect(const PhaseBarrier& b, uint32_t halves) { count(b, 0, static_cast<int>(halves)); }
    void bytes_landed(const PhaseBarrier& b) { count(b, 0, -1); }
    void wait(const PhaseBarrier& b, uint32_t parity) {
        auto passed = [=](uint32_t state) { return (state >> PhaseBarrier::phase_shift & 1) != parity; };
        world_.wait_until(thread_, b.cell, passed, "!= parity " + std::to_string(parity), true, Scope::gpu);
    }
    // One that finds the phase incomplete changes nothing, so only one that finds it complete is explored.
    bool test(const PhaseBarrier& b, uint32_t parity) { return wait(b, parity), true; }
    // The end of a launch and the start of the next of this rank: orders everything, in every proxy.
    void launch_boundary(int barrier) {
        world_.arrive(thread_, barrier, true), world_.wait(thread_, barrier, true);
    }
    bool poll(const std::function<bool()>& attempt) { return world_.poll(thread_, attempt); }
    void expect(uint32_t seen, uint32_t expected, const char* what) {
        if (seen != expected && !world_.poisoned()) {
            world_.fail(world_.thread_name(thread_) + " saw " + what + " = " + std::to_string(seen) +
                        ", expected " + std::to_string(expected));
        }
    }

  protected:
    World& world_;
    int thread_;

  private:
    void count(const PhaseBarrier& b, uint32_t arrived, int expected) {
        using B = PhaseBarrier;
        auto next = [&](uint32_t state) {
            state = (state | B::begun) + (arrived << B::arrivals_shift) + static_cast<uint32_t>(expected);
            uint32_t arrivals = state >> B::arrivals_shift & 0x7f;
            if (arrivals > b.arrivals) world_.fail(world_.cell_name(b.cell) + " has too many arrivals");
            bool complete = arrivals == b.arrivals && (state & 0xff) == B::no_bytes;
            return complete ? ((state >> B::phase_shift) + 1) << B::phase_shift | B::no_bytes : state;
        };
        world_.update(thread_, b.cell, next, [](uint32_t state) { return (state & B::begun) != 0; });
    }
};

// Memory with one mutation. While no mutation is active it collects every mutation that would apply
// (World::sites), so that a scenario's mutants come from the operations it really performs.
class MutantMemory : public Memory {
  public:
    using Memory::Memory;

    uint32_t load(Cell c, Order order, Scope scope) {
        if (order == Order::acquire && mutate("load acquire->relaxed", c)) order = Order::relaxed;
        return Memory::load(c, order, narrow("load", c, scope));
    }
    void store(Cell c, uint32_t v, Order order, Scope scope) {
        if (mutate("store dropped", c)) return;
        if (mutate("store of value + 1", c)) ++v;
        if (mutate("store of value - 1", c)) --v;
        if (order == Order::release && mutate("store release->relaxed", c)) order = Order::relaxed;
        Memory::store(c, v, order, narrow("store", c, scope));
    }
    void add(Cell c, uint32_t v, Order order) {
        if (mutate("add dropped", c)) return;
        if (mutate("add of value + 1", c)) ++v;
        if (mutate("add of value - 1", c)) --v;
        if (order == Order::release && mutate("add release->relaxed", c)) order = Order::relaxed;
        Memory::add(c, v, order);
    }
    uint32_t fetch_add(Cell c, uint32_t v) {
        bool acquire = !mutate("fetch_add without acquire", c),
             release = !mutate("fetch_add without release", c);
        return world_.fetch_add(thread_, c, v, acquire, release, Scope::gpu);
    }
    bool await(Cell c, Until until, uint32_t target, Scope scope, Wait) {
        after_ = c;
        if (mutate("await dropped", c)) return true;
        if (mutate("await of target + 1", c)) ++target;
        if (mutate("await of target - 1", c)) --target;
        bool acquire = !mutate("await acquire->relaxed", c);
        return await_ordered(c, until, target, narrow("await", c, scope), acquire);
    }
    bool await_for(Cell c, uint32_t target, uint32_t ns) {
        if (mutate("await_for dropped", c)) return true;
        if (mutate("await_for of target + 1", c)) ++target;
        if (mutate("await_for of target - 1", c)) --target;
        return Memory::await_for(c, target, ns);
    }
    bool linger(Cell c, uint32_t target, uint32_t cycles) {
        if (mutate("linger dropped", c)) return true;
        if (mutate("linger of target + 1", c)) ++target;
        if (mutate("linger of target - 1", c)) --target;
        return Memory::linger(c, target, cycles);
    }
    uint64_t load_word(Cell c) { return Memory::load_word(c); }
    void store_word(Cell c, uint64_t v) {
        if (mutate("word dropped", c)) return;
        if (mutate("word of value + 1", c)) ++v;
        if (mutate("word of epoch + 1", c)) v += uint64_t{1} << 32;
        if (mutate("word of epoch - 1", c)) v -= uint64_t{1} << 32;
        Memory::store_word(c, v);
    }
    using Memory::arrive;
    using Memory::expect;
    using Memory::wait;
    void wait(const PhaseBarrier& b, uint32_t parity) {
        if (mutate("wait dropped", b.cell)) return;
        Memory::wait(b, parity ^ (mutate("wait of the other parity", b.cell) ? 1 : 0));
    }
    void wait(const PairPhaseBarrier& b, uint32_t parity) { wait(b.member[b.own], parity); }
    void arrive(const PhaseBarrier& b) {
        if (!mutate("arrival dropped", b.cell)) Memory::arrive(b);
        if (mutate("arrival twice", b.cell)) Memory::arrive(b);
    }
    void arrive(const PairPhaseBarrier& b) {
        for (int member = 0; member < 2; ++member) {
            bool dropped =
                mutate(member == b.own ? "arrival at the own CTA dropped" : "arrival at the partner dropped",
                       b.member[member].cell);
            if (!dropped) Memory::arrive(b.member[member]);
        }
    }
    void arrive(const PhaseBarrier& b, uint32_t halves) {
        if (!mutate("arrival dropped", b.cell)) Memory::arrive(b, wrong(halves, b.cell));
    }
    void expect(const PhaseBarrier& b, uint32_t halves) {
        if (!mutate("expect dropped", b.cell)) Memory::expect(b, wrong(halves, b.cell));
    }
    void fence_proxy_async() {
        if (!mutate("fence_proxy_async dropped", after_)) Memory::fence_proxy_async();
    }
    void async_complete() {
        if (!mutate("async_complete dropped", -1)) Memory::async_complete();
    }

  private:
    int after_ = -1;  // the cell last awaited: names a fence

    // Cells are named family[index]: a mutation changes code, so it hits a family.
    bool mutate(const char* what, int cell) {
        if (world_.sites ? !world_.is_new_site(what, cell < 0 ? -1 - thread_ : cell)
                         : world_.mutation.what != what)
            return false;
        std::string where = cell < 0 ? world_.thread_name(thread_) : world_.cell_name(cell);
        where = where.substr(0, where.find_first_of("[@"));
        if (world_.sites) world_.sites->insert({what, where});
        return world_.mutation.what == what && world_.mutation.where == where;
    }
    uint32_t wrong(uint32_t halves, int cell) {
        if (mutate("one half too many expected", cell)) return halves + 1;
        return mutate("one half too few expected", cell) ? halves - 1 : halves;
    }
    Scope narrow(const char* operation, int cell, Scope scope) {
        if (scope == Scope::system && mutate((std::string(operation) + " system->gpu").c_str(), cell))
            return Scope::gpu;
        return scope;
    }
};

inline void World::fiber_main() {
    World& world = *current();
    int t = world.running_;
    {
        MutantMemory mem(world, t);
        world.threads_[t].body(mem);
    }
    world.done_[t] = true;
    world.pending_[t] = {};
    fibers::switch_context(world.fibers_[t].context, world.main_);
}

// --- scenarios
// -----------------------------------------------------------------------------------------------------

// A scenario asks which of its own flaws, if any, to build in.
class Flaw {
  public:
    explicit Flaw(std::string active = "") : active_(std::move(active)) {}
    bool operator()(const char* name) const { return active_ == name; }

  private:
    std::string active_;
};

struct Harmless {  // mutants that rightly survive (all whose names end like this), and why
    const char *ending, *why;
};

struct Scenario {
    const char* name;
    void (*build)(World&, const Flaw&);
    std::vector<const char*> flaws;  // each must be caught
    std::vector<Harmless> harmless;  // of the mutants made from its operations: all others must be caught
    bool mutants = true;
};

}  // namespace model
