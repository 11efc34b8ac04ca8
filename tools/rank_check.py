#!/usr/bin/env python3
"""Check the layer on every rank against the fp32 oracle, stage by stage where the backend shows its stages.

    python tools/rank_check.py --backend staged --ranks 2                      small, anywhere
    python tools/rank_check.py --backend mega --shape dsv3 --tokens 8 1024 8192 --precision bf16 fp8
    python tools/rank_check.py --backend mega --random 50 --repeat 3           random configurations, same bits?
    torchrun --nproc-per-node 4 tools/rank_check.py --backend mega             started by torchrun

Inputs and weights are drawn on the device from (seed, rank), so every rank can draw those of the others and needs no
communication to compute what it should have got. Large cases check a sample of tokens. Exit code 1 on any failure.
"""

import argparse
import gc
import itertools
import random
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import Rank, add_launch_arguments, add_shape_arguments, header, launch, shapes_from
from torch import Tensor

import megamoe
from megamoe import reference
from megamoe.config import ACTIVATIONS
from megamoe.testing import ROUTINGS, Inputs, compare, make_inputs, make_weights
from megamoe.testing.shapes import Shape

# Relative Frobenius error and largest error over the expected tensor's root mean square. The oracle rounds where the
# kernel rounds: what is left is the order of sums, and roundings that it tips over. docs/numerics.md
TOLERANCES = {"bf16": (4e-3, 0.1), "fp8": (1e-2, 0.3)}
ORDER = ["x_q", "x_scale", "x_pool", "x_pool_scale", "h", "h_scale", "y_rows", "partials", "y"]
MAX_CHECKED_TOKENS = 512  # of a rank


@dataclass(frozen=True)
class Case:
    """One configuration, equal on all ranks."""

    shape: Shape
    precision: str
    tokens: tuple[int, ...]  # of each rank
    routing: str = "uniform"
    ids_dtype: torch.dtype = torch.int32
    seed: int = 0

    def __str__(self) -> str:
        s = self.shape
        tokens = "x".join(map(str, self.tokens if len(set(self.tokens)) > 1 else self.tokens[:1]))
        bias = "+bias" if s.bias else ""
        return (
            f"{s.name} H={s.hidden} I={s.intermediate} E={s.num_experts} K={s.top_k} {s.activation}{bias} "
            f"{self.precision} T={tokens} {self.routing} {str(self.ids_dtype)[6:]} seed={self.seed}"
        )

    def problem(self, rank: int) -> megamoe.Problem:
        s = self.shape
        return megamoe.Problem(
            hidden=s.hidden,
            intermediate=s.intermediate,
            num_experts=s.num_experts,
            top_k=s.top_k,
            ep_size=len(self.tokens),
            rank=rank,
            max_tokens=max(1, *self.tokens),
            precision=self.precision,
            activation=megamoe.activation_by_name(s.activation),
            bias=s.bias,
        )

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

    def weights(self, rank: int, device: torch.device) -> megamoe.ExpertWeights:
        """Draw the experts of a rank, on the device."""
        return make_weights(self.problem(rank), seed=self.seed, device=device)


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
    return Case(
        shape,
        precision=r.choice(args.precision),
        tokens=tuple(0 if r.random() < 0.15 else r.randint(1, most) for _ in range(ranks)),
        routing=r.choice(ROUTINGS),
        ids_dtype=r.choice((torch.int32, torch.int64)),
        seed=args.seed + index,
    )


def listed_cases(ranks: int, args: argparse.Namespace) -> list[Case]:
    dtype = torch.int64 if args.int64_ids else torch.int32
    return [
        Case(shape, precision, (tokens,) * ranks, routing, dtype, args.seed)
        for shape, precision, tokens, routing in itertools.product(
            shapes_from(args), args.precision, args.tokens, args.routing
        )
    ]


class Checker:
    """Compares tensors of one case and remembers whether all were good."""

    def __init__(self, precision: str, verbose: bool) -> None:
        self.frobenius, self.largest = TOLERANCES[precision]
        self.verbose, self.good, self.lines = verbose, True, []

    def compare(self, name: str, got: Tensor, expected: Tensor) -> None:
        """got and expected: the same shape, rows along the first dimension."""
        if got.shape != expected.shape:
            self.require(False, f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}")
            return
        rms = expected.float().square().mean().sqrt().item() if expected.numel() else 0.0
        found = compare(got, expected, tolerance=self.largest * rms)
        good = found.relative <= self.frobenius and found.differing == 0
        self.good &= good
        if self.verbose or not good:
            where = "" if found.first is None else f"; beyond {self.largest:g} rms: {found}"
            self.lines.append(
                f"  {'ok  ' if good else 'FAIL'} {name:<12} relative error {found.relative:.2e} "
                f"(limit {self.frobenius:g}), largest {found.largest:.2e} at rms {rms:.2e}{where}"
            )

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.good = False
            self.lines.append("  FAIL " + message)


def checked_tokens(case: Case, device: torch.device) -> list[Tensor]:
    """Return the tokens of each home rank that are compared: all, or an even sample."""
    return [
        torch.linspace(0, tokens - 1, min(tokens, MAX_CHECKED_TOKENS), device=device).long()
        if tokens
        else torch.zeros(0, dtype=torch.long, device=device)
        for tokens in case.tokens
    ]


def compare_stages(
    checker: Checker,
    stages: dict[str, Tensor],
    case: Case,
    inputs: list[Inputs],
    mine: megamoe.ExpertWeights,
    me: Rank,
) -> None:
    """Compare what this rank computed: as home rank x_q and y, as expert rank the others."""
    kept = checked_tokens(case, me.device)
    weights = [mine if r == me.rank else case.weights(r, me.device) for r in range(me.size)]
    x, ids = [i.x for i in inputs], [i.topk_ids for i in inputs]
    scores = [i.topk_weights for i in inputs]
    want = reference.forward(case.problem(me.rank), x, ids, scores, weights, check_tokens=kept)

    # The oracle holds the kept tokens and their rows only; a partial exists for a token that has a row here.
    rows, home = want["rows"][me.rank], kept[me.rank]
    present = rows.token.unique()
    everywhere = torch.cat(offset(kept, case.tokens))
    where = {"x_q": home, "x_scale": home, "y": home, "partials": everywhere[present]}
    for name in ORDER:
        if name in stages and name in want:
            expected = want[name][me.rank]
            expected = expected[present] if name == "partials" else expected
            checker.compare(name, stages[name][where.get(name, rows.pool_row)], expected)


def check(case: Case, me: Rank, args: argparse.Namespace) -> Checker:
    """Run one case on this rank. Collective."""
    problem = case.problem(me.rank)
    checker = Checker(case.precision, args.verbose)
    group = dist.group.WORLD if me.size > 1 else None
    inputs = [case.inputs(rank, me.device) for rank in range(me.size)]
    mine = case.weights(me.rank, me.device)
    own = inputs[me.rank]
    arguments = (own.x, own.topk_ids, own.topk_weights, mine)

    backend = megamoe.make_backend(args.backend, problem, group, device=me.device)
    try:
        backend.prepare(mine)
        y = backend.forward(*arguments).clone()
        stages = getattr(backend, "intermediates", dict)() | {"y": y}
        compare_stages(checker, stages, case, inputs, mine, me)
        for call in range(1, args.repeat):
            again = backend.forward(*arguments)
            same = torch.equal(again.view(torch.int16), y.view(torch.int16))
            checker.require(same, f"call {call + 1} gives other bits than the first")
        getattr(backend, "check", lambda: None)()
    finally:
        backend.close()
    dropped = ((own.topk_ids < 0) | (own.topk_ids >= problem.num_experts)).all(-1)
    checker.require(bool((y[dropped] == 0).all()), "y of a token without a route is not zero")
    checker.require(bool(y.isfinite().all()), "y has values that are not finite")
    return checker


def offset(kept: list[Tensor], tokens: tuple[int, ...]) -> list[Tensor]:
    """Return each rank's tokens as indices into the tokens of all ranks put one after the other."""
    starts = itertools.accumulate(tokens, initial=0)
    return [k + start for k, start in zip(kept, starts, strict=False)]


def worker(me: Rank, args: argparse.Namespace) -> int:
    me.print(header())
    largest = 2048 if me.device.type == "cuda" else 320
    if args.random:
        cases = [random_case(i, me.size, args, largest) for i in range(args.random)]
    else:
        cases = listed_cases(me.size, args)
    failures = 0
    for case in cases:
        start = time.monotonic()
        with torch.no_grad():
            checker = check(case, me, args)
        reports: list = [None] * me.size
        dist.all_gather_object(reports, (checker.good, checker.lines))
        bad = [rank for rank, (good, _) in enumerate(reports) if not good]
        failures += bool(bad)
        verdict = f"FAIL on ranks {bad}" if bad else "ok"
        me.print(f"{verdict}: {args.backend} x{me.size} {case} ({time.monotonic() - start:.1f} s)")
        for rank, (_, lines) in enumerate(reports):
            for line in lines:
                me.print(f"  rank {rank}{line}")
        del checker
        gc.collect()
        if me.device.type == "cuda":
            torch.cuda.empty_cache()
    me.print(f"{len(cases) - failures} of {len(cases)} configurations are right on all ranks")
    return int(failures > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate", "reference"))
    add_shape_arguments(parser, default="tiny")
    add("--tokens", type=int, nargs="+", default=[64], help="tokens per rank")
    add("--precision", nargs="+", default=["bf16", "fp8"], choices=("bf16", "fp8"))
    add("--routing", nargs="+", default=["uniform"], choices=ROUTINGS)
    add("--int64-ids", action="store_true")
    add("--random", type=int, default=0, metavar="N", help="N random configurations instead")
    add("--repeat", type=int, default=1, metavar="N", help="N calls must give the same bits")
    add("--seed", type=int, default=0)
    add("--verbose", "-v", action="store_true", help="print good stages too")
    add_launch_arguments(parser)
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
