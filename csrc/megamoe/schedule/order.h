// Which work comes when: pure functions of counts, no memory operations, no thread index. Compiled for host
// and device; tests/schedule enumerates them.
#pragma once
#include "megamoe/base/portable.h"

namespace megamoe {

constexpr int block_rows = 128;    // tile height
constexpr int tile_columns = 256;  // tile width: two halves
constexpr int half_columns = 128;  // one accumulator, one FP8 weight scale, one quantization group of h
constexpr int chunk_tokens = 32;   // routing unit: one token a lane

enum class Stage : int { gemm1, gemm2 };

// Experts are owned in contiguous ranges; the first E % R ranks hold one more.
MEGAMOE_PURE int expert_begin_of(int num_experts, int num_ranks, int rank) {
    return rank * (num_experts / num_ranks) + min_of(rank, num_experts % num_ranks);
}
MEGAMOE_PURE int rank_of_expert(int num_experts, int num_ranks, int expert) {
    int base = num_experts / num_ranks, longer = num_experts % num_ranks;
    int in_longer = longer * (base + 1);
    return expert < in_longer ? expert / (base + 1) : longer + (expert - in_longer) / base;
}

// Chunk-order tokens: chunks of 32 tokens, interleaved over home ranks, so that the first blocks of every
// expert draw on all links at once. `ordered` is that index; (home, token) the other name of the same token.
MEGAMOE_PURE int home_of(int ordered, int num_ranks) { return ordered / chunk_tokens % num_ranks; }
MEGAMOE_PURE int token_of(int ordered, int num_ranks) {
    return ordered / chunk_tokens / num_ranks * chunk_tokens + ordered % chunk_tokens;
}
MEGAMOE_PURE int ordered_of(int home, int token, int num_ranks) {
    return (token / chunk_tokens * num_ranks + home) * chunk_tokens + token % chunk_tokens;
}
MEGAMOE_PURE int num_chunks_of(int max_tokens_any_rank, int num_ranks) {
    return ceil_div(max_tokens_any_rank, chunk_tokens) * num_ranks;
}

MEGAMOE_PURE int padded_rows(int rows) { return ceil_div(rows, block_rows) * block_rows; }

// A group: up to `max_group` consecutive blocks of one expert whose tiles run m-fastest, so that a weight
// tile is read from memory once for all of them. An expert's blocks are cut into equal groups.
struct Group {
    int first, size;
};
constexpr int max_group = 16;
MEGAMOE_PURE Group group_of(int expert_first_block, int expert_blocks, int block) {
    int groups = ceil_div(expert_blocks, max_group);
    int i = block - expert_first_block;
    // the last g with start(g) <= i, where start(g) = g*blocks/groups
    int g = (i * groups + groups - 1) / expert_blocks;
    while (g * expert_blocks / groups > i) --g;
    while ((g + 1) * expert_blocks / groups <= i) ++g;
    int first = g * expert_blocks / groups;
    return {expert_first_block + first, (g + 1) * expert_blocks / groups - first};
}

// A place in the launch's tile order: `slot` counts block-sized portions of a stage, `part` tiles in it.
struct Position {
    Stage stage;
    int slot, part;
};

// The order: step s = gemm1 of the blocks [s * span, (s+1) * span), then gemm2 of the blocks of step s - 1.
// Because span >= max_group, a gemm2 tile comes after every gemm1 tile of its group, which reaches into the
// next step at most: each tile stands after all its inputs. Steps are long (two gemm1 tiles a CTA), so that
// the CTAs that share a weight tile run it side by side and it is read from memory once: with steps of one
// block, BF16 tiles waited for data a third of the time.
//
// The stream of one CTA out of `stride`: of either stage every stride-th tile, in the order above. Each stage
// is dealt out by itself, since dealing the merged order can tie a CTA to one stage (measured on DSv3 with
// steps of one block: 44 tiles a step on 132 CTAs, 11.8 ms instead of 7). gemm2 is dealt from the other end,
// so that no CTA gets both remainders. Deadlock-free because every CTA walks its tiles in the global order
// and each tile's inputs precede it there.
struct TileStream {
    int num_blocks, tiles1, tiles2, span, stride;
    int next1, next2;  // next tile of each stage

    MEGAMOE_PURE TileStream(int blocks, int per_block1, int per_block2, int step_blocks, int cta,
                            int num_ctas)
        : num_blocks(blocks),
          tiles1(per_block1),
          tiles2(per_block2),
          span(step_blocks),
          stride(num_ctas),
          next1(cta),
          next2(num_ctas - 1 - cta) {}

    MEGAMOE_PURE bool done() const { return next1 >= num_blocks * tiles1 && next2 >= num_blocks * tiles2; }
    MEGAMOE_PURE Position pop() {  // not when done()
        bool left1 = next1 < num_blocks * tiles1, left2 = next2 < num_blocks * tiles2;
        if (left1 && (!left2 || next1 / (tiles1 * span) <= next2 / (tiles2 * span) + 1)) {
            int tile = next1;
            next1 += stride;
            return {Stage::gemm1, tile / tiles1, tile % tiles1};
        }
        int tile = next2;
        next2 += stride;
        return {Stage::gemm2, tile / tiles2, tile % tiles2};
    }
};

// A position names a tile once the group of its slot is known: within a group, m runs fastest.
MEGAMOE_PURE void tile_in_group(Group group, Position p, int tiles, int* block, int* n) {
    int i = (p.slot - group.first) * tiles + p.part;
    *n = i / group.size;
    *block = group.first + i % group.size;
}

}  // namespace megamoe
