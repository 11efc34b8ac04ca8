// schedule/order.h behind a C interface, for tests/schedule/test_schedule.py (ctypes).
#include "megamoe/schedule/order.h"

using namespace megamoe;

extern "C" {

int abi_block_rows() { return block_rows; }
int abi_chunk_tokens() { return chunk_tokens; }
int abi_max_group() { return max_group; }
int abi_expert_begin_of(int e, int r, int rank) { return expert_begin_of(e, r, rank); }
int abi_rank_of_expert(int e, int r, int expert) { return rank_of_expert(e, r, expert); }
int abi_home_of(int ordered, int r) { return home_of(ordered, r); }
int abi_token_of(int ordered, int r) { return token_of(ordered, r); }
int abi_ordered_of(int home, int token, int r) { return ordered_of(home, token, r); }
int abi_num_chunks_of(int tokens, int r) { return num_chunks_of(tokens, r); }
int abi_padded_rows(int rows) { return padded_rows(rows); }
void abi_group_of(int first_block, int blocks, int block, int* out) {
    Group g = group_of(first_block, blocks, block);
    out[0] = g.first, out[1] = g.size;
}
int abi_order_size(int blocks, int tiles1, int tiles2, int lag) {
    return TileOrder{blocks, tiles1, tiles2, lag}.size();
}

// The whole order of a launch whose experts have expert_blocks[0 .. num_experts) blocks: per index (stage,
// block, n).
void abi_tiles(const int* expert_blocks, int num_experts, int tiles1, int tiles2, int lag, int* out) {
    int num_blocks = 0;
    for (int e = 0; e < num_experts; ++e) num_blocks += expert_blocks[e];
    TileOrder order{num_blocks, tiles1, tiles2, lag};
    for (int i = 0; i < order.size(); ++i) {
        Position p = order.at(i);
        int first = 0, e = 0;  // the expert that holds block p.slot
        while (first + expert_blocks[e] <= p.slot) first += expert_blocks[e++];
        Group group = group_of(first, expert_blocks[e], p.slot);
        out[3 * i] = static_cast<int>(p.stage);
        tile_in_group(group, p, p.stage == Stage::gemm1 ? tiles1 : tiles2, &out[3 * i + 1], &out[3 * i + 2]);
    }
}
}
