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
constexpr int max_stashed_passes = 8;      // of a launch of StashedWeightsArgs, and
constexpr int max_stashed_entries = 3072;  // at most so many / (L + 1)

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
    kept = 13,           // a backward pass that filled its pool several times has not kept all rows
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
// One row of a launch's table: a GEMM, out = A B^T. A and out have `planes` maps, one a plane: of K where A has several,
// of gate and up where out has them; maps that are not needed repeat the first. Boxes are 64 rows x 128 bytes with the
// 128-byte swizzle, of K-major weights 128 rows x 128 bytes.
//
//   GemmId      A                                B                                  out             bias
//   gemm1       x_pool                           w13 [L, P, I, H]                   h               b13
//   gemm2       h                                w2 [L, 1, H, I]                    y_rows          b2
//   in backward, where bf16 weights are read as they lie, MN-major, and e4m3 ones as transposed copies:
//   gemm1       dy: x_pool                       w2, e4m3 [L, 1, I, H]              dgu             -
//   gemm2       dgu, or e4m3 of it, by plane     w13, e4m3 [L, P, H, I]             dx: y_rows      -
//   dw13        dgu by plane, MN-major           x_rows [1, 1, M, H], MN-major      [L, P, I, H]    db13, or null
//   dw2         dy_rows, MN-major                hs [1, 1, M, I], MN-major          [L, 1, H, I]    db2, or null
//   recompute   x_rows, or x_pool in e4m3        w13 as forward has it              dgu             b13
//   and where weight gradients are of e4m3, [M/128, columns, 128] each, K-major:
//   dw13        dgu, planes beside each other    x                                  [L, P, I, H]    db13, or null
//   dw2         dy                               hs                                 [L, 1, H, I]    db2, or null
//
// A grouped launch has one row: rows of the caller in A and out, and of weight gradients in A and B.
template <int planes>
struct Gemm {
    TensorMap a[planes];
    TensorMap a_small;       // A in boxes of 16 rows, where blocks are not padded
    TensorMap b;
    TensorMap out[planes];
    const float* a_scale;    // scaled A: [ceil(k/128), M], or of whole rows [1, M]
    const float* b_scale;    // scaled B: [L, p * ceil(n/128), ceil(k/128)], or by column [L, p * n]
    float* bias;             // [L, p * n] that is added, or null; of a weight gradient [L, P * m] of its bias
    float* out_scale;        // scaled out: [ceil(n/128), M]
    uint32_t* done;          // [M/128] finished tiles
    int32_t m;               // of a weight gradient: rows of a plane; 0: not requested
    int32_t n;               // of a weight gradient, 0: stash its rows for a StashedWeightsArgs launch instead
    int32_t k;               // of a plane
};

// What a training forward saves for its backward, in addition to pre-activations.
struct State {
    StateHeader* header;
    void* tokens;            // [S, max_tokens, H] in x's format; S = R - 1 without the own rank, or R if x has scales
    float* tokens_scale;     // scaled x: [S, max_tokens, ceil(H/128)]
};

// What backward needs in addition to its GEMMs and the state.
struct Backward {
    // backward's part of the workspace
    void* x_rows;            // [M, H] bf16, written by restore; or [M/128, H, 128] e4m3, see below
    void* dy_rows;           // scaled x: likewise; else dy in x_pool is bf16
    float* row_weight;       // [M] routing weights
    float* d_s;              // [M, ceil(I/256) + 1] parts of the gradient of the routing weight; the last is b2's
    int32_t* expert_rows;    // [L, 2] first block and rows in this pass
    uint32_t* grads_ready;   // [1] arrivals: of each CTA the store warp and the four transport warps
    uint32_t* scheduled;         // [3] tickets taken in this pass: gemm1, gemm2, weight gradients; none where shares are fixed
    // the call
    const void* x;           // [T, H] bf16 as forward had it
    float* d_topk_weights;   // [T, K]
    const float* b2;         // [L, H] or null
    int64_t window_d_weights;  // [max_tokens, K] float, of the home's own tokens
    int32_t dw_bytes;        // of an element of dw13 and dw2: 2 or 4
    int32_t accumulate;      // add to what dw13, dw2, db13 and db2 hold
    int32_t only_weights;    // on all ranks: gemm2 is left out, dx and d_topk_weights are not written
    // Weight gradients in e4m3: operands are blocks of 128 rows, [columns, 128], columns of each plane rounded up to 128,
    // and their scales, which the table has, too, have a block more, of zeros.
    int32_t* row_tokens;     // [M] chunk-order token of each row
    float* x_rows_scale;     // [ceil(H/128), M/128 + 1]
    float* hs_scale;         // [ceil(I/128), M/128 + 1]
    float* dy_rows_scale;    // [M/128 + 1, H]
    float* dgu_columns_scale;  // [M/128 + 1, P * I]
};

// What a grouped launch has besides its GEMM (kernels/grouped.cuh): R rows, sorted by expert; their scales by block,
// [ceil(./128), pool_rows] with 128 for each. Maps of outputs are ragged (cta/blocks.cuh).
struct Grouped {
    const int32_t* ends;     // [num_local_experts] where the rows of each expert end; null: all are one expert's
    int32_t row_alignment;   // a power of two: an expert's rows begin at the end before, rounded up to a multiple of it
    void* cleared[3];        // outputs [R, row bytes] or null: rows of no expert become zeros
    int64_t cleared_row_bytes[3];
    int32_t num_rows;        // R
    const float* row_weight; // factors of h, [R], or null
    float* d_s;              // parts of their gradients, as Backward's, of zeros; or null
    // Transposed e4m3 outputs, or null: h, whose map is hs, and dgu, whose map is A's second; their scales as Backward's.
    float* hs_scale;
    float* dgu_columns_scale;
    float* blocks[2];        // what they are: blocks of no expert become zeros
};
// A [R, m], B [1, 1, R, n]. Behind an expert's last whole 64 rows the others stand in tails, as 64 with zero rows:
// a[1] [L * 64, m], and tails_b. In e4m3 both are transposed as Backward's, of pool_rows / 128 blocks, without tails.
struct GroupedWeights {
    TensorMap tails_b;       // [1, 1, L * 64, n]
    const int32_t* ends;     // as above
    int32_t row_alignment;
    int32_t num_rows;        // R
    int32_t dw_bytes;        // of an element of the gradient: 2 or 4
    int32_t accumulate;      // add to what it and its bias hold
};

// What a backward launch has kept of its pass, in memory of its own, for weight gradients of several passes.
struct alignas(128) StashedPass {
    TensorMap dgu[2];        // A of dw13, by plane: [M, I]
    TensorMap dy;            // A of dw2: [M, H]
    TensorMap x;             // B of dw13: [1, 1, M, H]
    TensorMap hs;            // B of dw2: [1, 1, M, I]
    const float* row_weight;      // [M]
    const StateHeader* header;    // of its call's state, as
    const int32_t* chunk_prefix;  // [L, C+1]
    // In e4m3 the maps are of blocks of 128 rows, dgu's planes in one, and these their scales: see Backward.
    const float* a_scale[2];      // of dw13 and dw2
    const float* b_scale[2];
};
// The rows of an expert are those of all passes, one after the other. It has two GEMMs, dw13 and dw2.
struct StashedWeights {
    StashedPass passes[max_stashed_passes];
    const float* zeros;      // [max(P * I, H)] scales of an expert without rows, in e4m3
    int32_t num_passes;
    int32_t dw_bytes;        // as above
    int32_t accumulate;
};

// What a launch with packed weights has, that expands them once for many tiles (fp4/panels.cuh, fp4/matrices.cuh). By
// GEMM: w13 and w2, in backward w2 and w13, as they are packed, [L, p, n, k / 2].
struct Expanded {
    TensorMap map;           // panels [R, K of a slot]; box 128 rows x 128 bytes. In backward not used
    uint8_t* panels;         // [R, 128 bytes] of all rooms
    const uint8_t* packed[2];
    int64_t row_bytes[2];
    int64_t plane_bytes[2];
    int64_t expert_bytes[2];
    uint32_t* ready;         // [L, panels of an expert] patches that are there
    int32_t rooms;           // experts whose panels have a place
    int32_t above;           // rows of the first pass from which on a launch has panels
};

// How pairs of CTAs that share an operand of gemm1 stay in step, see meeting_of() in schedule/order.h.
struct Meet {
    uint32_t* came;  // [M/128, (P*I + 511)/512] pairs at the meeting that begins with a unit of gemm1
    int32_t rows;    // of a pass, from which on its pairs meet; 0: no pair ever meets
    int32_t cycles;  // that a pair waits at most, for each pipeline slot of its unit
    int32_t many;    // blocks of a run from which on the pairs of a column meet; in smaller runs all pairs do
};

// What all launches are given.
struct Args {
    // inputs and output, ordinary memory
    const void* rows_in;               // [T, H] x, bf16 or, with in_scale, e4m3; in backward dy, bf16
    const void* topk_ids;              // [T, K] int32 or int64, see ids_are_int64
    const float* topk_weights;         // [T, K]
    const int32_t* num_tokens_device;  // [1] or null: then num_tokens below
    void* rows_out;                    // [T, H] y, in backward dx, bf16
    const float* in_scale;             // [T, ceil(H/128)], of whole rows [T, 1], or null: rows_in is bf16. In forward only
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
    void* x_pool;           // [M, H] bf16 or e4m3, written by dispatch; rows may be wider, see fp4/format.cuh
    float* x_pool_scale;    // fp8: [ceil(H/128), M], of whole rows [1, M]
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
    int64_t window_x_scale;   // fp8: [max_tokens, ceil(H/128)] float, of whole rows [max_tokens, 1]
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
    Meet meet;
};

// The argument of each kind of launch (kernels/kinds.cuh): a table with one row for each of its GEMMs, and what it alone
// has.
struct ForwardArgs {
    Args args;
    Gemm<1> gemm[2];
};
struct PackedArgs {
    Args args;
    Gemm<1> gemm[2];
    Expanded expanded;
};
// A launch of few tokens of several ranks (rows/push.cuh): places in each rank's window for what the others push.
struct Pushes {
    int64_t window_few_words;    // [2, R, 1 + tokens * ((1 << ids_shift) + K)] uint64, of each home: count, ids, weights
    int64_t window_few_x;        // [R, tokens, H] e4m3, of each home
    int64_t window_few_x_scale;  // [R, tokens, ceil(H/128)] float
    int64_t window_few_x_ready;  // [R, tokens] uint32 epoch: the token is there
    int32_t tokens;              // that a rank may have
    int32_t ids_shift;           // a token has 1 << ids_shift words of ids, with two in each
};
struct PushArgs {
    Args args;
    Gemm<1> gemm[2];
    Pushes own;
};
struct TrainArgs {
    Args args;
    Gemm<2> gemm[2];
    TensorMap gu[2];  // by plane: pre-activations, [M, I] bf16 each
    State state;
};
struct BackwardArgs {
    Args args;
    Gemm<2> gemm[5];
    TensorMap gu[2];  // as train has saved them
    TensorMap hs;     // [M, I] bf16 or [M/128, I, 128] e4m3, written with dgu
    State state;
    Backward own;
    Expanded expanded;  // packed weights alone
};
struct GroupedArgs {
    Args args;
    Gemm<2> gemm[1];
    TensorMap gu[2];  // pre-activations that are saved, or that the gradient's epilogue reads
    TensorMap hs;     // h again, beside the gradient
    Grouped own;
};
struct GroupedWeightsArgs {
    Args args;
    Gemm<2> gemm[1];
    GroupedWeights own;
};
struct StashedWeightsArgs {
    Args args;
    Gemm<2> gemm[2];
    StashedWeights own;
};

// clang-format on

struct RouteCell {  // one writer; `epoch` stored last, with release
    uint32_t num_tokens;
    uint32_t config_hash;
    uint32_t launched;  // epoch of a launch that has begun, before all else; see protocol/edges.h
    uint32_t epoch;
};

}  // namespace megamoe
