"""Configurations to check, listed or random, and what each rank draws for one."""

import argparse
import gc
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import megamoe
from bench.ranks import Rank
from bench.shapes import problem_of, shapes_from
from megamoe.core.config import ACTIVATIONS
from megamoe.core.table import PRECISIONS
from megamoe.launch.layout import min_pool_rows
from megamoe.testing import OVERLOADED, ROUTINGS, Inputs, make_inputs, make_weights
from megamoe.testing.shapes import Shape

MAX_CHECKED_TOKENS = 512  # of a rank
# not those of inputs and weights; below 2^32, see megamoe/testing/inputs.py
GRADIENT_SEEDS = 3 << 29
CLAMP = 1.0  # reached by a third of the values; GPT-OSS's 7 by none of those drawn here


@dataclass(frozen=True)
class Case:
    """One configuration, equal on all ranks."""

    shape: Shape
    precision: str
    tokens: tuple[int, ...]  # of each rank
    routing: str = "uniform"
    ids_dtype: torch.dtype = torch.int32
    seed: int = 0
    # backward's
    live: tuple[int, ...] | None = None  # num_tokens_device of each rank
    least_pool: bool = False  # the fewest pool rows: several passes
    clamp: float | None = None  # of swiglu_oai
    weight_gradients: str = "bf16"

    def __str__(self) -> str:
        s = self.shape
        tokens = _joined(self.tokens)
        further = "+bias" if s.bias else ""
        further += f" clamp={self.clamp:g}" if self.clamp else ""
        further += " least pool" if self.least_pool else ""
        further += " e4m3 weights" if self.weight_gradients == "e4m3" else ""
        if self.live is not None:
            tokens += f" live={_joined(self.live)}"
        return (
            f"{s.name} H={s.hidden} I={s.intermediate} E={s.num_experts} K={s.top_k} {s.activation}{further} "
            f"{self.precision} T={tokens} {self.routing} {str(self.ids_dtype)[6:]} seed={self.seed}"
        )

    def problem(self, rank: int) -> megamoe.Problem:
        me = Rank(rank, len(self.tokens), torch.device("cpu"))
        problem = problem_of(self.shape, max(1, *self.tokens), me, self.precision)
        if self.clamp is None:
            return problem
        return replace(problem, activation=replace(problem.activation, limit=self.clamp))

    def options(self) -> dict[str, Any]:
        """Return those of the backend, equal on all ranks: the emulator has one pool size for them."""
        options: dict[str, Any] = {"weight_gradients": self.weight_gradients}
        if self.least_pool:
            problems = map(self.problem, range(len(self.tokens)))
            options["pool_rows"] = max(min_pool_rows(problem) for problem in problems)
        return options

    def inputs(self, rank: int, device: torch.device) -> Inputs:
        """Draw what a rank feeds the layer."""
        return make_inputs(
            self.problem(rank),
            self.tokens[rank],
            seed=self.seed,
            routing=self.routing,
            device=device,
            ids_dtype=self.ids_dtype,
        )

    def dy(self, rank: int, device: torch.device) -> Tensor:
        """Draw the gradient of y of a rank, [T, H] bf16; NaN behind the live tokens: nobody may look there."""
        generator = torch.Generator(device=device)
        generator.manual_seed(GRADIENT_SEEDS + self.seed * 64 + rank)
        shape = (self.tokens[rank], self.shape.hidden)
        dy = torch.randn(shape, generator=generator, dtype=torch.float32, device=device).bfloat16()
        if self.live is not None:
            dy[self.live[rank] :] = float("nan")
        return dy

    def masters(self, rank: int, device: torch.device) -> megamoe.ExpertWeights:
        """Draw the experts of a rank in bf16, on the device."""
        return make_weights(self.problem(rank), seed=self.seed, device=device, quantize=False)

    def checked_tokens(self, device: torch.device) -> list[Tensor]:
        """Return the tokens of each home rank that are compared: all, or an even sample."""
        return [
            torch.linspace(0, tokens - 1, min(tokens, MAX_CHECKED_TOKENS), device=device).long()
            if tokens
            else torch.zeros(0, dtype=torch.long, device=device)
            for tokens in self.tokens
        ]


def _joined(tokens: tuple[int, ...]) -> str:
    return "x".join(map(str, tokens if len(set(tokens)) > 1 else tokens[:1]))


def random_case(index: int, ranks: int, args: argparse.Namespace, largest: int) -> Case:
    """Return configuration `index` of the seed: odd sizes, uneven and empty ranks, every option."""
    r = random.Random(args.seed * 1_000_003 + index)
    num_experts = r.choice((1, 2, 3, 7, 8, 16, 33, 64))
    shape = Shape(
        f"random{index}",
        hidden=16 * r.randint(1, largest // 16),
        intermediate=16 * r.randint(1, largest // 16),
        num_experts=num_experts,
        top_k=r.randint(1, min(8, num_experts)),
        activation=r.choice(sorted(ACTIVATIONS)),
        bias=r.random() < 0.3,
    )
    most = r.choice((1, 17, 130, 700))
    precision = r.choice(args.precision)
    case = Case(
        of_multiples(shape, precision),
        precision=precision,
        tokens=tuple(0 if r.random() < 0.15 else r.randint(1, most) for _ in range(ranks)),
        routing=r.choice(ROUTINGS),
        ids_dtype=r.choice((torch.int32, torch.int64)),
        seed=args.seed + index,
        weight_gradients=products_of(precision, args),
    )
    return case if args.direction == "forward" else of_backward(case, r)


def products_of(precision: str, args: argparse.Namespace) -> str:
    """Return what weight gradients are products of: as asked for, where the precision has it."""
    asked: str = args.weight_gradients
    return asked if asked in PRECISIONS[precision].weight_gradients else "bf16"


def of_multiples(shape: Shape, precision: str) -> Shape:
    """Return it with the next larger widths that the precision can store."""
    unit = PRECISIONS[precision].multiple
    widths = {n: -(-getattr(shape, n) // unit) * unit for n in ("hidden", "intermediate")}
    return replace(shape, **widths)


def of_backward(case: Case, r: random.Random) -> Case:
    """Return it with what only backward's have: fewer live tokens, several passes, clamps, an overloaded expert."""
    if r.random() < 0.15:
        case = replace(case, routing=OVERLOADED)
    if r.random() < 0.3:
        case = replace(case, live=tuple(r.randint(0, tokens) for tokens in case.tokens))
    if r.random() < 0.3:
        return replace(case, least_pool=True)
    # a value that a further pass recomputes may fall on a clamp's other side: not where passes are likely
    if case.shape.activation == "swiglu_oai" and case.routing in ("uniform", "dropped"):
        return replace(case, clamp=r.choice((CLAMP, None)))
    return case


def listed_cases(ranks: int, args: argparse.Namespace) -> list[Case]:
    dtype = torch.int64 if args.int64_ids else torch.int32
    return [
        Case(
            *(shape, precision, (tokens,) * ranks, routing, dtype, args.seed),
            least_pool=args.least_pool,
            weight_gradients=products_of(precision, args),
        )
        for shape, precision, tokens, routing in itertools.product(
            shapes_from(args), args.precision, args.tokens, args.routing
        )
    ]


def release_memory(device: torch.device) -> None:
    """Hand cached memory back where others may want it: the next window, ranks that share the GPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < total / 2:
            gc.collect()
            torch.cuda.empty_cache()
