// The launch argument block: one POD, passed as a __grid_constant__ parameter.
//
// This file is its only definition. Python (jit/abi.py) reads it line by line to build the ctypes.Structure,
// so every field is one line `type name;` or `type name[count];`, largest alignment first within a group. All
// byte offsets are computed in megamoe/launch/layout.py; the kernel receives pointers and offsets and
// computes none. Shapes: T tokens of this rank, R ranks, E experts, L local experts, K top-k, H hidden, I
// intermediate, M pool rows, C chunks of 32 tokens, P planes of w13 (2 gated, 1 not).
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {

constexpr int max_ranks = 8;

// 128 opaque bytes: a CUtensorMap on the GPU, the fibers' EmulatedTensorMap in emulation.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

// Names of the places where a rank can wait; the fault record carries one. Python reads this list.
enum class Edge : uint32_t {
    none = 0,
    routes_ready = 1,    // home rank -> expert rank: ids and weights staged
    x_ready = 2,         // home rank -> expert rank: x staged
    grid_barrier = 3,    // all CTAs of this rank
    rows_ready = 4,      // dispatch -> load_a
    h_ready = 5,         // gemm1 -> load_a
    y_rows_ready = 6,    // gemm2 -> reduce
    partials_ready = 7,  // reduce (expert rank) -> combine (home rank)
    config = 8,          // a peer runs another configuration
    peer_abort = 9,      // no wait of this rank failed: another rank gave up
    grads_ready = 10,    // backward's gemm1 and restore -> weight tiles
    state = 11,          // backward was given a state that no forward completed, or another layer's
    panel_ready = 12,    // transport, which expands weights -> load_b
};

struct FaultRecord {  // in pinned host memory
    uint32_t edge;    // written last; 0 = no fault
    uint32_t peer;    // the rank waited for; max_ranks when local
    uint32_t role;    // warp index in the CTA
    uint32_t index;   // block or token waited for
    uint32_t expected;
    uint32_t seen;
};

// What a training forward says of itself at the head of its state.
struct StateHeader {
    uint32_t begun;      // epoch of the launch that makes the state
    uint32_t complete;   // the same, once all of it is written; 0 until then
    uint32_t pool_rows;  // M
    uint32_t config_hash;
    int32_t tokens_of_rank[max_ranks];
};

// clang-format off: one field a line, read by jit/abi.py
// One GEMM of the layer, out = A B^T: rows of the pool times the weights of their expert, p planes of n x k.
// gemm1: A = x_pool, B = w13, out = h; gemm2: A = h, B = w2, out = y_rows, p = 1. Maps have 128B swizzle.
struct Gemm {
    TensorMap a;           // [M, k]; box 64 rows x 128 bytes
    TensorMap b;           // [L, p, n, k]; box 128 rows x 128 bytes
    TensorMap out;         // [M, n]; box 64 rows x 128 bytes
    const float* a_scale;  // scaled A: [ceil(k/128), M]
    const float* b_scale;  // scaled B: [L, p * ceil(n/128), ceil(k/128)]
    const float* bias;     // [L, p * n] or null
    float* out_scale;      // scaled out: [ceil(n/128), M]
    uint32_t* done;        // [M/128] finished tiles
    int32_t n;
    int32_t k;
};

// What a launch that trains has besides: `train`, which saves, and `backward`. There gemm1 is dy w2, its A dy's rows in
// x_pool and its outputs dgu and hs; gemm2 is dgu w13, its A dgu_rows, its out dx_rows. Their B, the weights, is
// bf16: w2 and w13 as they lie, MN-major with boxes of 64 rows x 128 bytes; fp8: transposed, [L, 1, I, H] and
// [L, P, H, I], as forward's are. Maps here have boxes of 64 rows x 128 bytes but for w13, and are of bf16 where they
// say no other.
struct Training {
    TensorMap gu[2];    // by plane: pre-activations, state's gu; [M, I] each
    TensorMap dgu[2];   // by plane: [M, I] each
    TensorMap hs;       // [M, I]
    TensorMap dgu_rows[2];  // by plane: [M, I] each, A of gemm2: dgu, or e4m3 of it
    TensorMap dy_rows_map;  // [M, H], A of dw2
    TensorMap x_rows_map;   // [M, H], A of recompute: x_rows, or x_pool in e4m3
    TensorMap b[2];     // of the weight tiles: x_rows [1, 1, M, H], hs [1, 1, M, I]
    TensorMap dw[2];    // dw13 [L, P, I, H], dw2 [L, 1, H, I]; bf16 or fp32
    TensorMap w13;      // as forward's gemm1 has it, for passes whose gu was not saved
    // state
    StateHeader* header;
    void* tokens;           // [S, max_tokens, H] in x's format; S = R - 1 without the own rank, or R if x has scales
    float* tokens_scale;    // scaled x: [S, max_tokens, ceil(H/128)]
    // backward's part of the workspace
    void* x_rows;           // [M, H] bf16, written by restore
    void* dy_rows;          // scaled x: [M, H] bf16, likewise; else dy in x_pool is bf16
    float* row_weight;      // [M] routing weights
    float* d_s;             // [M, ceil(I/256) + 1] parts of the gradient of the routing weight; the last is b2's
    int32_t* expert_rows;   // [L, 2] first block and rows in this pass
    uint32_t* grads_ready;  // [1] arrivals: of each CTA the store warp and the four transport warps
    uint32_t* dealt;        // [3] tickets taken in this pass, of gemm1, gemm2 and weight gradients; none where lots are fixed
    // the call
    const void* x;          // [T, H] bf16 as forward had it; Args::x is dy then
    float* d_topk_weights;  // [T, K]
    float* db13;            // [L, P * I] or null
    float* db2;             // [L, H] or null
    const float* w13_scale;  // scaled w13: as forward's gemm1 has it, for recompute
    const float* b13;       // [L, P * I] or null, for recompute
    const float* b2;        // [L, H] or null
    int64_t window_d_weights;  // [max_tokens, K] float, of the home's own tokens
    int32_t weights_wanted;    // bit 0: dw13, bit 1: dw2
    int32_t dw_bytes;          // of an element of dw: 2 or 4
    int32_t accumulate;        // add to what dw13, dw2, db13 and db2 hold
    int32_t only_weights;      // on all ranks: gemm2 is left out, dx and d_topk_weights are not written
};

// What a grouped launch has (kernels/grouped.cuh), besides gemm[0], num_local_experts and what its epilogue needs of
// Training. R rows, sorted by expert; their scales by block, [ceil(./128), pool_rows] with 128 for each. Maps of outputs
// are ragged (cta/context.cuh). Weight gradients: A [R, gemm[0].n], B [1, 1, R, gemm[0].k], boxes 64 rows x 128 bytes, and
// of either a tail: behind an expert's last whole 64 rows the others, as 64 with zero rows.
struct Grouped {
    TensorMap tails_a;  // [L * 64, gemm[0].n]
    TensorMap tails_b;  // [1, 1, L * 64, gemm[0].k]
    const int32_t* ends;  // [num_local_experts] where the rows of each expert end; null: all are one expert's
    void* cleared[3];     // outputs [R, row bytes] or null: rows of no expert become zeros
    int64_t cleared_row_bytes[3];
    int32_t num_rows;     // R
};

// What a launch with packed weights has, that expands them once for many tiles (fp4/panels.cuh). By
// GEMM: w13 and w2 as they are packed, [L, p, n, k / 2].
struct Expanded {
    TensorMap map;    // panels [R, K of a slot]; box 128 rows x 128 bytes
    uint8_t* panels;  // [R, 128 bytes] of all rooms
    const uint8_t* packed[2];
    int64_t row_bytes[2];
    int64_t plane_bytes[2];
    int64_t expert_bytes[2];
    uint32_t* ready;  // [L, panels of an expert] patches that are there
    int32_t rooms;    // experts whose panels have a place
    int32_t above;    // rows of the first pass from which on a launch has panels
};

struct Args {
    Gemm gemm[2];  // by GemmId
    // inputs and output, ordinary memory
    const void* x;                     // [T, H] bf16; with x_scale e4m3
    const void* topk_ids;              // [T, K] int32 or int64, see ids_are_int64
    const float* topk_weights;         // [T, K]
    const int32_t* num_tokens_device;  // [1] or null: then num_tokens below
    void* y;                           // [T, H] bf16
    const float* x_scale;              // [T, ceil(H/128)], or null: x is bf16. In forward only
    // workspace, ordinary memory, zeroed once when it is made
    uint32_t* epoch;        // [1] completed launches
    uint32_t* ids_ticket;    // [1] CTAs that have staged their ids and weights
    uint32_t* x_ticket;      // [1] and x
    uint32_t* exit_ticket;   // [1] CTAs that are done
    uint32_t* fault_ticket;  // [1] whoever takes it first writes the fault record
    uint32_t* arrivals;      // [1] of the grid barrier, and
    uint32_t* generation;    // [1] how often it opened
    uint32_t* joined;        // [1] pairs of CTAs that have come to the door, see protocol/edges.h
    uint32_t* members;       // [1] epoch << 8 | pairs that take part
    int32_t* route_rows;    // [C*32, K] pool row in this pass or -1
    uint32_t* pool_routes;  // [M] routes in pool order, without padding: chunk-order token * 32 + k, leader and closer bits
    int32_t* block_table;   // [M/128, 2] expert and rows, run; see BlockEntry
    uint32_t* rows_ready;   // [M/128] rows that arrived
    void* x_pool;           // [M, H] bf16 or e4m3, written by dispatch; rows may be wider, see formats/words.h
    float* x_pool_scale;    // fp8: [ceil(H/128), M]
    void* y_rows;           // [M, H] bf16, read by reduce
    // state: what this call leaves behind; the tables of every pass follow from it
    int32_t* route_ids;     // [C*32, K] local expert or -1
    float* route_weights;   // [C*32, K]
    int32_t* chunk_prefix;  // [L, C+1] routes of expert l in chunks before c
    FaultRecord* fault;     // pinned host memory
    uint32_t* abort;        // [1] window[rank] + window_abort: the cell that this rank polls
    uint64_t* profile;      // [grid, 16] or null: in-kernel timestamps, see cta/profile.cuh
    // the window: base address of each rank's, as mapped here, and offsets that are equal on all ranks
    uint64_t window[max_ranks];
    int64_t window_abort;     // uint32: not 0 once a rank has given up; only a reset clears it
    int64_t window_routes;    // [2, R] RouteCell, written by each home rank
    int64_t window_staged;    // [R] uint32 epoch: x of that home rank is staged
    int64_t window_ids;       // [2, max_tokens, K] int32, global expert or -1
    int64_t window_weights;   // [2, max_tokens, K] float
    int64_t window_x;         // [max_tokens, H] bf16 or e4m3, as x_pool
    int64_t window_x_scale;   // fp8: [max_tokens, ceil(H/128)] float
    int64_t window_ready;     // [R, ready_cells] uint32 epoch: rank r's slice of a partial of my token exists
    int64_t window_partials;  // [R, max_tokens, H] bf16: rank r's partials of my tokens
    uint64_t timeout_ns;
    // sizes
    int32_t num_tokens;  // rows of x and y; num_tokens_device may say fewer
    int32_t max_tokens;
    int32_t num_ranks;
    int32_t rank;
    int32_t num_experts;
    int32_t num_local_experts;
    int32_t expert_begin;
    int32_t top_k;
    int32_t hidden;
    int32_t intermediate;
    int32_t pool_rows;   // M, a multiple of 128
    int32_t max_chunks;  // row length of chunk_prefix is max_chunks + 1
    int32_t ready_cells;  // of a rank: max_tokens or more, so that slices of few tokens have one each
    int32_t step_blocks;  // blocks of a step of the tile order, see schedule/order.h; 0 = two gemm1 tiles a CTA
    uint32_t join_ns;     // how long a launch waits for SMs before it does without; 0: it has all of its CTAs
    uint32_t peers_ns;    // how long it keeps all that it has while a peer's launch has not begun
    int32_t ids_are_int64;
    uint32_t config_hash;  // equal on all ranks, or Edge::config is raised
    float act_alpha;
    float act_limit;
    float act_up_offset;
    Training training;
    Grouped grouped;
    Expanded expanded;
    TensorMap small_boxes[2];  // by GemmId: Gemm::a; box 16 rows x 128 bytes
    int32_t gemm2_rounds;  // units of gemm2 that take no longer than one of gemm1
};

// clang-format on

struct RouteCell {  // one writer; `epoch` stored last, with release
    uint32_t num_tokens;
    uint32_t config_hash;
    uint32_t launched;  // epoch of a launch that has begun, before all else; see protocol/edges.h
    uint32_t epoch;
};

}  // namespace megamoe
