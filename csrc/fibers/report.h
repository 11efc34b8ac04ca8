// Who waits for what, in words: the body of every error and deadlock report.
#pragma once
#include "fibers/machine.h"

namespace fibers {

// The enumerator at the end of a template's __PRETTY_FUNCTION__, or "?". Valid until the next call.
const char* enumerator(const char* signature);

#if defined(FIBERS_COMPILED)
const char* enumerator(const char* signature) {
    static std::string name;
    name = signature;
    size_t from = name.rfind("::"), to = name.find_first_of(";])", from);
    bool named = from != std::string::npos && name[to] != ')';  // no number behind a cast
    name = named ? name.substr(from + 2, to - from - 2) : "?";
    return name.c_str();
}

std::string Machine::describe(const Fiber* fiber) const {
    Cta& cta = *fiber->cta;
    switch (fiber->waiting) {
        case Waiting::nothing:
            return "ready";
        case Waiting::time:
            return "sleeping (polls)";
        case Waiting::exited:
            return "exited";
        case Waiting::mbarrier:
            return text("mbarrier at shared +%td, parity %u: ",
                        static_cast<const uint8_t*>(fiber->address) - cta.shared, fiber->value) +
                   describe_mbarrier(fiber->address);
        case Waiting::named_barrier: {
            const NamedBarrier& barrier = cta.named[fiber->value];
            return text("named barrier %u: %d of %d threads", fiber->value, barrier.arrived,
                        barrier.expected);
        }
        case Waiting::cluster: {
            const NamedBarrier& barrier = cta.in_cluster(0).cluster;
            return text("cluster barrier: %d of %d threads", barrier.arrived, cluster_ctas * cta.threads);
        }
        case Waiting::warp:
            return text("%s: lanes %08x arrived", name_of(cta.warp(fiber).operation),
                        cta.warp(fiber).arrived);
        case Waiting::warpgroup:
            return text("wgmma_wait: %d of %d threads", cta.warpgroup(fiber).arrived, warpgroup_size);
        case Waiting::flag:
            return text("flag %s, index %u, peer %s: %s %u, now %u", enumerator(fiber->what),
                        fiber->numbers[0],
                        fiber->numbers[1] != no_peer ? text("%u", fiber->numbers[1]).c_str() : "-",
                        fiber->at_least ? "at least" : "equal", fiber->value,
                        *static_cast<const uint32_t*>(fiber->address));
    }
    return "?";
}

// For each CTA one line for each thing that somebody waits for; exited threads are left out.
std::string Machine::describe_waits() const {
    std::string result;
    for (const Cta& cta : ctas) {
        std::vector<std::pair<std::string, std::string>> groups;  // what, who
        for (int warp = 0; warp < cta.threads / warp_size; ++warp) {
            for (int lane = 0; lane < warp_size;) {
                std::string what = describe(&cta.fibers[warp * warp_size + lane]);
                int end = lane + 1;
                while (end < warp_size && describe(&cta.fibers[warp * warp_size + end]) == what) ++end;
                std::string who = end - lane == warp_size ? text(" %d", warp)
                                  : end - lane == 1       ? text(" %d.%d", warp, lane)
                                                          : text(" %d.%d-%d", warp, lane, end - 1);
                lane = end;
                if (what == "exited") continue;
                auto group =
                    std::find_if(groups.begin(), groups.end(), [&](auto& g) { return g.first == what; });
                if (group == groups.end()) group = groups.insert(groups.end(), {what, ""});
                group->second += who;
            }
        }
        for (const auto& [what, who] : groups)
            result += text("  rank %d cta %d warp", cta.rank, cta.block) + who + ": " + what + "\n";
    }
    return result;
}
#endif

}  // namespace fibers
