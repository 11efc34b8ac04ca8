// What the scenario files share: the names of protocol/edges.h, lists, the runner's table.
#pragma once
#include "model.h"

namespace model {

using megamoe::Door;
using megamoe::GradsReady;
using megamoe::GridBarrier;
using megamoe::HReady;
using megamoe::InStep;
using megamoe::LastArrival;
using megamoe::PanelReady;
using megamoe::PartialsReady;
using megamoe::Ring;
using megamoe::RoomFree;
using megamoe::RoutesReady;
using megamoe::RowsReady;
using megamoe::WordPushed;
using megamoe::XReady;
using megamoe::YRowsReady;
using Mem = MutantMemory;

inline std::string name_of(const char* family, int i) {
    return std::string(family) + "[" + std::to_string(i) + "]";
}
inline std::string name_of(const char* family, int i, int j) {
    return name_of(family, i) + "[" + std::to_string(j) + "]";
}

// Reasons why a mutant is harmless in a scenario.
inline constexpr const char *by_the_epoch = "ordered by the epoch cell's release and acquire, not by its own",
                            *only_grows = "the generation has to grow, by how much does not matter",
                            *one_of_one =
                                "one addition is all there is here: its edge's own scenario has several",
                            *only_count = "nothing but a number and the count goes through the door",
                            *count_below = "below the epoch stands a count, of one at least",
                            *leaves = "the first to come leaves, the second is the first then",
                            *impatient = "the first pair waits for nobody here",
                            *nobody_late = "all come in time here: see the next scenario",
                            *thought_missing = "a peer thought to be missing costs SMs, nothing else",
                            *not_read = "not read here: see routes_ready",
                            *one_barrier = "only one barrier here: see grid_barrier",
                            *nothing_depends = "nothing depends on who came to a meeting",
                            *no_tma = "no TMA here: see rows_ready",
                            *no_bulk_stores = "writes by ordinary stores, or not at all";

extern const std::vector<Scenario> edge_scenarios, grid_scenarios, reuse_scenarios, launch_scenarios,
    pair_scenarios, meeting_scenarios, expansion_scenarios, backward_scenarios, training_scenarios,
    few_scenarios, push_scenarios;

}  // namespace model
