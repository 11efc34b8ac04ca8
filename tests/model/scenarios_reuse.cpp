// Why memory may be written again: the window over consecutive launches of two ranks, the pool over passes.
// In most of these a rank is one thread, so that the end of its launch is program order; epochs count from 1.
#include "scenarios.h"

namespace model {
namespace {

// (a) ids in two parities. Neither rank has routes to the other, so nothing but the route flags holds anyone
// back.
void ids_parity(World& w, const Flaw& flaw) {
    uint32_t parities = flaw("one parity") ? 1 : 2;
    bool waits = !flaw("waits only for ranks that it has routes to");
    std::array<std::array<int, 2>, 2> ids, epoch_cell, tokens,
        hash;  // [home][parity]; cells are in the peer's window
    for (int r = 0; r < 2; ++r) {
        for (int p = 0; p < 2; ++p) {
            ids[r][p] = w.payload(name_of("ids", r, p));
            epoch_cell[r][p] = w.cell(name_of("route_epoch", r, p));
            tokens[r][p] = w.cell(name_of("route_tokens", r, p)),
            hash[r][p] = w.cell(name_of("route_hash", r, p));
        }
    }
    for (int r = 0; r < 2; ++r) {
        w.thread(name_of("rank", r), r, 0, [=](Mem& m) {
            for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
                uint32_t p = epoch % parities;
                m.write(ids[r][p], epoch);
                RoutesReady::publish(m, epoch_cell[r][p], tokens[r][p], hash[r][p], epoch, 32 + epoch, 77);
                if (!waits && r == 0) continue;
                RoutesReady::await(m, epoch_cell[1 - r][p], epoch, 1 - r);
                m.expect(m.load(tokens[1 - r][p], Order::relaxed, Scope::system), 32 + epoch, "num_tokens");
                m.expect(m.load(hash[1 - r][p], Order::relaxed, Scope::system), 77, "config_hash");
                m.read(ids[1 - r][p], epoch);
            }
        });
    }
}

// (b), (e) x in one buffer: rank 1 pulls it and owes a partial, rank 0 ends its launch when that came. The
// pull and the publication of the partial are on two CTAs of rank 1.
void x_single_buffer(World& w, const Flaw& flaw) {
    int x = w.payload("x"), staged = w.cell("staged"), ready = w.cell("partial_ready"),
        row_ready = w.cell("rows_ready");
    bool owes = !flaw("the pull owes nothing"),
         chained = !flaw("the partial is published without regard to the pull");
    std::array<int, 2> launch = {w.barrier("launch boundary", 2), w.barrier("launch boundary", 2)};
    w.thread("home@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            m.write(x, epoch);
            XReady::publish(m, staged, epoch);
            if (owes) m.poll([&] { return PartialsReady::ready(m, ready, epoch); });
        }
    });
    w.thread("dispatch@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            XReady::await(m, staged, epoch, 0);
            m.read(x, epoch);
            RowsReady::publish(m, row_ready, 1);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
    w.thread("reduce@1", 1, 1, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            if (chained) RowsReady::await(m, row_ready, epoch, 0);  // stands for the whole chain to gemm2
            if (owes) PartialsReady::publish(m, ready, epoch);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
}

// (e) The remedy for a pull that owes nothing: a cell that says "pulled", and that the home's launch waits
// for.
void pull_that_owes_nothing(World& w, const Flaw& flaw) {
    int x = w.payload("x"), staged = w.cell("staged"), pulled = w.cell("pulled");
    bool waits = !flaw("the launch does not wait for it");
    w.thread("home@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            m.write(x, epoch);
            XReady::publish(m, staged, epoch);
            if (waits) m.poll([&] { return PartialsReady::ready(m, pulled, epoch); });
        }
    });
    w.thread("pull@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            XReady::await(m, staged, epoch, 0);
            m.read(x, epoch);
            PartialsReady::publish(m, pulled, epoch);
        }
    });
}

// (c) Partials in one buffer: CTA 1 of the expert rank writes them, CTA 0 polls the home's route flag, a grid
// barrier between.
void partials_single_buffer(World& w, const Flaw& flaw) {
    int partial = w.payload("partial"), ready = w.cell("partial_ready"), epoch_cell = w.cell("route_epoch");
    int tokens = w.cell("route_tokens"), hash = w.cell("route_hash");
    int arrivals = w.cell("arrivals"), generation = w.cell("generation");
    std::array<int, 2> launch = {w.barrier("launch boundary", 2), w.barrier("launch boundary", 2)};
    bool early = flaw("written before the route flag"), grid = !flaw("no grid barrier after the route flag");
    w.thread("home@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            RoutesReady::publish(m, epoch_cell, tokens, hash, epoch, 1, 77);
            m.poll([&] { return PartialsReady::ready(m, ready, epoch); });
            m.read(partial, epoch);
        }
    });
    w.thread("route@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            RoutesReady::await(m, epoch_cell, epoch, 0);
            if (grid) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
    w.thread("reduce@1", 1, 1, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            if (early) m.write(partial, epoch);
            if (grid) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            if (!early) m.write(partial, epoch);
            PartialsReady::publish(m, ready, epoch);
            if (epoch < 3) m.launch_boundary(launch[epoch - 1]);
        }
    });
}

// (d) `ready` cells are never zeroed. The token has a route to rank 1 in launches 1 and 3, none in launch 2.
// `entered` stands for the home's route flag.
void ready_without_zeroing(World& w, const Flaw& flaw) {
    int partial = w.payload("partial"), ready = w.cell("partial_ready"), entered = w.cell("entered");
    bool boolean = flaw("a flag without an epoch"),
         no_partial = flaw("home waits for ranks that owe it nothing");
    auto tag = [=](uint32_t epoch) { return boolean ? 1 : epoch; };
    w.thread("home@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            m.Memory::store(entered, epoch, Order::release, Scope::system);
            if (epoch == 2 && !no_partial) continue;
            m.poll([&] { return PartialsReady::ready(m, ready, tag(epoch)); });
            m.read(partial, epoch);
        }
    });
    w.thread("expert@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
            m.Memory::await(entered, Until::at_least, epoch, Scope::system, {});
            if (epoch == 2) continue;
            m.write(partial, epoch);
            PartialsReady::publish(m, ready, tag(epoch));
        }
    });
}

// (f) Two passes through one pool. CTA 0: transport (dispatch, then reduce). CTA 1: load_a, math (it hands
// over only) and store. The end of a pass is a grid barrier, after which the store thread also crosses
// proxies: its TMA stores overwrite y rows that transport read, and other CTAs stored.
void passes(World& w, const Flaw& flaw) {
    int row = w.payload("x_pool row"), y = w.payload("y_row");
    int arrivals = w.cell("arrivals"), generation = w.cell("generation");
    bool barrier = !flaw("no grid barrier at the end of a pass");
    bool fence = !flaw("no proxy fence in the store thread after the barrier");
    std::array<int, 2> rows, done, full, enter, leave;
    for (int p = 0; p < 2; ++p) {
        rows[p] = w.cell(name_of("rows_ready", p)), done[p] = w.cell(name_of("gemm2_done", p));
        full[p] = w.barrier("full", 1);
        enter[p] = w.barrier("cta_sync before", 2), leave[p] = w.barrier("cta_sync after", 2);
    }
    w.thread("transport", 0, 0, [=](Mem& m) {
        for (int p = 0; p < 2; ++p) {
            m.write(row, p);
            RowsReady::publish(m, rows[p], 1);
            m.poll([&] { return YRowsReady::ready(m, done[p], 1); });
            m.read(y, p);
            if (p == 0 && barrier) GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
        }
    });
    w.thread("load_a", 0, 1, [=](Mem& m) {
        for (int p = 0; p < 2; ++p) {
            RowsReady::await(m, rows[p], 1, 0);
            m.tma_load(row, p);
            m.arrive_tma(full[p]);
            if (p == 0 && barrier) {
                m.sync(enter[p]);
                GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
                m.sync(leave[p]);
            }
        }
    });
    w.thread("store", 0, 1, [=](Mem& m) {
        for (int p = 0; p < 2; ++p) {
            m.wait(full[p]);
            m.tma_store(y, p);
            YRowsReady::publish(m, done[p]);
            if (p == 0 && barrier) {
                m.sync(enter[p]), m.sync(leave[p]);
                if (fence) m.fence_proxy_async();
            }
        }
    });
}

// (g) Rank 1 has no tokens. It still says so.
void zero_tokens(World& w, const Flaw& flaw) {
    std::array<int, 2> ids, epoch_cell, tokens, hash;
    for (int r = 0; r < 2; ++r) {
        ids[r] = w.payload(name_of("ids", r)), epoch_cell[r] = w.cell(name_of("route_epoch", r));
        tokens[r] = w.cell(name_of("route_tokens", r)), hash[r] = w.cell(name_of("route_hash", r));
    }
    bool silent = flaw("a rank without tokens sends no flag");
    for (uint32_t r = 0; r < 2; ++r) {
        w.thread(name_of("rank", r), r, 0, [=](Mem& m) {
            uint32_t count = r == 0 ? 1 : 0;
            if (count) m.write(ids[r]);
            if (count || !silent) RoutesReady::publish(m, epoch_cell[r], tokens[r], hash[r], 1, count, 77);
            RoutesReady::await(m, epoch_cell[1 - r], 1, 1 - r);
            uint32_t theirs = m.load(tokens[1 - r], Order::relaxed, Scope::system);
            m.expect(theirs, 1 - count, "num_tokens");
            m.expect(m.load(hash[1 - r], Order::relaxed, Scope::system), 77, "config_hash");
            if (theirs) m.read(ids[1 - r]);
        });
    }
}

// (h) Rank 1 died before its route flag. Whoever gives up first poisons the launch; every role runs its
// schedule to the end.
void abort_is_poison(World& w, const Flaw& flaw) {
    w.timeouts = true;
    int epoch_cell = w.cell("route_epoch"), rows = w.cell("rows_ready"), done = w.cell("gemm2_done");
    int arrivals = w.cell("arrivals"), generation = w.cell("generation"), ready = w.cell("partial_ready");
    bool leaves = flaw("load_a leaves on abort"),
         barrier_leaves = flaw("a CTA that gave up skips the cta_sync");
    int full = w.barrier("full", 1), sync = w.barrier("cta_sync", 2);
    w.thread("route@0", 0, 0, [=](Mem& m) {
        bool ok = RoutesReady::await(m, epoch_cell, 1, 1);
        ok = GridBarrier::arrive_and_wait(m, arrivals, generation, 2) && ok;
        if (ok || !barrier_leaves) m.arrive(sync);
    });
    w.thread("transport@0", 0, 0, [=](Mem& m) {
        m.sync(sync);
        RowsReady::publish(m, rows, 1);  // garbage that still arrives
        m.poll([&] { return YRowsReady::ready(m, done, 1); });
        m.poll([&] { return PartialsReady::ready(m, ready, 1); });
    });
    w.thread("load_a@0", 0, 1, [=](Mem& m) {
        bool ok = GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
        ok = RowsReady::await(m, rows, 1, 0) && ok;
        if (ok || !leaves) m.arrive_tma(full);
    });
    w.thread("math@0", 0, 1, [=](Mem& m) {
        m.wait(full);
        YRowsReady::publish(m, done);
    });
}

// (h) What was made after an abort is never published: load_a saw the abort cell and made garbage, so whoever
// acquires what followed from that sees the abort too. Relaxed loads do, because they come after the acquire.
void garbage_stays_here(World& w, const Flaw& flaw) {
    int abort = w.cell("abort"), done = w.cell("gemm2_done"), y = w.payload("y_row"),
        partial = w.payload("partial");
    int ready = w.cell("partial_ready"), full = w.barrier("full", 1), good = w.payload("operand", true);
    bool blind = flaw("reduce does not look"), early = flaw("reduce looks before it acquires");
    w.thread("faulting", 0, 0, [=](Mem& m) { m.Memory::store(abort, 1, Order::release, Scope::system); });
    w.thread("load_a", 0, 1, [=](Mem& m) {
        m.write(good, m.load(abort, Order::relaxed, Scope::system) == 0);
        m.arrive(full);
    });
    w.thread("store", 0, 1, [=](Mem& m) {
        m.wait(full);
        m.tma_store(y, m.read(good, -1));
        YRowsReady::publish(m, done);
    });
    w.thread("reduce", 0, 2, [=](Mem& m) {
        bool aborted = early && m.load(abort, Order::relaxed, Scope::system) != 0;
        m.poll([&] { return YRowsReady::ready(m, done, 1); });
        if (!early && !blind) aborted = m.load(abort, Order::relaxed, Scope::system) != 0;
        m.write(partial, m.read(y, -1));
        if (!aborted) m.expect(m.read(partial, -1), 1, "the published partial (0 is garbage)");
        PartialsReady::publish(m, ready, aborted ? 0 : 1);
    });
}

}  // namespace

const std::vector<Scenario> reuse_scenarios = {
    {"(a) ids in two parities",
     ids_parity,
     {"one parity", "waits only for ranks that it has routes to"},
     {{"system->gpu at route_hash", by_the_epoch}, {"system->gpu at route_tokens", by_the_epoch}}},
    {"(b) x in one buffer",
     x_single_buffer,
     {"the pull owes nothing", "the partial is published without regard to the pull"},
     {{"fence_proxy_async dropped at rows_ready", no_tma}}},
    {"(c) partials in one buffer",
     partials_single_buffer,
     {"written before the route flag", "no grid barrier after the route flag"},
     {{" at route_hash", not_read}, {" at route_tokens", not_read}, {"value + 1 at generation", only_grows}}},
    {"(d) ready cells are not zeroed",
     ready_without_zeroing,
     {"a flag without an epoch", "home waits for ranks that owe it nothing"},
     {}},
    {"(e) a pull that owes nothing, waited for",
     pull_that_owes_nothing,
     {"the launch does not wait for it"},
     {}},
    {"(f) pool reuse between passes",
     passes,
     {"no grid barrier at the end of a pass", "no proxy fence in the store thread after the barrier"},
     {{"add of value + 1 at rows_ready", one_of_one},
      {"add of value + 1 at gemm2_done", one_of_one},
      {"store dropped at arrivals", one_barrier},
      {"value + 1 at arrivals", one_barrier},
      {"value - 1 at arrivals", one_barrier},
      {"value + 1 at generation", only_grows}}},
    {"(g) a rank without tokens",
     zero_tokens,
     {"a rank without tokens sends no flag"},
     {{"system->gpu at route_hash", by_the_epoch}, {"system->gpu at route_tokens", by_the_epoch}}},
    {"(h) abort is poison",
     abort_is_poison,
     {"load_a leaves on abort", "a CTA that gave up skips the cta_sync"},
     {},
     false},
    {"(h) garbage is not published",
     garbage_stays_here,
     {"reduce does not look", "reduce looks before it acquires"},
     {},
     false},
};

}  // namespace model
