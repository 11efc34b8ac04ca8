// Weights that math warps expand where TMA put them: gemm/mainloop.cuh, Expansion. Weights that transport
// warps expand in memory, for tiles of all CTAs: fp4/expand.cuh. And output slots that both warpgroups
// fill, in the wide form: roles/math.cuh, claim_common() and hand_over_common().
#include "scenarios.h"

namespace model {
namespace {

// One slot, two laps, in one CTA. TMA lands the packed bytes (lap), two threads of the warpgroup that expands
// read all of them, meet, and each writes its part in their place (10 + lap). MMAs read both parts through
// the async proxy; then the slot is TMA's again.
void expansion(World& w, const Flaw& flaw) {
    constexpr int laps = 2, expanders = 2;
    constexpr uint32_t made = 10;
    bool unmet = flaw("an expander writes before the other has read"),
         hasty = flaw("MMAs do not wait for the expansion"),
         half = flaw("MMAs wait for one of the expanders");
    std::array<bool, expanders> fenced = {!flaw("no proxy fence in the first expander"),
                                          !flaw("no proxy fence in the second expander")};
    std::array<int, expanders> part;
    for (int e = 0; e < expanders; ++e) part[e] = w.payload(name_of("slot's part", e), /*shared=*/true);
    std::array<int, laps> full, met, expanded, released;
    for (int i = 0; i < laps; ++i) {
        full[i] = w.barrier(name_of("full", i), 1);
        met[i] = w.barrier(name_of("met", i), expanders);
        expanded[i] = w.barrier(name_of("expanded", i), half ? 1 : expanders);
        released[i] = w.barrier(name_of("empty", i), 1 + expanders);
    }
    w.thread("tma", 0, 0, [=](Mem& m) {
        for (int i = 0; i < laps; ++i) {
            if (i > 0) m.wait(released[i - 1]);
            for (int p : part) m.tma_store(p, i);
            m.arrive_tma(full[i]);
        }
    });
    for (int e = 0; e < expanders; ++e) {
        w.thread(name_of("expander", e), 0, 0, [=](Mem& m) {
            for (int i = 0; i < laps; ++i) {
                m.wait(full[i]);
                for (int p : part) m.read(p, i);
                if (!unmet) m.sync(met[i]);
                m.write(part[e], made + i);
                if (fenced[e]) m.fence_proxy_async_shared();
                if (!half || e == 0) m.arrive(expanded[i]);
                m.arrive(released[i]);
            }
        });
    }
    w.thread("math", 0, 0, [=](Mem& m) {
        for (int i = 0; i < laps; ++i) {
            m.wait(full[i]);
            if (!hasty) m.wait(expanded[i]);
            for (int p : part) m.tma_load(p, made + i);
            m.arrive_tma(released[i]);
        }
    });
}

// One output slot, two laps. Either warpgroup writes its columns, crosses the proxies, meets the other, and
// commits to its own ring. The store thread reads the first one's slot when that has been committed, and
// releases both when both have.
void common_output(World& w, const Flaw& flaw) {
    constexpr int laps = 2, groups = 2;
    bool apart = flaw("the warpgroups do not meet"), hasty = flaw("a warpgroup does not wait for its turn");
    std::array<bool, groups> fenced = {!flaw("no proxy fence in the first warpgroup"),
                                       !flaw("no proxy fence in the second warpgroup")};
    std::array<int, groups> part;
    for (int g = 0; g < groups; ++g) part[g] = w.payload(name_of("slot's columns", g), /*shared=*/true);
    std::array<int, laps> met, stored;
    std::array<std::array<int, laps>, groups> full;
    for (int i = 0; i < laps; ++i) {
        met[i] = w.barrier(name_of("met", i), groups);
        stored[i] = w.barrier(name_of("empty", i), 1);
        for (int g = 0; g < groups; ++g)
            full[g][i] = w.barrier(name_of(g == 0 ? "full" : "full beside", i), 1);
    }
    for (int g = 0; g < groups; ++g) {
        w.thread(name_of("math", g), 0, 0, [=](Mem& m) {
            for (int i = 0; i < laps; ++i) {
                if (i > 0 && !(hasty && g == 1)) m.wait(stored[i - 1]);
                m.write(part[g], i);
                if (fenced[g]) m.fence_proxy_async_shared();
                if (!apart) m.sync(met[i]);
                m.arrive(full[g][i]);
            }
        });
    }
    w.thread("store", 0, 0, [=](Mem& m) {
        for (int i = 0; i < laps; ++i) {
            m.wait(full[0][i]);
            for (int p : part) m.tma_load(p, i);
            m.wait(full[1][i]);
            m.arrive_tma(stored[i]);
        }
    });
}

// One room, of two experts in turn. Two warps, the first with two lanes, make the patches of its panel; both
// tiles that need it read all of them through the async proxy, and are done. Then the other expert's take
// their place.
void panel_room(World& w, const Flaw& flaw) {
    constexpr int experts = 2, tiles = 2;
    bool synced = !flaw("no warp_sync before publish"), asked = !flaw("nobody asks for the room"),
         together = !flaw("a lane does not wait for the one that asked");
    uint32_t patches = flaw("one patch is enough") ? 1 : 2, needed = flaw("one tile is enough") ? 1 : tiles;
    std::array<int, 3> part;
    for (int i = 0; i < 3; ++i) part[i] = w.payload(name_of("room's part", i));
    std::array<int, experts> ready, written;
    for (int e = 0; e < experts; ++e)
        ready[e] = w.cell(name_of("panel_ready", e)), written[e] = w.barrier(name_of("warp_sync", e), 2);
    int done = w.cell("gemm1_done"), voted = w.barrier("ballot", 2);
    w.thread("expand.lane1", 0, 0, [=](Mem& m) {
        for (int e = 0; e < experts; ++e) {
            if (e == 1 && together) m.sync(voted);
            m.write(part[1], 1 + e);
            if (synced) m.arrive(written[e]);
        }
    });
    for (int warp = 0; warp < 2; ++warp) {
        w.thread(name_of("expand", warp), 0, warp, [=](Mem& m) {
            for (int e = 0; e < experts; ++e) {
                if (e == 1 && asked) m.poll([&] { return RoomFree::ready(m, done, needed); });
                if (e == 1 && together && warp == 0) m.arrive(voted);
                m.write(part[2 * warp], 1 + e);
                if (synced && warp == 0) m.sync(written[e]);
                PanelReady::publish(m, ready[e]);
            }
        });
    }
    for (int t = 0; t < tiles; ++t) {
        int loaded = w.barrier(name_of("full", t), 1);
        w.thread(name_of("load_b", t), 0, 2 + t, [=](Mem& m) {
            PanelReady::await(m, ready[0], patches, 0);
            for (int p : part) m.tma_load(p, 1);
            m.arrive_tma(loaded);
            if (t != 0) return;
            PanelReady::await(m, ready[1], patches, 1);
            for (int p : part) m.tma_load(p, 2);
        });
        w.thread(name_of("store", t), 0, 2 + t, [=](Mem& m) {
            m.wait(loaded);  // as math did, which then handed over the tile
            HReady::publish(m, done);
        });
    }
}

}  // namespace

const std::vector<Scenario> expansion_scenarios = {
    {"weights expanded in their slot",
     expansion,
     {"an expander writes before the other has read", "MMAs do not wait for the expansion",
      "MMAs wait for one of the expanders", "no proxy fence in the first expander",
      "no proxy fence in the second expander"},
     {}},
    {"a room of panels",
     panel_room,
     {"no warp_sync before publish", "nobody asks for the room",
      "a lane does not wait for the one that asked", "one patch is enough", "one tile is enough"},
     {{"async_complete dropped at store", "what the tile stores is not read here"}}},
    {"an output slot that both warpgroups fill",
     common_output,
     {"the warpgroups do not meet", "a warpgroup does not wait for its turn",
      "no proxy fence in the first warpgroup", "no proxy fence in the second warpgroup"},
     {}},
};

}  // namespace model
