// Weights that math warps expand where TMA put them: gemm/mainloop.cuh, Expansion. And output slots that both
// warpgroups fill, in the wide form: roles/math.cuh, claim_common() and hand_over_common().
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

}  // namespace

const std::vector<Scenario> expansion_scenarios = {
    {"weights expanded in their slot",
     expansion,
     {"an expander writes before the other has read", "MMAs do not wait for the expansion",
      "MMAs wait for one of the expanders", "no proxy fence in the first expander",
      "no proxy fence in the second expander"},
     {}},
    {"an output slot that both warpgroups fill",
     common_output,
     {"the warpgroups do not meet", "a warpgroup does not wait for its turn",
      "no proxy fence in the first warpgroup", "no proxy fence in the second warpgroup"},
     {}},
};

}  // namespace model
