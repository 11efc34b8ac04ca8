// What a kernel file exports in emulation; the counterpart of its __global__ function.
//
//   int name(const Args* args_per_rank, int num_ranks, int num_ctas, uint64_t seed, char* report, size_t
//   report_bytes) uint64_t name_args_bytes(), name_smem_bytes(), name_threads()
//
// body_function is callable as body_function(args) by each thread: a void(const Args&).
#pragma once
#include "megamoe/arch/host/launch.h"

#define MEGAMOE_HOST_EXPORT extern "C" __attribute__((visibility("default")))

#define MEGAMOE_HOST_ENTRY(name, body_function, smem_bytes, threads)                                      \
    MEGAMOE_HOST_EXPORT int name(const ::megamoe::Args* args_per_rank, int num_ranks, int num_ctas,       \
                                 uint64_t seed, char* report, size_t report_bytes) {                      \
        return ::megamoe::host::launch([](const ::megamoe::Args& args) { body_function(args); },          \
                                       args_per_rank, num_ranks, num_ctas, (threads), (smem_bytes), seed, \
                                       report, report_bytes);                                             \
    }                                                                                                     \
    MEGAMOE_HOST_EXPORT uint64_t name##_args_bytes() { return sizeof(::megamoe::Args); }                  \
    MEGAMOE_HOST_EXPORT uint64_t name##_smem_bytes() { return (smem_bytes); }                             \
    MEGAMOE_HOST_EXPORT uint64_t name##_threads() { return (threads); }                                   \
    static_assert(true, "a semicolon follows")
