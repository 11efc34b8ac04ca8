// What is between CTAs of one rank: the grid barrier, "whoever arrives last", and what is reset by whom.
#include "scenarios.h"

namespace model {
namespace {

// Two consecutive barriers, then the next launch's first one: every CTA reads what every other wrote before.
void grid_barrier(World& w, const Flaw& flaw, int num_ctas, int phases) {
    int arrivals = w.cell("arrivals"), generation = w.cell("generation");
    std::array<int, 3> slot;
    for (int c = 0; c < num_ctas; ++c) slot[c] = w.payload(name_of("slot", c));
    int last_phase = flaw("second barrier left out") ? 0 : 1;
    bool one_too_few = flaw("expects one CTA too few");
    for (int c = 0; c < num_ctas; ++c) {
        w.thread(name_of("cta", c), 0, c, [=](Mem& m) {
            for (int phase = 0; phase < phases; ++phase) {
                m.write(slot[c], phase + 1);
                GridBarrier::arrive_and_wait(m, arrivals, generation, num_ctas - one_too_few);
                for (int other = 0; other < num_ctas; ++other) m.read(slot[other], phase + 1);
                if (last_phase == 1)
                    GridBarrier::arrive_and_wait(m, arrivals, generation, num_ctas - one_too_few);
            }
        });
    }
}
void grid_barrier_2(World& w, const Flaw& flaw) { grid_barrier(w, flaw, 2, 2); }
void grid_barrier_3(World& w, const Flaw& flaw) { grid_barrier(w, flaw, 3, 1); }

// One thread a CTA takes part: the others hand over to it and from it by a barrier of the warps that take
// part.
void grid_barrier_cta(World& w, const Flaw& flaw) {
    int arrivals = w.cell("arrivals"), generation = w.cell("generation");
    std::array<int, 2> slot = {w.payload("slot[0]"), w.payload("slot[1]")};
    bool before = !flaw("no cta_sync before"), after = !flaw("no cta_sync after");
    for (int c = 0; c < 2; ++c) {
        int in = w.barrier("cta_sync before", before ? 2 : 1),
            out = w.barrier("cta_sync after", after ? 2 : 1);
        w.thread(name_of("thread1", c), 0, c, [=](Mem& m) {
            m.write(slot[c]);
            if (before) m.sync(in);
            if (after) m.sync(out);
            m.read(slot[1 - c]);
        });
        w.thread(name_of("thread0", c), 0, c, [=](Mem& m) {
            m.sync(in);
            GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            m.sync(out);
        });
    }
}

// Three CTAs stage parts of x, the last publishes to the peer; the ticket serves the next launch too. Two
// launches of rank 0; rank 1 tells that it has read x of launch 1 (in the kernel: it owes a partial).
void last_arrival(World& w, const Flaw& flaw) {
    int ticket = w.cell("ticket"), staged = w.cell("staged"), owed = w.cell("owed");
    std::array<int, 2> part = {w.payload("x[0]"), w.payload("x[1]")};
    int launch = w.barrier("launch boundary", 2);
    bool first_publishes = flaw("each CTA publishes");
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("cta", c), 0, c, [=](Mem& m) {
            for (uint32_t epoch = 1; epoch <= 2; ++epoch) {
                m.write(part[c], epoch);
                bool last = LastArrival::arrive(m, ticket, 2);
                if (last || first_publishes) XReady::publish(m, staged, epoch);
                if (epoch == 1) {
                    m.Memory::await(owed, Until::at_least, 1, Scope::system, {});
                    m.launch_boundary(launch);
                }
            }
        });
    }
    w.thread("dispatch@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 2; ++epoch) {
            XReady::await(m, staged, epoch, 0);
            m.read(part[0], epoch), m.read(part[1], epoch);
            m.Memory::store(owed, epoch, Order::release, Scope::system);
        }
    });
}

// The peers of a rank at its door.
struct Peers {
    std::vector<int> to_cells, from_cells;
    uint32_t ns;
    int count() const { return static_cast<int>(to_cells.size()); }
    int to(int r) const { return to_cells[r]; }
    int from(int r) const { return from_cells[r]; }
    uint32_t patience_ns() const { return ns; }
};

// Pairs at the door of a launch: each that takes part has a number of its own, all know how many they are,
// and the next launch finds the door open.
void door(World& w, const Flaw& flaw, int num_pairs, uint32_t launches) {
    int joined = w.cell("joined"), members = w.cell("members"), ticket = w.cell("exit_ticket");
    int arrivals = w.cell("arrivals"), generation = w.cell("generation");
    std::array<int, 3> slot;
    for (int p = 0; p < num_pairs; ++p) slot[p] = w.payload(name_of("slot", p));
    int boundary = w.barrier("launch boundary", num_pairs), ended = w.cell("ended"),
        first = w.payload("first");
    bool stay = flaw("late pairs stay"), alone = flaw("the last member zeroes the door");
    for (int p = 0; p < num_pairs; ++p) {
        w.thread(name_of("pair", p), 0, p, [=](Mem& m) {
            for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
                auto [number, count] = Door::enter(m, joined, members, epoch, num_pairs, 0, Peers{{}, {}, 0});
                if (number < 0 && stay) number = count = num_pairs - 1;
                if (number >= 0) {
                    m.write(slot[number], epoch);
                    GridBarrier::arrive_and_wait(m, arrivals, generation, count);
                    for (int other = 0; other < count; ++other) m.read(slot[other], epoch);
                }
                if (number == 0) m.write(first, epoch);  // somebody takes part
                if (!alone || number >= 0) {
                    if (LastArrival::arrive(m, ticket, alone ? count : num_pairs)) {
                        m.read(first, epoch);
                        m.store(joined, 0, Order::relaxed, Scope::gpu);
                        m.Memory::store(ended, epoch, Order::release, Scope::gpu);
                    }
                }
                m.Memory::await(ended, Until::at_least, epoch, Scope::gpu, {});
                if (epoch < launches) m.launch_boundary(boundary);
            }
        });
    }
}
void door_3(World& w, const Flaw& flaw) { door(w, flaw, 3, 1); }
void door_twice(World& w, const Flaw& flaw) { door(w, flaw, 2, 2); }

// All come to the door in time: two pairs of rank 0, one of rank 1. Nobody leaves.
void door_in_time(World& w, const Flaw& flaw) {
    int joined = w.cell("joined"), members = w.cell("members");
    std::array<int, 2> launched = {w.cell("launched[0]"), w.cell("launched[1]")};  // by the rank that says it
    bool waits = !flaw("does not wait for the other pairs");
    for (int p = 0; p < 2; ++p) {
        w.thread(name_of("pair", p), 0, p, [=](Mem& m) {
            Peers peers{{launched[0]}, {launched[1]}, 1};
            m.expect(Door::enter(m, joined, members, 1, 2, waits, peers).count, 2, "count");
        });
    }
    w.thread("pair@1", 1, 0, [=, joined = w.cell("joined@1"), members = w.cell("members@1")](Mem& m) {
        Peers peers{{launched[1]}, {launched[0]}, 1};
        m.expect(Door::enter(m, joined, members, 1, 1, 1, peers).count, 1, "count");
    });
}

// Rank 0's host waits for a kernel of NCCL's before it makes its launch; on rank 1 that kernel comes behind
// the launch, which has both of the SMs there. Twice.
void door_beside_nccl(World& w, const Flaw& flaw) {
    int joined = w.cell("joined"), members = w.cell("members"), ticket = w.cell("exit_ticket");
    int joined_0 = w.cell("joined@0"), members_0 = w.cell("members@0");
    std::array<int, 2> launched = {w.cell("launched[0]"), w.cell("launched[1]")},
                       routes = {w.cell("routes[0]"), w.cell("routes[1]")};
    int left = w.cell("left"), gathered = w.cell("gathered"), boundary = w.barrier("launch boundary", 2);
    bool stay = flaw("all stay without the peer");
    uint32_t launches = 2;
    auto await_peer = [=](Mem& m, int peer, uint32_t epoch) {
        m.Memory::await(routes[peer], Until::equal, epoch, Scope::system, {});
    };
    for (int p = 0; p < 2; ++p) {
        w.thread(name_of("pair", p), 1, p, [=](Mem& m) {
            for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
                Peers peers{{launched[1]}, {launched[0]}, 0};
                int number = Door::enter(m, joined, members, epoch, 2, 0, peers).number;
                if (number == 0) m.Memory::store(routes[1], epoch, Order::release, Scope::system);
                if (number >= 0 || stay) await_peer(m, 0, epoch);
                auto& last = static_cast<Memory&>(m);  // without mutants, which "two launches" has
                if (LastArrival::arrive(last, ticket, 2)) m.store(joined, 0, Order::relaxed, Scope::gpu);
                m.Memory::add(left, 1, Order::release);  // an SM is free
                if (epoch < launches) m.launch_boundary(boundary);
            }
        });
    }
    w.thread("nccl@1", 1, 2, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
            m.Memory::await(left, Until::at_least, 2 * epoch - 1, Scope::gpu, {});
            m.Memory::store(gathered, epoch, Order::release, Scope::system);
        }
    });
    w.thread("host and pair@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
            m.Memory::await(gathered, Until::at_least, epoch, Scope::system, {});
            Door::enter(m, joined_0, members_0, epoch, 1, 0, Peers{{launched[0]}, {launched[1]}, 0});
            m.Memory::store(routes[0], epoch, Order::release, Scope::system);
            await_peer(m, 1, epoch);
            m.Memory::store(joined_0, 0, Order::relaxed, Scope::gpu);
        }
    });
}

// The last arrival's thread tells another thread of its CTA, which publishes: one peer a thread.
void last_arrival_cta(World& w, const Flaw& flaw) {
    int ticket = w.cell("ticket"), staged = w.cell("staged");
    std::array<int, 2> part = {w.payload("ids[0]"), w.payload("ids[1]")},
                       last = {w.payload("last[0]", true), w.payload("last[1]", true)};
    bool synced = !flaw("no cta_sync before publish"), converged = !flaw("no cta_sync before arrive");
    for (int c = 0; c < 2; ++c) {
        int in = w.barrier("cta_sync before", converged ? 2 : 1),
            out = w.barrier("cta_sync after", synced ? 2 : 1);
        w.thread(name_of("thread0", c), 0, c, [=](Mem& m) {
            m.sync(in);
            m.write(last[c], LastArrival::arrive(m, ticket, 2));
            m.sync(out);
        });
        w.thread(name_of("thread1", c), 0, c, [=](Mem& m) {
            m.write(part[c]);
            if (converged) m.sync(in);
            if (synced) m.sync(out);
            if (m.read(last[c], -1)) XReady::publish(m, staged, 1);
        });
    }
    w.thread("dispatch@1", 1, 0, [=](Mem& m) {
        XReady::await(m, staged, 1, 0);
        m.read(part[0]), m.read(part[1]);
    });
}

// The epoch is read by every CTA at entry and advanced by the last one out, with ordinary accesses. Two
// launches.
void epoch_cell(World& w, const Flaw& flaw) {
    int ticket = w.cell("ticket"), epoch = w.payload("epoch");
    std::array<int, 2> launch = {w.barrier("launch boundary", 3), w.barrier("launch boundary", 3)};
    bool first_out = flaw("whoever leaves first advances it");
    for (int c = 0; c < 3; ++c) {
        w.thread(name_of("cta", c), 0, c, [=](Mem& m) {
            for (uint32_t completed = 0; completed < 2; ++completed) {
                m.read(epoch, completed);
                bool last = LastArrival::arrive(m, ticket, 3);
                if (last || (first_out && c == 0)) m.write(epoch, completed + 1);
                m.launch_boundary(launch[completed]);
            }
            m.read(epoch, 2);
        });
    }
}

// Block counters are zeroed by ordinary stores between the two barriers of a prologue: after the end of the
// last pass, before the first add of this one. Two passes of two CTAs; each CTA zeroes a cell, adds to the
// other and awaits its own.
void counters_zeroed(World& w, const Flaw& flaw) {
    int arrivals = w.cell("arrivals"), generation = w.cell("generation");
    std::array<int, 2> ready = {w.cell("rows_ready[0]"), w.cell("rows_ready[1]")};
    std::array<std::array<int, 2>, 2> row;
    for (int p = 0; p < 2; ++p) row[p] = {w.payload(name_of("row", p, 0)), w.payload(name_of("row", p, 1))};
    bool late = flaw("zeroed after the second barrier"),
         early = flaw("zeroed before the pass ended everywhere");
    bool never = flaw("never zeroed");
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("cta", c), 0, c, [=](Mem& m) {
            for (int pass = 0; pass < 2; ++pass) {
                if (early) m.plain_store(ready[1 - c], 0);
                GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
                if (!late && !early && !never) m.plain_store(ready[c], 0);
                GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
                if (late) m.plain_store(ready[c], 0);
                m.write(row[pass][c]);
                RowsReady::publish(m, ready[1 - c], 1);
                RowsReady::await(m, ready[c], 1, 0);
                m.tma_load(row[pass][1 - c]);
            }
        });
    }
}

}  // namespace

const std::vector<Scenario> grid_scenarios = {
    {"grid_barrier, 2 CTAs x 4",
     grid_barrier_2,
     {"second barrier left out", "expects one CTA too few"},
     {{"value + 1 at generation", only_grows}}},
    {"grid_barrier, 3 CTAs x 2",
     grid_barrier_3,
     {"expects one CTA too few"},
     {{"value + 1 at generation", only_grows}}},
    {"grid_barrier, whole CTAs", grid_barrier_cta, {"no cta_sync before", "no cta_sync after"}, {}, false},
    {"last_arrival", last_arrival, {"each CTA publishes"}, {}},
    {"door, three pairs", door_3, {"late pairs stay", "the last member zeroes the door"}, {}, false},
    {"door, two launches",
     door_twice,
     {"late pairs stay", "the last member zeroes the door"},
     {{"acquire at joined", only_count},
      {"release at joined", only_count},
      {"relaxed at members", only_count},
      {"value - 1 at joined", leaves},
      {"target + 1 at members", count_below},
      {"target - 1 at members", count_below},
      {"await_for dropped at joined", impatient},
      {"await_for of target + 1 at joined", impatient},
      {"await_for of target - 1 at joined", impatient},
      {"value + 1 at generation", only_grows}}},
    {"door, all in time",
     door_in_time,
     {"does not wait for the other pairs"},
     {{"acquire at joined", only_count},
      {"release at joined", only_count},
      {"relaxed at members", only_count},
      {"target + 1 at members", count_below},
      {"target - 1 at members", count_below},
      {"await_for dropped at launched", nobody_late},
      {"await_for of target - 1 at launched", nobody_late}}},
    {"door, a peer's host waits for NCCL",
     door_beside_nccl,
     {"all stay without the peer"},
     {{"acquire at joined", only_count},
      {"release at joined", only_count},
      {"relaxed at members", only_count},
      {"value - 1 at joined", leaves},
      {"target + 1 at members", count_below},
      {"target - 1 at members", count_below},
      {"value - 1 at members", "one takes part, the other would leave anyway"},
      {"await_for dropped at joined", impatient},
      {"await_for of target + 1 at joined", impatient},
      {"await_for of target - 1 at joined", impatient},
      {"await_for of target + 1 at launched", thought_missing},
      {"store dropped at launched", thought_missing},
      {"value - 1 at launched", thought_missing},
      {"system->gpu at launched", "never seen here in time: see the scenario before"}}},
    {"last_arrival, whole CTAs",
     last_arrival_cta,
     {"no cta_sync before arrive", "no cta_sync before publish"},
     {},
     false},
    {"epoch advanced by the last out", epoch_cell, {"whoever leaves first advances it"}, {}},
    {"counters zeroed in the prologue",
     counters_zeroed,
     {"zeroed after the second barrier", "zeroed before the pass ended everywhere", "never zeroed"},
     {{"value + 1 at generation", only_grows}, {"value + 1 at rows_ready", one_of_one}}},
};

}  // namespace model
