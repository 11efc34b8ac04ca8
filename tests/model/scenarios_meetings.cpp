// Pairs that stay in step: meetings, which hand nothing over and may run out.
#include "scenarios.h"

namespace model {
namespace {

constexpr uint32_t patient = 1, impatient_pair = 0;  // cycles

// Three pairs meet twice. As patient as can be, so a count that does not come is a deadlock; whoever has met
// finds exactly those that it counts.
void meetings(World& w, const Flaw& flaw) {
    std::array<int, 2> came = {w.cell("came[0]"), w.cell("came[1]")};
    bool away = flaw("a pair never comes"), twice = flaw("a pair comes twice");
    uint32_t counted = flaw("counts a pair too many") ? 4 : flaw("counts a pair too few") ? 2 : 3;
    for (int p = 0; p < 3; ++p) {
        w.thread(name_of("pair", p), 0, p, [=](Mem& m) {
            for (int cell : came) {
                if (away && p == 2) continue;
                if (twice && p == 2) InStep::pass_by(m, cell);
                m.expect(InStep::come(m, cell, counted, patient), 1, "met");
                m.expect(m.load(cell, Order::relaxed, Scope::gpu), 3, "pairs that came");
            }
        });
    }
}

// One of three pairs never comes, one comes late: the others go on, and what they read has an edge of its
// own.
void meeting_runs_out(World& w, const Flaw& flaw) {
    int came = w.cell("came"), ready = w.cell("rows_ready"), row = w.payload("x_pool row");
    bool relies = flaw("rows are read behind a meeting alone"), waits = flaw("waits without a bound");
    for (int p = 0; p < 2; ++p) {
        w.thread(name_of("pair", p), 0, p, [=](Mem& m) {
            if (p == 1) {
                m.write(row);
                RowsReady::publish(m, ready, 1);
            }
            InStep::come(m, came, 3, waits ? patient : impatient_pair);
            if (p == 0) {
                if (relies) m.poll([&] { return m.load(came, Order::relaxed, Scope::gpu) == 2; });
                if (!relies) RowsReady::await(m, ready, 1, 0);
                m.tma_load(row);
            }
        });
    }
}

// Passes of a launch, the pairs coming late to meetings of the first; or two launches, of which the second
// has fewer pairs (decision 0017). The cell is zeroed with each plan, so no pair of another pass is counted.
void meeting_again(World& w, const Flaw& flaw, bool launches) {
    int came = w.cell("came"), arrivals = w.cell("arrivals"), generation = w.cell("generation");
    int boundary = w.barrier("launch boundary", 3);
    bool early = flaw("zeroed before the pass ended everywhere"), never = flaw("never zeroed"),
         late = flaw("zeroed after the second barrier"), grid = flaw("counts the pairs of the grid");
    for (int p = 0; p < (launches ? 3 : 2); ++p) {
        w.thread(name_of("pair", p), 0, p, [=](Mem& m) {
            for (int pass = 0; pass < 2; ++pass) {
                int pairs = launches && pass == 0 ? 3 : 2;
                auto meet_others = [&](uint32_t cycles) {
                    if (InStep::come(m, came, grid ? 3 : pairs, cycles))
                        m.expect(m.load(came, Order::relaxed, Scope::gpu), pairs, "pairs that came");
                };
                if (p < pairs) {
                    if (early && p == 0) m.plain_store(came, 0);
                    GridBarrier::arrive_and_wait(m, arrivals, generation, pairs);
                    if (p == 0 && !early && !never && !late) m.plain_store(came, 0);
                    GridBarrier::arrive_and_wait(m, arrivals, generation, pairs);
                    if (p == 0 && late) m.plain_store(came, 0);
                    meet_others(pass == 0 ? impatient_pair : patient);
                }
                if (launches && pass == 0) m.launch_boundary(boundary);
            }
        });
    }
}
void meeting_of_passes(World& w, const Flaw& flaw) { meeting_again(w, flaw, false); }
void meeting_of_launches(World& w, const Flaw& flaw) { meeting_again(w, flaw, true); }

}  // namespace

const std::vector<Scenario> meeting_scenarios = {
    {"meetings, three pairs",
     meetings,
     {"a pair never comes", "a pair comes twice", "counts a pair too many", "counts a pair too few"},
     {}},
    {"meeting that runs out",
     meeting_runs_out,
     {"rows are read behind a meeting alone", "waits without a bound"},
     {{" at came", nothing_depends}, {"value + 1 at rows_ready", one_of_one}}},
    {"meeting, two passes",
     meeting_of_passes,
     {"zeroed before the pass ended everywhere", "never zeroed", "zeroed after the second barrier",
      "counts the pairs of the grid"},
     {{"value + 1 at generation", only_grows}}},
    {"meeting, two launches",
     meeting_of_launches,
     {"never zeroed", "zeroed after the second barrier", "counts the pairs of the grid"},
     {{"value + 1 at generation", only_grows}}},
};

}  // namespace model
