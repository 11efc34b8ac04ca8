"""Training in tools/soak.py: steps of two layers and two microbatches; eager, captured, beside NCCL."""

import argparse
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megamoe
from bench.ranks import Rank
from bench.soak.layer import Outcome, Static, chosen, each_precision, problem_of
from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.mega.backend import MegaBackend
from megamoe.core.table import PRECISIONS
from megamoe.launch.cache import QuantizedCache
from megamoe.launch.layout import min_pool_rows
from megamoe.testing import OVERLOADED, ROUTINGS, Inputs, make_inputs, make_weights, same_bits
from megamoe.window.window import Window

LOOK = 250  # iterations between two looks at the device
# By operands of weight gradients: whether masters are quantized behind each step, as by megamoe.after_step().
FOLLOWS = {"bf16": False, "e4m3": True}
RATE = 2e-3  # of a step's length over the weights' own
ROUTES = (*ROUTINGS, OVERLOADED)


def descend(w: Tensor, gradient: Tensor) -> None:
    """Go a fixed part of w's length against the gradient, in w's type: SGD that no scale breaks."""
    direction = gradient.float() / (gradient.float().norm() + 1e-12)
    w.copy_(w.float() - RATE * w.float().norm() * direction)


class Trainer:
    """Two layers on one device, trained to give back what they are given; all it does is in stream order.

    layers: backends of one problem, in the order of their calls. record: [steps, 5] float64 on the device, a row a
    step: the loss, then sums of the bits of y, dx and d_topk_weights, and how many values were not finite.
    products: operands of the layers' weight gradients.
    """

    def __init__(self, me: Rank, layers: list[Any], steps: int, products: str = "bf16") -> None:
        self.me, self.layers, self.problem = me, layers, layers[0].problem
        named = len(self.problem.formats.weight_gradients) > 1
        self.label = self.problem.precision + f" by {products}" * named
        self.caches = [QuantizedCache() for _ in layers]
        for cache in self.caches:
            cache.follows = FOLLOWS[products]
        self.stale = 0  # copies of masters that were not those of the last step
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

    def wanted(self, i: int, into: dict[str, Tensor] | None = None) -> GradRequest:
        """Return what a backward of layer i is to make."""
        transposed = None
        if self.problem.formats.w.scaled:
            transposed = self.caches[i].transposed(self.problem, self.masters[i])
        return GradRequest(Needs(b13=False, b2=False), into or {}, transposed=transposed)

    def call(self, i: int, x: Tensor, drawn: Inputs, count: Tensor | None) -> Call:
        """Return a call of layer i as its backward is given it."""
        return Call(x, drawn.topk_ids, drawn.topk_weights, self.masters[i], count)

    @torch.no_grad()
    def reset(self) -> None:
        """Begin again with the first weights."""
        for w, (w13, w2) in zip(self.masters, self.start, strict=True):
            w.w13.copy_(w13)
            w.w2.copy_(w2)
        self._follow()
        self.record.zero_()
        self.step_number.zero_()

    def _follow(self) -> None:
        for w, cache in zip(self.masters, self.caches, strict=True):
            if cache.follows:
                self._given(w, cache)

    def _count_stale(self) -> None:
        """Compare what the next calls multiply with copies that are made now."""
        if not self.problem.formats.w.scaled:
            return
        for w, cache in zip(self.masters, self.caches, strict=True):
            copies = []
            for of in (cache, QuantizedCache()):
                kinds = self._given(w, of), of.transposed(self.problem, w)
                copies.append([t for kind in kinds for t in kind.named().values()])
            self.stale += sum(not same_bits(a, b) for a, b in zip(*copies, strict=True))

    @torch.no_grad()
    def forward(self, drawn: Inputs, count: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the input of each layer and its state; y behind them."""
        x, passed = drawn.x, []
        for layer, w, cache in zip(self.layers, self.masters, self.caches, strict=True):
            call = Call(x, drawn.topk_ids, drawn.topk_weights, self._given(w, cache), count)
            y, state = layer.forward(call, keep=True)
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
            wanted = self.wanted(i, self.into[i] if add else None)
            made = self.layers[i].backward(self.call(i, x, drawn, count), dy, state, wanted)
            dy, d_scores, *dw = made[:4]
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
        self._follow()
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

    def run(
        self, steps: int, look: Callable[[], None], one: Callable[[int], None] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Train from the first weights; return the record and the last weights, on the device.

        one: makes step n in another way.
        """
        self.reset()
        for n in range(steps):
            self.step(self.draw(n), n) if one is None else one(n)
            if n % LOOK == LOOK - 1:
                look()
                self._count_stale()
        look()
        self._count_stale()
        weights = [t.detach().clone() for w in self.masters for t in (w.w13, w.w2)]
        return self.record.clone(), weights


def _bits(tensor: Tensor) -> Tensor:
    """Return a sum of all bits, with the places that they stand in: exact in float64 for a million elements."""
    bits = tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    place = torch.arange(bits.numel(), device=bits.device) % 127 + 1
    return (bits.flatten().long() * place).sum() % (1 << 50)


def verdict(out: Outcome, trainer: Trainer, runs: list[tuple[Tensor, list[Tensor]]]) -> str:
    """Record what went wrong in two equal runs; return the figures."""
    (record, weights), (again, last) = runs
    precision = trainer.label
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
    out.require(trainer.stale == 0, f"{precision}: {trainer.stale} quantized copies were stale")
    return f"{precision} {len(other)} steps differ in the repeat, {lost} values are not finite"


def shared_layers(me: Rank, precision: str, **options: Any) -> tuple[Window, list[MegaBackend]]:
    """Return two layers in one window, the second with the least pool: it takes several passes."""
    problem = problem_of(me, precision)
    window = Window(problem, me.group, device=me.device)
    options = chosen({"window": window, **options})
    pools = None, min_pool_rows(problem)
    return window, [
        MegaBackend(problem, me.group, device=me.device, pool_rows=rows, **options)
        for rows in pools
    ]


def each_products(args: argparse.Namespace, run: Callable[[str, str], str]) -> Callable[[str], str]:
    """Return what runs a precision with all operands of weight gradients that it has and that are asked for."""
    return lambda precision: "; ".join(
        run(precision, products)
        for products in PRECISIONS[precision].weight_gradients
        if products in args.weight_gradients
    )


def train(me: Rank, args: argparse.Namespace) -> Outcome:
    """Two layers of a window, two microbatches in flight, routing and tokens drawn anew in each; the run, twice."""
    out, steps = Outcome(""), args.steps

    def twice(precision: str, products: str) -> str:
        window, layers = shared_layers(me, precision, weight_gradients=products)
        trainer = Trainer(me, layers, steps, products)
        runs = [trainer.run(steps, window.check) for _ in range(2)]
        text = verdict(out, trainer, runs)
        window.close()
        return text

    told = each_precision(args, each_products(args, twice))
    out.text = f"2 x {steps} steps a precision, 8 launches each, {told}"
    return out


def train_graph(me: Rank, args: argparse.Namespace) -> Outcome:
    """One captured step, forward, backward and update, replayed with other tokens, routes and counts; bits as eager."""
    out, steps = Outcome(""), args.replays

    def eager_and_replayed(precision: str, products: str) -> str:
        window, layers = shared_layers(me, precision, weight_gradients=products)
        trainer = Trainer(me, layers, steps, products)
        static = Static(trainer.problem, me.device)
        batch = static.inputs, static.count

        def step() -> None:
            trainer.update(trainer.backward(*batch, trainer.forward(*batch), add=True), clear=True)

        def one(n: int, make_step: Callable[[], None]) -> None:
            static.fill(*trainer.draw(n)[0])
            make_step()

        runs = [trainer.run(steps, window.check, partial(one, make_step=step))]
        trainer.reset()
        window.check()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            step()
        runs.append(trainer.run(steps, window.check, partial(one, make_step=captured.replay)))
        captured.reset()
        text = verdict(out, trainer, runs)
        window.close()
        return text

    told = each_precision(args, each_products(args, eager_and_replayed))
    out.text = f"{steps} steps eager, {steps} replays a precision {told}"
    return out
