"""A backend inside each of several hosts, beside one rank of the same backend: values, bits, bytes, refusals."""

import os
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_hosts import (
    FP8,
    MAX_TOKENS,
    TOP_K,
    Case,
    along,
    be_on_host,
    bf16_wire,
    compute,
    differing,
    inputs,
    made,
    of_one_rank,
    part_of,
    step,
)
from outcomes import outcome
from torch.distributed.device_mesh import init_device_mesh

from megamoe import Problem
from megamoe.backends.hosts.backend import chunks_of
from megamoe.group.hosts import Hosts
from megamoe.testing import launch

CASES = {
    "exact": Case(),
    "chunks": Case(over={"chunks": 3}),
    "static": Case(over={"exchange": "static", "chunks": 2}),
    "more chunks than tokens": Case((2, 1, 3), over={"chunks": 5}),
    "more chunks than tokens, static": Case((2, 1, 3), over={"chunks": 5, "exchange": "static"}),
    "top_k 1, static": Case(layer={"top_k": 1}, over={"exchange": "static"}),
    "fp8": Case(layer=FP8, over={"chunks": 2}),
    "some have no tokens": Case((0, 9, 5, 0), over={"chunks": 2}),
    "some have no tokens, static": Case((0, 9, 5, 0), over={"exchange": "static"}),
    "nobody has tokens": Case((0,), over={"chunks": 2}),
    "dropped": Case(routing="dropped", over={"chunks": 3}),
    "dropped, static": Case(routing="dropped", over={"exchange": "static"}),
    "all dropped": Case(routing="none"),
    "an expert twice": Case(routing="twice", over={"chunks": 2}),
    "one host takes all": Case(routing="one host", over={"chunks": 2}),
    "top_k 1": Case(layer={"top_k": 1}),
    "count": Case(count=4, over={"chunks": 2}),
    "count, static": Case(count=4, over={"chunks": 2, "exchange": "static"}),
    "main_grad": Case(mode="main_grad", over={"chunks": 2}),
    "delay_wgrad": Case(mode="delay", over={"chunks": 2}),
    "checkpoint": Case(mode="checkpoint"),
    "no bias": Case(layer={"bias": False, "activation": "relu2"}),
    "emulate": Case(layer={"backend": "emulate"}, over={"chunks": 2}),
    "emulate, max_tokens": Case(
        (MAX_TOKENS,), routing="one host", layer={"backend": "emulate"}, over={"chunks": 3}
    ),
    "emulate fp8": Case(layer=FP8 | {"backend": "emulate"}, over={"exchange": "static"}),
}
ELSEWHERE = ("chunks", "static", "dropped", "fp8", "some have no tokens")
FORMS = {"3x2": (3, 2), "4x1": (4, 1), "2x4": (2, 4)}


def compared(num_hosts, each, names):
    """Return name -> what is wrong, by rank."""
    cases, ranks = {name: CASES[name] for name in names}, num_hosts * each
    found = launch(compute, ranks, num_hosts, each, cases, timeout_s=200)
    wrong = {}
    for name, case in cases.items():
        expected = of_one_rank(case, ranks, num_hosts)
        parts = [part_of(case, expected, rank, ranks) for rank in range(ranks)]
        wrong[name] = [
            differing(case, mine[name], part) for mine, part in zip(found, parts, strict=True)
        ]
        assert all(mine[name]["same"] for mine in found), f"{name}: other bits without gradients"
    return wrong


@pytest.fixture(scope="module")
def two_by_two():
    return compared(2, 2, CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_hosts_compute_what_one_rank_does(two_by_two, name):
    assert two_by_two[name] == [[]] * 4


@pytest.mark.parametrize("form", FORMS)
def test_other_hosts_compute_what_one_rank_does(form):
    num_hosts, each = FORMS[form]
    names = ELSEWHERE[:3] if form == "2x4" else ELSEWHERE
    names = [n for n in names if CASES[n].options["num_experts"] > (num_hosts - 1) * each]
    for name, wrong in compared(num_hosts, each, names).items():
        assert wrong == [[]] * (num_hosts * each), name


@pytest.mark.slow
def test_sixteen_ranks():
    assert compared(2, 8, ["dropped"])["dropped"] == [[]] * 16


# --- equal bits ---


def of_bits(rank, tokens, backend, repeats):
    """Return what differs between ways to compute the same."""
    be_on_host(rank, 2)
    wrong, size = [], {"backend": backend, "max_tokens": max(tokens)}
    for layer in ({}, FP8):
        found = {}
        for way in ("exact", "static", "bf16 wire", "delay"):
            over = {"chunks": 2, "exchange": "static" if way == "static" else "exact"}
            mode = "delay" if way == "delay" else "step"
            case = Case(tokens, layer | size, over, routing="dropped", mode=mode)
            with bf16_wire() if way == "bf16 wire" else nullcontext():
                module = made(case, dist.group.WORLD, **case.over)
                found[way] = step(module, case, *inputs(case, rank))
        assert all(t.any() or not t.numel() for t in found["exact"].values())
        for way, results in found.items():
            for name, t in results.items():
                if not torch.equal(t, found["exact"][name]):
                    wrong.append(f"{layer.get('precision')}, {way}: {name}")
    case = Case(tokens, size, {"chunks": 3}, routing="dropped")
    module = made(case, dist.group.WORLD, **case.over)
    first = step(module, case, *inputs(case, rank))
    shuffle(along(module), rank)
    for i in range(repeats):
        again = step(module, case, *inputs(case, rank))
        wrong += [f"repeat {i}: {n}" for n, t in again.items() if not torch.equal(t, first[n])]
    return wrong


def shuffle(backend, rank):
    """Delay what is sent, and what is waited for, by chance."""
    dice = torch.Generator().manual_seed(rank)
    good = backend.planner.engine

    def later():
        time.sleep(float(torch.rand(1, generator=dice)) * 2e-3)

    def exchange(rows, send, receive, *place):
        later()
        arrived = good(rows, send, receive, *place)

        def wait():
            later()
            return arrived()

        return wait

    backend.planner.engine = exchange


FEW, MANY = (9, 10, 11), (70, 61, 0, 66)  # the kernel routes 32 tokens at a time


def test_bits_are_equal():
    assert launch(of_bits, 4, FEW, "reference", 5, timeout_s=100) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "emulate"])
def test_bits_of_many_tokens_and_100_repeats_are_equal(backend):
    repeats = 100 if backend == "reference" else 3
    assert launch(of_bits, 4, MANY, backend, repeats, timeout_s=300) == [[]] * 4


# --- chunks ---


@pytest.mark.parametrize(
    ("hosts", "tokens", "experts", "chunks"),
    [(2, 8192, 64, 4), (6, 8192, 64, 6), (6, 4095, 64, 2), (6, 1023, 64, 1), (2, 8192, 1024, 2)],
)
def test_large_calls_have_a_chunk_for_each_host_and_512_rows_for_each_expert(
    hosts, tokens, experts, chunks
):
    problem = Problem(1024, 512, experts, 8, ep_size=8 * hosts, max_tokens=tokens)
    assert chunks_of(problem, Hosts(tuple("abcdef"[:hosts]), 8), None) == chunks


# --- bytes on the wire ---


def of_bytes(rank, layer, exchange):
    """Return what a step sent to other hosts, forward and backward, and what ids say."""
    over = {"chunks": 3, "exchange": exchange}
    case = Case((13, 9, 16), layer=layer, over=over, routing="dropped")
    module = made(case, dist.group.WORLD, **case.over)
    module.prepare()
    backend, sent = along(module), []
    good = backend.planner.engine

    def counting(rows, send, receive, *place):
        pieces = rows.split(send)
        sent.append(sum(p.nbytes for h, p in enumerate(pieces) if h != backend.planner.host))
        return good(rows, send, receive, *place)

    backend.planner.engine = counting
    step(module, case, *inputs(case, rank))

    def owners(ids):
        held = (0, 4), (4, 8), (8, 11)
        return torch.stack([((ids >= b) & (ids < e)).any(1) for b, e in held])

    away = [owners(inputs(case, r)[1]) for r in range(3)]  # [N, T] of each rank
    out = sum(int(away[rank][h].sum()) for h in range(3) if h != rank)
    home = sum(int(away[r][rank].sum()) for r in range(3) if r != rank)
    if exchange == "static":
        out = home = 2 * 3 * -(-MAX_TOKENS // 3)
    hidden = case.options["hidden"]
    scales = 4 * -(-hidden // 128) if layer else 0
    row = hidden + scales if layer else 2 * hidden
    forward = out * (8 * TOP_K + row) + home * 2 * hidden
    backward = out * row + home * (2 * hidden + 4 * TOP_K)
    if exchange == "static":  # as many with the rows as in forward; in both, marks
        backward += out * 8 * TOP_K
        sent += [-2 * 2 * (8 * TOP_K + scales)]
    return sum(sent), forward + backward


def all_bytes(rank):
    be_on_host(rank, 1)
    return [of_bytes(rank, la, ex) for la in ({}, FP8) for ex in ("exact", "static")]


def test_a_token_is_sent_once_to_each_host_that_it_needs():
    for found in launch(all_bytes, 3, timeout_s=60):
        for sent, expected in found:
            assert sent == expected > 0


# --- which backend, where, and what is refused ---


def of_choices(rank):
    """Return what layers say that are made over two hosts of two ranks, or over other ones."""
    be_on_host(rank, 2)
    found, case, world = {}, Case(), dist.group.WORLD
    dist.new_group([0])  # from here on rank 0 is in more groups than the others
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "experts"))
    auto = made(case, world, backend="auto")
    auto.prepare()
    found["auto"] = type(auto._layer._runtime.backend).__name__
    with mock.patch.dict(os.environ, MEGAMOE_BACKEND="reference"):
        named = made(case, world, backend="auto")
        named.prepare()
        assert along(named)
    expected = step(made(case, world), case, *inputs(case, rank))

    def over_mesh(mesh):
        layer = made(case, mesh)
        results = step(layer, case, *inputs(case, rank))
        return along(layer), [torch.equal(results[n], t) for n, t in expected.items()]

    backend, found["mesh"] = over_mesh(mesh["hosts", "experts"])
    found["names"] = backend.links.hosts.names
    copies = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("copies", "hosts", "experts"))
    half = made(case, copies["hosts", "experts"])  # of two ranks of four, that are one host by name
    half.prepare()
    found["half"] = along(half).links.names, half.problem.ep_size
    again = made(case, world)
    again.prepare()
    found["links"] = backend.links is along(again).links
    del again

    def tried(function):
        name, text = outcome(function)
        return name and f"{name}: {text}"

    def refusal(**options):
        return tried(lambda: made(case, world, **options))

    found["chunks"] = refusal(chunks=0)
    found["many chunks"] = refusal(chunks=1025, max_tokens=4096)
    found["exchange"] = refusal(exchange="fast")
    found["differing chunks"] = refusal(chunks=2 + rank // 3)
    found["differing exchange"] = refusal(exchange="static" if rank == 2 else "exact")
    found["no experts"] = refusal(num_experts=2)
    found["window"] = refusal(backend="emulate", max_tokens=1 << 24, chunks=1)
    found["mega"] = refusal(backend="mega")
    be_on_host(rank, 3)
    found["uneven"] = refusal()
    os.environ["MEGAMOE_HOST"] = "ab"[rank % 2]
    found["interleaved"] = refusal()
    found["interleaved, staged"] = tried(lambda: made(case, world, backend="staged").prepare())
    found["mesh across hosts"] = tried(lambda: made(case, mesh["hosts", "experts"]))
    os.environ["MEGAMOE_HOST"] = "one"
    found["one host, flat"] = tried(lambda: made(case, world).prepare())
    backend, found["one host, mesh"] = over_mesh(mesh["hosts", "experts"])
    found["its names"] = backend.links.hosts.names
    return found


@pytest.fixture(scope="module")
def choices():
    return launch(of_choices, 4, timeout_s=60)


def test_auto_stays_with_staged(choices):
    assert [found["auto"] for found in choices] == ["StagedBackend"] * 4


def test_a_mesh_says_which_ranks_are_a_host(choices):
    for found in choices:
        assert found["mesh"] == found["one host, mesh"] == [True] * 7
        assert found["names"] == ("host-0", "host-1")
        assert found["its names"] == ("one #0", "one #1")
        assert found["links"]
    names = [f"rank {r} on host-{r // 2} #{r % 2}" for r in range(4)]
    assert [found["half"] for found in choices] == [(names[:2], 2)] * 2 + [(names[2:], 2)] * 2


REFUSED = {
    "chunks": "ConfigError: chunks is 0, expected None or a number from 1 to max_tokens = 16",
    "many chunks": "ConfigError: chunks is 1025, expected None or a number from 1 to 1024",
    "exchange": "ConfigError: exchange is 'fast', expected 'exact' or 'static'",
    "differing chunks": "RankMismatch: chunks is 3 on rank 3, 2 on rank 0",
    "differing exchange": "RankMismatch: exchange is static on rank 2, exact on rank 0",
    "no experts": "ConfigError: num_experts is 2, expected more than 2, so that each of 2 hosts has experts",
    "window": "ConfigError: max_tokens is 33554432, expected 1..16777216 for the kernel's window",
    "mega": "ConfigError: backend is 'mega', expected one that can run here: the tensors are on cpu",
    "uneven": "ConfigError: group is ranks 0..2 on host-0; 3 on host-1, expected as many ranks on each host",
    "interleaved": "ConfigError: group is ranks 0, 2 on a; 1, 3 on b, expected as many ranks on each host",
    "mesh across hosts": "ConfigError: group is ranks 0, 2 on a; 1, 3 on b, expected rows of 2 ranks of one host each",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_over_hosts_is_refused_by_name_on_all_ranks(choices, what):
    for found in choices:
        assert str(found[what]).startswith(REFUSED[what])


def test_others_stay_flat(choices):
    for found in choices:
        assert found["interleaved, staged"] is found["one host, flat"] is None
