// Shared memory of a CTA. sizeof(Smem) is what the launch asks for; nothing is summed by hand.
#pragma once
#include "megamoe/gemm/precision.h"
#include "megamoe/layout/args.h"
#include "megamoe/schedule/order.h"

namespace megamoe {

constexpr int num_stages = 3;
constexpr int num_math_groups = 2;
constexpr int num_threads = 512;
constexpr int num_warps = num_threads / 32;
constexpr int first_transport_warp = 4;  // a warpgroup of its own, for its register budget; warp 3 idles
constexpr int num_transport_warps = 4;
constexpr int first_math_warp = 8;
constexpr int group_rows = 64;  // rows of one math warpgroup
constexpr int max_local_experts = 1024;
constexpr int chunk_bytes = group_rows * stage_k_bytes;  // one swizzled output box: 64 rows x 128 bytes
constexpr int num_output_slots = 4;                      // chunks of one warpgroup in flight to memory

// What one pass over the pool does; written by one thread, read by every role after a CTA barrier.
struct PassPlan {
    int chunk_begin, chunk_end;  // chunks whose rows are in the pool
    int num_blocks;              // 0 when the launch is poisoned
    int is_last;
};

struct alignas(1024) Smem {
    struct alignas(1024) PipelineStage {
        uint8_t a[block_rows * stage_k_bytes];
        uint8_t b[2][half_columns * stage_k_bytes];
    };
    union {
        PipelineStage stages[num_stages];
        // Between passes nothing is in flight, and routing counts rows of each expert here, one row of
        // counters a warp. The CTA barrier that ends routing, behind a proxy fence of each writer, separates
        // the two lives.
        int32_t expert_counters[num_warps][max_local_experts];
    };
    union alignas(1024) {
        uint8_t output[num_math_groups][num_output_slots][chunk_bytes];
        int32_t
            expert_start[max_local_experts + 1];  // first block of each expert in this pass (routing only)
    };
    float a_scale[num_stages][block_rows];
    float b_scale[num_stages][2];  // of either half
    uint64_t full[num_stages], empty[num_stages];
    uint64_t output_full[num_math_groups][num_output_slots], output_empty[num_math_groups][num_output_slots];
    PassPlan plan;
    int32_t tokens_of_rank[max_ranks];
    uint32_t epoch;  // of this launch; kept here, not in registers, like the counts below
    int32_t own_tokens;
    int32_t num_chunks;
    int32_t last_arrival;
};
static_assert(sizeof(Smem) <= 232448, "a Hopper CTA has 227 KB of shared memory");

}  // namespace megamoe
