"""tools/tune.py: the length of a step of the tile order, as the kernel chooses it by formula and beside all others."""

import argparse
from dataclasses import dataclass
from functools import partial

from bench.layers import Entry, layers_of
from bench.ranks import Rank
from bench.sweep import measure_all
from bench.tables import WIDTH
from bench.timing import Timer
from megamoe.testing.shapes import Shape

STEPS = (16, 24, 32, 48, 64, 96, 128, 256)


@dataclass(frozen=True)
class Choice:
    """One place of the table."""

    shape: str
    precision: str
    direction: str
    ranks: int
    tokens: int
    step_blocks: int  # 0: by formula
    us: float


def measure(shape: Shape, precision: str, me: Rank, args: argparse.Namespace) -> list[Choice]:
    """Return every choice, the formula's first, of each number of tokens; print a line for each. Collective."""
    gradients = None if args.direction == "forward" else "bf16"
    entries = [
        Entry("mega", precision, args.direction, gradients, 0, step_blocks=blocks)
        for blocks in (0, *args.steps)
    ]
    timer, found = Timer(me.device, args.samples), []
    with layers_of(shape, entries, max(args.tokens), me) as layers:
        for tokens in args.tokens:
            medians = timer.medians([layer.contender(tokens) for layer in layers.values()])
            place = (shape.name, precision, args.direction, me.size, tokens)
            pairs = zip(layers, medians, strict=True)
            choices = [Choice(*place, e.step_blocks or 0, us) for e, us in pairs]
            best, over = over_best(choices)
            times = "".join(f"{us:9.1f}" for us in medians)
            me.print(
                f"{shape.name:<16}{precision:<{WIDTH}}{tokens:>6}{times}"
                f"{best.step_blocks or 'formula':>9}{over:9.1%}"
            )
            found += choices
    return found


def over_best(choices: list[Choice]) -> tuple[Choice, float]:
    """Return the fastest choice, and the share of its time that the formula's takes more."""
    best = min(choices, key=lambda c: c.us)
    return best, choices[0].us / best.us - 1


def worker(me: Rank, args: argparse.Namespace) -> int:
    columns = "".join(f"{n:>9}" for n in ("formula", *args.steps, "best", "over"))
    heads = f"{'shape':<16}{'prec':<{WIDTH}}{'T':>6}{columns}"
    measure_all(me, args, heads, partial(measure, me=me, args=args))
    return 0
