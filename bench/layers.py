"""A layer as a contender: its forward, backward or step, by a backend or through autograd."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe
from bench.floors import HBM_BYTES_PER_US, NVLINK_BYTES_PER_US, Load
from bench.ranks import Rank
from bench.shapes import problem_of
from bench.timing import Contender
from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.select import make_backend
from megamoe.core.table import PRECISIONS
from megamoe.formats.quantization import codec
from megamoe.formats.quantized import QuantizedRows
from megamoe.launch.cache import QuantizedCache
from megamoe.testing import Inputs, make_inputs, make_weights
from megamoe.testing.shapes import Shape

DIRECTIONS = ("forward", "train", "backward", "step")
FROZEN, FROZEN_MADE = "none", "none, transposes made"  # in place of gradients of weights
E4M3_FORWARD = "e4m3 x"  # forward of an x that comes quantized
Halves = tuple[Callable[[bool], Any], Callable[[Any], object]]


@dataclass(frozen=True)
class Entry:
    """One contender: a backend in a precision, and what it is asked for."""

    backend: str
    precision: str
    direction: str = "forward"  # or E4M3_FORWARD, or "quantize": of the weights, once a step
    gradients: str | None = None  # of the weights: "bf16", "main_grad", added to fp32, or FROZEN
    reserve_sms: int | None = None  # None: the default
    through_layer: bool = False
    # backward: that keep their rows, for one launch of weight gradients; 0: it makes its own
    passes: int = 0
    products: str | None = None  # operands of weight gradients; None: the layer's default

    @property
    def frozen(self) -> bool:
        """Whether weights have no gradients."""
        return self.gradients in (FROZEN, FROZEN_MADE)

    @property
    def label(self) -> str | None:
        """The gradients, of how many passes at once, and of which operands if those were named."""
        parts = [self.gradients or "", f"of {self.passes}" * bool(self.passes)]
        return " ".join(filter(None, [*parts, self.products and f"by {self.products}"])) or None

    def flops(self, shape: Shape, tokens: int) -> float:
        """Return those of `tokens` tokens: backward has twice forward's."""
        times = {"forward": 1, "train": 1, E4M3_FORWARD: 1, "backward": 2, "step": 3, "quantize": 0}
        return (times[self.direction] - self.frozen) * shape.flops(tokens)

    def floors(self, shape: Shape, tokens: int, ranks: int) -> tuple[float, float, float]:
        """Return the least time in us that GEMMs, memory and links need, under uniform routing."""
        load = Load(shape, tokens, ranks)
        parts = {"forward": [load.forward(self.precision)], "quantize": [load.quantize()]}
        products = self.products or PRECISIONS[self.precision].weight_gradients[0]
        of_backward = self.precision, self.gradients, max(self.passes, 1), products
        parts["backward"] = [load.backward(*of_backward)]
        parts[E4M3_FORWARD], parts["train"] = parts["forward"], [load.train(self.precision)]
        parts["step"] = parts["forward"] + parts["backward"]
        gemm, memory, link = (sum(part) for part in zip(*parts[self.direction], strict=True))
        return gemm, memory / HBM_BYTES_PER_US, link / NVLINK_BYTES_PER_US


class TimedLayer:
    """A backend under test with its own weights.

    Backward and step are the backend's launches where it trains by itself; otherwise, and with `entry.through_layer`,
    torch's gradients of a Layer. "autograd": those of staged's own operations, which recompute nothing.
    """

    def __init__(
        self,
        entry: Entry,
        problem: megamoe.Problem,
        masters: Any,
        me: Rank,
        profile: bool,
        into: dict[str, Tensor],
    ) -> None:
        """into: fp32 sums for main_grad, and masters, shared with the other contenders."""
        self.entry, self.device = entry, me.device
        self.problem = replace(problem, precision=entry.precision)
        self.masters = masters
        self.fp8: megamoe.ExpertWeights | None = None  # in place of these, where they do not change
        chosen: dict[str, Any] = {"reserve_sms": entry.reserve_sms}
        chosen |= {"weight_gradients": entry.products}
        options: dict[str, Any] = {n: value for n, value in chosen.items() if value is not None}
        if profile:
            options["profile"] = True
        self.infers = entry.direction in ("forward", E4M3_FORWARD)
        training = not self.infers
        self.cache = QuantizedCache(entry.gradients == FROZEN_MADE)
        self.layer: megamoe.Layer | None = None
        plain = entry.backend == "autograd"
        with torch.set_grad_enabled(training):  # launches take the SMs that are free where it is on
            name = "staged" if plain else entry.backend
            self.backend: Any = make_backend(
                name, self.problem, me.group, device=me.device, **options
            )
            trains = not (self.backend.recomputes or entry.through_layer)
            if entry.direction in ("train", "backward", "step") and not (trains or plain):
                self.backend.close()
                self.layer = megamoe.Layer(
                    self.problem, me.group or "alone", backend=name, **options
                )
                self.layer.prepare(self.masters)
            else:
                self.backend.prepare(self.weights())
        self.into: dict[str, Tensor] | None = None
        if entry.gradients == "main_grad":
            if self.layer is not None or plain:
                raise SystemExit(f"--main-grad: {entry.backend} does not add to fp32 gradients")
            if not into:
                named = self.masters.named()
                into |= {n: torch.zeros_like(t, dtype=torch.float32) for n, t in named.items()}
            self.into = into
        if entry.passes > self.backend.max_stashed:
            most = self.backend.max_stashed
            raise SystemExit(f"--passes {entry.passes}: {entry.backend} keeps at most {most}")
        if entry.passes:
            self.backend.prepare_stash()
        if not training and self.problem.formats.w.scaled:
            self.fp8, self.masters = self.weights(), None

    def weights(self) -> megamoe.ExpertWeights:
        """Return the experts as the backend takes them."""
        if self.fp8 is not None:
            return self.fp8
        if not self.problem.formats.w.scaled:
            return self.masters
        trains = not self.infers and self.layer is None and self.problem.formats.transposes
        return self.cache.weights(self.problem, self.masters, trains)

    def quantized_again(self) -> megamoe.ExpertWeights:
        """Do the same as after an optimizer step."""
        self.cache.invalidate()
        return self.weights()

    def contender(self, tokens: int, routing: str = "uniform") -> Contender:
        """Return what is timed, after a call that pays for first-call work."""
        drawn = make_inputs(
            self.problem, tokens, routing=routing, device=self.device, ids_dtype=torch.int32
        )
        name = self.entry.backend
        if self.infers:
            quantized = self.entry.direction == E4M3_FORWARD
            formulas = codec(self.problem.formats.x) if quantized else None
            x = QuantizedRows(*formulas.quantize(drawn.x)) if formulas else drawn.x
            call = Call(x, drawn.topk_ids, drawn.topk_weights, self.weights())
            found = Contender(name, lambda _: self.backend.forward(call))
        elif self.entry.direction == "quantize":
            found = Contender(name, lambda _: self.quantized_again())
        else:
            by_torch = self.layer is not None or name == "autograd"
            forward, backward = self._autograd(drawn) if by_torch else self._launches(drawn)
            if self.entry.direction == "train":
                found = Contender(name, lambda _: forward(False))
            elif self.entry.direction == "backward":
                found = Contender(name, backward, lambda: forward(False))
            else:
                found = Contender(name, lambda _: backward(forward(True)))
        found.timed(found.before())
        return found

    def _launches(self, drawn: Inputs) -> Halves:
        """Of the backend; forward quantizes the weights if it is told that they are new."""
        x, ids, scores = drawn.x, drawn.topk_ids, drawn.topk_weights
        dy, biased = torch.randn_like(x), self.problem.bias

        def forward(new_weights: bool) -> Tensor:
            weights = self.quantized_again() if new_weights else self.weights()
            return self.backend.forward(Call(x, ids, scores, weights), keep=True)[1]

        def backward(state: Tensor) -> object:
            wanted = GradRequest(Needs(b13=biased, b2=biased), self.into or {})
            masters = self.masters
            rows, transposed = GradRequest(Needs(True, True, False, False, False, False)), None
            if self.problem.formats.transposes:
                transposed = self.cache.transposed(self.problem, masters)
            elif self.problem.formats.packed:
                masters = self.weights()
            wanted = rows if self.entry.frozen else wanted
            call, kept = Call(x, ids, scores, masters), []
            for _ in range(self.entry.passes):
                kept.append(self.backend.new_stash())
                one = rows._replace(transposed=transposed, stash=kept[-1])
                self.backend.backward(call, dy, state, one)
            if kept:
                needs = wanted.needs._replace(x=False, topk_weights=False)
                return self.backend.weight_gradients(
                    self.masters, kept, wanted._replace(needs=needs)
                )
            return self.backend.backward(call, dy, state, wanted._replace(transposed=transposed))

        return forward, backward

    def _autograd(self, drawn: Inputs) -> Halves:
        """Through torch's graph."""
        x, scores = drawn.x.requires_grad_(), drawn.topk_weights.requires_grad_()
        dy = torch.randn_like(drawn.x)
        named = {n: t.detach().requires_grad_() for n, t in self.masters.named().items()}
        leaves, weights = named.values(), replace(self.masters, **named)

        def run(*call: Any) -> Tensor:
            return self.backend.forward(Call(*call))[0] if self.layer is None else self.layer(*call)

        def forward(new_weights: bool) -> Tensor:
            if new_weights and self.layer is not None:
                self.layer.invalidate()
            with torch.enable_grad():
                return run(x, drawn.topk_ids, scores, weights)

        def backward(y: Tensor) -> object:
            return torch.autograd.grad(y, [x, scores, *leaves], dy)

        return forward, backward

    def clock_ghz(self) -> float | None:
        """Return the SM clock inside the last call, where the backend measures it."""
        if getattr(self.backend, "profile", None) is None or self.layer is not None:
            return None
        return self.backend.clock_ghz()

    def ctas(self) -> int | None:
        """Return how many CTAs took part in the last call, on the rank that had the fewest. Collective; waits."""
        if self.layer is not None or not hasattr(self.backend, "num_ctas"):
            return None
        fewest = torch.tensor([self.backend.num_ctas()], device=self.device)
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
        return int(fewest)

    def close(self) -> None:
        """Free what is shared with other ranks. Collective."""
        (self.backend if self.layer is None else self.layer).close()


@contextmanager
def layers_of(
    shape: Shape, entries: list[Entry], most: int, me: Rank, profile: bool = False
) -> Iterator[dict[Entry, TimedLayer]]:
    """Give the contenders of one shape, for at most so many tokens of a rank, with the same weights. Collective.

    profile: with the kernel's timestamps.
    """
    problem = problem_of(shape, most, me)
    masters = make_weights(problem, device=me.device, quantize=False)
    into: dict[str, Tensor] = {}
    layers = {entry: TimedLayer(entry, problem, masters, me, profile, into) for entry in entries}
    del masters, into
    yield layers
    for layer in layers.values():
        layer.close()
