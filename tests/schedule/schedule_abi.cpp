// schedule/order.h behind a C interface, for tests/schedule/test_schedule.py (ctypes).
#include "megamoe/schedule/order.h"

using namespace megamoe;

extern "C" {

int abi_chunk_tokens() { return chunk_tokens; }
int abi_max_group() { return max_group; }
int abi_expert_begin_of(int e, int r, int rank) { return expert_begin_of(e, r, rank); }
int abi_rank_of_expert(int e, int r, int expert) { return rank_of_expert(e, r, expert); }
int abi_home_of(int ordered, int r) { return home_of(ordered, r); }
int abi_token_of(int ordered, int r) { return token_of(ordered, r); }
int abi_ordered_of(int home, int token, int r) { return ordered_of(home, token, r); }
int abi_num_chunks_of(int tokens, int r) { return num_chunks_of(tokens, r); }
int abi_padded_rows(int rows, int block_rows) { return padded_rows(rows, block_rows); }
void abi_slices_of(int vectors, int step, int most, int* out) {
    Slices s = slices_of(vectors, step, most);
    out[0] = s.count, out[1] = s.vectors;
}
void abi_sum_slices_of(int hidden, int tokens, int r, int cells, int* out) {
    Slices s = sum_slices_of(hidden, tokens, r, cells);
    out[0] = s.count, out[1] = s.vectors;
}
void abi_group_of(int first_block, int blocks, int block, int* out) {
    Group g = group_of(first_block, blocks, block);
    out[0] = g.first, out[1] = g.size;
}

// The stream of every CTA of a launch whose experts have expert_blocks[0 .. num_experts) blocks, one CTA
// after the other: per tile (cta, step, stage, part, block, n, shared). A step is `span` blocks of gemm1 and
// then the previous step's blocks of gemm2; part counts all units of a stage. A CTA without a tile in its
// pair's unit has n = -1. Writes at most `capacity` tiles and returns how many there are.
int abi_streams(const int* expert_blocks, int num_experts, int tiles1, int tiles2, int span, int num_ctas,
                int* out, int capacity) {
    int num_blocks = 0;
    for (int e = 0; e < num_experts; ++e) num_blocks += expert_blocks[e];
    int written = 0;
    for (int cta = 0; cta < num_ctas; ++cta) {
        UnitStream stream(num_blocks, units_of(tiles1), units_of(tiles2), span, cta / pair_ctas,
                          num_ctas / pair_ctas);
        while (!stream.done()) {
            Position p = stream.pop();
            int first = 0, e = 0;                       // the expert that holds block p.portion
            while (e < num_experts && first + expert_blocks[e] <= p.portion) first += expert_blocks[e++];
            if (e == num_experts) return -1;  // a portion past the last block
            bool is1 = p.stage == Stage::gemm1;
            int tiles = is1 ? tiles1 : tiles2;
            Group group = group_of(first, expert_blocks[e], p.portion);
            UnitTile unit;
            if (!unit_in_group(group, p, tiles, cta % pair_ctas, &unit)) continue;
            if (written++ >= capacity) return written;  // one too many: the test says so
            int* tile = out + 7 * (written - 1);
            tile[0] = cta, tile[1] = p.portion / span + (is1 ? 0 : 1), tile[2] = static_cast<int>(p.stage),
            tile[3] = p.portion * units_of(tiles) + p.part, tile[4] = unit.block;
            tile[5] = unit.n < tiles ? unit.n : -1, tile[6] = static_cast<int>(unit.shared);
        }
    }
    return written;
}
}
