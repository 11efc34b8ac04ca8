// Tests of the checker itself: what the memory model allows and forbids (litmus tests), and that the reduced
// exploration sees every outcome that the full one sees (random programs). One line a case; exit code 1 if
// any fails.
#include <random>

#include "scenarios.h"

namespace {

using namespace model;
using Outcomes = std::set<std::vector<uint32_t>>;

bool all_ok = true;

void check(bool ok, const std::string& name, const std::string& detail = "") {
    all_ok &= ok;
    std::printf("%-4s %-60s %s\n", ok ? "ok" : "BAD", name.c_str(), detail.c_str());
}

// Registers of the loads, read by value after the executions: does one outcome satisfy `wanted`?
struct Litmus {
    const char* name;
    bool allowed;
    void (*build)(World&, std::vector<uint32_t>& registers);
    bool (*wanted)(const std::vector<uint32_t>& registers);
};

bool observable(const Litmus& litmus) {
    World w;
    std::vector<uint32_t> registers(8);
    bool seen = false;
    litmus.build(w, registers);
    int done = w.barrier("done", 4);
    for (int t = 0; t < 3; ++t) w.thread("idle", 0, 9, [=](Mem& m) { m.arrive(done); });
    // A last thread starts after the others: every litmus thread ends by arriving at barrier 0.
    w.thread("judge", 0, 9, [&, done](Mem& m) {
        m.sync(done);
        m.wait(0);
        seen |= litmus.wanted(registers);
    });
    w.explore(200000);
    return seen;
}

template <class F>
void body(World& w, int rank, F f) {
    w.thread("t", rank, 0, [=](Mem& m) {
        f(m);
        m.arrive(0);
    });
}

constexpr Order rlx = Order::relaxed, acq = Order::acquire, rel = Order::release;
constexpr Scope sys = Scope::system;

const Litmus litmus_tests[] = {
    {"message passing, relaxed: stale data may be read", true,
     [](World& w, std::vector<uint32_t>& r) {
         w.barrier("end", 2);
         int x = w.cell("x"), y = w.cell("y");
         body(w, 0, [=](Mem& m) { m.store(x, 1, rlx, sys), m.store(y, 1, rlx, sys); });
         body(w, 1, [=, &r](Mem& m) { r[0] = m.load(y, rlx, sys), r[1] = m.load(x, rlx, sys); });
     },
     [](const std::vector<uint32_t>& r) { return r[0] == 1 && r[1] == 0; }},
    {"message passing, release and acquire: it may not", false,
     [](World& w, std::vector<uint32_t>& r) {
         w.barrier("end", 2);
         int x = w.cell("x"), y = w.cell("y");
         body(w, 0, [=](Mem& m) { m.store(x, 1, rlx, sys), m.store(y, 1, rel, sys); });
         body(w, 1, [=, &r](Mem& m) { r[0] = m.load(y, acq, sys), r[1] = m.load(x, rlx, sys); });
     },
     [](const std::vector<uint32_t>& r) { return r[0] == 1 && r[1] == 0; }},
    {"message passing through another's relaxed add", false,
     [](World& w, std::vector<uint32_t>& r) {
         w.barrier("end", 3);
         int x = w.cell("x"), y = w.cell("y");
         body(w, 0, [=](Mem& m) { m.store(x, 1, rlx, sys), m.add_across_ranks(y, 1, false, true); });
         body(w, 1, [=](Mem& m) { m.add_across_ranks(y, 16, false, false); });
         body(w, 1, [=, &r](Mem& m) { r[0] = m.load(y, acq, sys), r[1] = m.load(x, rlx, sys); });
     },
     [](const std::vector<uint32_t>& r) { return r[0] == 17 && r[1] == 0; }},
    {"a plain relaxed store ends a release sequence", true,
     [](World& w, std::vector<uint32_t>& r) {
         w.barrier("end", 2);
         int x = w.cell("x"), y = w.cell("y");
         body(w, 0,
              [=](Mem& m) { m.store(x, 1, rlx, sys), m.store(y, 1, rel, sys), m.store(y, 2, rlx, sys); });
         body(w, 1, [=, &r](Mem& m) { r[0] = m.load(y, acq, sys), r[1] = m.load(x, rlx, sys); });
     },
     [](const std::vector<uint32_t>& r) { return r[0] == 2 && r[1] == 0; }},
    {"coherence: a later read of a cell is not older", false,
     [](World& w, std::vector<uint32_t>& r) {
         w.barrier("end", 2);
         int x = w.cell("x");
         body(w, 0, [=](Mem& m) { m.store(x, 1, rlx, sys), m.store(x, 2, rlx, sys); });
         body(w, 1, [=, &r](Mem& m) { r[0] = m.load(x, rlx, sys), r[1] = m.load(x, rlx, sys); });
     },
     [](const std::vector<uint32_t>& r) { return r[0] > r[1]; }},
    {"store buffering: both may read the old value", true,
     [](World& w, std::vector<uint32_t>& r) {
         w.barrier("end", 2);
         int x = w.cell("x"), y = w.cell("y");
         body(w, 0, [=, &r](Mem& m) { m.store(x, 1, rel, sys), r[0] = m.load(y, acq, sys); });
         body(w, 1, [=, &r](Mem& m) { m.store(y, 1, rel, sys), r[1] = m.load(x, acq, sys); });
     },
     [](const std::vector<uint32_t>& r) { return r[0] == 0 && r[1] == 0; }},
    {"independent reads of independent writes may disagree", true,
     [](World& w, std::vector<uint32_t>& r) {
         w.barrier("end", 4);
         int x = w.cell("x"), y = w.cell("y");
         body(w, 0, [=](Mem& m) { m.store(x, 1, rel, sys); });
         body(w, 1, [=](Mem& m) { m.store(y, 1, rel, sys); });
         body(w, 0, [=, &r](Mem& m) { r[0] = m.load(x, acq, sys), r[1] = m.load(y, acq, sys); });
         body(w, 1, [=, &r](Mem& m) { r[2] = m.load(y, acq, sys), r[3] = m.load(x, acq, sys); });
     },
     [](const std::vector<uint32_t>& r) { return r[0] == 1 && r[1] == 0 && r[2] == 1 && r[3] == 0; }},
    {"two adds: none is lost", false,
     [](World& w, std::vector<uint32_t>& r) {
         w.barrier("end", 2);
         int x = w.cell("x");
         body(w, 0, [=, &r](Mem& m) { r[0] = m.add_across_ranks(x, 1, true, true); });
         body(w, 1, [=, &r](Mem& m) { r[1] = m.add_across_ranks(x, 1, true, true); });
     },
     [](const std::vector<uint32_t>& r) { return r[0] == r[1]; }},
};

// A random program of loads, stores, additions and awaits; deterministic in the seed.
void random_program(World& w, unsigned seed, int threads, int operations) {
    std::mt19937 random(seed);
    auto pick = [&](int n) { return static_cast<int>(random() % n); };
    int cells[2] = {w.cell("x"), w.cell("y")};
    bool synced = pick(2);
    int middle = w.barrier("middle", threads);
    for (int t = 0; t < threads; ++t) {
        struct Operation {
            int kind, cell, value, order;
        };
        std::vector<Operation> program;
        for (int i = 0; i < operations; ++i)
            program.push_back({pick(9), cells[pick(2)], 1 + pick(2), pick(2)});
        w.thread(name_of("t", t), t % 2, 0, [=](Mem& m) {
            for (size_t i = 0; i < program.size(); ++i) {
                const Operation& o = program[i];
                if (synced && i == program.size() / 2) m.sync(middle);
                if (o.kind < 3)
                    m.load(o.cell, o.order ? acq : rlx, sys);
                else if (o.kind < 5)
                    m.store(o.cell, o.value + 4 * t, o.order ? rel : rlx, sys);
                else if (o.kind < 7)
                    m.add_across_ranks(o.cell, o.value, true, true);
                else if (o.kind < 8)
                    m.add_across_ranks(o.cell, o.value, false, o.order);
                else
                    m.await(o.cell, Until::at_least, o.value, sys, {});
            }
        });
    }
}

void compare(int programs, int threads, int operations) {
    long full_executions = 0, reduced_executions = 0, deadlocks = 0, different = 0;
    for (int seed = 0; seed < programs; ++seed) {
        Outcomes outcomes[2];
        std::string why[2];
        for (int full = 0; full < 2; ++full) {
            World w;
            w.full = full;
            w.outcomes = &outcomes[full];
            random_program(w, static_cast<unsigned>(seed), threads, operations);
            why[full] = w.explore(3000000);
            (full ? full_executions : reduced_executions) += w.executions + w.pruned;
        }
        bool deadlock[2] = {!why[0].empty(), !why[1].empty()};
        deadlocks += deadlock[1];
        bool same = deadlock[0] == deadlock[1] && (deadlock[0] || outcomes[0] == outcomes[1]);
        different += !same;
        if (!same)
            std::printf("     seed %d: %zu outcomes, %zu without reduction; %s | %s\n", seed,
                        outcomes[0].size(), outcomes[1].size(), why[0].c_str(), why[1].c_str());
    }
    std::string name = std::to_string(programs) + " random programs, " + std::to_string(threads) +
                       " threads x " + std::to_string(operations);
    check(different == 0, name,
          std::to_string(reduced_executions) + " executions for " + std::to_string(full_executions) + ", " +
              std::to_string(deadlocks) + " with deadlocks");
}

}  // namespace

int main() {
    for (const Litmus& litmus : litmus_tests) check(observable(litmus) == litmus.allowed, litmus.name);
    compare(300, 2, 4);
    compare(150, 3, 2);
    compare(25, 3, 3);
    return !all_ok;
}
