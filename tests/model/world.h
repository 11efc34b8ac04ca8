// A stateless model checker for protocol/edges.h: threads are fibers, every execution of a bounded scenario
// is replayed from its start, and vector clocks per (thread, proxy) find accesses that nothing orders.
//
// What an execution is. Flags ("cells") keep every value they ever had; a load may return any of them that
// neither coherence nor happens-before forbids, so a relaxed flag can be stale here as on the machine.
// Read-modify-writes take the newest. Payload accesses carry no choice: whatever the order, two conflicting
// ones that happens-before does not order are a violation. Awaits, polls and CTA barriers block; nobody left
// to run is a deadlock, reported with who waits for what.
//
// Exploration. Depth first, dynamic partial-order reduction (source sets: backtrack where two writes of a
// cell, or a read and a later write, could swap) with sleep sets. tests/model/self_test.cpp compares it with
// the exploration of everything. What is assumed and what is out of reach: docs/protocol.md.
#pragma once
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "fibers/context.h"
#include "megamoe/protocol/edges.h"
#include "megamoe/protocol/ring.h"

namespace model {

using megamoe::Order;
using megamoe::Scope;
using megamoe::Until;
using megamoe::Wait;

constexpr int max_threads = 16, max_cells = 48, max_choices = 64;
constexpr int max_agents = 2 * max_threads;  // agent = 2 * thread + proxy: 0 generic, 1 async

// What has happened before a point: how far each agent got, and below which write no cell can be read any
// more.
struct Knowledge {
    std::array<uint16_t, max_agents> clock{};
    std::array<uint16_t, max_cells> view{};
    void join(const Knowledge& other) {
        for (int i = 0; i < max_agents; ++i) clock[i] = std::max(clock[i], other.clock[i]);
        for (int i = 0; i < max_cells; ++i) view[i] = std::max(view[i], other.view[i]);
    }
};

class World;
class Memory;
class MutantMemory;

// One change of the protocol's code: everywhere that `what` is done to `where`. Empty = the code as it is.
struct Mutation {
    std::string what, where;
    std::string name() const { return what + " at " + where; }
    bool operator<(const Mutation& o) const { return name() < o.name(); }
};

class World {
  public:
    using Body = std::function<void(MutantMemory&)>;
    using Causes =
        std::array<uint16_t, max_threads>;  // events of each thread that a transition needs before it

    // --- what a scenario declares
    // -------------------------------------------------------------------------------
    int cell(std::string name, uint32_t initial = 0) {
        cells_.push_back({std::move(name), initial, {}, {}});
        if (cells_.size() > max_cells) std::abort();
        return static_cast<int>(cells_.size()) - 1;
    }
    int payload(std::string name, bool shared = false) {  // shared: in shared memory of one CTA
        payloads_.push_back({std::move(name), shared, -1, 0, 0, {}});
        return static_cast<int>(payloads_.size()) - 1;
    }
    // A CTA-level barrier of one phase: `count` arrivals, then all waiters pass. A new phase is a new
    // barrier.
    int barrier(std::string name, int count) {
        barriers_.push_back({std::move(name), count, 0, {}, {}, {}});
        return static_cast<int>(barriers_.size()) - 1;
    }
    void thread(std::string name, int rank, int cta, Body body) {
        threads_.push_back({std::move(name), rank, cta, std::move(body)});
        if (threads_.size() > max_threads) std::abort();
    }
    bool timeouts =
        false;  // a deadlock is not the end: an await gives up, and from then on every await returns false
    bool full = false;  // no reduction; for the self test
    Mutation mutation;
    std::set<Mutation>* sites = nullptr;                  // where the mutations that apply are collected
    bool is_new_site(std::string_view what, int where) {  // seen in this exploration for the first time
        return sites_seen_.insert(std::hash<std::string_view>()(what) * 131 + static_cast<size_t>(where))
            .second;
    }
    std::set<std::vector<uint32_t>>* outcomes = nullptr;  // what each complete execution read

    long executions = 0, pruned = 0;

    // Runs every execution; returns the first violation, or "".
    std::string explore(long max_executions) {
        path_.clear();
        for (;;) {
            bool complete = run_once();
            (complete ? executions : pruned) += 1;
            if (!error_.empty()) return error_;
            if (executions + pruned >= max_executions) return "too many executions";
            do {
                if (path_.empty()) return "";
            } while (!next_sibling(path_.back()) && (path_.pop_back(), true));
        }
    }

    // --- what the memories below call, on a fiber
    // ----------------------------------------------------------------
    uint32_t load(int t, int cell, Order order, Scope scope) {
        if (probe_.active) {
            probe_.cell = cell;
            return probe_.value;
        }
        int index = visible(t, {Kind::read, cell, -1, nullptr});
        return take(t, cell, index, order != Order::relaxed, static_cast<int>(scope));
    }
    void store(int t, int cell, uint32_t value, Order order, int scope) {
        visible(t, {Kind::write, cell, -1, nullptr});
        put(t, cell, value, order == Order::release, scope, /*rmw=*/false);
    }
    uint32_t fetch_add(int t, int cell, uint32_t value, bool acquire, bool release, Scope scope) {
        visible(t, {Kind::write, cell, -1, nullptr});
        int last = static_cast<int>(cells_[cell].messages.size()) - 1;
        uint32_t old = take(t, cell, last, acquire, static_cast<int>(scope));
        put(t, cell, old + value, release, static_cast<int>(scope), /*rmw=*/true);
        return old;
    }
    // Any other read-modify-write, as an mbarrier's. Releases; `chained`: what is acquired from it includes
    // the releases before it.
    void update(int t, int cell, const std::function<uint32_t(uint32_t)>& next,
                const std::function<bool(uint32_t)>& chained) {
        visible(t, {Kind::write, cell, -1, nullptr});
        int last = static_cast<int>(cells_[cell].messages.size()) - 1, scope = static_cast<int>(Scope::gpu);
        uint32_t old = take(t, cell, last, /*acquire=*/false, scope);
        put(t, cell, next(old), /*release=*/true, scope, /*rmw=*/chained(old));
    }
    // Blocks until a value of the cell satisfies; false if the launch was poisoned first.
    bool wait_until(int t, int cell, const std::function<bool(uint32_t)>& satisfied, std::string wanted,
                    bool acquire, Scope scope) {
        wanted_[t] = std::move(wanted);
        int index = visible(t, {Kind::await, cell, -1, &satisfied});
        if (index == gave_up) return false;
        take(t, cell, index, acquire, static_cast<int>(scope));
        return true;
    }
    // A poll loop around one load: the loads that fail change nothing, so only the one that succeeds is
    // explored.
    bool poll(int t, const std::function<bool()>& attempt) {
        auto would = [&](uint32_t value) {
            probe_ = {true, -1, value};
            bool ok = attempt();
            probe_.active = false;
            return ok;
        };
        would(0);
        int cell = probe_.cell;
        std::function<bool(uint32_t)> satisfied = would;
        wanted_[t] = "poll";
        int index = visible(t, {Kind::await, cell, -1, &satisfied});
        if (index == gave_up) return false;
        forced_[t] = index;
        bool ok = attempt();
        forced_[t] = -1;
        return ok;
    }
    void fence_proxy_async(int t) {
        async_[t].join(generic_[t]);
        fence_proxy_async_shared(t);
    }
    // A fence by a writer of shared memory serves whichever thread of the CTA then issues the copy (A5).
    void fence_proxy_async_shared(int t) {
        fenced_[t].join(generic_[t]);
        async_shared_[t].join(generic_[t]);
    }
    void async_complete(int t) { generic_[t].join(async_[t]), generic_[t].join(async_shared_[t]); }
    void arrive(int t, int id, bool with_async) {
        Barrier& b = barriers_[id];
        if (++b.arrived > b.count) fail("barrier " + b.name + " overrun by " + threads_[t].name);
        b.knowledge.join(generic_[t]);
        b.fenced.join(fenced_[t]);
        if (with_async) b.knowledge.join(async_[t]), b.knowledge.join(async_shared_[t]);
        for (int i = 0; i < max_threads; ++i) b.causes[i] = std::max(b.causes[i], causes_[t][i]);
    }
    void wait(int t, int id, bool with_async) {
        visible(t, {Kind::barrier, -1, id, nullptr});
        generic_[t].join(barriers_[id].knowledge);
        fenced_[t].join(barriers_[id].fenced);
        async_shared_[t].join(fenced_[t]);
        if (with_async) fence_proxy_async(t);
    }
    // expected < 0: any value. Writes race with every unordered access, reads with every unordered write.
    uint32_t access(int t, int id, bool async, bool write, uint32_t value, int64_t expected) {
        Payload& p = payloads_[id];
        Knowledge& mine = !async ? generic_[t] : p.shared ? async_shared_[t] : async_[t];
        int agent = 2 * t + (async ? 1 : 0);
        auto ordered = [&](int other, uint16_t stamp) {
            bool same_proxy_and_cta = async && other % 2 == 1 &&
                                      threads_[other / 2].rank == threads_[t].rank &&
                                      threads_[other / 2].cta == threads_[t].cta;  // needs no fence (A9)
            return other == agent || mine.clock[other] >= stamp ||
                   (same_proxy_and_cta && generic_[t].clock[other] >= stamp);
        };
        if (!poisoned_) {
            if (p.writer >= 0 && !ordered(p.writer, p.stamp)) race(p, agent, write, p.writer, "write");
            if (write) {
                for (auto [reader, stamp] : p.reads) {
                    if (!ordered(reader, stamp)) race(p, agent, write, reader, "read");
                }
            } else if (expected >= 0 && p.value != expected) {
                fail(threads_[t].name + " read " + p.name + " = " + std::to_string(p.value) + ", expected " +
                     std::to_string(expected));
            }
        }
        uint16_t stamp = ++mine.clock[agent];
        if (write) {
            p.writer = agent, p.stamp = stamp, p.value = value;
            p.reads.clear();
        } else {
            p.reads.emplace_back(agent, stamp);
        }
        return p.value;
    }
    [[noreturn]] void fail(std::string why) {
        error_ = std::move(why);
        fibers::switch_context(fibers_[running_].context, main_);
        std::abort();
    }
    const std::string& cell_name(int cell) const { return cells_[cell].name; }
    const std::string& thread_name(int t) const { return threads_[t].name; }
    int rank(int t) const { return threads_[t].rank; }
    bool poisoned() const { return poisoned_; }
    void poison() { poisoned_ = true; }

    static constexpr int plain = -1;  // the scope of an ordinary store

  private:
    enum class Kind { none, read, write, await, barrier };
    struct Pending {
        Kind kind = Kind::none;
        int cell = -1, barrier = -1;
        const std::function<bool(uint32_t)>* satisfied = nullptr;
    };
    struct Thread {
        std::string name;
        int rank, cta;
        Body body;
    };
    struct Release {
        Knowledge knowledge;
        int thread, scope;
    };
    struct Message {
        uint32_t value;
        int thread;  // -1: initial
        std::vector<Release>
            releases;  // of the write that heads the chain, and of each read-modify-write since
        Causes causes;
    };
    struct Use {  // of a cell, for the check that unordered uses are morally strong
        int thread, scope;
        uint16_t stamp;
        bool write;
    };
    struct Cell {
        std::string name;
        uint32_t initial;
        std::vector<Message> messages;
        std::vector<Use> uses;
    };
    struct Payload {
        std::string name;
        bool shared;
        int writer;
        uint16_t stamp;
        uint32_t value;
        std::vector<std::pair<int, uint16_t>> reads;
    };
    struct Barrier {
        std::string name;
        int count, arrived;
        Knowledge knowledge, fenced;
        Causes causes;
    };
    struct Fiber {
        fibers::Context context;
        std::unique_ptr<uint8_t[]> stack;
    };
    struct Step {                  // one node of the search, and the transition taken from it
        std::vector<int> enabled;  // transition = thread * max_choices + choice
        std::vector<int> sleep;
        uint32_t backtrack = 0, enabled_threads = 0;
        int chosen = -1;
        int cell = -1, sequence = 0;
        bool write = false;
        Causes causes{};
    };
    struct Probe {
        bool active = false;
        int cell = -1;
        uint32_t value = 0;
    };

    static constexpr int gave_up = max_choices - 1, stack_bytes = 96 << 10;
    static int thread_of(int transition) { return transition / max_choices; }

    std::unordered_set<size_t> sites_seen_;
    std::vector<Thread> threads_;
    std::vector<Cell> cells_;
    std::vector<Payload> payloads_;
    std::vector<Barrier> barriers_;
    std::vector<Step> path_;
    std::array<Fiber, max_threads> fibers_;
    std::array<Knowledge, max_threads> generic_, async_, async_shared_, fenced_;
    std::array<Pending, max_threads> pending_;
    std::array<Causes, max_threads> causes_;
    std::array<std::string, max_threads> wanted_;
    std::array<int, max_threads> choice_, forced_;
    std::array<bool, max_threads> done_;
    std::vector<uint32_t> outcome_;
    std::string error_;
    Probe probe_;
    fibers::Context main_;
    int running_ = -1;
    bool poisoned_ = false;

    static World*& current() {
        static World* world;
        return world;
    }
    static void fiber_main();

    int count() const { return static_cast<int>(threads_.size()); }

    // Hands the processor to the search until it picks this operation; returns the picked choice.
    int visible(int t, Pending pending) {
        if (pending.kind == Kind::read && forced_[t] >= 0) return forced_[t];
        pending_[t] = pending;
        fibers::switch_context(fibers_[t].context, main_);
        return choice_[t];
    }
    void resume(int t) {
        running_ = t;
        fibers::switch_context(main_, fibers_[t].context);
    }

    bool covers(int scope, int from, int to) const {  // does `from`, at this scope, include `to`?
        return scope == static_cast<int>(Scope::system) ||
               (scope == static_cast<int>(Scope::gpu) && threads_[from].rank == threads_[to].rank);
    }
    bool morally_strong(int a, int scope_a, int b, int scope_b) const {
        return covers(scope_a, a, b) && covers(scope_b, b, a);
    }
    void use(int t, Cell& cell, int scope, bool write) {
        for (const Use& u : cell.uses) {
            if (poisoned_ || u.thread == t || !(u.write || write) ||
                generic_[t].clock[2 * u.thread] >= u.stamp)
                continue;
            if (!morally_strong(t, scope, u.thread, u.scope)) {
                fail("race on flag " + cell.name + ": " + threads_[t].name + " and " +
                     threads_[u.thread].name + " are not ordered and their scopes do not include each other");
            }
        }
        cell.uses.push_back({t, scope, ++generic_[t].clock[2 * t], write});
    }
    // t reads message `index`.
    uint32_t take(int t, int id, int index, bool acquire, int scope) {
        Cell& cell = cells_[id];
        use(t, cell, scope, false);
        const Message& m = cell.messages[index];
        generic_[t].view[id] = std::max<uint16_t>(generic_[t].view[id], static_cast<uint16_t>(index));
        for (int i = 0; i < max_threads; ++i) causes_[t][i] = std::max(causes_[t][i], m.causes[i]);
        if (acquire) {
            for (const Release& r : m.releases) {
                if (morally_strong(t, scope, r.thread, r.scope)) generic_[t].join(r.knowledge);
            }
        }
        if (outcomes) outcome_.push_back(static_cast<uint32_t>(t << 16) + m.value);
        return m.value;
    }
    void put(int t, int id, uint32_t value, bool release, int scope, bool rmw) {
        Cell& cell = cells_[id];
        use(t, cell, scope, true);
        generic_[t].view[id] = static_cast<uint16_t>(cell.messages.size());
        Message m{value, t, {}, {}};
        const Message& last = cell.messages.back();
        if (rmw) m.releases = last.releases;
        if (release) m.releases.push_back({generic_[t], t, scope});
        for (int i = 0; i < max_threads; ++i) causes_[t][i] = std::max(causes_[t][i], last.causes[i]);
        m.causes = causes_[t];
        cell.messages.push_back(std::move(m));
        if (cell.messages.size() >= max_choices) fail("too many writes of " + cell.name);
    }
    [[noreturn]] void race(const Payload& p, int agent, bool write, int other, const char* what) {
        auto say = [&](int a) { return threads_[a / 2].name + (a & 1 ? " (async)" : ""); };
        fail("race on " + p.name + ": " + (write ? "write" : "read") + " by " + say(agent) +
             " is not ordered after the " + what + " by " + say(other));
    }

    // --- the search
    // ----------------------------------------------------------------------------------------------
    void restart() {
        for (Cell& c : cells_) c.messages.assign(1, {c.initial, -1, {}, {}}), c.uses.clear();
        for (Payload& p : payloads_) p.writer = -1, p.value = 0, p.reads.clear();
        for (Barrier& b : barriers_) b.arrived = 0, b.knowledge = {}, b.fenced = {}, b.causes = {};
        generic_.fill({}), async_.fill({}), async_shared_.fill({}), fenced_.fill({}), causes_.fill({}),
            done_.fill(false), forced_.fill(-1);
        poisoned_ = false, error_.clear(), outcome_.clear();
        current() = this;
        for (int t = 0; t < count() && error_.empty(); ++t) {
            Fiber& f = fibers_[t];
            if (!f.stack) f.stack.reset(new uint8_t[stack_bytes]);
            fibers::make_context(f.context, f.stack.get(), stack_bytes, &World::fiber_main);
            resume(t);  // to its first visible operation
        }
    }
    void list_enabled(Step& step) {
        for (int t = 0; t < count(); ++t) {
            if (done_[t]) continue;
            const Pending& p = pending_[t];
            size_t before = step.enabled.size();
            auto add = [&](int choice) { step.enabled.push_back(t * max_choices + choice); };
            if (p.kind == Kind::write ||
                (p.kind == Kind::barrier && barriers_[p.barrier].arrived == barriers_[p.barrier].count)) {
                add(0);
            } else if (p.kind == Kind::await && poisoned_) {
                add(gave_up);
            } else if (p.kind == Kind::read || p.kind == Kind::await) {
                const auto& messages = cells_[p.cell].messages;
                for (size_t i = generic_[t].view[p.cell]; i < messages.size(); ++i) {
                    if (p.kind == Kind::read || (*p.satisfied)(messages[i].value)) add(static_cast<int>(i));
                }
            }
            if (step.enabled.size() > before) step.enabled_threads |= 1u << t;
        }
    }
    // A transition commutes with a pending one unless both write the same cell (what a read chose stays
    // choosable).
    bool commutes(int transition, int asleep) const {
        const Pending &a = pending_[thread_of(transition)], &b = pending_[thread_of(asleep)];
        return thread_of(transition) != thread_of(asleep) &&
               !(a.kind == Kind::write && b.kind == Kind::write && a.cell == b.cell);
    }
    // Each pending write that could have come before an earlier use of its cell: search that order too.
    void add_backtracks() {
        for (int p = 0; p < count(); ++p) {
            if (done_[p] || pending_[p].kind != Kind::write) continue;
            for (size_t d = 0; d < path_.size(); ++d) {
                Step& step = path_[d];
                int q = thread_of(step.chosen);
                if (step.cell != pending_[p].cell || q == p || causes_[p][q] >= step.sequence) continue;
                uint32_t first = initials(d, p);
                if (!(first & step.backtrack)) step.backtrack |= first & -first;
            }
        }
    }
    // Of what follows step d without needing it, and then p's pending write: the threads that could go first.
    uint32_t initials(size_t d, int p) const {
        int q = thread_of(path_[d].chosen);
        uint32_t seen = 0, first = 0;
        std::vector<size_t> after;
        for (size_t j = d + 1; j < path_.size(); ++j) {
            const Step& step = path_[j];
            int r = thread_of(step.chosen);
            if (step.causes[q] >= path_[d].sequence) continue;
            bool free = !(seen >> r & 1);
            for (size_t k : after) free = free && step.causes[thread_of(path_[k].chosen)] < path_[k].sequence;
            if (free) first |= 1u << r;
            seen |= 1u << r;
            after.push_back(j);
        }
        bool free = !(seen >> p & 1);
        for (size_t k : after) {
            const Step& step = path_[k];
            free = free && causes_[p][thread_of(step.chosen)] < step.sequence &&
                   !(step.write && step.cell == pending_[p].cell);
        }
        return free ? first | 1u << p : first;
    }
    bool next_sibling(Step& step) {
        step.sleep.push_back(step.chosen);
        return choose(step);
    }
    bool choose(Step& step) {
        for (int transition : step.enabled) {
            bool wanted = step.backtrack >> thread_of(transition) & 1;
            bool asleep = std::find(step.sleep.begin(), step.sleep.end(), transition) != step.sleep.end();
            if (wanted && !asleep) {
                step.chosen = transition;
                return true;
            }
        }
        return false;
    }
    bool give_up(Step& step) {  // a deadlock with timeouts: any await may be the first to lose patience
        if (!timeouts || poisoned_) return false;
        for (int t = 0; t < count(); ++t) {
            if (!done_[t] && pending_[t].kind == Kind::await) {
                step.enabled.push_back(t * max_choices + gave_up);
                step.enabled_threads |= 1u << t;
            }
        }
        return !step.enabled.empty();
    }
    std::string deadlock() const {
        std::string s = "deadlock:";
        for (int t = 0; t < count(); ++t) {
            if (done_[t]) continue;
            const Pending& p = pending_[t];
            s += " " + threads_[t].name + " waits for ";
            if (p.kind == Kind::barrier) {
                const Barrier& b = barriers_[p.barrier];
                s += b.name + " (" + std::to_string(b.arrived) + " of " + std::to_string(b.count) + ");";
            } else {
                s += cells_[p.cell].name + " " + wanted_[t] + " (newest " +
                     std::to_string(cells_[p.cell].messages.back().value) + ");";
            }
        }
        return s;
    }
    // True: ran to the end. False: cut off, because what would follow is explored elsewhere.
    bool run_once() {
        restart();
        std::vector<int> sleep;
        std::array<int, max_threads> events{};
        for (size_t depth = 0; error_.empty(); ++depth) {
            bool all_done = true;
            for (int t = 0; t < count(); ++t) all_done &= done_[t];
            if (depth == path_.size()) {
                if (!full && !poisoned_) add_backtracks();
                if (all_done) break;
                Step step;
                step.sleep = sleep;
                list_enabled(step);
                bool timed_out = step.enabled.empty() && give_up(step);
                if (step.enabled.empty()) {
                    error_ = deadlock();
                    break;
                }
                step.backtrack = full || timed_out ? step.enabled_threads : 0;
                for (int t = 0; t < count() && !step.backtrack;
                     ++t) {  // barriers commute with all: never a choice
                    if ((step.enabled_threads >> t & 1) && pending_[t].kind == Kind::barrier)
                        step.backtrack = 1u << t;
                }
                for (int t = 0; t < count() && !step.backtrack; ++t) {
                    step.backtrack = step.enabled_threads & 1u << t;
                    if (!choose(step)) step.backtrack = 0;
                }
                if (!choose(step)) return false;
                path_.push_back(std::move(step));
            }
            Step& step = path_[depth];
            int t = thread_of(step.chosen);
            sleep.clear();
            if (!full) {
                for (int s : step.sleep) {
                    if (commutes(step.chosen, s)) sleep.push_back(s);
                }
            }
            if (step.chosen % max_choices == gave_up) poisoned_ = true;
            step.cell = pending_[t].cell;
            step.write = pending_[t].kind == Kind::write;
            step.sequence = ++events[t];
            causes_[t][t] = static_cast<uint16_t>(step.sequence);
            if (pending_[t].kind == Kind::barrier) {
                const Causes& from = barriers_[pending_[t].barrier].causes;
                for (int i = 0; i < max_threads; ++i) causes_[t][i] = std::max(causes_[t][i], from[i]);
            }
            choice_[t] = step.chosen % max_choices;
            resume(t);
            path_[depth].causes = causes_[t];
        }
        if (outcomes && error_.empty()) {
            std::stable_sort(outcome_.begin(), outcome_.end(),
                             [](uint32_t a, uint32_t b) { return a >> 16 < b >> 16; });
            for (const Cell& c : cells_) outcome_.push_back(c.messages.back().value);
            outcomes->insert(outcome_);
        }
        return true;
    }
};

}  // namespace model
