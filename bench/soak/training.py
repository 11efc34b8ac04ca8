"""Training in tools/soak.py: steps of two layers and two microbatches; eager, captured, beside NCCL."""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megamoe
from bench.ranks import Rank
from bench.soak.layer import Outcome, problem_of
from megamoe.backends.mega import MegaBackend
from megamoe.formats.cache import QuantizedCache
from megamoe.launch.layout import min_pool_rows
from megamoe.testing import OVERLOADED, ROUTINGS, Inputs, make_inputs, make_weights, same_bits
from megamoe.window.window import Window

LOOK = 250  # iterations between two looks at the device
RATE = 2e-3  # of a step's length over the weights' own
ROUTES = (*ROUTINGS, OVERLOADED)
Update = Callable[[Tensor, Tensor], None]


def descend(w: Tensor, gradient: Tensor) -> None:
    """Go a fixed part of w's length against the gradient, in w's type: SGD that no scale breaks."""
    direction = gradient.float() / (gradient.float().norm() + 1e-12)
    w.copy_(w.float() - RATE * w.float().norm() * direction)


class Trainer:
    """Two layers on one device, trained to give back what they are given; all it does is in stream order.

    layers: backends of one problem, in the order of their calls. record: [steps, 5] float64 on the device, a row a
    step: the loss, then sums of the bits of y, dx and d_topk_weights, and how many values were not finite.
    """

    def __init__(self, me: Rank, layers: list[Any], steps: int) -> None:
        self.me, self.layers, self.problem = me, layers, layers[0].problem
        self.caches = [QuantizedCache() for _ in layers]
        self.masters = [
            make_weights(self.problem, seed=i, device=me.device, quantize=False) for i in (0, 1)
        ]
        self.start = [[w.w13.clone(), w.w2.clone()] for w in self.masters]
        for w in self.masters:  # so that a captured step quantizes them again
            w.w13.requires_grad_()
            w.w2.requires_grad_()
        self.into = [
            {n: torch.zeros_like(t, dtype=torch.float32) for n, t in w.named().items()}
            for w in self.masters
        ]
        self.record = torch.zeros(steps, 5, dtype=torch.float64, device=me.device)
        self.step_number = torch.zeros(1, dtype=torch.int64, device=me.device)
        for layer, w, cache in zip(layers, self.masters, self.caches, strict=True):
            layer.prepare(self._given(w, cache))

    def _given(self, w: megamoe.ExpertWeights, cache: QuantizedCache) -> megamoe.ExpertWeights:
        return cache.weights(self.problem, w, trains=True) if self.problem.formats.w.scaled else w

    def turned(self, i: int) -> dict[str, Any]:
        """Return what backward of layer i is given besides."""
        if not self.problem.formats.w.scaled:
            return {}
        return {"turned": self.caches[i].turned(self.problem, self.masters[i])}

    @torch.no_grad()
    def reset(self) -> None:
        """Begin again with the first weights."""
        for w, (w13, w2) in zip(self.masters, self.start, strict=True):
            w.w13.copy_(w13)
            w.w2.copy_(w2)
        self.record.zero_()
        self.step_number.zero_()

    @torch.no_grad()
    def forward(self, drawn: Inputs, count: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the input of each layer and its state; y behind them."""
        x, passed = drawn.x, []
        for layer, w, cache in zip(self.layers, self.masters, self.caches, strict=True):
            call = drawn.topk_ids, drawn.topk_weights, self._given(w, cache), count
            y, state = layer.forward_train(x, *call)
            passed.append((x, state))
            x = y
        return [*passed, (x, x)]

    @torch.no_grad()
    def backward(
        self, drawn: Inputs, count: Tensor | None, passed: list[tuple[Tensor, Tensor]], add: bool
    ) -> list[list[Tensor]]:
        """Return dw13 and dw2 of each layer, or add them to fp32; write down what came out."""
        y = passed.pop()[0]
        error = y.float() - drawn.x.float()
        if count is not None:  # y is undefined behind it
            live = torch.arange(y.shape[0], device=y.device)[:, None] < count
            y, error = torch.where(live, y, 0.0), torch.where(live, error, 0.0)
        sums: list[Any] = [error.square().mean() if error.numel() else error.sum(), _bits(y)]
        dy = (error / max(error.numel(), 1) ** 0.5).bfloat16()
        found: list[list[Tensor]] = []
        d_scores: Any = None
        lost: Any = 0
        for i in (1, 0):
            x, state = passed[i]
            needs = [True, True, True, True, False, False]
            into = self.into[i] if add else None
            call = dy, x, drawn.topk_ids, self.masters[i], state, needs
            options = {"num_tokens_device": count, "into": into, **self.turned(i)}
            dy, d_scores, *dw = self.layers[i].backward(*call, **options)[:4]
            found.insert(0, [self.into[i][n] for n in ("w13", "w2")] if add else dw)
            lost = lost + sum((~t.isfinite()).sum() for t in (dy, d_scores, *found[0]))
        row = torch.stack([t.double() for t in (*sums, _bits(dy), _bits(d_scores), lost)])
        self.record.index_add_(0, self.step_number, row[None])
        return found

    @torch.no_grad()
    def update(self, gradients: list[list[Tensor]], clear: bool) -> None:
        for w, (dw13, dw2) in zip(self.masters, gradients, strict=True):
            descend(w.w13, dw13)
            descend(w.w2, dw2)
        if clear:
            for gradient in (g for into in self.into for g in into.values()):
                gradient.zero_()
        self.step_number.add_(1)

    def step(self, batches: list[tuple[Inputs, Tensor | None]], n: int) -> None:
        """Train on two microbatches, both in flight; their order in backward and where gradients go change with n."""
        passed = [self.forward(*batch) for batch in batches]
        add = n % 2 == 0
        total: list[list[Tensor]] = []
        for i in (0, 1) if n % 4 < 2 else (1, 0):
            found = self.backward(*batches[i], passed[i], add)
            if total and not add:
                found = [
                    [a + b for a, b in zip(*pair, strict=True)]
                    for pair in zip(total, found, strict=True)
                ]
            total = found
        self.update(total, add)

    def draw(self, n: int) -> list[tuple[Inputs, Tensor | None]]:
        """Return the two microbatches of step n: tokens, routing, and which of them count."""
        r, drawn = random.Random(n * 64 + self.me.rank), []
        for half in (0, 1):
            most = self.problem.max_tokens
            tokens = r.choice((0, 1, most, r.randint(1, most), r.randint(1, most)))
            routing = ROUTES[(2 * n + half) % len(ROUTES)]
            ids = (torch.int32, torch.int64)[n % 2]
            kind: dict[str, Any] = {
                "seed": 2 * n + half,
                "routing": routing,
                "device": self.me.device,
            }
            inputs = make_inputs(self.problem, tokens, ids_dtype=ids, **kind)
            # all ranks do or none: with a count tensor or without is part of the call's form, not of its contents
            counted = (n + half) % 3 == 0
            count = torch.full((1,), r.randint(0, tokens), dtype=torch.int32) if counted else None
            drawn.append((inputs, None if count is None else count.to(self.me.device)))
        return drawn

    def run(self, steps: int, look: Callable[[], None]) -> tuple[Tensor, list[Tensor]]:
        """Train from the first weights; return the record and the last weights, on the device."""
        self.reset()
        for n in range(steps):
            self.step(self.draw(n), n)
            if n % LOOK == LOOK - 1:
                look()
        look()
        return self.record.clone(), [
            t.detach().clone() for w in self.masters for t in (w.w13, w.w2)
        ]


def _bits(tensor: Tensor) -> Tensor:
    """Return a sum of all bits, with the places that they stand in: exact in float64 for a million elements."""
    bits = tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    place = torch.arange(bits.numel(), device=bits.device) % 127 + 1
    return (bits.flatten().long() * place).sum() % (1 << 50)


def verdict(out: Outcome, trainer: Trainer, runs: list[tuple[Tensor, list[Tensor]]]) -> str:
    """Record what went wrong in two equal runs; return the figures."""
    (record, weights), (again, last) = runs
    precision = trainer.problem.precision
    other = (record != again).any(1).nonzero().flatten().tolist()
    out.require(
        not other,
        f"{precision}: a repeat has other bits from step {other[:1]} on, in {len(other)} steps",
    )
    equal = all(same_bits(a, b) for a, b in zip(weights, last, strict=True))
    out.require(equal, f"{precision}: a repeat ends with other weights")
    lost = int(record[:, 4].sum())
    out.require(lost == 0, f"{precision}: {lost} values of gradients are not finite")
    out.require(bool(record.isfinite().all()), f"{precision}: a loss is not finite")
    moved = any(
        not same_bits(w, s)
        for w, s in zip(weights, (t for pair in trainer.start for t in pair), strict=True)
    )
    out.require(moved, f"{precision}: no weight has moved")
    return f"{precision} {len(other)} steps differ in the repeat, {lost} values are not finite"


def train(me: Rank, args: argparse.Namespace) -> Outcome:
    """Two layers of a window, two microbatches in flight, routing and tokens drawn anew in each; the run, twice."""
    out, steps, texts, start = Outcome(""), args.steps, [], time.monotonic()
    for precision in args.precision:
        window, layers = shared_layers(me, precision)
        trainer = Trainer(me, layers, steps)
        runs = [trainer.run(steps, window.check) for _ in range(2)]
        texts.append(verdict(out, trainer, runs))
        window.close()
    seconds = time.monotonic() - start
    out.text = (
        f"2 x {steps} steps a precision, 8 launches each, in {seconds:.1f} s: {'; '.join(texts)}"
    )
    return out


def shared_layers(me: Rank, precision: str, **options: Any) -> tuple[Window, list[MegaBackend]]:
    """Return two layers in one window, the second with the least pool: it takes several passes."""
    problem = problem_of(me, precision)
    window = Window(problem, me.group, device=me.device)
    options = {"window": window, "timeout_s": 20.0, "reserve_sms": 0, **options}
    if options["reserve_sms"] is None:
        del options["reserve_sms"]
    pools: tuple[dict[str, Any], ...] = ({}, {"pool_rows": min_pool_rows(problem)})
    return window, [
        MegaBackend(problem, me.group, device=me.device, **options, **pool) for pool in pools
    ]


def train_graph(me: Rank, args: argparse.Namespace) -> Outcome:
    """One captured step, forward, backward and update, replayed with other tokens, routes and counts; bits as eager."""
    out, steps, texts, start = Outcome(""), args.replays, [], time.monotonic()
    for precision in args.precision:
        window, layers = shared_layers(me, precision)
        trainer = Trainer(me, layers, steps)
        problem, most = trainer.problem, trainer.problem.max_tokens
        x = torch.zeros(most, problem.hidden, dtype=torch.bfloat16, device=me.device)
        ids = torch.zeros(most, problem.top_k, dtype=torch.int64, device=me.device)
        static = Inputs(x, ids, torch.zeros(most, problem.top_k, device=me.device))
        count = torch.zeros(1, dtype=torch.int32, device=me.device)

        def fill(
            n: int, static: Inputs = static, count: Tensor = count, trainer: Trainer = trainer
        ) -> None:
            (drawn, live), _ = trainer.draw(n)
            tokens = drawn.x.shape[0]
            for name, tensor in vars(static).items():
                tensor[:tokens].copy_(getattr(drawn, name))
            count.fill_(tokens) if live is None else count.copy_(live)

        def one(trainer: Trainer = trainer, static: Inputs = static, count: Tensor = count) -> None:
            passed = trainer.forward(static, count)
            trainer.update(trainer.backward(static, count, passed, add=True), clear=True)

        runs = []
        for captured in (False, True):
            trainer.reset()
            graph = torch.cuda.CUDAGraph()
            if captured:
                window.check()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    one()
                trainer.reset()
            for n in range(steps):
                fill(n)
                graph.replay() if captured else one()
                if n % LOOK == LOOK - 1:
                    window.check()
            window.check()
            weights = [t.detach().clone() for w in trainer.masters for t in (w.w13, w.w2)]
            runs.append((trainer.record.clone(), weights))
            del graph
        texts.append(verdict(out, trainer, runs))
        window.close()
    seconds = time.monotonic() - start
    out.text = (
        f"{steps} steps eager, {steps} replays a precision in {seconds:.1f} s: {'; '.join(texts)}"
    )
    return out
