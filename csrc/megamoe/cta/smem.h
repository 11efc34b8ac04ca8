// Shared memory of a CTA. A launch requests sizeof(CtaSmem); no size is added up by hand.
#pragma once
#include "megamoe/cta/warps.h"
#include "megamoe/layout/args.h"
#include "megamoe/protocol/ring.h"
#include "megamoe/schedule/tile.h"
#include "megamoe/schedule/tile_shape.h"

namespace megamoe {

constexpr int max_local_experts = 1024;
// Of cta/profile.cuh.
constexpr int num_wait_marks = 3, num_marks = 24, num_tile_marks = 7;
constexpr int num_marked_tiles = 8, num_profile_words = num_marks + num_marked_tiles * num_tile_marks;

// A pass of backward whose pre-activations were not saved makes them again first, with the same plan.
enum class Phase : int { data, recompute };

// What one pass over the pool does. Read by every role after a cluster barrier: both CTAs of a pair must walk
// the same tiles, since each loads half of what they share.
struct PassPlan {
    int chunk_begin, chunk_end;  // chunks whose rows are in the pool
    int num_blocks;              // 0 when the launch is poisoned
    int num_rows;                // without padding
    int is_last;
    Phase phase;
    int batch_rows;  // that a warp takes at a time, see rows/batches.cuh
    Slices pulls;    // of a row in dispatch: rows_ready counts so many for each
    int meets;       // do pairs meet in this pass?
};

// Reduce and combine are done by the transport warps, joined by math warps that have no tiles left: the
// movers. What a mover's thread remembers while it sums rows is here, because the loads that it keeps in
// flight take the registers. Each struct has an odd number of words, so that a warp's accesses meet no bank
// conflicts. Those of math warps hold their tiles' column scales before (epilogue/column_scales.cuh).
struct ReducerState {
    int32_t row;       // the batch's first; no batch: negative
    int32_t block;     // the last that has a row of the batch's closers
    int32_t done;      // blocks before this one are done
    uint32_t route;    // of this lane's row of the batch
    uint16_t slice;    // of the batch: what is summed of its rows
    uint16_t closers;  // lanes of the batch whose tokens are still to be summed
};
struct CombinerState {  // of one (token, expert rank)
    int32_t token;      // or -1
    int32_t slice;
    uint32_t owed;  // bit 0: the rank owes the token a partial; bit 1: which has not been seen ready yet
};

// What a mover sums: of the 16-byte vectors [begin, end) of a row, out = sum over the set bits i of
// `sources`, lowest first, of weight[i] * the bf16 row number row[i] of those at `from`.
constexpr int max_top_k = 32;  // a lane for each
struct SumJob {
    uint64_t out, from;
    int32_t row[max_top_k];
    float weight[max_top_k];
    int32_t begin, end;
    uint32_t sources;
};

// What the GEMM roles share, for tiles of shape S.
template <class S>
struct alignas(1024) TileSmem {
    static constexpr int a_rows = max_of(S::rows, S::Forms::most_steps* S::step_rows);
    struct alignas(1024) PipelineSlot : S::Forms::BesideWeights {
        alignas(1024) uint8_t a[a_rows * slot_k_bytes];
        uint8_t b[2][S::half_columns * slot_k_bytes];
    };
    PipelineSlot slots[S::num_slots];
    alignas(1024) uint8_t output[num_math_warpgroups][S::num_output_slots][S::output_bytes];
    alignas(16) float a_scale[S::num_slots][a_rows];  // destination of bulk copies
    float b_scale[S::num_slots][2];                   // of either half
    int32_t input_slot[S::num_output_slots];          // of the pipeline, that stands in for an output slot
    Tile tile[S::num_slots];                          // that begins in a slot: load_b tells the math warps
    Tile math_tile[num_math_warpgroups * 4];          // each math warp's copy: its registers are full of sums
    Slots<S::num_slots, typename EmptyBarrier<S::paired>::Type> pipeline;
    Slots<S::num_output_slots, uint64_t> outputs[num_math_warpgroups];
    typename S::Forms::template Smem<S::num_slots> forms;
};

// What routing and the plan count in the bytes of the pipeline's slots, while nothing is in flight there:
// rows of each expert, one row of counters a warp; each expert's first block in this pass, and the padding
// rows before it. The cluster barrier behind the plan, after a proxy fence of each writer, separates the two
// lives.
struct RoutingSmem {
    int32_t expert_counters[num_warps / 2][max_local_experts];
    int32_t expert_start[max_local_experts + 1];
    int32_t padding_before[max_local_experts];
};

struct alignas(16) MoverSmem {
    ReducerState reducer[num_movers * 32];
    CombinerState combiner[num_movers * 32];
    SumJob job[num_movers];
};

// The rows of a grouped launch stay where the caller has them, sorted by expert. These are each expert's
// first block and the end of the rows before, and behind the last expert the ends of all blocks and rows.
struct ExpertTable {
    int32_t first_block[max_local_experts + 1];
    int32_t end_before[max_local_experts + 1];
    int32_t alignment;
    MEGAMOE_DEVICE int first_row(int expert) const {
        return min_of((end_before[expert] + alignment - 1) & -alignment, end_before[expert + 1]);
    }
    MEGAMOE_DEVICE int rows(int expert) const { return end_before[expert + 1] - first_row(expert); }
};
// A grouped launch has no movers, whose memory this is.
struct GroupedSmem : ExpertTable {
    alignas(16) float column_scales[num_math_warpgroups][Tile128x256::columns];  // of a tile
};

// Where the rows of experts stand that backward launches have kept: for each pass, of each expert and of one
// behind the last, first block << 1 | whether its last block is not half full.
struct StashedTable {
    int32_t lost;  // not 0: there are rows that were not kept, or never made
    int32_t entry[max_stashed_entries];
};

// A launch of few tokens (rows/few.cuh). Its warp `deal` leaves here what it has found in the ids, and tiles
// on their way to the warps that load, gather and store.
constexpr int max_few_tokens = 64;  // rows of an expert, too
constexpr int few_block_rows = 32, num_dealt = 4;
using DealtRing = Ring<num_dealt>;
struct FewSmem {
    int16_t ids[max_top_k][max_few_tokens];  // local expert, or -1
    uint32_t routes[max_local_experts];      // of each expert
    uint16_t experts[max_local_experts];     // those with rows, ascending
    struct Dealt {
        Tile tile;
        int32_t is_last;  // of its unit, which has more than one where rows do not fit into one
        uint8_t tokens[few_block_rows];  // whose rows it has
    } dealt[num_dealt];
    Slots<num_dealt, uint64_t> slots;
};

// The same of few tokens of several ranks (rows/push.cuh). Tokens have numbers, in the order of their ranks.
constexpr int max_pushed_tokens = 256, max_pushed_top_k = 16, max_pushed_experts = 512;
struct PushSmem {
    int16_t ids[max_pushed_top_k][max_pushed_tokens];  // local expert, or -1
    uint32_t blocks[max_pushed_experts];               // routes of each expert, then its first block
    uint16_t experts[max_pushed_experts];              // those with rows, ascending
    uint16_t source[max_pushed_tokens];                // home << 8 | token
    uint16_t unit[max_pushed_tokens];                  // rows of a unit, as below
    int32_t num_tokens;                                // of all ranks
    struct Dealt {
        Tile tile;
        int32_t is_last;
        uint16_t tokens[few_block_rows];  // k << 8 | number
    } dealt[num_dealt];
    Slots<num_dealt, uint64_t> slots;
    int32_t many;        // a rank has more tokens
    uint64_t listed;     // mbarriers: ids are here, and what is known of all ranks;
    uint64_t all_begun;  // each rank has begun this launch
};

// Where pairs meet before a tile, packed: a cell of args.meet.came << 8 | pairs; 0: nowhere.
struct PlacedMeeting {
    int packed;
    MEGAMOE_PURE bool any() const { return packed != 0; }
    MEGAMOE_PURE int cell() const { return packed >> 8; }
    MEGAMOE_PURE uint32_t pairs() const { return static_cast<uint32_t>(packed & 0xff); }
};

// Tiles that are looked up, on their way to the threads of a CTA that walk them. A slot is free when all have
// read it; with three, one or two tiles are ahead of the loaders, as `store` is about one behind.
constexpr int num_scheduled = 3;
constexpr int num_scheduled_to = 3;  // threads of a CTA: load_a, load_b, store
using TileRing = Ring<num_scheduled>;
struct SchedulerSmem {
    Tile tile[num_scheduled];
    union {
        Slots<num_scheduled, uint64_t> own;                         // by a thread of this CTA
        Slots<num_scheduled, TakenBarrier, ScheduledBarrier> pair;  // by one of the pair's CTA 0, for both
    };
};

// What schedule() needs where pairs may meet. It is here because schedule() has no registers left.
struct MeetSmem {
    PlacedMeeting before[num_scheduled];  // a tile that is scheduled, of CTA 0's load_b
    int32_t drafted;                      // before the next one, packed
    int32_t rounds1;                      // of gemm1, before the pair's next unit of gemm2
    int32_t tiles;                        // of a block in gemm1
    int32_t patience;                     // of the pair in this pass, see protocol/edges.h
    UnitStream stream;
    Gemm2Shares shares;
};

struct Smem {
    SchedulerSmem scheduler;
    union {
        MoverSmem movers;
        GroupedSmem experts;
        StashedTable kept;
        FewSmem few;
        PushSmem push;
    };
    int32_t row_batches_taken, token_batches_taken;  // by the movers of this CTA, in this pass
    PassPlan draft;                                  // this CTA's own; of a pair, CTA 0's is what both run
    PassPlan plan;
    int32_t tokens_of_rank[max_ranks];
    uint32_t epoch;         // of this launch; kept here, not in registers, like the counts below
    int32_t cta, num_ctas;  // among those that take part in the launch; num_ctas = 0: this one does not
    int32_t own_tokens;
    int32_t num_chunks;
    int32_t num_tokens;              // of all ranks
    Slices sum_slices;               // of partials and y, equal on all ranks
    int32_t last_arrival[2];         // of either crew of the prologue
    uint32_t waits[num_wait_marks];  // cycles, of the variant with timestamps
    MeetSmem meet;
    uint8_t tiles_begun[num_warps];  // by each warp, of that variant too
    uint32_t tile_marks[num_marked_tiles][num_tile_marks];
};

static_assert(sizeof(PushSmem) <= sizeof(MoverSmem), "no other launch has more for it");

// All shared memory of a CTA.
template <class S>
struct CtaSmem {
    union {
        TileSmem<S> tiles;
        RoutingSmem routing;
    };
    Smem common;
    static_assert(sizeof(RoutingSmem) <= sizeof(tiles.slots), "barriers and tiles outlive the plan");
};

}  // namespace megamoe
