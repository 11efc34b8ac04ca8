"""schedule/order.h, enumerated: every tile once, in order, after its inputs; index maps one to one."""

import ctypes
import itertools
import pathlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = pathlib.Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
GEMM1, GEMM2 = 0, 1
SHARED_A, SHARED_B = 0, 1


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    library = tmp_path_factory.mktemp("schedule") / "libschedule.so"
    command = ["g++", "-O2", "-std=c++20", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([*command, str(HERE / "schedule_abi.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@dataclass(frozen=True)
class Launch:
    """What fixes the streams of a launch."""

    blocks: Sequence[int]  # of each expert
    tiles1: int
    tiles2: int
    span: int  # blocks of a step
    ctas: int
    seed: int = 0  # not 0: by tickets, the pairs coming in an order drawn from it
    fixed2: bool = False  # gemm2 by fixed shares all the same
    rounds: int = (
        0  # units of gemm2 that take no longer than one of gemm1; 0: shares of every so many-th
    )
    many: int = (
        0  # blocks of a run whose columns meet; not 0: pairs meet, the order is that by rounds
    )

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks)

    @property
    def head(self) -> int:
        """Units of gemm2 that the pairs take which have one of gemm1 less."""
        pairs, units = self.ctas // 2, self.num_blocks * -(-self.tiles1 // 2)
        return self.rounds * (-units % pairs) if units >= 2 * pairs else 0

    def round_of(self, tile: "Tile", first: int) -> tuple[str, int]:
        """Return the round of a tile. first: of the head, where the tile is one of gemm2."""
        pairs, part = self.ctas // 2, tile.part - first
        if tile.stage == GEMM1 or part < 0:
            return "all", tile.part // pairs
        if part < self.head:
            return "light", part // (self.head // self.rounds)
        return "behind", (part - self.head) // pairs


class Tile(NamedTuple):
    """One tile of a stream; (step, stage, part) is its place in the global order."""

    cta: int
    step: int
    stage: int
    part: int
    block: int
    n: int  # -1: none for this CTA
    shared: int
    first: int  # unit of the GEMM that its meeting begins with, and how many take part
    pairs: int

    @property
    def place(self) -> tuple[int, int, int]:
        return self.step, self.stage, self.part


def streams_of(order, launch: Launch) -> list[Tile]:
    """Return the tiles of every CTA, each CTA's in its own order, one CTA after the other."""
    units = -(-launch.tiles1 // 2) + -(-launch.tiles2 // 2)
    most = 2 * launch.num_blocks * units
    out = (ctypes.c_int * (9 * most))()
    blocks = (ctypes.c_int * len(launch.blocks))(*launch.blocks)
    found = order.abi_streams(
        *(blocks, len(launch.blocks), launch.tiles1, launch.tiles2, launch.span),
        *(launch.ctas, launch.seed, launch.fixed2, launch.rounds, launch.many),
        *(out, most),
    )
    assert 0 <= found <= most, "more tiles than places"
    tiles = [Tile(*out[9 * i : 9 * i + 9]) for i in range(found)]
    return sorted(tiles, key=lambda t: t.cta)


def check_streams(order, launch: Launch) -> None:
    everything = streams_of(order, launch)
    check_pairs(everything)
    tiles = [t for t in everything if t.n >= 0]
    wanted = {(GEMM1, b, n) for b in range(launch.num_blocks) for n in range(launch.tiles1)}
    wanted |= {(GEMM2, b, n) for b in range(launch.num_blocks) for n in range(launch.tiles2)}
    assert len(tiles) == len(wanted), "a tile is missing or comes twice"
    assert {(t.stage, t.block, t.n) for t in tiles} == wanted, "a tile is missing or comes twice"
    assert len({(*t.place, t.cta % 2) for t in tiles}) == len(tiles), (
        "two tiles at one place of the order"
    )
    for before, after in itertools.pairwise(everything):
        assert before.cta != after.cta or before.place < after.place, (
            f"{after} comes after {before} in its CTA, before it in the order"
        )
    # Deadlock-free because: each pair takes its units in the global order, where each unit stands after the inputs
    # of both its tiles.
    last_gemm1 = [(-1, 0, 0)] * launch.num_blocks
    for t in tiles:
        if t.stage == GEMM1:
            last_gemm1[t.block] = max(last_gemm1[t.block], t.place)
    for t in tiles:
        assert t.stage == GEMM1 or last_gemm1[t.block] < t.place, f"{t} stands before its inputs"
    if launch.seed == 0 and launch.rounds == 0:
        check_shares(everything, launch)
    if launch.seed == 0 and launch.rounds > 0:
        check_even(everything, launch)
    if launch.fixed2:
        check_fixed_shares(everything, launch)
    if launch.many > 0:
        check_meetings(order, everything, launch)


def check_meetings(order, tiles: list[Tile], launch: Launch) -> None:
    """Whoever takes part in a meeting knows the same one; it has the pairs that it counts, all of one round."""
    pairs = launch.ctas // 2
    units = -(-launch.tiles1 // 2), -(-launch.tiles2 // 2)
    head = order.abi_head_first(launch.num_blocks, *units, pairs)
    meetings: dict[tuple[int, int], list[Tile]] = {}
    for t in tiles:
        if t.cta % 2 == 0 and t.pairs >= 2:
            meetings.setdefault((t.stage, t.first), []).append(t)
    for (_, first), members in meetings.items():
        assert {t.pairs for t in members} == {len(members)}, (
            f"{members} count another number of pairs than come"
        )
        assert sorted(t.part for t in members) == list(range(first, first + len(members)))
        assert len({t.cta for t in members}) == len(members) <= pairs, "a pair comes twice"
        assert len({launch.round_of(t, head) for t in members}) == 1, (
            f"{members} meet across rounds"
        )
    # Who shares meets: whoever reads a weight tile of a run of many blocks in one round. Runs of experts of at most 16
    # blocks are the experts.
    expert_of = [e for e, blocks in enumerate(launch.blocks) for _ in range(blocks)]
    sharers: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for t in tiles:
        expert = expert_of[t.block]
        if t.shared == SHARED_B and launch.many <= launch.blocks[expert] <= 16:
            place = t.stage, launch.round_of(t, head), t.n, expert
            sharers.setdefault(place, set()).add((t.first, t.pairs))
    for tile, met in sharers.items():
        assert len(met) == 1, f"who reads {tile} does not meet: {met}"


def check_pairs(tiles: list[Tile]) -> None:
    """The CTAs of a pair walk the same units, and their tiles have the operand in common that they share."""
    by_cta: dict[int, list[Tile]] = {}
    for t in tiles:
        by_cta.setdefault(t.cta, []).append(t)
    for cta in range(0, max(by_cta, default=-1) + 1, 2):
        for a, b in zip(by_cta.get(cta, []), by_cta.get(cta + 1, []), strict=True):
            assert (a.place, a.shared) == (b.place, b.shared)
            if a.shared == SHARED_B:
                assert (a.block + 1, a.n) == (b.block, b.n)
            else:
                assert a.block == b.block
                assert b.n in (a.n + 1, -1)
            assert a.n >= 0, "the first CTA of a pair always has a tile"


def check_shares(tiles: list[Tile], launch: Launch) -> None:
    """Every pair has its share of either stage, to one unit, and of both together, to one unit."""
    pairs = launch.ctas // 2
    counts = [[0] * pairs for _ in range(2)]
    odd = launch.tiles1 % 2 or launch.tiles2 % 2
    for t in tiles:
        counts[t.stage][t.cta // 2] += t.cta % 2
    if odd:  # units without a tile are scheduled too
        return
    both = [sum(pair) for pair in zip(*counts, strict=True)]
    for name, scheduled in (("gemm1", counts[GEMM1]), ("gemm2", counts[GEMM2]), ("both", both)):
        assert max(scheduled) - min(scheduled) <= 1, f"{name} is scheduled unevenly: {scheduled}"
    more = [[n > min(scheduled) for n in scheduled] for scheduled in counts]
    if sum(map(sum, more)) <= pairs:  # else some pair must have both; the sum stays even
        assert not any(map(all, zip(*more, strict=True))), "a pair has the remainder of both stages"


def check_even(tiles: list[Tile], launch: Launch) -> None:
    """Pairs' shares differ by less than two units of gemm2, counting each of gemm1 as `rounds` of these."""
    pairs, units = launch.ctas // 2, -(-launch.tiles1 // 2) * launch.num_blocks
    enough = units >= 2 * pairs and launch.tiles2 >= launch.rounds * launch.tiles1 // 2
    if launch.tiles1 % 2 or launch.tiles2 % 2 or not enough:
        return
    load = [0] * pairs
    for t in tiles:
        load[t.cta // 2] += t.cta % 2 * (1 if t.stage == GEMM2 else launch.rounds)
    assert max(load) - min(load) <= 1, f"scheduled unevenly: {load}"


def check_fixed_shares(tiles: list[Tile], launch: Launch) -> None:
    """Every pair has every so many-th unit of gemm2, counted from the last pair."""
    pairs = launch.ctas // 2
    for t in tiles:
        assert t.stage == GEMM1 or (t.part + t.cta // 2) % pairs == pairs - 1, f"{t} is another's"


def run_of(order, first, blocks, block):
    out = (ctypes.c_int * 2)()
    order.abi_group_of(first, blocks, block, out)
    return out[0], out[1]


def test_streams_small_bounds(order):
    """Exhaustive: few blocks, few tiles, up to more CTAs than tiles."""
    least = order.abi_max_run()
    for blocks in itertools.product([0, 1, 2, 3], repeat=2):
        for tiles1, tiles2, ctas in itertools.product([1, 2, 3, 4], [1, 2, 5], (2, 4, 6, 8)):
            for span in (least, least + 1, 40):
                check_streams(order, Launch(blocks, tiles1, tiles2, span, ctas))
                for rounds in (1, 3):
                    launch = Launch(blocks, tiles1, tiles2, span, ctas, rounds=rounds)
                    check_streams(order, launch)
                for fixed2 in (False, True):
                    check_streams(order, Launch(blocks, tiles1, tiles2, span, ctas, 7, fixed2))


def test_rounds_and_meetings_small_bounds(order):
    """Exhaustive: the order where pairs meet, and who meets whom."""
    for blocks in itertools.product([0, 1, 2, 3, 7], repeat=2):
        for tiles1, tiles2, ctas in itertools.product([1, 2, 3, 4], [1, 2, 5], (2, 4, 6, 8)):
            for many, rounds in ((4, 3), (2, 1), (40, 3)):
                launch = Launch(blocks, tiles1, tiles2, 16, ctas, rounds=rounds, many=many)
                check_streams(order, launch)


@settings(max_examples=100, deadline=None)
@given(
    blocks=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    tiles1=st.integers(1, 24),
    tiles2=st.integers(1, 28),
    ctas=st.integers(1, 70).map(lambda pairs: 2 * pairs),
    rounds=st.integers(0, 5),
    many=st.integers(2, 17),
)
def test_rounds_and_meetings(order, blocks, tiles1, tiles2, ctas, rounds, many):
    check_streams(order, Launch(blocks, tiles1, tiles2, 16, ctas, 0, False, rounds, many))


def test_meetings_that_count_wrong_are_seen(order):
    launch = Launch([9] * 8, 16, 28, 16, 132, rounds=3, many=6)
    tiles = streams_of(order, launch)
    check_meetings(order, tiles, launch)
    assert {t.pairs for t in tiles} >= {9}
    with pytest.raises(AssertionError, match="count another number"):
        check_meetings(order, [t for t in tiles if t.cta != 6], launch)
    parted = [t._replace(first=t.part, pairs=1) if t.cta == 6 else t for t in tiles]
    with pytest.raises(AssertionError, match="count another number|does not meet"):
        check_meetings(order, parted, launch)


def test_streams_around_the_group(order):
    """Experts of one group less, exactly and more than the largest group, in the shortest steps."""
    least = order.abi_max_run()
    sizes = (0, 1, least - 1, least, least + 1, 2 * least, 2 * least + 1)
    for blocks in itertools.product(sizes, repeat=2):
        for tiles1, tiles2, ctas in itertools.product([1, 3, 4], [1, 4], [2, 10, 132]):
            check_streams(order, Launch(blocks, tiles1, tiles2, least, ctas))


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    tiles1=st.integers(1, 24),
    tiles2=st.integers(1, 28),
    extra=st.integers(0, 200),
    ctas=st.integers(1, 70).map(lambda pairs: 2 * pairs),
    seed=st.integers(0, 2**31),
    fixed2=st.booleans(),
    rounds=st.integers(0, 5),
)
def test_streams(order, blocks, tiles1, tiles2, extra, ctas, seed, fixed2, rounds):
    span = order.abi_max_run() + extra
    check_streams(order, Launch(blocks, tiles1, tiles2, span, ctas, seed, fixed2))
    check_streams(order, Launch(blocks, tiles1, tiles2, span, ctas, rounds=rounds))


# DSv3, Qwen3-30B: tiles, and the K of gemm1 over that of gemm2
@pytest.mark.parametrize(("tiles1", "tiles2", "rounds"), [(16, 28, 3), (6, 8, 2)])
def test_few_blocks_are_shared_evenly(order, tiles1, tiles2, rounds):
    uneven = 0
    for blocks in range(1, 129):
        launch = Launch([1] * blocks, tiles1, tiles2, order.abi_max_run(), 132, rounds=rounds)
        check_streams(order, launch)
        in_turns = streams_of(order, replace(launch, rounds=0))
        try:
            check_even(in_turns, launch)
        except AssertionError:
            uneven += 1
    assert uneven > 60, "shares of every so many-th unit are even too"


def test_tickets_are_no_fixed_shares(order):
    launch = Launch([16] * 8, 16, 28, order.abi_max_run(), 132, seed=7)
    with pytest.raises(AssertionError, match="is another's"):
        check_fixed_shares(streams_of(order, launch), launch)


@pytest.mark.parametrize(
    ("tiles1", "tiles2"), [(16, 28), (16, 16), (12, 16), (6, 8)], ids=str
)  # DSv3, Flash, Qwen3-235B, Qwen3-30B
def test_real_shapes_share_both_stages(order, tiles1, tiles2):
    """132 CTAs: all of them have work of both stages, also where tiles1 + tiles2 divides the grid."""
    launch = Launch([8] * 16, tiles1, tiles2, order.abi_max_run(), 132)
    check_streams(order, launch)
    tiles = streams_of(order, launch)
    for stage in (GEMM1, GEMM2):
        assert {t.cta for t in tiles if t.stage == stage} == set(range(132))


@pytest.mark.parametrize("missing", [2, 3, 4, 8, 15])
def test_streams_need_long_steps(order, missing):
    """Steps of max_run blocks make the dependencies hold: short ones must fail, or the tests above prove nothing.

    One block less would still do: a group starts in its step's last block at worst, and gemm1 comes
    first within the next step.
    """
    group = order.abi_max_run()
    for blocks in itertools.product(range(1, group), [group]):
        check_streams(order, Launch(blocks, 24, 2, group - 1, 6))
    span = group - missing
    with pytest.raises(AssertionError, match="before its inputs"):
        check_streams(order, Launch([span - 1, group] if span > 1 else [group], 24, 2, span, 6))


def test_dealing_the_merged_order_is_seen(order):
    """What UnitStream replaced, on DSv3: 44 tiles a step tie 132 CTAs to one stage each."""
    launch = Launch([16] * 8, 16, 28, order.abi_max_run(), 132)
    merged = sorted((t for t in streams_of(order, launch) if t.cta % 2), key=lambda t: t.place)
    with pytest.raises(AssertionError, match="scheduled unevenly"):
        check_shares([t._replace(cta=2 * (i % 66) + 1) for i, t in enumerate(merged)], launch)


def test_groups_partition_the_blocks(order):
    limit = order.abi_max_run()
    for blocks in range(1, 300):
        for first in (0, 7):
            groups = [run_of(order, first, blocks, first + i) for i in range(blocks)]
            for i, (start, size) in enumerate(groups):
                assert 1 <= size <= limit
                assert start <= first + i < start + size
            distinct = sorted(set(groups))
            assert sum(size for _, size in distinct) == blocks
            assert len(distinct) == -(-blocks // limit)
            sizes = [size for _, size in distinct]
            assert max(sizes) - min(sizes) <= 1, "equal groups"


def test_expert_ranges_partition(order):
    for num_ranks in range(1, 9):
        for num_experts in range(num_ranks, 300):
            begins = [
                order.abi_expert_begin_of(num_experts, num_ranks, r) for r in range(num_ranks + 1)
            ]
            assert begins[0] == 0
            assert begins[-1] == num_experts
            for rank, (begin, end) in enumerate(itertools.pairwise(begins)):
                assert end - begin == num_experts // num_ranks + (rank < num_experts % num_ranks)
                for expert in range(begin, end):
                    assert order.abi_rank_of_expert(num_experts, num_ranks, expert) == rank


def test_fewer_experts_than_ranks(order):
    for num_ranks in range(2, 9):
        for num_experts in range(1, num_ranks):
            for expert in range(num_experts):
                assert order.abi_rank_of_expert(num_experts, num_ranks, expert) == expert


def test_ordered_tokens_are_one_to_one(order):
    chunk = order.abi_chunk_tokens()
    for num_ranks in range(1, 9):
        for tokens in (1, chunk - 1, chunk, chunk + 1, 5 * chunk + 3):
            chunks = order.abi_num_chunks_of(tokens, num_ranks)
            assert chunks % num_ranks == 0
            seen = set()
            for home, token in itertools.product(range(num_ranks), range(tokens)):
                ordered = order.abi_ordered_of(home, token, num_ranks)
                assert 0 <= ordered < chunks * chunk
                assert order.abi_home_of(ordered, num_ranks) == home
                assert order.abi_token_of(ordered, num_ranks) == token
                seen.add(ordered)
            assert len(seen) == num_ranks * tokens


@settings(max_examples=300, deadline=None)
@given(ordered=st.integers(0, 8 * 65536 - 1), num_ranks=st.integers(1, 8))
def test_ordered_round_trip(order, ordered, num_ranks):
    home, token = order.abi_home_of(ordered, num_ranks), order.abi_token_of(ordered, num_ranks)
    assert 0 <= home < num_ranks
    assert order.abi_ordered_of(home, token, num_ranks) == ordered


def slices(function, *arguments):
    out = (ctypes.c_int * 2)()
    function(*arguments, out)
    return tuple(out)


@settings(max_examples=300, deadline=None)
@given(vectors=st.integers(1, 4096), step=st.sampled_from([64, 128]), most=st.integers(-1, 9000))
def test_slices_cover_a_row_once(order, vectors, step, most):
    count, size = slices(order.abi_slices_of, vectors, step, most)
    assert 1 <= count <= max(most, 1)
    assert size % step == 0
    assert (count - 1) * size < vectors <= count * size


@settings(max_examples=300, deadline=None)
@given(
    hidden=st.integers(1, 1024).map(lambda i: 16 * i),
    tokens=st.integers(0, 40000),
    num_ranks=st.integers(1, 8),
)
def test_slices_of_partials_have_a_flag_each(order, hidden, tokens, num_ranks):
    cells = max(tokens, 8192)
    count, size = slices(order.abi_sum_slices_of, hidden, tokens, num_ranks, cells)
    assert tokens * count <= cells
    assert (count - 1) * size < hidden // 8 <= count * size
    if tokens * num_ranks <= 64:  # every warp's step is a slice
        assert size == 64


def test_chunks_interleave_homes(order):
    """Consecutive chunks come from consecutive home ranks: the first blocks of an expert draw on all links."""
    chunk = order.abi_chunk_tokens()
    for num_ranks in range(1, 9):
        homes = [order.abi_home_of(c * chunk, num_ranks) for c in range(3 * num_ranks)]
        assert homes == list(range(num_ranks)) * 3


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.integers(0, 1000), min_size=1, max_size=32),
    height=st.sampled_from([16, 64, 128]),
)
def test_blocks_cover_rows_once(order, rows, height):
    """Experts stacked at padded sizes: each row lies in one block of its expert, and only a last block is short."""
    row0 = 0
    for count in rows:
        padded = order.abi_padded_rows(count, height)
        assert padded % height == 0
        assert 0 <= padded - count < height
        blocks = [min(height, count - first) for first in range(0, padded, height)]
        assert sum(blocks) == count
        assert all(b == height for b in blocks[:-1])
        assert row0 % height == 0
        row0 += padded
