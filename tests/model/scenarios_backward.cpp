// What training adds to the edges: zero rows, parts of d_s and d_weights that ride on others, weight tiles.
#include "scenarios.h"

namespace model {
namespace {

// A block of three rows and, up to the multiple that weight tiles read, a row of zeros.
void zero_rows(World& w, const Flaw& flaw) {
    constexpr uint32_t zero = 7;
    std::array<int, 3> row;
    for (int i = 0; i < 3; ++i) row[i] = w.payload(name_of("row", i));
    int zeros = w.payload("row of zeros"), ready = w.cell("rows_ready");
    uint32_t target = flaw("awaits the tokens' rows only") ? 3 : 4;
    bool late = flaw("zeros behind the release");
    w.thread("dispatch@0", 0, 0, [=](Mem& m) {
        m.write(row[0]), m.write(row[1]);
        RowsReady::publish(m, ready, 2);
    });
    w.thread("dispatch@1", 0, 1, [=](Mem& m) {
        m.write(row[2]);
        RowsReady::publish(m, ready, 1);
        if (!late) m.write(zeros, zero);
        RowsReady::publish(m, ready, 1);
        if (late) m.write(zeros, zero);
    });
    w.thread("load_a", 0, 2, [=](Mem& m) {
        RowsReady::await(m, ready, target, 0);
        for (int r : row) m.tma_load(r);
        m.tma_load(zeros, zero);
    });
}

// d_s of a row: a part by each tile of gemm1 (CTAs 0 and 1), the bias' part by dispatch. reduce reads them
// all, and has acquired no more than gemm2's tile (CTA 2), whose load_a has acquired gemm1's.
void d_s_parts(World& w, const Flaw& flaw) {
    int dy = w.payload("dy row"), dx = w.payload("dx row"), bias = w.payload("d_s of the bias");
    int rows = w.cell("rows_ready"), done1 = w.cell("gemm1_done"), done2 = w.cell("gemm2_done");
    std::array<int, 2> dgu, part;
    bool bias_late = flaw("the bias' part behind rows_ready"),
         part_late = flaw("a tile's part behind the hand-over");
    uint32_t tiles = flaw("gemm2 awaits one tile of gemm1") ? 1 : 2;
    w.thread("dispatch", 0, 3, [=](Mem& m) {
        m.write(dy);
        if (!bias_late) m.write(bias);
        RowsReady::publish(m, rows, 1);
        if (bias_late) m.write(bias);
    });
    for (int c = 0; c < 2; ++c) {
        dgu[c] = w.payload(name_of("dgu", c)), part[c] = w.payload(name_of("d_s", c));
        int dgu_c = dgu[c], part_c = part[c], full = w.barrier(name_of("full", c), 1),
            output = w.barrier(name_of("output_full", c), 1),
            chunk = w.payload(name_of("chunk", c), /*shared=*/true);
        w.thread(name_of("load_a", c), 0, c, [=](Mem& m) {
            RowsReady::await(m, rows, 1, 0);
            m.tma_load(dy);
            m.arrive_tma(full);
        });
        w.thread(name_of("math", c), 0, c, [=](Mem& m) {
            m.wait(full);
            m.write(chunk);
            if (!part_late) m.write(part_c);
            m.fence_proxy_async_shared();
            m.arrive(output);
            if (part_late) m.write(part_c);
        });
        w.thread(name_of("store", c), 0, c, [=](Mem& m) {
            m.wait(output);
            m.tma_load(chunk), m.tma_store(dgu_c);
            HReady::publish(m, done1);
        });
    }
    int full2 = w.barrier("full of gemm2", 1);
    w.thread("load_a of gemm2", 0, 2, [=](Mem& m) {
        HReady::await(m, done1, tiles, 0);
        for (int c = 0; c < 2; ++c) m.tma_load(dgu[c]);
        m.arrive_tma(full2);
    });
    w.thread("store of gemm2", 0, 2, [=](Mem& m) {
        m.wait(full2);
        m.tma_store(dx);
        YRowsReady::publish(m, done2);
    });
    w.thread("reduce", 0, 3, [=](Mem& m) {
        m.poll([&] { return YRowsReady::ready(m, done2, 1); });
        m.read(dx), m.read(bias);
        for (int c = 0; c < 2; ++c) m.read(part[c]);
    });
}

// Weight tiles of CTA 2: load_a reads dgu and dy, load_b x rows and hs. CTA 0 has a tile of gemm1 and rows to
// restore, CTA 1 rows to dispatch and to restore, but no tile.
void grads_ready(World& w, const Flaw& flaw) {
    int dy = w.payload("dy row"), dgu = w.payload("dgu"), hs = w.payload("hs");
    int rows = w.cell("rows_ready"), cell = w.cell("grads_ready");
    std::array<int, 2> x = {w.payload("x_rows[0]"), w.payload("x_rows[1]")};
    int full = w.barrier("full", 1), awaited = w.barrier("awaited", 1);
    bool uncounted = flaw("restore does not arrive"),
         early = flaw("the store thread arrives before its last tile");
    bool source_only = flaw("waits until the source is read, not until dgu is written");
    bool restore_early = flaw("a transport warp arrives before its last row");
    bool shared = flaw("load_b relies on load_a's await");
    std::array<bool, 2> fences = {!flaw("no fence in load_a"), !flaw("no fence in load_b")};
    uint32_t arrivals = uncounted || flaw("awaits one arrival less") ? 3 : 4;
    w.thread("load_a of gemm1", 0, 0, [=](Mem& m) {
        RowsReady::await(m, rows, 1, 0);
        m.tma_load(dy);
        m.arrive_tma(full);
    });
    w.thread("store[0]", 0, 0, [=](Mem& m) {
        m.wait(full);
        m.tma_store(hs);
        if (early) GradsReady::publish(m, cell);
        m.tma_store(dgu);
        if (source_only) return m.add(cell, 1, Order::release);
        if (!early) GradsReady::publish(m, cell);
    });
    w.thread("store[1]", 0, 1, [=](Mem& m) { GradsReady::publish(m, cell); });
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("transport", c), 0, c, [=](Mem& m) {
            if (c == 1) {
                m.write(dy);
                RowsReady::publish(m, rows, 1);
            }
            if (restore_early && c == 0) GradsReady::publish(m, cell);
            m.write(x[c]);
            if (c == 0 && (uncounted || restore_early)) return;
            GradsReady::publish(m, cell);
        });
    }
    auto await = [=](Mem& m, bool fence) {
        if (fence)
            GradsReady::await(m, cell, arrivals, 0);
        else
            m.await(cell, Until::at_least, arrivals, Scope::gpu, {});
    };
    w.thread("load_a", 0, 2, [=](Mem& m) {
        await(m, fences[0]);
        m.arrive(awaited);
        m.tma_load(dgu), m.tma_load(dy);
    });
    w.thread("load_b", 0, 2, [=](Mem& m) {
        if (shared)
            m.wait(awaited);
        else
            await(m, fences[1]);
        for (int r : x) m.tma_load(r);
        m.tma_load(hs);
    });
}

// Where weight gradients multiply e4m3, a transport warp of CTA 0 transposes a block that CTA 1 has filled:
// one lane awaits its rows, all read them and the tokens that they are of. A weight tile of CTA 2 reads what
// they write.
void transposed_rows(World& w, const Flaw& flaw) {
    int dy = w.payload("dy row"), token = w.payload("row_tokens"), columns = w.payload("dy transposed");
    int rows = w.cell("rows_ready"), cell = w.cell("grads_ready");
    int awaited = w.barrier("warp_sync", 2), written = w.barrier("second warp_sync", 2);
    bool unawaited = flaw("the block is not awaited"), late = flaw("a row's token behind the release");
    bool apart = flaw("no warp_sync behind the await"), early = flaw("no warp_sync before publish");
    w.thread("dispatch", 0, 1, [=](Mem& m) {
        m.write(dy);
        if (!late) m.write(token);
        RowsReady::publish(m, rows, 1);
        if (late) m.write(token);
        GradsReady::publish(m, cell);
    });
    w.thread("transpose.lane0", 0, 0, [=](Mem& m) {
        if (!unawaited) RowsReady::await(m, rows, 1, 0);
        if (!apart) m.arrive(awaited);
        m.read(token);
        if (!early) m.sync(written);
        GradsReady::publish(m, cell);
    });
    w.thread("transpose.lane1", 0, 0, [=](Mem& m) {
        if (!apart) m.sync(awaited);
        m.read(token), m.read(dy);
        m.write(columns);
        if (!early) m.arrive(written);
    });
    w.thread("load_a", 0, 2, [=](Mem& m) {
        GradsReady::await(m, cell, 2, 0);
        m.tma_load(columns);
    });
}

// The gradient of a token's routing weight comes beside its partial: by another lane of the warp that
// publishes.
void d_weights(World& w, const Flaw& flaw) {
    int ready = w.cell("partial_ready", 4), lanes = w.barrier("warp_sync", 2);
    int partial = w.payload("partial"), weight = w.payload("d_weights"),
        own = w.payload("d_weights of lane 0");
    bool synced = !flaw("no warp_sync before publish"), late = flaw("stored behind the release");
    bool early = flaw("combine reads before its acquire");
    w.thread("reduce.lane1", 1, 0, [=](Mem& m) {
        m.write(weight);
        if (synced) m.arrive(lanes);
    });
    w.thread("reduce.lane0", 1, 0, [=](Mem& m) {
        m.write(partial);
        if (!late) m.write(own);
        if (synced) m.sync(lanes);
        PartialsReady::publish(m, ready, 5);
        if (late) m.write(own);
    });
    w.thread("combine@0", 0, 0, [=](Mem& m) {
        if (early) m.read(weight);
        m.poll([&] { return PartialsReady::ready(m, ready, 5); });
        m.read(partial), m.read(weight), m.read(own);
    });
}

}  // namespace

const std::vector<Scenario> backward_scenarios = {
    {"zero rows", zero_rows, {"awaits the tokens' rows only", "zeros behind the release"}, {}},
    {"parts of d_s",
     d_s_parts,
     {"the bias' part behind rows_ready", "a tile's part behind the hand-over",
      "gemm2 awaits one tile of gemm1"},
     {{"add of value + 1 at rows_ready", one_of_one}, {"add of value + 1 at gemm2_done", one_of_one}}},
    {"grads_ready",
     grads_ready,
     {"restore does not arrive", "the store thread arrives before its last tile", "awaits one arrival less",
      "waits until the source is read, not until dgu is written",
      "a transport warp arrives before its last row", "load_b relies on load_a's await", "no fence in load_a",
      "no fence in load_b"},
     {{"add of value + 1 at rows_ready", one_of_one},
      {"async_complete dropped at transport", no_bulk_stores}}},
    {"transposed rows",
     transposed_rows,
     {"the block is not awaited", "a row's token behind the release", "no warp_sync behind the await",
      "no warp_sync before publish"},
     {{"add of value + 1 at rows_ready", one_of_one},
      {"fence_proxy_async dropped at rows_ready", no_tma},
      {"async_complete dropped at dispatch", no_bulk_stores},
      {"async_complete dropped at transpose.lane0", no_bulk_stores}}},
    {"d_weights",
     d_weights,
     {"no warp_sync before publish", "stored behind the release", "combine reads before its acquire"},
     {}},
};

}  // namespace model
