// schedule/order.h behind a C interface, for tests/schedule/test_schedule.py (ctypes).
#include <vector>

#include "megamoe/schedule/order.h"

using namespace megamoe;

extern "C" {

int abi_chunk_tokens() { return chunk_tokens; }
int abi_max_run() { return max_run; }
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
    Run g = run_of(first_block, blocks, block);
    out[0] = g.first, out[1] = g.size;
}

// Where pairs meet: the first unit of gemm2 that those take which have one of gemm1 less.
int abi_head_first(int num_blocks, int units1, int units2, int num_pairs) {
    return UnitStream(num_blocks, units1, units2, 0, max_run, 0, num_pairs).rounds_before_last(num_pairs) *
           num_pairs;
}

// The units of every CTA of a launch whose experts have expert_blocks[0 .. num_experts) blocks: per tile
// (cta, step, stage, part, block, n, shared, first, pairs), each CTA's in its own order. A step is `span`
// blocks of gemm1 and then the previous step's blocks of gemm2; part counts all units of a stage. With many >
// 0 pairs meet, `first` and `pairs` say where, and the order is that by rounds: steps 2 r + 1 are rounds of
// gemm1, in 2 r stand those of gemm2 that come before round r of gemm1. A CTA without a tile in its pair's
// unit has n = -1. seed 0: by fixed shares, gemm2's as Gemm2Shares has them, one CTA after the other is
// written; else by tickets, gemm2 by fixed shares still if `fixed2`, to the pairs as they come in an order
// that the seed draws. Writes at most `capacity` tiles and returns how many there are; -1 for a portion past
// the last block.
int abi_streams(const int* expert_blocks, int num_experts, int tiles1, int tiles2, int span, int num_ctas,
                unsigned seed, bool fixed2, int rounds, int many, int* out, int capacity) {
    int num_blocks = 0, num_pairs = num_ctas / pair_ctas, written = 0;
    for (int e = 0; e < num_experts; ++e) num_blocks += expert_blocks[e];
    Gemm2Shares shares(
        num_blocks * units_of(tiles1), rounds, num_pairs,
        many > 0 ? abi_head_first(num_blocks, units_of(tiles1), units_of(tiles2), num_pairs) : 0);
    LastBlock last = many > 0 ? LastBlock::beside : LastBlock::behind;
    auto write = [&](Unit unit_of_pair, int pair, const UnitStream& before) {
        Position p = unit_of_pair.position(units_of(tiles1), units_of(tiles2));
        int first = 0, e = 0;  // the expert that holds block p.portion
        while (e < num_experts && first + expert_blocks[e] <= p.portion) first += expert_blocks[e++];
        if (e == num_experts) return false;
        bool is1 = p.gemm == GemmId::gemm1;
        int tiles = is1 ? tiles1 : tiles2;
        Run group = run_of(first, expert_blocks[e], p.portion);
        int number = p.portion * units_of(tiles) + p.part, step = p.portion / span + (is1 ? 0 : 1);
        Meeting meeting = {number, 0};
        if (many > 0) {
            Round round = is1 ? Round::of(number, num_pairs) : shares.round_of(number, num_pairs);
            meeting = meeting_of(group, p, tiles, many, round);
            step = is1 ? 2 * (number / num_pairs) + 1 : 2 * before.rounds_before(round, num_pairs);
        }
        for (int member = 0; member < pair_ctas; ++member) {
            UnitTile unit;
            if (!unit_in_run(group, p, tiles, last, member, &unit)) continue;
            if (written++ >= capacity) continue;  // one too many: the test says so
            int* tile = out + 9 * (written - 1);
            tile[0] = pair * pair_ctas + member, tile[1] = step;
            tile[2] = static_cast<int>(p.gemm), tile[3] = number;
            tile[4] = unit.block, tile[5] = unit.n < tiles ? unit.n : -1;
            tile[6] = static_cast<int>(unit.shared), tile[7] = meeting.first, tile[8] = meeting.pairs;
        }
        return true;
    };
    std::vector<UnitStream> streams;
    for (int pair = 0; pair < num_pairs; ++pair)
        streams.emplace_back(num_blocks, units_of(tiles1), units_of(tiles2), 0, span, pair, num_pairs);
    for (int p = 0; p < num_pairs && seed == 0; ++p) streams[p].next2 = shares.first(num_pairs - 1 - p);
    auto all_done = [&] {
        for (const UnitStream& stream : streams)
            if (!stream.done()) return false;
        return true;
    };
    int tickets[2] = {0, 0}, pair = 0;
    while (!all_done()) {
        if (seed != 0) pair = static_cast<int>((seed = seed * 1664525u + 1013904223u) >> 8) % num_pairs;
        while (streams[pair].done()) pair = (pair + 1) % num_pairs;
        UnitStream& stream = streams[pair];
        auto take = [&](GemmId id, int before) {
            if (seed == 0 && id == GemmId::gemm2)
                return shares.behind(before, num_pairs - 1 - pair, num_pairs);
            bool fixed = seed == 0 || (fixed2 && id == GemmId::gemm2);
            return num_pairs + (fixed ? before : tickets[static_cast<int>(id)]++);
        };
        Unit unit = stream.pop(take, [&] {
            return many > 0 ? stream.by_rounds(shares.round_of(stream.next2, num_pairs), num_pairs)
                            : stream.by_steps();
        });
        if (!write(unit, pair, stream)) return -1;
    }
    return written;
}
}
