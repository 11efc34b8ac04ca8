// What a kernel file exports in emulation; the counterpart of its __global__ function.
//
//   int name(const Args* args_per_rank, int num_ranks, int num_ctas, uint64_t seed, char* report,
//            size_t report_bytes)
//   uint64_t name_args_bytes(), name_smem_bytes(), name_threads()
//
// body_function is callable as body_function(args) by each thread: a void(const Args&).
#pragma once
#include <algorithm>

#include "megamoe/arch/arch.cuh"

namespace megamoe::host {

// Runs a kernel on all CTAs of all ranks, whose arguments are added to `launch`. 0: finished (a fault, if
// any, is in args.fault; `report` then says who waited for what). 1: deadlock, 2: misuse, with a report.
template <class LaunchArgs>
inline int run(fibers::Launch launch, const LaunchArgs* args_per_rank, int num_ranks, char* report,
               size_t report_bytes) {
    for (int rank = 0; rank < num_ranks; ++rank) {
        launch.arguments.push_back(&args_per_rank[rank]);
        launch.timeout_ns = std::max<uint64_t>(launch.timeout_ns, args_per_rank[rank].args.timeout_ns);
    }
    std::string text;
    int status = fibers::run(launch, &text);
    if (report && report_bytes) report[text.copy(report, report_bytes - 1)] = 0;
    return status;
}

}  // namespace megamoe::host

#define MEGAMOE_HOST_EXPORT extern "C" __attribute__((visibility("default")))

#define MEGAMOE_HOST_ENTRY(name, LaunchArgs, body_function, smem_bytes, threads)                           \
    MEGAMOE_HOST_EXPORT int name(const LaunchArgs* args_per_rank, int num_ranks, int num_ctas,             \
                                 uint64_t seed, char* report, size_t report_bytes) {                       \
        auto body = [](const void* args) { body_function(static_cast<const LaunchArgs*>(args)->args); };   \
        return ::megamoe::host::run({body, {}, num_ctas, (threads), (smem_bytes), seed, 0}, args_per_rank, \
                                    num_ranks, report, report_bytes);                                      \
    }                                                                                                      \
    MEGAMOE_HOST_EXPORT uint64_t name##_args_bytes() { return sizeof(LaunchArgs); }                        \
    MEGAMOE_HOST_EXPORT uint64_t name##_smem_bytes() { return (smem_bytes); }                              \
    MEGAMOE_HOST_EXPORT uint64_t name##_threads() { return (threads); }                                    \
    static_assert(true, "a semicolon follows")
