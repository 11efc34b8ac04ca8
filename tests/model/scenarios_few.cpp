// The kernel for few tokens of one rank: rows of h and y that ordinary stores write and ordinary loads read,
// pipeline slots that warps take in turns, and counters that the last CTA out leaves zeroed.
#include "scenarios.h"

namespace model {
namespace {

// In either of two CTAs a math thread writes scales of h, and two lanes of scatter write rows: of a unit's
// first block, then of its last. A third CTA's warp of gather needs both CTAs' tiles; one lane awaits them.
void few_h(World& w, const Flaw& flaw) {
    int cell = w.cell("few_done1"), joined = w.barrier("warp_sync of gather", 2);
    bool early = flaw("math arrives before it wrote its scales"), apart = flaw("no warp_sync before publish"),
         first = flaw("published behind the unit's first block");
    std::array<int, 8> of_h;
    for (int c = 0; c < 2; ++c) {
        int* mine = &of_h[4 * c];
        const char* names[] = {"h_scale", "h of lane 0", "h of lane 1", "h of the last block"};
        for (int i = 0; i < 4; ++i) mine[i] = w.payload(name_of(names[i], c));
        int scale = mine[0], lane0 = mine[1], lane1 = mine[2], last = mine[3];
        int full = w.barrier(name_of("output_full", c), 1), lanes = w.barrier(name_of("warp_sync", c), 2);
        w.thread(name_of("math", c), 0, c, [=](Mem& m) {
            if (!early) m.write(scale);
            m.arrive(full);
            if (early) m.write(scale);
        });
        w.thread(name_of("scatter.lane1", c), 0, c, [=](Mem& m) {
            m.wait(full);
            m.write(lane1);
            if (!apart) m.arrive(lanes);
        });
        w.thread(name_of("scatter.lane0", c), 0, c, [=](Mem& m) {
            m.wait(full);
            m.write(lane0);
            if (!apart) m.sync(lanes);
            if (first) HReady::publish(m, cell);
            m.write(last);
            if (!first) HReady::publish(m, cell);
        });
    }
    uint32_t tiles = flaw("awaits one tile of the expert") ? 1 : 2;
    bool alone = flaw("only one lane waits");
    w.thread("gather.lane1", 0, 2, [=](Mem& m) {
        if (!alone) m.sync(joined);
        for (int h : of_h) m.read(h);
    });
    w.thread("gather.lane0", 0, 2, [=](Mem& m) {
        HReady::await(m, cell, tiles, 0);
        m.arrive(joined);
        for (int h : of_h) m.read(h);
    });
}

// A token's rows of two experts, either in two tiles of two CTAs, which finish them in opposite orders. Each
// lane of the mover polls one expert's counter; then all read all rows.
void few_y_rows(World& w, const Flaw& flaw) {
    std::array<std::array<int, 2>, 2> row;
    std::array<int, 2> done;
    for (int e = 0; e < 2; ++e) {
        done[e] = w.cell(name_of("few_done2", e));
        for (int n = 0; n < 2; ++n) row[e][n] = w.payload(name_of("y_row", e, n));
    }
    for (int n = 0; n < 2; ++n) {
        w.thread(name_of("scatter", n), 0, n, [=](Mem& m) {
            for (int e : {n, 1 - n}) {
                m.write(row[e][n]);
                YRowsReady::publish(m, done[e]);
            }
        });
    }
    uint32_t tiles = flaw("one tile is enough") ? 1 : 2;
    int lanes = w.barrier("warp_sync", 2);
    bool apart = flaw("no warp_sync behind the polls");
    for (int lane = 0; lane < 2; ++lane) {
        w.thread(name_of("reduce.lane", lane), 0, 2, [=](Mem& m) {
            m.poll([&] { return YRowsReady::ready(m, done[lane], tiles); });
            if (!apart) m.sync(lanes);
            for (int e = 0; e < 2; ++e) m.read(row[e][0]), m.read(row[e][1]);
        });
    }
}

// Two warps of gather fill every other slot and do not wait for those between; load_b fills its half of all.
template <int slots>
void turns(World& w, const Flaw& flaw) {
    constexpr int warps = 2, stages = 7;
    struct {
        std::array<PhaseBarrier, slots> full, empty;
    } barriers;
    std::array<int, slots> rows, weights;
    bool alone = flaw("full counts load_b only"), early = flaw("math releases before it read");
    for (int s = 0; s < slots; ++s) {
        barriers.full[s] = PhaseBarrier(w, name_of("full", s), alone ? 1 : 2);
        barriers.empty[s] = PhaseBarrier(w, name_of("empty", s), 1);
        rows[s] = w.payload(name_of("rows", s), true), weights[s] = w.payload(name_of("weights", s), true);
    }
    for (int warp = 0; warp < warps; ++warp) {
        w.thread(name_of("gather", warp), 0, 0, [=](Mem& m) {
            Ring<slots> ring;
            for (int i = 0; i < stages; ++i, ring.advance()) {
                if (i % warps != warp) continue;
                ring.acquire(m, barriers);
                m.write(rows[ring.slot()], i);
                ring.commit(m, barriers);
            }
        });
    }
    w.thread("load_b", 0, 0, [=](Mem& m) {
        Ring<slots> ring;
        for (int i = 0; i < stages; ++i, ring.advance()) {
            ring.acquire(m, barriers);
            m.write(weights[ring.slot()], i);
            ring.commit(m, barriers);
        }
    });
    w.thread("math", 0, 0, [=](Mem& m) {
        Ring<slots> ring;
        for (int i = 0; i < stages; ++i, ring.advance()) {
            ring.await(m, barriers);
            if (early) ring.release(m, barriers);
            m.read(rows[ring.slot()], i), m.read(weights[ring.slot()], i);
            if (!early) ring.release(m, barriers);
        }
    });
}
void few_slots(World& w, const Flaw& flaw) {
    flaw("fewer slots than warps") ? turns<1>(w, flaw) : turns<3>(w, flaw);
}

// Three launches of two CTAs, each with a tile of either GEMM: the counters serve all of them.
void few_counters(World& w, const Flaw& flaw) {
    constexpr uint32_t launches = 3;
    std::array<int, 2> done = {w.cell("few_done1"), w.cell("few_done2")}, h, y_row;
    int ticket = w.cell("exit_ticket"), y = w.payload("y[0]"), other_y = w.payload("y[1]");
    std::array<int, launches> boundary;
    for (int& b : boundary) b = w.barrier("launch boundary", 2);
    for (int c = 0; c < 2; ++c) h[c] = w.payload(name_of("h", c)), y_row[c] = w.payload(name_of("y_row", c));
    bool kept = flaw("the counters keep their counts"), half = flaw("gemm2's keep theirs"),
         own = flaw("each CTA zeroes them"), first = flaw("the first CTA out zeroes them");
    for (int c = 0; c < 2; ++c) {
        w.thread(name_of("cta", c), 0, c, [=](Mem& m) {
            for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
                m.write(h[c], epoch);
                HReady::publish(m, done[0]);
                HReady::await(m, done[0], 2, 0);
                m.read(h[1 - c], epoch);
                m.write(y_row[c], epoch);
                YRowsReady::publish(m, done[1]);
                m.poll([&] { return YRowsReady::ready(m, done[1], 2); });
                m.read(y_row[1 - c], epoch);
                m.write(c == 0 ? y : other_y, epoch);
                bool last = LastArrival::arrive(m, ticket, 2);
                if (own || last != first) {
                    if (!kept) m.plain_store(done[0], 0);
                    if (!kept && !half) m.plain_store(done[1], 0);
                }
                m.launch_boundary(boundary[epoch - 1]);
            }
        });
    }
}

// CTA 0 gives up on something and raises the abort cell: its rows are garbage (0), and so is what CTA 1 makes
// of them; it sums no token. CTA 2 has nothing to do with it. The last CTA out looks: what stays in y is
// right or NaN.
void few_abort(World& w, const Flaw& flaw) {
    constexpr uint32_t garbage = 0, right = 1, nan = 2;
    int abort = w.cell("abort"), cell = w.cell("few_done2"), ticket = w.cell("exit_ticket");
    int row = w.payload("y_row"), late = w.cell("few_done1");
    std::array<int, 3> y = {w.payload("y[0]"), w.payload("y[1]"), w.payload("y[2]")};
    bool blind = flaw("nobody looks"), early = flaw("looks before it arrives"),
         first = flaw("the first CTA to leave looks");
    auto aborted = [=](Mem& m) { return m.load(abort, Order::relaxed, Scope::system) != 0; };
    w.thread("late", 0, 3, [=](Mem& m) { m.Memory::add(late, 1, Order::release); });
    for (int c = 0; c < 3; ++c) {
        w.thread(name_of("cta", c), 0, c, [=](Mem& m) {
            uint32_t sum = right;
            if (c == 0) {
                if (m.load(late, Order::acquire, Scope::gpu) == 0) sum = garbage;
                if (sum == garbage) m.Memory::store(abort, 1, Order::release, Scope::system);
                m.write(row, sum);
                YRowsReady::publish(m, cell);
            } else if (c == 1) {
                m.poll([&] { return YRowsReady::ready(m, cell, 1); });
                sum = m.read(row, -1);
            }
            if (c != 0 || sum == right) m.write(y[c], sum);
            bool seen = early && aborted(m), last = LastArrival::arrive(m, ticket, 3);
            if (first == last) return;
            if (!early && !blind) seen = aborted(m);
            for (int token : y) {
                if (seen) m.write(token, nan);
                if (m.read(token, -1) == garbage) m.expect(garbage, right, "y");
            }
        });
    }
}

constexpr const char* read_by_loads = "no TMA reads h here";

}  // namespace

const std::vector<Scenario> few_scenarios = {
    {"few tokens: h",
     few_h,
     {"math arrives before it wrote its scales", "no warp_sync before publish",
      "published behind the unit's first block", "awaits one tile of the expert", "only one lane waits"},
     {{"async_complete dropped at scatter.lane0", no_bulk_stores},
      {"fence_proxy_async dropped at few_done1", read_by_loads}}},
    {"few tokens: y_rows",
     few_y_rows,
     {"one tile is enough", "no warp_sync behind the polls"},
     {{"async_complete dropped at scatter", no_bulk_stores}}},
    {"few tokens: slots in turns",
     few_slots,
     {"full counts load_b only", "math releases before it read", "fewer slots than warps"},
     {}},
    {"few tokens: counters of three launches",
     few_counters,
     {"the counters keep their counts", "gemm2's keep theirs", "each CTA zeroes them",
      "the first CTA out zeroes them"},
     {{"async_complete dropped at cta", no_bulk_stores},
      {"fence_proxy_async dropped at few_done1", read_by_loads}}},
    {"few tokens: an abort",
     few_abort,
     {"nobody looks", "looks before it arrives", "the first CTA to leave looks"},
     {},
     false},
};

}  // namespace model
