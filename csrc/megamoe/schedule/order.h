// The order of work: pure functions of counts, without memory operations or thread indices. Both host and
// device compile this file; tests/schedule enumerates the order.
#pragma once
#include "megamoe/layout/args.h"

namespace megamoe {

constexpr int chunk_tokens = 32;  // routing unit: one token a lane

// The GEMMs of a launch. The last three are backward's: tiles of dw13 and dw2, and gemm1 of the forward pass
// again.
enum class GemmId : int { gemm1, gemm2, dw13, dw2, recompute };

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

// Where there are fewer tokens than warps, a warp moves a slice of a row: `vectors` of its 16-byte vectors.
struct Slices {
    int count, vectors;  // the last slice may be shorter
};
// At most `most` slices, each a multiple of what a warp moves in one go.
MEGAMOE_PURE Slices slices_of(int vectors, int step, int most) {
    int steps = ceil_div(vectors, step), per_slice = ceil_div(steps, max_of(1, min_of(most, steps)));
    return {ceil_div(steps, per_slice), per_slice * step};
}
// How a token's partials and its y are cut. Each slice has a flag of its own, so all ranks must cut alike,
// whatever CTAs take part. There are four times as many slices as an H200 has warps that sum; with fewer,
// some warps are done long before others.
constexpr int sum_vector = 8;  // values of bf16 in 16 bytes
constexpr int sum_step = 64;   // vectors
constexpr int max_sum_slices = 4 * 12 * 132;
MEGAMOE_PURE Slices sum_slices_of(int hidden, int max_tokens_any_rank, int num_ranks, int ready_cells) {
    int tokens = max_of(1, max_tokens_any_rank);
    return slices_of(hidden / sum_vector, sum_step,
                     min_of(max_sum_slices / (tokens * num_ranks), ready_cells / tokens));
}

MEGAMOE_PURE int padded_rows(int rows, int block_rows) { return ceil_div(rows, block_rows) * block_rows; }

// A run: up to `max_run` consecutive blocks of one expert whose tiles run m-fastest, so that a weight
// tile is read from memory once for all of them. An expert's blocks are cut into equal runs.
struct Run {
    int first, size;
};
constexpr int max_run = 16;
constexpr int pair_ctas = 2;  // CTAs of a cluster: they take their tiles together
MEGAMOE_PURE Run run_of(int expert_first_block, int expert_blocks, int block) {
    int groups = ceil_div(expert_blocks, max_run);
    int i = block - expert_first_block;
    // the last g with start(g) <= i, where start(g) = g*blocks/groups
    int g = (i * groups + groups - 1) / expert_blocks;
    while (g * expert_blocks / groups > i) --g;
    while ((g + 1) * expert_blocks / groups <= i) ++g;
    int first = g * expert_blocks / groups;
    return {expert_first_block + first, (g + 1) * expert_blocks / groups - first};
}

// What a pair of CTAs does at a time: two tiles of one run that have an operand in common, of which either
// CTA loads one half for both. Two blocks under the same columns share B; the last block of an odd run
// shares A between neighbouring columns. So a block has `units_of(tiles)` units whatever its neighbours.
// Sharing takes a third off what the tiles read from L2, which bounded BF16 before (0012).
enum class Shared : int { a, b };
MEGAMOE_PURE int units_of(int tiles) { return ceil_div(tiles, pair_ctas); }

// A place in the launch's order of units: `portion` counts block-sized portions of a GEMM, `part` units in
// it.
struct Position {
    GemmId gemm;
    int portion, part;
};

// A pair's unit. The units of a GEMM are numbered from 0, block by block; dw13 stands for both weight
// matrices here (weight_unit()).
struct Unit {
    int packed;
    static MEGAMOE_PURE Unit none() { return {-1}; }
    static MEGAMOE_PURE Unit of(GemmId id, int number, bool gemm1_done) {
        return {number << 3 | (gemm1_done ? 4 : 0) | static_cast<int>(id)};
    }
    MEGAMOE_PURE bool valid() const { return packed >= 0; }
    MEGAMOE_PURE GemmId gemm() const { return static_cast<GemmId>(packed & 3); }
    MEGAMOE_PURE int number() const { return packed >> 3; }
    MEGAMOE_PURE bool gemm1_done() const { return (packed & 4) != 0; }  // the pair has none behind this unit
    MEGAMOE_PURE Position position(int units1, int units2) const {      // not of a weight matrix
        int of_block = gemm() == GemmId::gemm1 ? units1 : units2;
        return {gemm(), number() / of_block, number() % of_block};
    }
};

// Units [first, first + units) of a GEMM, which as many pairs begin side by side.
struct Round {
    int first, units;
    static MEGAMOE_PURE Round of(int unit, int num_pairs) {
        return {unit / num_pairs * num_pairs, num_pairs};
    }
};

// The order: step s = gemm1 of the blocks [s * span, (s+1) * span), then gemm2 of the blocks of step s - 1.
// Because span >= max_run, a gemm2 tile comes after every gemm1 tile of its run, which reaches into the
// next step at most: each tile stands after all its inputs. Steps are long (two gemm1 tiles a CTA), so that
// the CTAs that share a weight tile run it side by side and it is read from memory once: with steps of one
// block, BF16 tiles waited for data a third of the time.
//
// The units of one pair, in the order above. Each GEMM is distributed by itself, since scheduling the merged
// order can tie a pair to one GEMM (measured on DSv3 with steps of one block: 44 tiles a step on 132 CTAs,
// 11.8 ms instead of 7). A pair holds its next unit of either; the first ones are given, gemm2's from the
// other end, so that no pair begins with both remainders, and `take` says what comes behind one: a ticket
// that counts up, or every so many-th, each GEMM in its own way. Deadlock-free because a pair walks its
// units in the global order, the inputs of both tiles of a unit precede it there, and a GEMM's first unit
// that is not done is some pair's already: by tickets, as they are given in order and a pair that begins a
// unit holds the next; in fixed shares from the start. So whatever a unit waits for is done, or is with a
// pair whose own waits are for earlier units yet. Units of weight gradients come last.
struct UnitStream {
    int num_blocks, units1, units2, num_weights, span;
    int next1, next2, next_weight;  // held, of each GEMM

    MEGAMOE_PURE UnitStream(int blocks, int per_block1, int per_block2, int weights, int step_blocks,
                            int pair, int num_pairs)
        : num_blocks(blocks),
          units1(per_block1),
          units2(per_block2),
          num_weights(weights),
          span(step_blocks),
          next1(pair),
          next2(num_pairs - 1 - pair),
          next_weight(pair) {}

    MEGAMOE_PURE bool gemm1_done() const { return next1 / units1 >= num_blocks; }
    MEGAMOE_PURE bool rows_done() const { return gemm1_done() && next2 / units2 >= num_blocks; }
    MEGAMOE_PURE bool done() const { return rows_done() && next_weight >= num_weights; }
    // The order by steps: where both GEMMs have a unit left, is gemm1's the next one?
    MEGAMOE_PURE bool by_steps() const { return next1 / units1 / span <= next2 / units2 / span + 1; }
    // The order by rounds of all pairs, where pairs meet: before a round of gemm2 come those of gemm1 that
    // have its inputs (they end with the run of its last unit), and one more. So each tile stands after all
    // its inputs here, too.
    MEGAMOE_PURE int rounds_before(Round round2, int num_pairs) const {
        int blocks = min_of((round2.first + round2.units - 1) / units2 + max_run, num_blocks);
        return ceil_div(blocks * units1, num_pairs) + 1;
    }
    MEGAMOE_PURE bool by_rounds(Round round2, int num_pairs) const {
        return next1 / num_pairs < rounds_before(round2, num_pairs);
    }
    // Rounds of gemm2 that come before the last of gemm1.
    MEGAMOE_PURE int rounds_before_last(int num_pairs) const {
        int last = ceil_div(num_blocks * units1, num_pairs) - 1;
        int blocks = (last - 1) * num_pairs / units1 - max_run + 1;
        return max_of(blocks, 0) * units2 / num_pairs;
    }
    // Must not be called when done(). take(id, unit) returns the pair's unit behind this one. gemm1_first():
    // by_steps(), by_rounds().
    template <class Take, class First>
    MEGAMOE_PURE Unit pop(Take take, First gemm1_first) {
        if (rows_done()) {
            int unit = next_weight;
            next_weight = take(GemmId::dw13, unit);
            return Unit::of(GemmId::dw13, unit, true);
        }
        bool is_gemm1 = !gemm1_done() && (next2 / units2 >= num_blocks || gemm1_first());
        GemmId id = is_gemm1 ? GemmId::gemm1 : GemmId::gemm2;
        int unit = is_gemm1 ? next1 : next2, next = take(id, unit);
        next1 = is_gemm1 ? next : next1;
        next2 = is_gemm1 ? next2 : next;
        return Unit::of(id, unit, gemm1_done());
    }
};

// Fixed shares of gemm2's units, as long as `rounds` of them take no longer than one of gemm1. Where gemm1's
// units do not divide evenly, the last `light` pairs have one less: they share out `head` of gemm2's units,
// those from `from` on, among themselves; all other units go round all pairs, from the last pair on. This is
// not done where gemm1 has less than two rounds: there gemm2 waits for its last units, and all pairs have to
// be free then.
//
// In the order by steps the light pairs begin gemm2 with these units. Where pairs meet, they take them in the
// last round of gemm1, in place of the unit that they do not have; otherwise they would be that much behind
// the others for the whole launch.
struct Gemm2Shares {
    int from, light, head;
    MEGAMOE_PURE Gemm2Shares(int num_units1, int rounds, int num_pairs, int from)
        : from(from),
          light(num_pairs - num_units1 % num_pairs),
          head(light < num_pairs && num_units1 >= 2 * num_pairs ? rounds * light : 0) {}
    // `from_last`: a pair's number, counted from the last one, which is 0.
    MEGAMOE_PURE int first(int from_last) const { return from == 0 ? first_from(from_last) : from_last; }
    MEGAMOE_PURE int behind(int unit, int from_last, int num_pairs) const {
        if (unit >= from + head) return unit + num_pairs;
        if (unit >= from) return unit + light < from + head ? unit + light : from + head + from_last;
        return unit + num_pairs < from ? unit + num_pairs : first_from(from_last);
    }
    MEGAMOE_PURE Round round_of(int unit, int num_pairs) const {
        int units = unit >= from && unit < from + head ? light : num_pairs;
        int begin = unit < from ? 0 : from + (unit < from + head ? 0 : head);
        return {begin + Round::of(unit - begin, units).first, units};
    }

  private:
    MEGAMOE_PURE int first_from(int from_last) const {
        return from + (from_last < min_of(light, head) ? from_last : head + from_last);
    }
};

// One CTA's tile of a unit.
struct UnitTile {
    int block, n;  // n == tiles: this CTA has none, but its partner has and counts on its half of A
    Shared shared;
};

// How a run's units are laid out. The last block of an odd run comes behind all other blocks or, where pairs
// meet, beside the columns that its units have, so that those who read the same weights are near each other.
enum class LastBlock : int { behind, beside };

// The units of a run that hold a tile are its first ones: with an odd number of tiles, each pair of blocks
// leaves one over.
MEGAMOE_PURE int held_units(Run run, int tiles) {
    return run.size / 2 * tiles + (run.size % 2 == 1 ? units_of(tiles) : 0);
}

// The tile of CTA `member` (0 or 1) in the unit at `p`: within a run, m runs fastest. False for a unit that
// holds no tile at all.
MEGAMOE_PURE bool unit_in_run(Run run, Position p, int tiles, LastBlock layout, int member, UnitTile* out) {
    int i = (p.portion - run.first) * units_of(tiles) + p.part;
    int pairs = run.size / 2;
    if (layout == LastBlock::beside && run.size % 2 == 1) {
        int two = i / run.size * 2, j = i % run.size;
        int of_columns = min_of(tiles - two, 2) * pairs;
        if (j < of_columns) {
            int second = j >= pairs ? 1 : 0;
            *out = {run.first + 2 * (j - second * pairs) + member, two + second, Shared::b};
            return true;
        }
        *out = {run.first + run.size - 1, min_of(two + member, tiles), Shared::a};
        return j == of_columns;
    }
    if (i < pairs * tiles) {
        *out = {run.first + 2 * (i % pairs) + member, i / pairs, Shared::b};
        return true;
    }
    int n = 2 * (i - pairs * tiles);
    *out = {run.first + run.size - 1, min_of(n + member, tiles), Shared::a};
    return run.size % 2 == 1 && n < tiles;
}

// A meeting: the pairs that begin the units [first, first + pairs) of a GEMM wait for each other, for a
// bounded time, before they load weights. Only units of one round meet: a pair takes part in it with one
// unit, and every unit of it belongs to some pair. Nobody meets where there are fewer than two.
//
// The pairs that share an operand meet. In a run of `many` blocks or more they share a weight tile, under one
// column (or two, where the last block of an odd run stands beside both); in a smaller run they share its
// rows, under all columns.
struct Meeting {
    int first, pairs;
};
MEGAMOE_PURE Meeting meeting_of(Run run, Position p, int tiles, int many, Round round) {
    int of_block = units_of(tiles), unit = p.portion * of_block + p.part;
    int first = run.first * of_block, held = held_units(run, tiles);
    if (run.size >= many) {
        int group =
            run.size % 2 == 1 ? run.size : run.size / 2;  // of two columns and the last block, or of one
        int in_run = unit - first, in_group = in_run % group;
        first += in_run - in_group;
        held = min_of(held - (in_run - in_group), group);
    }
    int begin = max_of(first, round.first), end = min_of(first + held, round.first + round.units);
    return {begin, end - begin};
}

// The tiles of dw13 and dw2, 128 rows (m) of a weight matrix x 256 columns (n) over all rows of an expert:
// experts ascending, dw13 before dw2, and within a matrix the order of blocks above, with m-blocks for
// blocks. One CTA owns a tile over all of K, so that nothing is summed twice.
struct WeightMatrix {
    int m_blocks, n_tiles;  // none: not wanted
    MEGAMOE_PURE int units() const { return m_blocks * units_of(n_tiles); }
};
struct WeightUnit {
    int expert;
    GemmId gemm;
    Position position;  // portion: an m-block
};
MEGAMOE_PURE int num_weight_units(int num_experts, WeightMatrix w13, WeightMatrix w2) {
    return num_experts * (w13.units() + w2.units());
}
MEGAMOE_PURE WeightUnit weight_unit(int i, WeightMatrix w13, WeightMatrix w2) {
    int per_expert = w13.units() + w2.units();
    int expert = i / per_expert, unit = i % per_expert;
    bool first = unit < w13.units();
    if (!first) unit -= w13.units();
    int parts = units_of(first ? w13.n_tiles : w2.n_tiles);
    GemmId id = first ? GemmId::dw13 : GemmId::dw2;
    return {expert, id, {id, unit / parts, unit % parts}};
}

}  // namespace megamoe
