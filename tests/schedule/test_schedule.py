"""schedule/order.h, enumerated: every tile once and after its inputs, index maps one to one, ranges that partition."""

import ctypes
import itertools
import pathlib
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = pathlib.Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
GEMM1, GEMM2 = 0, 1


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    library = tmp_path_factory.mktemp("schedule") / "libschedule.so"
    command = ["g++", "-O2", "-std=c++20", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([*command, str(HERE / "schedule_abi.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def tiles_of(order, expert_blocks, tiles1, tiles2, lag):
    """The launch's tiles in order: [(stage, block, n)]."""
    size = order.abi_order_size(sum(expert_blocks), tiles1, tiles2, lag)
    out = (ctypes.c_int * (3 * size))()
    blocks = (ctypes.c_int * len(expert_blocks))(*expert_blocks)
    order.abi_tiles(blocks, len(expert_blocks), tiles1, tiles2, lag, out)
    return list(zip(out[0::3], out[1::3], out[2::3], strict=True))


def check_tiles(order, expert_blocks, tiles1, tiles2, lag):
    tiles = tiles_of(order, expert_blocks, tiles1, tiles2, lag)
    blocks = range(sum(expert_blocks))
    wanted = {(GEMM1, b, n) for b in blocks for n in range(tiles1)}
    wanted |= {(GEMM2, b, n) for b in blocks for n in range(tiles2)}
    assert len(tiles) == len(wanted), "a tile is missing or comes twice"
    assert set(tiles) == wanted, "a tile is missing or comes twice"
    # Deadlock-free because: a CTA takes tiles in this order, and each stands after all of its inputs.
    last_gemm1 = {block: i for i, (stage, block, _) in enumerate(tiles) if stage == GEMM1}
    for i, (stage, block, n) in enumerate(tiles):
        assert stage == GEMM1 or last_gemm1[block] < i, (
            f"gemm2 of block {block}, n {n} stands before its inputs"
        )


def group_of(order, first, blocks, block):
    out = (ctypes.c_int * 2)()
    order.abi_group_of(first, blocks, block, out)
    return out[0], out[1]


def test_tiles_small_bounds(order):
    lags = [order.abi_max_group(), order.abi_max_group() + 1, 40, 1000]
    for num_experts in range(1, 4):
        for blocks in itertools.product([0, 1, 2, 3, 16, 17, 33], repeat=num_experts):
            for tiles1, tiles2, lag in itertools.product([1, 3], [1, 2], lags):
                check_tiles(order, blocks, tiles1, tiles2, lag)


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.lists(st.integers(0, 70), min_size=1, max_size=16),
    tiles1=st.integers(1, 24),
    tiles2=st.integers(1, 28),
    extra_lag=st.integers(0, 200),
)
def test_tiles(order, blocks, tiles1, tiles2, extra_lag):
    check_tiles(order, blocks, tiles1, tiles2, order.abi_max_group() + extra_lag)


def test_tile_order_needs_the_lag(order):
    """What makes the dependency hold is lag >= the group: a smaller one must fail, or the test above proves nothing."""
    with pytest.raises(AssertionError, match="before its inputs"):
        check_tiles(order, [order.abi_max_group()], 2, 2, 1)


def test_groups_partition_the_blocks(order):
    limit = order.abi_max_group()
    for blocks in range(1, 300):
        for first in (0, 7):
            groups = [group_of(order, first, blocks, first + i) for i in range(blocks)]
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


def test_chunks_interleave_homes(order):
    """Consecutive chunks come from consecutive home ranks: the first blocks of an expert draw on all links."""
    chunk = order.abi_chunk_tokens()
    for num_ranks in range(1, 9):
        homes = [order.abi_home_of(c * chunk, num_ranks) for c in range(3 * num_ranks)]
        assert homes == list(range(num_ranks)) * 3


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.integers(0, 1000), min_size=1, max_size=32))
def test_blocks_cover_rows_once(order, rows):
    """Experts stacked at padded sizes: each row lies in one block of its expert, and only a last block is short."""
    height, row0 = order.abi_block_rows(), 0
    for count in rows:
        padded = order.abi_padded_rows(count)
        assert padded % height == 0
        assert 0 <= padded - count < height
        blocks = [min(height, count - first) for first in range(0, padded, height)]
        assert sum(blocks) == count
        assert all(b == height for b in blocks[:-1])
        assert row0 % height == 0
        row0 += padded
