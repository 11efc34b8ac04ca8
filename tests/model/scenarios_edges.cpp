// One scenario an edge: who writes what with which proxy, publishes, and who then reads it how.
#include "scenarios.h"

namespace model {
namespace {

// Home rank 0 stages ids with two threads of a CTA; rank 1 reads them remotely by ordinary loads.
void routes_ready(World& w, const Flaw& flaw) {
    int ids = w.payload("ids"), weights = w.payload("weights"), staged = w.barrier("cta_sync", 2);
    int epoch = w.cell("route_epoch"), tokens = w.cell("route_tokens"), hash = w.cell("route_hash");
    bool synced = !flaw("no cta_sync before publish");
    w.thread("stager@0", 0, 0, [=](Mem& m) {
        m.write(weights);
        if (synced) m.arrive(staged);
    });
    w.thread("publisher@0", 0, 0, [=](Mem& m) {
        m.write(ids);
        if (synced) m.sync(staged);
        RoutesReady::publish(m, epoch, tokens, hash, 1, 32, 77);
    });
    w.thread("route@1", 1, 0, [=](Mem& m) {
        RoutesReady::await(m, epoch, 1, 0);
        m.expect(m.load(tokens, Order::relaxed, Scope::system), 32, "num_tokens");
        m.expect(m.load(hash, Order::relaxed, Scope::system), 77, "config_hash");
        m.read(ids), m.read(weights);
    });
}

// x of two consecutive epochs, in two buffers here (whether one is enough is a question of reuse, not of the
// edge).
void x_ready(World& w, const Flaw& flaw) {
    int x[2] = {w.payload("x of 7"), w.payload("x of 8")}, scale = w.payload("x_scale of 7");
    int staged = w.barrier("cta_sync", 2), cell = w.cell("staged", 6);
    bool synced = !flaw("no cta_sync before publish");
    w.thread("stager@0", 0, 0, [=](Mem& m) {
        m.write(scale);
        if (synced) m.arrive(staged);
    });
    w.thread("publisher@0", 0, 0, [=](Mem& m) {
        m.write(x[0]);
        if (synced) m.sync(staged);
        XReady::publish(m, cell, 7);
        m.write(x[1]);
        XReady::publish(m, cell, 8);
    });
    for (int reader = 0; reader < 2; ++reader) {
        w.thread(name_of("dispatch", reader), reader, 1,
                 [=](Mem& m) {  // rank 0 pulls from itself, rank 1 remotely
                     XReady::await(m, cell, 7, 0);
                     m.read(x[0]), m.read(scale);
                     XReady::await(m, cell, 8, 0);
                     m.read(x[1]);
                 });
    }
}

// Two dispatch warps, the first with two lanes, fill a block of three rows; of a second block's one row, each
// fills a slice.
void rows_ready(World& w, const Flaw& flaw) {
    std::array<int, 5> row;  // the last two are one row's slices
    for (int i = 0; i < 5; ++i) row[i] = w.payload(name_of("row", i));
    int block0 = w.cell("rows_ready[0]"), block1 = w.cell("rows_ready[1]");
    int lanes = w.barrier("warp_sync", 2), fenced = w.barrier("fenced", 2);
    bool synced = !flaw("no warp_sync before publish");
    uint32_t rows = flaw("awaits one row of the block") ? 1 : 3;
    uint32_t slices = flaw("awaits rows, not their slices") ? 1 : 2;
    bool elsewhere = flaw("TMA by another thread than the one that fenced");
    w.thread("dispatch.lane1", 0, 0, [=](Mem& m) {
        m.write(row[0]);
        if (synced) m.arrive(lanes);
    });
    w.thread("dispatch.lane0", 0, 0, [=](Mem& m) {
        m.write(row[1]);
        if (synced) m.sync(lanes);
        RowsReady::publish(m, block0, 2);
        m.write(row[4]);
        RowsReady::publish(m, block1, 1);
    });
    w.thread("dispatch@1", 0, 1, [=](Mem& m) {
        m.write(row[3]);
        RowsReady::publish(m, block1, 1);
        m.write(row[2]);
        RowsReady::publish(m, block0, 1);
    });
    w.thread("load_a", 0, 2, [=](Mem& m) {
        RowsReady::await(m, block0, rows, 0);
        m.arrive(fenced);
        for (int i = 0; i < 3; ++i) m.tma_load(row[i]);
        RowsReady::await(m, block1, slices, 1);
        m.tma_load(row[3]), m.tma_load(row[4]);
    });
    w.thread("other thread", 0, 2, [=](Mem& m) {
        m.sync(fenced);
        if (elsewhere) m.tma_load(row[0]);
    });
}

// Per CTA: a math thread writes its chunk to shared memory and its scales to global memory, the store thread
// TMA-stores the chunk and publishes. A third CTA's load_a needs both tiles of the block.
void h_ready(World& w, const Flaw& flaw) {
    int cell = w.cell("gemm1_done");
    std::array<int, 2> h, scale;
    bool early = flaw("math arrives before it wrote its scales"),
         fenced = !flaw("no shared-memory proxy fence in math");
    bool source_only = flaw("waits until the source is read, not until h is written");
    for (int c = 0; c < 2; ++c) {
        h[c] = w.payload(name_of("h", c)), scale[c] = w.payload(name_of("h_scale", c));
        int h_c = h[c], scale_c = scale[c];
        int chunk = w.payload(name_of("chunk", c), /*shared=*/true),
            full = w.barrier(name_of("output_full", c), 1);
        w.thread(name_of("math", c), 0, c, [=](Mem& m) {
            m.write(chunk);
            if (!early) m.write(scale_c);
            if (fenced) m.fence_proxy_async_shared();
            m.arrive(full);
            if (early) m.write(scale_c);
        });
        w.thread(name_of("store", c), 0, c, [=](Mem& m) {
            m.wait(full);
            m.tma_load(chunk);  // a TMA store reads its source through the async proxy
            m.tma_store(h_c);
            if (source_only) return m.add(cell, 1, Order::release);
            HReady::publish(m, cell);
        });
    }
    uint32_t tiles = flaw("awaits one tile of the block") ? 1 : 2;
    w.thread("load_a", 0, 2, [=](Mem& m) {
        HReady::await(m, cell, tiles, 0);
        for (int c = 0; c < 2; ++c) m.tma_load(h[c]), m.tma_load(scale[c]);
    });
}

// A token with rows in blocks 0 and 1, each made by both CTAs' store threads (two n-tiles), in opposite
// orders: block 1 may be done first. The reader checks every block up to its closer's.
void y_rows_ready(World& w, const Flaw& flaw) {
    std::array<std::array<int, 2>, 2> row;
    std::array<int, 2> done;
    for (int b = 0; b < 2; ++b) {
        done[b] = w.cell(name_of("gemm2_done", b));
        for (int n = 0; n < 2; ++n) row[b][n] = w.payload(name_of("y_row", b, n));
    }
    for (int n = 0; n < 2; ++n) {
        w.thread(name_of("store", n), 0, n, [=](Mem& m) {
            for (int i = 0; i < 2; ++i) {
                int b = i ^ n;
                m.tma_store(row[b][n]);
                YRowsReady::publish(m, done[b]);
            }
        });
    }
    int first = flaw("checks the closer's block only") ? 1 : 0;
    uint32_t tiles = flaw("one tile is enough") ? 1 : 2;
    w.thread("reduce", 0, 2, [=](Mem& m) {
        for (int b = first; b < 2; ++b) m.poll([&] { return YRowsReady::ready(m, done[b], tiles); });
        for (int b = 0; b < 2; ++b) m.read(row[b][0]), m.read(row[b][1]);
    });
}

// Both expert ranks (one is the home itself) owe home rank 0 a partial; each is written by two lanes.
void partials_ready(World& w, const Flaw& flaw) {
    std::array<std::array<int, 2>, 2> half;
    std::array<int, 2> cell;
    bool synced = !flaw("no warp_sync before publish");
    int last = flaw("home waits for its own partial only") ? 0 : 1;
    for (int r = 0; r < 2; ++r) {
        cell[r] = w.cell(name_of("partial_ready", r), 4);
        for (int lane = 0; lane < 2; ++lane) half[r][lane] = w.payload(name_of("partial", r, lane));
        int lanes = w.barrier("warp_sync", 2), c = cell[r], h0 = half[r][0], h1 = half[r][1];
        w.thread(name_of("reduce.lane1", r), r, 1, [=](Mem& m) {
            m.write(h1);
            if (synced) m.arrive(lanes);
        });
        w.thread(name_of("reduce.lane0", r), r, 1, [=](Mem& m) {
            m.write(h0);
            if (synced) m.sync(lanes);
            PartialsReady::publish(m, c, 5);
        });
    }
    w.thread("combine@0", 0, 0, [=](Mem& m) {
        for (int r = 0; r <= last; ++r) m.poll([&] { return PartialsReady::ready(m, cell[r], 5); });
        for (int r = 0; r < 2; ++r) m.read(half[r][0]), m.read(half[r][1]);
    });
}

// A partial in two slices, each summed by a mover of the expert rank and then by one of the home, which waits
// for the flag of its own slice. In the next launch the same cells are of another token's, in one slice.
void partial_slices(World& w, const Flaw& flaw) {
    std::array<int, 2> slice, cell;
    for (int s = 0; s < 2; ++s) {
        slice[s] = w.payload(name_of("slice", s)), cell[s] = w.cell(name_of("partial_ready", s), 4);
    }
    int whole = w.payload("another token's partial");
    bool first_only = flaw("every slice goes by the first one's flag"),
         numbered = !flaw("flags without an epoch");
    for (int s = 0; s < 2; ++s) {
        w.thread(name_of("reduce@1", s), 1, s, [=](Mem& m) {
            m.write(slice[s]);
            PartialsReady::publish(m, cell[s], numbered ? 5 : 1);
            if (s == 0) return;
            m.write(whole);
            PartialsReady::publish(m, cell[1], numbered ? 6 : 1);
        });
        w.thread(name_of("combine@0", s), 0, s, [=](Mem& m) {
            int own = first_only ? 0 : s;
            m.poll([&] { return PartialsReady::ready(m, cell[own], numbered ? 5 : 1); });
            m.read(slice[s]);
            if (s == 0) return;
            m.poll([&] { return PartialsReady::ready(m, cell[1], numbered ? 6 : 1); });
            m.read(whole);
        });
    }
}

}  // namespace

const std::vector<Scenario> edge_scenarios = {
    {"routes_ready",
     routes_ready,
     {"no cta_sync before publish"},
     {{"system->gpu at route_hash", by_the_epoch}, {"system->gpu at route_tokens", by_the_epoch}}},
    {"x_ready", x_ready, {"no cta_sync before publish"}, {}},
    {"rows_ready",
     rows_ready,
     {"no warp_sync before publish", "awaits one row of the block", "awaits rows, not their slices",
      "TMA by another thread than the one that fenced"},
     {}},
    {"h_ready",
     h_ready,
     {"math arrives before it wrote its scales", "no shared-memory proxy fence in math",
      "awaits one tile of the block", "waits until the source is read, not until h is written"},
     {}},
    {"y_rows_ready", y_rows_ready, {"checks the closer's block only", "one tile is enough"}, {}},
    {"partials_ready",
     partials_ready,
     {"no warp_sync before publish", "home waits for its own partial only"},
     {}},
    {"partial_slices",
     partial_slices,
     {"every slice goes by the first one's flag", "flags without an epoch"},
     {}},
};

}  // namespace model
