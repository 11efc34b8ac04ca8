"""What the scenarios of tools/soak.py share: a layer, inputs of every kind for it, what it should and did give."""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import megamoe
from bench import shapes
from bench.ranks import Rank
from megamoe.backends import reference
from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.mega.backend import MegaBackend
from megamoe.core.table import by_precision
from megamoe.testing import ROUTINGS, Inputs, compare, gpu_of, make_inputs, make_weights
from megamoe.testing.shapes import Shape

# relative error of y; docs/numerics.md
LIMIT = by_precision({"bf16": 5e-3, "fp8": 1e-2, "fp8_channel": 2e-2})
SMALL = Shape("soak", hidden=1024, intermediate=512, num_experts=32, top_k=4)
BLOCK = 500  # calls between two looks at the device
FEW_TOKENS = 64  # below, one rounding step of h weighs more: four times the limit


@dataclass
class Outcome:
    """What a scenario found on one rank."""

    text: str
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def require(self, condition: object, message: str) -> None:
        if not condition:
            self.failures.append(message)


def device_of(rank: int) -> torch.device:
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    return device


def problem_of(me: Rank, precision: str = "bf16", **changes: Any) -> megamoe.Problem:
    return replace(shapes.problem_of(SMALL, 512, me, precision), **changes)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a backend here: all SMs, or the default where reserve_sms is None, as for training."""
    options = {"timeout_s": 20.0, "reserve_sms": 0, **options}
    return {name: value for name, value in options.items() if value is not None}


def draw_plans(me: Rank, most: int, count: int) -> list[tuple[str, list[int], torch.dtype]]:
    """Return (routing, tokens of each rank, type of ids) of `count` inputs, the same on all ranks."""
    r = random.Random(5)
    full, alone = [most] * me.size, [0] * (me.size - 1) + [most]
    plans = [
        ("uniform", full),
        ("hot", full),
        ("one_rank", full),
        ("uniform", alone),
        ("dropped", alone[::-1]),
    ]
    plans += [("all_dropped", full), ("uniform", [0] * me.size), ("uniform", [1] * me.size)]
    while len(plans) < count:
        sizes = [0 if r.random() < 0.2 else r.randint(1, most) for _ in range(me.size)]
        plans.append((ROUTINGS[len(plans) % len(ROUTINGS)], sizes))
    return [(*plan, (torch.int32, torch.int64)[i % 2]) for i, plan in enumerate(plans[:count])]


def each_precision(args: argparse.Namespace, run: Callable[[str], str]) -> str:
    """Return what run tells of each precision, behind the seconds that all took."""
    start = time.monotonic()
    texts = [run(precision) for precision in args.precision]
    return f"in {time.monotonic() - start:.1f} s: {'; '.join(texts)}"


class Static:
    """Inputs of a captured call, changed in place; `count` says on the device how many tokens are live."""

    def __init__(self, problem: megamoe.Problem, device: torch.device) -> None:
        most, top_k = problem.max_tokens, problem.top_k
        x = torch.zeros(most, problem.hidden, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(most, top_k, dtype=torch.int64, device=device)
        self.inputs = Inputs(x, ids, torch.zeros(most, top_k, device=device))
        self.count = torch.zeros(1, dtype=torch.int32, device=device)

    def fill(self, drawn: Inputs, live: torch.Tensor | None = None) -> None:
        """Copy inputs to the front; rows behind keep what earlier replays left there. live: fewer than these."""
        tokens = drawn.x.shape[0]
        for name, tensor in vars(self.inputs).items():
            tensor[:tokens].copy_(getattr(drawn, name))
        self.count.fill_(tokens) if live is None else self.count.copy_(live)


class CheckedBackend:
    """A backend, inputs for it, what they should give and what they gave at the first call."""

    def __init__(self, me: Rank, problem: megamoe.Problem, count: int = 16, **options: Any) -> None:
        self.me, self.problem = me, problem
        ranks = range(me.size)
        everyones = [make_weights(problem, rank=r, device=me.device) for r in ranks]
        self.weights, self.inputs, self.expected = everyones[me.rank], [], []
        for seed, (routing, tokens, dtype) in enumerate(draw_plans(me, problem.max_tokens, count)):
            kind: dict[str, Any] = {
                "seed": seed,
                "routing": routing,
                "device": me.device,
                "ids_dtype": dtype,
            }
            drawn = [make_inputs(problem, tokens[r], rank=r, **kind) for r in ranks]
            names = ("x", "topk_ids", "topk_weights")
            x, ids, scores = ([getattr(i, name) for i in drawn] for name in names)
            wanted = reference.forward(problem, x, ids, scores, everyones)
            self.expected.append(wanted["y"][me.rank])
            self.inputs.append(drawn[me.rank])
        del everyones
        torch.cuda.synchronize()
        self.backend = MegaBackend(problem, me.group, device=me.device, **chosen(options))
        self.backend.prepare(self.weights)
        self.first: list[torch.Tensor] = []
        # Calls whose bits are compared: input, y, and on the device whether they differ; and what is known of those.
        self.noted: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.others: list[str] = []
        self.worst, self.bad = 0.0, 0

    def _call(self, i: int) -> Call:
        inputs = self.inputs[i]
        return Call(inputs.x, inputs.topk_ids, inputs.topk_weights, self.weights)

    def call(self, i: int) -> torch.Tensor:
        return self.backend.forward(self._call(i))[0]

    def save(self, i: int) -> Any:
        """Return the state of a forward that keeps it."""
        return self.backend.forward(self._call(i), keep=True)[1]

    def backward(self, i: int, state: torch.Tensor) -> list[Any]:
        """Return the gradients for a gradient of ones; BF16 only, where the weights are their own masters."""
        call, wanted = self._call(i), GradRequest(Needs(b13=False, b2=False))
        return list(self.backend.backward(call, torch.ones_like(self.inputs[i].x), state, wanted))

    def start(self) -> "CheckedBackend":
        """Make the first call of every input and compare it with the oracle."""
        self.first = [self.call(i) for i in range(len(self.inputs))]
        self.backend.check()
        for i, y in enumerate(self.first):
            self.judge(i, y)
        # loads the kernels that note() needs before anything depends on it
        self.note(0, self.first[0])
        self.settle()
        return self

    def judge(self, i: int, y: torch.Tensor) -> None:
        """Compare with the oracle."""
        relative = compare(y, self.expected[i]).relative
        limit = LIMIT[self.problem.precision] * (4 if y.shape[0] < FEW_TOKENS else 1)
        self.worst = max(self.worst, relative)
        self.bad += not relative <= limit

    def note(self, i: int, y: torch.Tensor) -> None:
        """Compare with the first call's bits, on the current stream; settle() collects the verdict."""
        first = self.first[i][: y.shape[0]]
        differs = (y.view(torch.int16) != first.view(torch.int16)).any()
        self.noted.append((i, y.clone(), differs))

    def settle(self) -> int:
        """Wait for the device; return how many calls had other bits. Raises the fault if there was one."""
        self.backend.check()
        wrong = [self._difference(i, y) for i, y, differs in self.noted if differs]
        self.others += wrong
        self.noted.clear()
        return len(wrong)

    def _difference(self, i: int, y: torch.Tensor) -> str:
        """Return where y of input i has other bits than the first, and how far it is from that and from the oracle."""
        first = self.first[i][: y.shape[0]]
        tokens, columns = (y.view(torch.int16) != first.view(torch.int16)).nonzero(as_tuple=True)
        plan = draw_plans(self.me, self.problem.max_tokens, len(self.inputs))[i]
        by_token = {t: columns[tokens == t].tolist() for t in tokens.unique().tolist()[:8]}
        spans = ", ".join(f"{t}: {len(c)} in {c[0]}..{c[-1]}" for t, c in by_token.items())
        errors = [compare(y, other).relative for other in (first, self.expected[i][: y.shape[0]])]
        return f"input {i} {plan}, {len(tokens)} values; columns by token {spans}; errors {errors}"

    def verdict(self, out: Outcome, wrong: int) -> str:
        """Record what went wrong; return the figures."""
        precision = self.problem.precision
        out.require(
            wrong == 0, f"{precision}: {wrong} calls gave other bits than the first of their input"
        )
        message = f"{precision}: {self.bad} results are beyond the limit, relative error up to {self.worst:.2e}"
        out.require(self.bad == 0, message)
        out.notes += self.others
        return f"{precision} {wrong} differ, worst error {self.worst:.1e}"
