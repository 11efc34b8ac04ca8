// What training adds, launch by launch and pass by pass: launches of both directions on one window, state
// that a launch leaves for another, two phases in a pass, weight tiles in two passes.
#include "scenarios.h"

namespace model {
namespace {

// (a) with launches forward, backward, forward: backward has no ids, but its flag.
void ids_of_mixed_launches(World& w, const Flaw& flaw) {
    uint32_t parities = flaw("one parity") ? 1 : 2;
    bool silent = flaw("backward has no route flag"), waits = !flaw("backward does not await the flag");
    std::array<std::array<int, 2>, 2> ids, epoch_cell, tokens, hash;
    for (int r = 0; r < 2; ++r) {
        for (int p = 0; p < 2; ++p) {
            ids[r][p] = w.payload(name_of("ids", r, p)),
            epoch_cell[r][p] = w.cell(name_of("route_epoch", r, p));
            tokens[r][p] = w.cell(name_of("route_tokens", r, p)),
            hash[r][p] = w.cell(name_of("route_hash", r, p));
        }
    }
    for (int r = 0; r < 2; ++r) {
        w.thread(name_of("rank", r), r, 0, [=](Mem& m) {
            for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
                bool backward = epoch == 2;
                uint32_t p = epoch % parities, kind = backward ? 88 : 77;
                if (!backward) m.write(ids[r][p], epoch);
                if (backward && silent) continue;
                RoutesReady::publish(m, epoch_cell[r][p], tokens[r][p], hash[r][p], epoch, 32 + epoch, kind);
                if (backward && !waits && r == 0) continue;
                RoutesReady::await(m, epoch_cell[1 - r][p], epoch, 1 - r);
                m.expect(m.load(tokens[1 - r][p], Order::relaxed, Scope::system), 32 + epoch, "num_tokens");
                m.expect(m.load(hash[1 - r][p], Order::relaxed, Scope::system), kind, "config_hash");
                if (!backward) m.read(ids[1 - r][p], epoch);
            }
        });
    }
}

// (c) with launches forward, backward, backward: partials of y and dx lie in one buffer, d_weights in
// another.
void partials_of_mixed_launches(World& w, const Flaw& flaw) {
    int partial = w.payload("partial"), weight = w.payload("d_weights"), ready = w.cell("partial_ready");
    int epoch_cell = w.cell("route_epoch"), tokens = w.cell("route_tokens"), hash = w.cell("route_hash");
    int arrivals = w.cell("arrivals"), generation = w.cell("generation");
    std::array<int, 2> launch = {w.barrier("launch boundary", 2), w.barrier("launch boundary", 2)};
    bool silent = flaw("backward has no route flag"),
         barrier = !flaw("backward has no grid barrier behind it");
    bool late = flaw("d_weights behind the release"), unread = flaw("home ends before it read d_weights");
    w.thread("home@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            bool backward = epoch > 1;
            if (!(backward && silent)) RoutesReady::publish(m, epoch_cell, tokens, hash, epoch, 1, 77);
            m.poll([&] { return PartialsReady::ready(m, ready, epoch); });
            m.read(partial, epoch);
            if (backward && !(unread && epoch == 2)) m.read(weight, epoch);
            if (unread && epoch == 3) m.read(weight, 2);
        }
    });
    w.thread("route@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            bool backward = epoch > 1;
            if (!(backward && silent)) RoutesReady::await(m, epoch_cell, epoch, 0);
            if (!backward || barrier) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
    w.thread("reduce@1", 1, 1, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            bool backward = epoch > 1;
            if (!backward || barrier) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            m.write(partial, epoch);
            if (backward && !late) m.write(weight, epoch);
            PartialsReady::publish(m, ready, epoch);
            if (backward && late) m.write(weight, epoch);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
}

// (i) A training forward of two CTAs, then the backward that reads its state, with a peer that may raise the
// abort cell at any time. Garbage (0) is what a CTA makes that saw it raised.
void state_across_launches(World& w, const Flaw& flaw) {
    int abort = w.cell("abort"), ticket = w.cell("exit_ticket");
    int begun = w.payload("header.begun"), complete = w.payload("header.complete");
    std::array<int, 2> gu, tokens, launch;
    for (int c = 0; c < 2; ++c) {
        gu[c] = w.payload(name_of("gu", c)), tokens[c] = w.payload(name_of("tokens", c));
    }
    launch = {w.barrier("launch boundary before", 2), w.barrier("launch boundary", 2)};
    bool blind = flaw("complete without a look at the abort cell"), early = flaw("looks before it arrives");
    bool first_out = flaw("complete by the first CTA out"),
         trusting = flaw("backward does not look at the header");
    bool unset = flaw("the launch does not begin with an incomplete header");
    w.thread("peer", 1, 0, [=](Mem& m) { m.Memory::store(abort, 1, Order::release, Scope::system); });
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("cta", c), 0, c, [=](Mem& m) {
            if (c == 0) m.write(begun, 1), m.write(complete, 1);  // another call's, in the same memory
            m.launch_boundary(launch[0]);
            if (c == 0 && !unset) m.write(complete, 0);
            bool good = m.load(abort, Order::relaxed, Scope::system) == 0;
            if (c == 0 && good) m.write(begun, 1);
            m.write(tokens[c], good ? 1 : 0);
            m.tma_store(gu[c], good ? 1 : 0);
            m.async_complete();
            bool aborted = early && m.load(abort, Order::relaxed, Scope::system) != 0;
            bool last = LastArrival::arrive(m, ticket, 2);
            if (first_out) last = c == 0;
            if (last && !early && !blind) aborted = m.load(abort, Order::relaxed, Scope::system) != 0;
            if (last && !aborted) m.write(complete, 1);
            m.launch_boundary(launch[1]);
            if (!trusting && (m.read(complete, -1) != 1 || m.read(begun, -1) != 1)) return;  // Edge::state
            for (int other = 0; other < 2; ++other) m.read(tokens[other]), m.tma_load(gu[other]);
        });
    }
}

// A pass whose gu was not saved: a tile of recompute (CTA 0) writes gu, behind the plan of the data phase a
// tile of gemm1 (CTA 1) reads it and writes dgu to the same place, which gemm2 reads. Counters serve both
// phases.
void phases_of_a_pass(World& w, const Flaw& flaw) {
    constexpr uint32_t gu = 1, gradient = 2;
    int place = w.payload("dgu"), x = w.payload("x_rows");
    int arrivals = w.cell("arrivals"), generation = w.cell("generation"), rows = w.cell("rows_ready");
    int done = w.cell("gemm1_done");
    int full0 = w.barrier("full of recompute", 1), full1 = w.barrier("full of gemm1", 1);
    std::array<int, 2> enter, leave;
    bool barrier = !flaw("no grid barrier between the phases"), zeroed = !flaw("counters are not zeroed");
    bool fence_b = !flaw("no fence in load_b"), fence_store = !flaw("no fence in the store thread");
    bool waits = !flaw("dgu is stored before gu was read"),
         completes = !flaw("stores of recompute do not complete");
    for (int c = 0; c < 2; ++c) {
        enter[c] = w.barrier(name_of("cluster_sync before", c), 3);
        leave[c] = w.barrier(name_of("cluster_sync after", c), 3);
    }
    auto meet = [=](Mem& m, int c) { m.sync(enter[c]), m.sync(leave[c]); };
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("transport", c), 0, c, [=](Mem& m) {
            if (c == 0) {
                m.write(x);
                RowsReady::publish(m, rows, 1);
            }
            m.sync(enter[c]);
            if (barrier) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            if (c == 0 && zeroed) m.plain_store(rows, 0);
            if (barrier) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            m.sync(leave[c]);
            if (c == 0) {
                m.write(x, 3);  // stands for the rows of dy, which the counter promises now
                RowsReady::publish(m, rows, 1);
            }
        });
    }
    w.thread("load_a[0]", 0, 0, [=](Mem& m) {
        RowsReady::await(m, rows, 1, 0);
        m.tma_load(x);
        m.arrive_tma(full0);
        meet(m, 0);
        HReady::await(m, done, 1, 0);
        m.tma_load(place, gradient);
    });
    w.thread("store[0]", 0, 0, [=](Mem& m) {
        m.wait(full0);
        m.tma_store(place, gu);
        if (completes) m.async_complete();
        meet(m, 0);
    });
    w.thread("load[1]", 0, 1, [=](Mem& m) {  // load_b, and load_a with another fence
        meet(m, 1);
        if (fence_b) m.Memory::fence_proxy_async();
        m.tma_load(place, gu);
        if (waits) m.arrive_tma(full1);
        RowsReady::await(m, rows, 1, 0);
        m.tma_load(x, 3);
        if (!waits) m.arrive(full1);
    });
    w.thread("store[1]", 0, 1, [=](Mem& m) {
        meet(m, 1);
        if (fence_store) m.fence_proxy_async();
        m.wait(full1);
        m.tma_store(place, gradient);
        HReady::publish(m, done);
    });
}

// Two passes with weight tiles: what those read is restored, and stored by gemm1 of another CTA, anew. A tile
// of dw is written in the first pass and added to in the second, by the same CTA.
void weights_of_two_passes(World& w, const Flaw& flaw) {
    int x = w.payload("x_rows"), dgu = w.payload("dgu"), dw = w.payload("dw"), cell = w.cell("grads_ready");
    int arrivals = w.cell("arrivals"), generation = w.cell("generation");
    bool barrier = !flaw("no grid barrier at the end of a pass"), zeroed = !flaw("the counter is not zeroed");
    bool fence = !flaw("no fence in the store thread at the start of a pass"),
         math = !flaw("math does not await slots");
    std::array<std::array<int, 2>, 2> enter, leave;
    std::array<int, 2> full;
    for (int p = 0; p < 2; ++p) {
        full[p] = w.barrier(name_of("full", p), 1);
        for (int c = 0; c < 2; ++c) {
            enter[p][c] = w.barrier(name_of("cluster_sync before", p, c), c == 0 ? 2 : 3);
            leave[p][c] = w.barrier(name_of("cluster_sync after", p, c), c == 0 ? 2 : 3);
        }
    }
    auto plan = [=](Mem& m, int p, int c) {  // of the transport warps
        m.sync(enter[p][c]);
        if (barrier) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
        if (c == 0 && zeroed) m.plain_store(cell, 0);
        if (barrier) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
        m.sync(leave[p][c]);
    };
    auto meet = [=](Mem& m, int p, int c) { m.sync(enter[p][c]), m.sync(leave[p][c]); };
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("transport", c), 0, c, [=](Mem& m) {
            for (int p = 0; p < 2; ++p) {
                if (c == 0) m.write(x, p);
                GradsReady::publish(m, cell);
                if (p == 0) plan(m, p, c);
            }
        });
    }
    w.thread("store[0]", 0, 0, [=](Mem& m) {
        for (int p = 0; p < 2; ++p) {
            m.tma_store(dgu, p);
            GradsReady::publish(m, cell);
            if (p == 0) {
                meet(m, p, 0);
                if (fence) m.fence_proxy_async();
            }
        }
    });
    w.thread("load[1]", 0, 1, [=](Mem& m) {
        for (int p = 0; p < 2; ++p) {
            GradsReady::await(m, cell, 3, 0);
            m.tma_load(x, p), m.tma_load(dgu, p);
            if (math)
                m.arrive_tma(full[p]);
            else
                m.arrive(full[p]);
            if (p == 0) meet(m, p, 1);
        }
    });
    w.thread("store[1]", 0, 1, [=](Mem& m) {
        for (int p = 0; p < 2; ++p) {
            m.wait(full[p]);
            m.tma_store(dw, p);
            m.async_complete();
            if (p == 0) meet(m, p, 1);
        }
    });
}

// (h) A loader of CTA 1 that saw the abort multicasts what is there (0) into CTA 0's slot. The last CTA to
// leave, 0 or one of another pair, looks. What stays in dw is right or NaN.
void garbage_is_no_gradient(World& w, const Flaw& flaw) {
    constexpr uint32_t garbage = 0, right = 1, nan = 2;
    int abort = w.cell("abort"), cell = w.cell("grads_ready"), dgu = w.payload("dgu"), dw = w.payload("dw");
    int slot = w.payload("operand", true), full = w.barrier("full", 1),
        through = w.barrier("cluster_sync", 2), ticket = w.cell("exit_ticket");
    bool blind = flaw("nobody looks"), early = flaw("looks before it arrives"),
         hasty = flaw("arrives before the cluster barrier"), first = flaw("the first CTA to leave looks");
    bool completes = !flaw("the tile's store is not complete");
    auto aborted = [=](Mem& m) { return m.load(abort, Order::relaxed, Scope::system) != 0; };
    w.thread("peer", 1, 0, [=](Mem& m) { m.Memory::store(abort, 1, Order::release, Scope::system); });
    w.thread("store[2]", 0, 2, [=](Mem& m) {
        m.tma_store(dgu);
        GradsReady::publish(m, cell);  // it has not seen the abort
    });
    w.thread("load_b[1]", 0, 1, [=](Mem& m) {
        bool lost = aborted(m);
        if (!lost) {
            GradsReady::await(m, cell, 1, 0);
            m.tma_load(dgu);
        }
        m.write(slot, lost ? garbage : right);
        m.arrive(full);
    });
    w.thread("store[0]", 0, 0, [=](Mem& m) {
        m.wait(full);
        m.tma_store(dw, m.read(slot, -1));
        if (completes) m.async_complete();
        m.arrive(through);
    });
    for (int cta : {0, 2}) {
        w.thread(name_of("leave", cta), 0, cta, [=](Mem& m) {
            bool seen = early && aborted(m);
            if (cta == 0 && !hasty) m.sync(through);
            bool last = LastArrival::arrive(m, ticket, 2);
            if (cta == 0 && hasty) m.sync(through);
            if (first == last) return;
            if (!early && !blind) seen = aborted(m);
            m.fence_proxy_async();
            if (seen) m.tma_store(dw, nan);
            m.async_complete();
            if (m.read(dw, -1) == garbage) m.expect(garbage, right, "a gradient");
        });
    }
}

constexpr const char *by_the_boundary = "the kernel boundary completes and orders it",
                     *one_launch = "the ticket serves one launch here: see last_arrival";

}  // namespace

const std::vector<Scenario> training_scenarios = {
    {"(a) ids, forward and backward mixed",
     ids_of_mixed_launches,
     {"one parity", "backward has no route flag", "backward does not await the flag"},
     {{"system->gpu at route_hash", by_the_epoch}, {"system->gpu at route_tokens", by_the_epoch}}},
    {"(c) partials, forward and backward mixed",
     partials_of_mixed_launches,
     {"backward has no route flag", "backward has no grid barrier behind it", "d_weights behind the release",
      "home ends before it read d_weights"},
     {{" at route_hash", not_read}, {" at route_tokens", not_read}, {"value + 1 at generation", only_grows}}},
    {"(i) state across launches",
     state_across_launches,
     {"complete without a look at the abort cell", "looks before it arrives", "complete by the first CTA out",
      "backward does not look at the header", "the launch does not begin with an incomplete header"},
     {{"async_complete dropped at cta", by_the_boundary},
      {"store dropped at exit_ticket", one_launch},
      {"value + 1 at exit_ticket", one_launch},
      {"value - 1 at exit_ticket", one_launch}}},
    {"(h) garbage is no gradient",
     garbage_is_no_gradient,
     {"nobody looks", "looks before it arrives", "arrives before the cluster barrier",
      "the first CTA to leave looks", "the tile's store is not complete"},
     {},
     false},
    {"(f) recompute, then data",
     phases_of_a_pass,
     {"no grid barrier between the phases", "counters are not zeroed", "no fence in load_b",
      "no fence in the store thread", "dgu is stored before gu was read",
      "stores of recompute do not complete"},
     {{"add of value + 1 at rows_ready", one_of_one},
      {"add of value + 1 at gemm1_done", one_of_one},
      {"value + 1 at generation", only_grows}}},
    {"(f) weight tiles of two passes",
     weights_of_two_passes,
     {"no grid barrier at the end of a pass", "the counter is not zeroed",
      "no fence in the store thread at the start of a pass", "math does not await slots"},
     {{"async_complete dropped at transport", no_bulk_stores}, {"value + 1 at generation", only_grows}}},
};

}  // namespace model
