// What the two CTAs of a pair hand each other through their shared memory: halves of a shared operand, units,
// CTA 0's plan, the last arrivals; and what the roles of one do.
#include "scenarios.h"

namespace model {
namespace {

// The barriers of a ring, as the threads of one CTA see them.
struct RingSlots {
    std::vector<PhaseBarrier> full;
    std::vector<PairPhaseBarrier> empty;
};

// The kernel's ring of `slots`, walked over `stages`. Either CTA's loader copies a half of the shared operand
// into both CTAs' slot (`halves` = 1: a short block, of which CTA 0 loads all there is), and writes scales of
// its own. The math thread stands for all math warps. Each copy into a CTA lands when it likes, after it was
// issued. All accesses are in one proxy: the mbarriers order the two (A2).
template <int slots>
void shared_stage(World& w, const Flaw& flaw, int stages, int halves) {
    bool own_count = flaw("empty counts the math warps of its own CTA only"),
         half = flaw("a loader expects only its own half"), fewer = flaw("CTA 1 walks one unit fewer"),
         early = flaw("math releases before it read"), late = flaw("a loader writes behind its commit"),
         tall = flaw("both halves are expected of a short block");
    std::array<RingSlots, 2> ring_of;                               // [CTA]
    std::vector<std::array<std::array<int, 2>, 2>> operand(slots);  // [slot][CTA][half]
    std::vector<std::array<int, 2>> scales(slots), issued(stages);  // [slot][CTA], [stage][half]
    for (int s = 0; s < slots; ++s) {
        std::array<PhaseBarrier, 2> empty;
        for (int c = 0; c < 2; ++c) {
            ring_of[c].full.emplace_back(w, name_of("full", c, s), 1);
            empty[c] = PhaseBarrier(w, name_of("empty", c, s), own_count ? 1 : 2);
            operand[s][c] = {w.payload(name_of("half 0 of operand", c, s)),
                             w.payload(name_of("half 1 of operand", c, s))};
            scales[s][c] = w.payload(name_of("scales", c, s));
        }
        for (int c = 0; c < 2; ++c) ring_of[c].empty.push_back({empty, c});
    }
    for (int i = 0; i < stages; ++i) {
        for (int h = 0; h < 2; ++h) issued[i][h] = w.barrier(name_of("issued half", h, i), 1);
    }
    for (int c = 0; c < 2; ++c) {
        int walked = stages - (fewer && c == 1);
        RingSlots barriers = ring_of[c];
        w.thread(name_of("load", c), 0, c, [=](Mem& m) {
            Ring<slots> ring;
            for (int i = 0; i < walked; ++i, ring.advance()) {
                ring.acquire(m, barriers);
                if (!late) m.write(scales[ring.slot()][c], i);
                ring.commit(m, barriers, half ? 1 : tall ? 2 : halves);
                if (c < halves) m.arrive(issued[i][c]);
                if (late) m.write(scales[ring.slot()][c], i);
            }
        });
        w.thread(name_of("math", c), 0, c, [=](Mem& m) {
            Ring<slots> ring;
            for (int i = 0; i < walked; ++i, ring.advance()) {
                ring.await(m, barriers);
                if (early) ring.release(m, barriers);
                for (int h = 0; h < halves; ++h) m.read(operand[ring.slot()][c][h], i);
                m.read(scales[ring.slot()][c], i);
                if (!early) ring.release(m, barriers);
            }
        });
        for (int h = 0; h < halves; ++h) {
            int copied = stages - (fewer && h == 1);
            w.thread(name_of("copy of half", h, c), 0, c, [=](Mem& m) {
                for (int i = 0; i < copied; ++i) {
                    m.wait(issued[i][h]);
                    m.write(operand[i % slots][c][h], i);
                    m.bytes_landed(barriers.full[i % slots]);
                }
            });
        }
    }
}

// The ring of tiles that CTA 0's scheduler fills in both CTAs, for two of the three threads that walk them in
// either. One look of all is enough for a slot to be scheduled again.
struct ScheduledSlots {
    std::vector<PairPhaseBarrier> full;  // the scheduler arrives at both
    std::vector<PhaseBarrier> empty;     // CTA 0's
};
template <int slots>
void scheduled_tiles(World& w, const Flaw& flaw, int units) {
    bool own_count = flaw("empty counts the threads of CTA 0 only"),
         ahead = flaw("tiles are scheduled unasked"), late = flaw("the tile is written behind the arrival"),
         one = flaw("only CTA 0 is told"), early = flaw("a role gives the slot back before it read");
    std::array<ScheduledSlots, 2> ring_of;        // [CTA]
    std::vector<std::array<int, 2>> unit(slots);  // [slot][CTA]
    for (int s = 0; s < slots; ++s) {
        std::array<PhaseBarrier, 2> full;
        PhaseBarrier empty(w, name_of("empty", 0, s), own_count ? 2 : 4);
        for (int c = 0; c < 2; ++c) {
            full[c] = PhaseBarrier(w, name_of("full", c, s), 1);
            unit[s][c] = w.payload(name_of("unit", c, s));
        }
        for (int c = 0; c < 2; ++c) {
            ring_of[c].full.push_back({full, c});
            ring_of[c].empty.push_back(empty);
        }
    }
    w.thread("scheduler", 0, 0, [=](Mem& m) {
        Ring<slots> ring;
        for (int i = 0; i < units; ++i, ring.advance()) {
            if (!ahead) ring.acquire(m, ring_of[0]);
            if (late) ring.commit(m, ring_of[0]);
            for (int c = 0; c < (one ? 1 : 2); ++c) m.write(unit[ring.slot()][c], i);
            if (!late) ring.commit(m, ring_of[0]);
        }
    });
    for (int c = 0; c < 2; ++c) {
        for (const char* role : {"load", "store"}) {
            w.thread(name_of(role, c), 0, c, [=](Mem& m) {
                Ring<slots> ring;
                for (int i = 0; i < units; ++i, ring.advance()) {
                    ring.await(m, ring_of[c]);
                    if (early) ring.release(m, ring_of[c]);
                    m.read(unit[ring.slot()][c], i);
                    if (!early) ring.release(m, ring_of[c]);
                }
            });
        }
    }
}
void dealt_tiles_1(World& w, const Flaw& flaw) { scheduled_tiles<1>(w, flaw, 2); }
void dealt_tiles_2(World& w, const Flaw& flaw) { scheduled_tiles<2>(w, flaw, 3); }

// The ring of tiles that a thread fills ahead of its loaders and its store thread, which is behind: it
// stores a tile when that is loaded, and only then asks for the next.
template <int slots>
void own_tiles(World& w, const Flaw& flaw) {
    constexpr int tiles = slots + 2;
    bool one = flaw("empty counts one reader"), ahead = flaw("tiles are scheduled unasked"),
         late = flaw("the tile is written behind the arrival"),
         early = flaw("a role gives the slot back before it read");
    struct {
        std::array<PhaseBarrier, slots> full, empty;
    } barriers;
    std::array<int, slots> tile;
    std::array<int, tiles> loaded;
    for (int s = 0; s < slots; ++s) {
        barriers.full[s] = PhaseBarrier(w, name_of("full", s), 1);
        barriers.empty[s] = PhaseBarrier(w, name_of("empty", s), one ? 1 : 2);
        tile[s] = w.payload(name_of("tile", s));
    }
    for (int i = 0; i < tiles; ++i) loaded[i] = w.barrier(name_of("loaded", i), 1);
    w.thread("scheduler", 0, 0, [=](Mem& m) {
        Ring<slots> ring;
        for (int i = 0; i < tiles; ++i, ring.advance()) {
            if (!ahead) ring.acquire(m, barriers);
            if (late) ring.commit(m, barriers);
            m.write(tile[ring.slot()], i);
            if (!late) ring.commit(m, barriers);
        }
    });
    for (bool loads : {true, false}) {
        w.thread(loads ? "load" : "store", 0, 0, [=](Mem& m) {
            Ring<slots> ring;
            for (int i = 0; i < tiles; ++i, ring.advance()) {
                ring.await(m, barriers);
                if (early) ring.release(m, barriers);
                m.read(tile[ring.slot()], i);
                if (!early) ring.release(m, barriers);
                if (loads) {
                    m.arrive(loaded[i]);
                } else {
                    m.wait(loaded[i]);
                }
            }
        });
    }
}

void shared_stage_1(World& w, const Flaw& flaw) { shared_stage<1>(w, flaw, 3, 2); }
void shared_stage_2(World& w, const Flaw& flaw) { shared_stage<2>(w, flaw, 3, 2); }
void shared_stage_short(World& w, const Flaw& flaw) { shared_stage<1>(w, flaw, 3, 1); }

// A slot that an epilogue works in: K (0), its input (1), K again (2). CTA 0 loads K into both CTAs, either
// loads its own input. math overwrites that with what it makes (10), and the store thread, whose source it
// is, gives the slot back for the math warps. One proxy, as above.
void slot_in_place(World& w, const Flaw& flaw) {
    constexpr uint32_t made = 10;
    bool by_math = flaw("math gives the slot back itself"),
         early = flaw("given back before the store read it");
    bool apart = flaw("stored before math handed it over");
    std::array<RingSlots, 2> ring_of;
    std::array<PhaseBarrier, 2> empty = {PhaseBarrier(w, "empty[0]", 2), PhaseBarrier(w, "empty[1]", 2)};
    std::array<int, 3> issued_k = {w.barrier("issued K", 1), -1, w.barrier("issued K again", 1)};
    for (int c = 0; c < 2; ++c) {
        ring_of[c].full.emplace_back(w, name_of("full", c), 1);
        ring_of[c].empty.push_back({empty, c});
    }
    for (int c = 0; c < 2; ++c) {
        RingSlots barriers = ring_of[c];
        int slot = w.payload(name_of("slot", c)), output = w.barrier(name_of("output_full", c), 1);
        int issued_input = w.barrier(name_of("issued input", c), 1);
        w.thread(name_of("load", c), 0, c, [=](Mem& m) {
            Ring<1> ring;
            for (int i = 0; i < 3; ++i, ring.advance()) {
                ring.acquire(m, barriers);
                ring.commit(m, barriers, 1);
                if (i == 1) m.arrive(issued_input);
                if (i != 1 && c == 0) m.arrive(issued_k[i]);
            }
        });
        w.thread(name_of("copy into", c), 0, c, [=](Mem& m) {
            for (int i = 0; i < 3; ++i) {
                m.wait(i == 1 ? issued_input : issued_k[i]);
                m.write(slot, i);
                m.bytes_landed(barriers.full[0]);
            }
        });
        w.thread(name_of("math", c), 0, c, [=](Mem& m) {
            Ring<1> ring;
            for (int i = 0; i < 3; ++i, ring.advance()) {
                ring.await(m, barriers);
                if (i == 1 && apart) m.arrive(output);
                m.read(slot, i);
                if (i == 1) m.write(slot, made);
                if (i == 1 && !apart) m.arrive(output);
                if (i != 1 || by_math) ring.release(m, barriers);
            }
        });
        w.thread(name_of("store", c), 0, c, [=](Mem& m) {
            m.wait(output);
            if (early && !by_math) m.arrive(barriers.empty[0]);
            m.read(slot, made);
            if (!early && !by_math) m.arrive(barriers.empty[0]);
        });
    }
}

// One CTA's: load_a announces its copy with its commit and then issues it, load_b writes scales between its
// copy and its commit, and two lanes of a math warp read them, of which one releases for the warp. One looks
// ahead and finds that the next stage has arrived, the other awaits it.
void two_loaders(World& w, const Flaw& flaw) {
    constexpr int stages = 3;
    constexpr bool looks[] = {true, false};
    bool apart = flaw("no warp_sync before the release"), alone = flaw("full counts load_a only"),
         own_lap = flaw("a loader does not acquire a slot that the other has acquired"),
         granted = flaw("a slot is read whatever the look ahead found");
    struct {
        std::array<PhaseBarrier, 1> full, empty;
    } barriers;
    barriers.full[0] = PhaseBarrier(w, "full", alone ? 1 : 2),
    barriers.empty[0] = PhaseBarrier(w, "empty", 1);
    int a = w.payload("A"), b = w.payload("B"), scales = w.payload("scales");
    std::array<std::array<int, 2>, stages> issued;
    std::array<int, stages> converged;
    for (int i = 0; i < stages; ++i) {
        issued[i] = {w.barrier(name_of("issued A", i), 1), w.barrier(name_of("issued B", i), 1)};
        converged[i] = w.barrier(name_of("warp_sync", i), 2);
    }
    w.thread("load_a", 0, 0, [=](Mem& m) {
        Ring<1> ring;
        for (int i = 0; i < stages; ++i, ring.advance()) {
            if (!own_lap) ring.acquire(m, barriers);
            ring.commit(m, barriers, 1);
            m.arrive(issued[i][0]);
        }
    });
    w.thread("load_b", 0, 0, [=](Mem& m) {
        Ring<1> ring;
        for (int i = 0; i < stages; ++i, ring.advance()) {
            ring.acquire(m, barriers);
            ring.expect(m, barriers, 1);
            m.arrive(issued[i][1]);
            m.write(scales, i);
            ring.commit(m, barriers);
        }
    });
    for (int operand = 0; operand < 2; ++operand) {
        w.thread(name_of("copy", operand), 0, 0, [=](Mem& m) {
            for (int i = 0; i < stages; ++i) {
                m.wait(issued[i][operand]);
                m.write(operand == 0 ? a : b, i);
                m.bytes_landed(barriers.full[0]);
            }
        });
    }
    for (int lane = 0; lane < 2; ++lane) {
        w.thread(name_of("math.lane", lane), 0, 0, [=](Mem& m) {
            Ring<1> ring;
            bool has_arrived = false;
            for (int i = 0; i < stages; ++i) {
                if (!has_arrived) ring.await(m, barriers);
                m.read(scales, i);
                if (lane == 0) m.read(a, i), m.read(b, i);
                if (!apart) m.sync(converged[i]);
                if (lane == 0) ring.release(m, barriers);
                ring.advance();
                has_arrived = granted || (looks[lane] && i + 1 < stages && ring.test(m, barriers));
            }
        });
    }
}

// Memory whose waits end as soon as they see the abort, as the kernel's do.
struct Impatient {
    Mem& m;
    int abort;
    bool aborted() { return m.aborted() || m.Memory::load(abort, Order::relaxed, Scope::system) != 0; }
    uint32_t load(int c, Order order, Scope scope) { return m.load(c, order, scope); }
    void store(int c, uint32_t v, Order order, Scope scope) { m.store(c, v, order, scope); }
    uint32_t fetch_add(int c, uint32_t v) { return m.fetch_add(c, v); }
    bool await(int c, Until until, uint32_t target, Scope scope, Wait wait) {
        return !aborted() && m.await(c, until, target, scope, wait);
    }
};

// Two passes under plans of CTA 0, and an abort at any moment. A plan is the pass (1: another follows, 2: the
// last), or 0 for no blocks and no further pass. A role that runs a plan waits for both halves of a tile: two
// plans are a deadlock. A table is complete if its CTA did not see the abort when it drafted. Once CTA 0 saw
// the abort, only the cluster barrier at the end of a pass keeps its next plan behind its partner's use of
// the last.
void plan_of_a_pair(World& w, const Flaw& flaw) {
    bool alone = flaw("each CTA decides by itself"), hasty = flaw("CTA 1 reads before the cluster barrier"),
         blind = flaw("CTA 0 hands over its draft"),
         late = flaw("the old plan is read after the pass has ended");
    w.timeouts = true;  // of those who missed the abort when they began to wait
    int abort = w.cell("abort"), arrivals = w.cell("arrivals"), generation = w.cell("generation");
    std::array<int, 2> plan = {w.payload("plan[0]"), w.payload("plan[1]")},
                       table = {w.payload("table[0]"), w.payload("table[1]")}, planned, ended;
    std::array<std::array<int, 2>, 2> halves;  // [pass][CTA]
    for (int p = 0; p < 2; ++p) {
        planned[p] = w.barrier("cluster_sync planned", hasty ? 3 : 4),
        ended[p] = w.barrier("cluster_sync ended", 4);
        halves[p] = {w.barrier("both halves[0]", 2), w.barrier("both halves[1]", 2)};
    }
    w.thread("faulting", 0, 2, [=](Mem& m) { m.Memory::store(abort, 1, Order::release, Scope::system); });
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("transport", c), 0, c, [=](Mem& m) {
            Impatient mem{m, abort};
            for (uint32_t pass = 1;; ++pass) {
                if (pass != 1) GridBarrier::arrive_and_wait(mem, arrivals, generation, 2);
                uint32_t draft = mem.aborted() ? 0 : pass;
                if (draft != 0) m.write(table[c], draft);
                GridBarrier::arrive_and_wait(mem, arrivals, generation, 2);
                if (c == 0 || alone) {
                    if (!blind && mem.aborted()) draft = 0;
                    m.write(plan[c], draft);
                    if (!alone) m.write(plan[1 - c], draft);
                }
                m.sync(planned[pass - 1]);
                uint32_t mine = m.read(plan[c], -1);
                if (mine != 0) m.read(table[0], mine), m.read(table[1], mine);
                if (mine != 1) break;
                m.sync(ended[pass - 1]);
                if (late) m.read(plan[c], mine);
            }
        });
        w.thread(name_of("role", c), 0, c, [=](Mem& m) {
            for (uint32_t pass = 1;; ++pass) {
                if (!(hasty && c == 1)) m.sync(planned[pass - 1]);
                uint32_t mine = m.read(plan[c], -1);
                if (mine != 0) {
                    for (int member = 0; member < 2; ++member) m.arrive(halves[pass - 1][member]);
                    m.wait(halves[pass - 1][c]);
                }
                if (mine != 1) break;
                m.sync(ended[pass - 1]);
            }
        });
    }
}

// The first and the last thing that a CTA does to its partner's shared memory, which holds 1 from the time
// that its barriers are initialised until it exits.
void start_and_leave(World& w, const Flaw& flaw) {
    bool starts = !flaw("no cluster barrier behind the initialisation"),
         leaves = !flaw("leaves without the cluster barrier"),
         own = flaw("leaves when its own warps are done");
    int begun = w.barrier("cluster_sync begun", 4), done = w.barrier("cluster_sync done", 4);
    std::array<int, 2> memory = {w.payload("shared memory[0]"), w.payload("shared memory[1]")}, inited, ended;
    for (int c = 0; c < 2; ++c) inited[c] = w.barrier("cta_sync", 2), ended[c] = w.barrier("cta_sync", 2);
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("math", c), 0, c, [=](Mem& m) {
            m.sync(starts ? begun : inited[c]);
            for (int member = 0; member < 2; ++member) m.read(memory[member], 1);  // the last release_stage
            m.arrive(own ? ended[c] : done);
        });
        w.thread(name_of("load", c), 0, c, [=](Mem& m) {
            m.write(memory[c], 1);
            m.sync(starts ? begun : inited[c]);
            if (own) {
                m.sync(ended[c]);
            } else {
                m.arrive(done);
                if (leaves) m.wait(done);
            }
            m.write(memory[c], 0);
        });
    }
}

}  // namespace

const std::vector<Scenario> pair_scenarios = {
    {"shared stage, 1 slot x 3",
     shared_stage_1,
     {"empty counts the math warps of its own CTA only", "a loader expects only its own half",
      "CTA 1 walks one unit fewer", "math releases before it read", "a loader writes behind its commit"},
     {}},
    {"shared stage, 2 slots, 3 stages",
     shared_stage_2,
     {"empty counts the math warps of its own CTA only", "a loader expects only its own half",
      "CTA 1 walks one unit fewer", "math releases before it read", "a loader writes behind its commit"},
     {}},
    {"shared stage of a short block",
     shared_stage_short,
     {"empty counts the math warps of its own CTA only", "both halves are expected of a short block",
      "math releases before it read"},
     {}},
    {"scheduled tiles of a pair, 1 slot",
     dealt_tiles_1,
     {"empty counts the threads of CTA 0 only", "tiles are scheduled unasked",
      "the tile is written behind the arrival", "only CTA 0 is told",
      "a role gives the slot back before it read"},
     {}},
    {"scheduled tiles of a pair, 2 slots",
     dealt_tiles_2,
     {"empty counts the threads of CTA 0 only", "tiles are scheduled unasked",
      "the tile is written behind the arrival", "only CTA 0 is told",
      "a role gives the slot back before it read"},
     {}},
    {"scheduled tiles of a CTA, 1 slot",
     own_tiles<1>,
     {"empty counts one reader", "tiles are scheduled unasked", "the tile is written behind the arrival",
      "a role gives the slot back before it read"},
     {}},
    {"scheduled tiles of a CTA, 2 slots",
     own_tiles<2>,
     {"empty counts one reader", "tiles are scheduled unasked", "the tile is written behind the arrival",
      "a role gives the slot back before it read"},
     {}},
    {"two loaders of a stage",
     two_loaders,
     {"no warp_sync before the release", "full counts load_a only",
      "a loader does not acquire a slot that the other has acquired",
      "a slot is read whatever the look ahead found"},
     {}},
    {"slot in place",
     slot_in_place,
     {"math gives the slot back itself", "given back before the store read it",
      "stored before math handed it over"},
     {}},
    {"plan of a pair",
     plan_of_a_pair,
     {"each CTA decides by itself", "CTA 1 reads before the cluster barrier", "CTA 0 hands over its draft",
      "the old plan is read after the pass has ended"},
     {},
     false},
    {"start and leave",
     start_and_leave,
     {"no cluster barrier behind the initialisation", "leaves without the cluster barrier",
      "leaves when its own warps are done"},
     {},
     false},
};

}  // namespace model
