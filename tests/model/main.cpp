// Runs every scenario as it is (must hold), with each of its flaws and with every mutant made from its
// operations (must be caught, or be listed as harmless). One line a case; exit code 1 if any expectation
// fails.
#include <chrono>

#include "scenarios.h"

namespace {

using namespace model;

struct Totals {
    long scenarios = 0, flaws = 0, mutants = 0, harmless = 0, executions = 0, bad = 0;
};

std::string run(const Scenario& s, const Flaw& flaw, const Mutation& mutation, std::set<Mutation>* sites,
                long* executions) {
    World w;
    w.mutation = mutation;
    w.sites = sites;
    s.build(w, flaw);
    std::string why = w.explore(400000);
    *executions = w.executions + w.pruned;
    return why;
}

// Prints one line. `caught` says whether a violation is wanted.
void report(Totals& totals, const Scenario& s, const std::string& what, bool wanted, const Flaw& flaw,
            const Mutation& mutation, std::set<Mutation>* sites, const char* note = "") {
    auto start = std::chrono::steady_clock::now();
    long executions = 0;
    std::string why = run(s, flaw, mutation, sites, &executions);
    bool ok = why.empty() != wanted && why != "too many executions";
    double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    totals.executions += executions;
    totals.bad += !ok;
    std::string name = s.name + (what.empty() ? "" : " / " + what);
    std::printf("%-4s %-76s %7ld executions %8.1f ms  %s%s\n", ok ? "ok" : "BAD", name.c_str(), executions,
                ms, why.c_str(), note);
}

}  // namespace

int main(int argc, char** argv) {
    std::string only = argc > 1 ? argv[1] : "";
    Totals totals;
    for (const auto* list : {&edge_scenarios, &grid_scenarios, &reuse_scenarios, &launch_scenarios,
                             &pair_scenarios, &meeting_scenarios, &expansion_scenarios, &backward_scenarios,
                             &training_scenarios, &few_scenarios, &push_scenarios}) {
        for (const Scenario& s : *list) {
            if (!only.empty() && std::string(s.name).find(only) == std::string::npos) continue;
            std::set<Mutation> sites;
            ++totals.scenarios;
            report(totals, s, "", false, Flaw(), {}, &sites);
            for (const char* flaw : s.flaws) {
                ++totals.flaws;
                report(totals, s, std::string("flaw: ") + flaw, true, Flaw(flaw), {}, nullptr);
            }
            if (!s.mutants) continue;
            std::set<const Harmless*> used;
            for (const Mutation& mutation : sites) {
                const char* why = nullptr;
                for (const Harmless& h : s.harmless) {
                    if (mutation.name().ends_with(h.ending)) why = h.why, used.insert(&h);
                }
                ++(why ? totals.harmless : totals.mutants);
                report(totals, s, "mutant: " + mutation.name(), why == nullptr, Flaw(), mutation, nullptr,
                       why ? why : "");
            }
            if (used.size() != s.harmless.size()) {
                ++totals.bad;
                std::printf("BAD  %s lists a harmless mutant that does not exist\n", s.name);
            }
        }
    }
    std::printf(
        "total: %ld scenarios, %ld flaws and %ld mutants caught, %ld harmless mutants, %ld executions, %ld "
        "bad\n",
        totals.scenarios, totals.flaws, totals.mutants, totals.harmless, totals.executions, totals.bad);
    return totals.bad != 0;
}
