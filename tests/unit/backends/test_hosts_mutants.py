"""Flaws planted in the backend over hosts and in its plan: the cases of test_hosts.py see each of them."""

import os
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_hosts import Case, be_on_host, differing, inputs, made, of_one_rank, part_of, step
from torch.multiprocessing.spawn import ProcessException

from megamoe import ExpertWeights, Layer, Problem
from megamoe.backends import select
from megamoe.backends.hosts import backend as hosts
from megamoe.backends.hosts import plan as plans
from megamoe.testing import launch

SOURCES = {module: Path(module.__file__).read_text() for module in (plans, hosts)}
CASES = {
    "exact": Case(routing="dropped", over={"chunks": 3}),
    "static": Case(routing="dropped", over={"chunks": 2, "exchange": "static"}),
    "few": Case((2, 1, 3), over={"chunks": 5}),
    "count": Case(count=4),
}
# what is planted: the case that sees it, a text, and what takes its place
MUTANTS = {
    "ids keep the group's numbers": (
        "exact", "(met[0] - self._first_expert)", "(met[0] - 0)"),
    "a sum over one host less": (
        "exact", "places.transpose(1, 2).reshape(-1)",
        "(places * torch.tensor([[1], [0]])).transpose(1, 2).reshape(-1)"),
    "a sum that takes the largest": (
        "exact", "sum_rows(rows, plan.places, bags)",
        "torch.embedding_bag(rows, plan.places, bags, False, 2, False, None, False, 0)[0]"),
    "chunk 0 is cut at the wrong end": ("exact", "first[: sent[0]]", "first[len(first) - sent[0] :]"),
    "a chunk's state is the next one's": (
        "exact", "local, kept = self._views(state, i, len(rows))",
        "local, kept = self._views(state, (i + 1) % self.chunks, len(rows))"),
    "weight gradients of the last chunk only": (
        "exact", "sums[name] = made[name] = gradient", "made[name] = gradient"),
    "ids of chunks in another order": (
        "exact", "return _swap_levels(found, [*zip(*receive, strict=True)])", "return found"),
    "d_topk_weights of one host only": (
        "exact", "= self._summed(plan, padded)",
        "= self._summed(plan, padded) * (self.planner.host == 0)"),
    "a refusal is not reported": (
        "refusal", "        self.links.report(error, refuses=True)\n        for", "        for"),
    "hosts in reverse order": (
        "order", "places.transpose(1, 2).reshape(-1)", "places.flip(1).transpose(1, 2).reshape(-1)"),
    "a chunk left out": (
        "few", "numbers, part = self.numbers, -(-tokens // chunks)",
        "numbers, part = self.numbers, tokens // chunks"),
    "ids wrap in 32 bits": ("exact", "ids.clamp(-1, self.problem.num_experts).int()", "ids.int()"),
    "static rows stay in the order of their computation": (
        "static", "return y if order is None else", "return y if True else"),
    "empty slots count as tokens": ("static", "token.masked_fill(none, tokens)", "token.clamp(max=tokens - 1)"),
    "num_tokens_device is not looked at": (
        "count", "ids = self._valid(call.computed_ids())", "ids = self._valid(call.topk_ids)"),
}  # fmt: skip


def planted(old, new):
    """Return the backend with a text of one module in another's place."""
    (of,) = [module for module, source in SOURCES.items() if source.count(old)]
    assert SOURCES[of].count(old) == 1, f"{SOURCES[of].count(old)} times: {old}"
    made = {}
    for module, source in SOURCES.items():  # backend.py takes what plan.py has
        made[module] = types.ModuleType("planted")
        text = source.replace(old, new) if module is of else source
        with mock.patch.dict(sys.modules, {plans.__name__: made.get(plans)}):
            sys.modules["planted"] = made[module]  # where dataclasses look
            exec(compile(text, "planted", "exec"), made[module].__dict__)
    return made[hosts].HostsBackend


def seen_by(case, rank, expected):
    """Return what is wrong with a step."""
    layer = made(case, dist.group.WORLD, **case.over)
    try:
        return differing(case, step(layer, case, *inputs(case, rank), count=case.count), expected)
    except Exception as error:
        return [str(error)]
    finally:
        layer.close()


def seen_by_refusal(rank):
    """Return what is wrong with the errors where rank 1 refuses."""
    layer, case = made(CASES["exact"], dist.group.WORLD, chunks=3), CASES["exact"]
    layer.prepare()
    x, ids, weights, _ = inputs(case, rank)
    try:
        layer(x.float() if rank == 1 else x, ids, weights)
    except Exception as error:
        text = "x.dtype" if rank == 1 else "rank 1 on host-0 raised "
        return [] if str(error).startswith(text) else [str(error)]
    return ["no error"]


def program(rank, expected, cases, mutants):
    """Return name -> what is wrong, of flaws and of the code as it is."""
    be_on_host(rank, 2)
    parts = {n: part_of(case, expected[n], rank, 4) for n, case in cases.items()}
    found = {}
    for name, (case, backend) in mutants.items():
        with mock.patch.object(select, "HostsBackend", planted(*backend)):
            if case == "refusal":
                found[name] = seen_by_refusal(rank)
            else:
                found[name] = seen_by(cases[case], rank, parts[case])
    return found


SAME = ("MAX_CHUNKS = ", "MAX_CHUNKS = ")
WRONG_SIZES = (
    "self.planner.engine(result, plan.receive[i], plan.send[i], pieces[i])",
    "self.planner.engine(result, plan.receive[i], plan.receive[i])",
)


@pytest.fixture(scope="module")
def found():
    mutants = {n: (case, flaw) for n, (case, *flaw) in MUTANTS.items() if case != "order"}
    mutants |= {case: (case, SAME) for case in (*CASES, "refusal")}
    expected = {name: of_one_rank(case, 4, 2) for name, case in CASES.items()}
    os.environ["MEGAMOE_TIMEOUT_S"] = "2"
    try:
        return launch(program, 4, expected, CASES, mutants, timeout_s=100)
    finally:
        del os.environ["MEGAMOE_TIMEOUT_S"]


@pytest.mark.parametrize("name", [n for n, (case, *_) in MUTANTS.items() if case != "order"])
def test_a_planted_flaw_is_seen(found, name):
    assert any(mine[name] for mine in found)


@pytest.mark.parametrize("case", [*CASES, "refusal"])
def test_nothing_is_seen_without_a_flaw(found, case):
    assert [mine[case] for mine in found] == [[]] * 4


def test_rows_back_with_the_sizes_of_the_way_out_are_seen():
    """gloo ends the process that is sent more than it expects."""
    expected = {name: of_one_rank(case, 4, 2) for name, case in CASES.items()}
    with pytest.raises(ProcessException, match="process|Process"):
        launch(program, 4, expected, CASES, {"sizes": ("exact", WRONG_SIZES)}, timeout_s=30)


# --- the order of hosts, which only shows in bits ---


def cancelling(rank, flaw):
    """Return y of a token with experts on three hosts: tiny + 1 - 1, in fp32."""
    be_on_host(rank, 1)
    problem = Problem(16, 16, 3, 3, ep_size=3, rank=rank, max_tokens=4, activation="relu2")
    one = torch.eye(16, dtype=torch.bfloat16)[None]
    with mock.patch.object(select, "HostsBackend", planted(*flaw)):
        layer = Layer(problem, dist.group.WORLD, backend="reference")
        call = torch.ones(1, 16).bfloat16(), torch.tensor([[0, 1, 2]])
        return layer(*call, torch.tensor([[2.0**-30, 1.0, -1.0]]), ExpertWeights(one, one))


def test_sums_are_in_the_order_of_hosts():
    assert not any(y.any() for y in launch(cancelling, 3, SAME, timeout_s=60))
    _, *flaw = MUTANTS["hosts in reverse order"]
    assert all(y.all() for y in launch(cancelling, 3, flaw, timeout_s=60))
