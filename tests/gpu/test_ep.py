"""The layer on 1, 2, 4 and 8 GPUs: routings, bits, graphs, streams, modules; another transport; and faults.

Starting ranks takes longer than testing on them, so a group of ranks starts once and goes through all scenarios. A
scenario returns what it found wrong. tools/rank_check.py looks at the stages, tools/soak.py at many calls.
"""

import importlib.util
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from failing import judge, one_rank_fails

from megamoe import MegaMoE, Problem
from megamoe.backends import reference
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.launch.layout import BLOCK_ROWS, min_pool_rows
from megamoe.launch.layout import few_tokens as few_kernel_tokens
from megamoe.testing import compare, launch, make_inputs, make_weights, same_bits
from megamoe.testing.intermediates import StageChecker
from megamoe.window.window import Window

ROOT = Path(__file__).resolve().parents[2]
BACKEND, DEVICE, PROCESS_GROUP = "mega", "cuda", "cpu:gloo,cuda:nccl"
MOST = 300  # tokens of a rank
STAGED = {
    "bf16": 1e-2,
    "fp8": 4e-2,
}  # its matmuls round gate_up to bf16: more values of h take a step


class Layer:
    """A layer of this rank, and the weights of all ranks for the oracle."""

    def __init__(self, rank: int, precision: str) -> None:
        ranks = dist.get_world_size()
        self.group = dist.group.WORLD if ranks > 1 else None
        self.problem = Problem(
            hidden=512, intermediate=384, num_experts=4 * ranks + 1, top_k=3,
            ep_size=ranks, rank=rank, max_tokens=MOST, precision=precision,
        )  # fmt: skip
        self.rank, self.ranks = rank, range(ranks)
        self.weights = [make_weights(self.problem, rank=r, device=DEVICE) for r in self.ranks]

    def backend(self, **options):
        options = {"reserve_sms": 0, "timeout_s": 20.0, **options}
        return make_backend(BACKEND, self.problem, self.group, device=DEVICE, **options)

    def inputs(self, routing="uniform", tokens=None, seed=0):
        """Draw what each rank feeds the layer."""
        tokens = tokens or [MOST] * len(self.ranks)
        kind = {"routing": routing, "seed": seed, "device": DEVICE}
        return [make_inputs(self.problem, tokens[r], rank=r, **kind) for r in self.ranks]

    def call(self, backend, inputs):
        own = inputs[self.rank]
        mine = self.weights[self.rank]
        return backend.forward(Call(own.x, own.topk_ids, own.topk_weights, mine))[0]

    def oracle(self, inputs):
        names = ("x", "topk_ids", "topk_weights")
        columns = ([getattr(i, name) for i in inputs] for name in names)
        return reference.forward(self.problem, *columns, self.weights)

    def judge(self, title, y, inputs) -> list[str]:
        """Return what is wrong with y."""
        checker = StageChecker(self.problem)
        ids = inputs[self.rank].topk_ids
        routes = int(((ids >= 0) & (ids < self.problem.num_experts)).sum())
        want = self.oracle(inputs)["y"][self.rank]
        checker.compare_stage("y", {"y": y}, {"y": want}, rows=routes)
        return [title + line for line in checker.lines]


def routings(layer: Layer) -> list[str]:
    """Every kind of routing; ranks without tokens; all tokens on one rank. Called twice: the same bits."""
    others = len(layer.ranks) - 1
    plans = [(kind, [MOST] * (others + 1)) for kind in ("uniform", "hot", "one_rank")]
    plans += [("duplicates", [MOST - 40 * r for r in layer.ranks])]
    plans += [("dropped", [33 + r for r in layer.ranks]), ("all_dropped", [MOST] * (others + 1))]
    plans += [("uniform", [0] * others + [MOST]), ("hot", [0] + [MOST] * others)]
    plans += [("uniform", [0] * (others + 1)), ("uniform", [1] * (others + 1))]
    backend, wrong = layer.backend(), []
    for seed, (kind, tokens) in enumerate(plans):
        inputs, title = layer.inputs(kind, tokens, seed), f"{kind} {tokens}"
        y = layer.call(backend, inputs)
        wrong += layer.judge(title, y, inputs)
        if not same_bits(layer.call(backend, inputs), y):
            wrong.append(f"{title}: the second call gives other bits")
    backend.check()
    backend.close()
    return wrong


def pools_and_grids(layer: Layer) -> list[str]:
    """Neither passes nor the number of CTAs nor the order of steps change a bit."""
    inputs, wrong = layer.inputs("hot"), []
    first = layer.backend()
    y = layer.call(first, inputs)
    wrong += layer.judge("hot", y, inputs)
    first.close()
    least = max(min_pool_rows(replace(layer.problem, rank=r)) for r in layer.ranks)
    per_expert = [rows.expert.bincount() for rows in layer.oracle(inputs)["rows"]]
    rows = max(int((-(-counts // BLOCK_ROWS) * BLOCK_ROWS).sum()) for counts in per_expert)
    if rows <= least:
        wrong.append(f"{rows} rows make one pass in a pool of {least}")
    for options in (
        {"reserve_sms": 40},
        {"pool_rows": least},
        {"pool_rows": least + BLOCK_ROWS, "reserve_sms": 100},
        {"step_blocks": 16},
    ):
        other = layer.backend(**options)
        if not same_bits(layer.call(other, inputs), y):
            wrong.append(f"{options}: other bits")
        other.check()
        other.close()
    return wrong


def graphs(layer: Layer) -> list[str]:
    """One captured call, replayed with other tokens, ids, weights and a count on the device."""
    wrong = []
    for pdl in (False, True):
        backend, own = layer.backend(pdl=pdl), layer.inputs()[layer.rank]
        mine = layer.weights[layer.rank]
        static = [t.clone() for t in (own.x, own.topk_ids, own.topk_weights)]
        count = torch.full((1,), MOST, dtype=torch.int32, device=DEVICE)
        call = Call(*static, mine, count)
        backend.forward(call)
        backend.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y, _ = backend.forward(call)
        for seed, routing in enumerate(("hot", "dropped", "uniform", "one_rank")):
            tokens = [max(0, MOST - 120 * ((seed + r) % 4)) for r in layer.ranks]
            inputs = layer.inputs(routing, tokens, seed + 1)
            own, n = inputs[layer.rank], tokens[layer.rank]
            for to, new in zip(static, (own.x, own.topk_ids, own.topk_weights), strict=True):
                to[:n].copy_(new)  # rows behind keep what an earlier replay left there
            count.fill_(n)
            graph.replay()
            title = f"pdl={pdl} {routing} {tokens}"
            wrong += layer.judge(title, y[:n].clone(), inputs)
            if not same_bits(layer.call(backend, inputs), y[:n]):
                wrong.append(f"{title}: an ordinary call gives other bits than the graph")
        backend.check()
        del graph
        backend.close()
    return wrong


def streams(layer: Layer) -> list[str]:
    """Calls on three streams without any order between them but the library's own."""
    backend = layer.backend()
    inputs = [layer.inputs(kind, seed=5) for kind in ("uniform", "hot")]
    first = [layer.call(backend, i) for i in inputs]
    torch.cuda.synchronize()
    sides, found = [torch.cuda.Stream() for _ in range(3)], []
    for n in range(12):
        with torch.cuda.stream(sides[n % 3]):
            found.append(layer.call(backend, inputs[n % 2]))
    backend.check()
    wrong = [f"call {n}: other bits" for n, y in enumerate(found) if not same_bits(y, first[n % 2])]
    backend.close()
    return wrong


def modules(layer: Layer) -> list[str]:
    """A module's output, loss and gradients equal those of the staged backend."""
    p, results, wrong = layer.problem, [], []
    own = layer.inputs("dropped", [0] + [MOST] * (len(layer.ranks) - 1), seed=7)[layer.rank]
    if len(layer.ranks) == 1:
        own = layer.inputs("dropped", seed=7)[0]
    target = torch.randn(own.x.shape, device=DEVICE)
    for backend in (BACKEND, "staged"):
        module = MegaMoE(
            p.hidden, p.intermediate, p.num_experts, p.top_k, layer.group, precision=p.precision,
            max_tokens=MOST, backend=backend, init_seed=2, device=DEVICE, weight_gradients="bf16",
        )  # fmt: skip
        x, scores = (t.clone().requires_grad_() for t in (own.x, own.topk_weights))
        y = module(x, own.topk_ids, scores)
        loss = (y.float() - target).square().sum()
        loss.backward()
        gradients = [x.grad, scores.grad, module.w13.grad, module.w2.grad]
        results.append([y.detach(), loss.detach(), *gradients])
        module.check()
        module.close()
    names = ("y", "loss", "x.grad", "topk_weights.grad", "w13.grad", "w2.grad")
    for name, found, expected in zip(names, *results, strict=True):
        error = compare(found, expected).relative
        if not error <= STAGED[p.precision]:
            wrong.append(f"{name}: relative error {error:.2e} to staged")
    gradient = results[0][4].float().norm()  # of w13; a rank without tokens has rows of others
    if not math.isfinite(gradient) or gradient == 0:
        wrong.append(f"w13.grad has norm {gradient}")
    return wrong


def few_tokens(layer: Layer) -> list[str]:
    """The kernel for few tokens of several ranks: the bits of the ordinary one, also if a rank has many."""
    if len(layer.ranks) == 1 or "push" not in layer.problem.formats.few:
        return []
    few, wrong = few_kernel_tokens(layer.problem), []
    ordinary, backend = layer.backend(few=False), layer.backend()
    plans = [(kind, [few] * len(layer.ranks)) for kind in ("uniform", "hot", "duplicates")]
    plans += [("dropped", [min(few, 1 + 8 * r) for r in layer.ranks])]
    plans += [("uniform", [0] + [8] * (len(layer.ranks) - 1)), ("one_rank", [8] * len(layer.ranks))]
    plans += [("uniform", [8] * (len(layer.ranks) - 1) + [MOST])]
    inputs = [layer.inputs(kind, tokens, seed) for seed, (kind, tokens) in enumerate(plans)]
    expected = [layer.call(ordinary, i) for i in inputs]
    for _ in range(3):  # one behind the other, with no host in between
        found = [layer.call(backend, i) for i in inputs]
        for plan, y, e in zip(plans, found, expected, strict=True):
            if not same_bits(y, e):
                wrong.append(f"{plan}: other bits than the ordinary kernel")
    for used in (ordinary, backend):
        used.check()
        used.close()
    return wrong


SCENARIOS = (routings, pools_and_grids, graphs, streams, modules, few_tokens)
PRECISIONS = ("bf16", "fp8")


def all_scenarios(rank: int) -> dict[str, list[str]]:
    layers = {precision: Layer(rank, precision) for precision in PRECISIONS}
    return {
        f"{scenario.__name__} {precision}": scenario(layer)
        for scenario in SCENARIOS
        for precision, layer in layers.items()
    }


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.ep(n)) for n in (1, 2, 4, 8)]
)
def outcomes(request):
    """What every rank of a group found wrong, by scenario."""
    return launch(all_scenarios, request.param, timeout_s=240, backend=PROCESS_GROUP)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_ranks(outcomes, scenario, precision):
    wrong = [outcome[f"{scenario} {precision}"] for outcome in outcomes]
    assert wrong == [[] for _ in outcomes]


def over_nvshmem(rank: int) -> list[str]:
    layer = Layer(rank, "fp8")
    inputs, backend = layer.inputs("hot"), layer.backend()
    y = layer.call(backend, inputs)
    window = Window(layer.problem, layer.group, device=DEVICE, transport="nvshmem")
    other = layer.backend(window=window)
    wrong = layer.judge("hot", layer.call(other, inputs), inputs)
    if not same_bits(layer.call(other, inputs), y):
        wrong.append("other bits over NVSHMEM")
    other.check()
    window.close()
    backend.close()
    return wrong


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.ep(n, share=False)) for n in (2, 4, 8)]
)
def test_nvshmem(ranks):
    missing = [name for name in ("nvshmem", "cuda.core") if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot be imported: pip install 'megamoe[nvshmem]'")
    found = launch(over_nvshmem, ranks, timeout_s=120, backend=PROCESS_GROUP)
    assert found == [[] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ep(n)) for n in (2, 4)])
def test_an_error_of_one_rank_is_raised_on_all(ranks):
    found = launch(one_rank_fails, ranks, BACKEND, DEVICE, timeout_s=240, backend=PROCESS_GROUP)
    assert judge(found, bound_s=1) == []


def soak(*scenarios: str) -> None:
    command = [sys.executable, ROOT / "tools" / "soak.py", *scenarios]
    options = ["--ranks", "2", "--calls", "60", "--replays", "60", "--bound", "60"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok: ") == len(scenarios), done.stdout


@pytest.mark.ep(2)
def test_faults_are_named_and_can_be_reset():
    soak("late", "mismatch")


@pytest.mark.ep(2, share=False)
def test_beside_nccl():
    soak("nccl")


@pytest.mark.slow
@pytest.mark.ep(2)
def test_killed_ranks_and_busy_devices():
    soak("kill", "busy")
