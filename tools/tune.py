#!/usr/bin/env python3
"""Measure what the kernel chooses by formula beside every other choice: the length of a step of the tile order.

    python tools/tune.py --shape dsv3 qwen3-30b --ranks 1 --local-experts-of 4 --precision fp8 bf16

Prints us a call for each number of blocks a step (`step_blocks` of MegaBackend, csrc/megamoe/schedule/order.h), the
best one, and what the formula costs over it; writes OUT/NAME.csv. Cool, aligned, in turns, as tools/latency_sweep.py.
"""

import argparse
import csv
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import Rank, add_launch_arguments, add_shape_arguments, header, launch
from latency_sweep import Timer, local_shapes, worst
from sweep_contenders import DIRECTIONS, Contender, Entry, problem_of

from megamoe.core.config import PRECISIONS
from megamoe.testing import make_weights
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


def measure(
    shape: Shape, precision: str, me: Rank, args: argparse.Namespace
) -> dict[int, list[Choice]]:
    """Return tokens -> every choice, the formula's first. Collective."""
    problem = problem_of(shape, max(args.tokens), me)
    masters = make_weights(problem, device=me.device, quantize=False)
    gradients = None if args.direction == "forward" else "bf16"
    entries = [
        Entry("mega", precision, args.direction, gradients, 0, step_blocks=blocks)
        for blocks in (0, *args.steps)
    ]
    contenders = {e: Contender(e, problem, masters, me, profile=False) for e in entries}
    del masters
    timer, found = Timer(me, args.samples), {}
    for tokens in args.tokens:
        medians = timer.cool({e: c.call(tokens) for e, c in contenders.items()})
        place = (shape.name, precision, args.direction, me.size, tokens)
        found[tokens] = [
            Choice(*place, e.step_blocks or 0, worst(us, me.device)) for e, us in medians.items()
        ]
    for contender in contenders.values():
        contender.close()
    return found


def over_best(choices: list[Choice]) -> tuple[Choice, float]:
    """Return the fastest choice, and the share of its time that the formula's takes more."""
    best = min(choices, key=lambda c: c.us)
    return best, choices[0].us / best.us - 1


def worker(me: Rank, args: argparse.Namespace) -> int:
    title = header()
    me.print(title)
    columns = "".join(f"{n:>9}" for n in ("formula", *args.steps, "best", "over"))
    me.print(f"{'shape':<16}{'prec':<11}{'T':>6}{columns}")
    found: list[Choice] = []
    with torch.no_grad():
        for shape in local_shapes(args):
            for precision in args.precision:
                for tokens, choices in measure(shape, precision, me, args).items():
                    best, over = over_best(choices)
                    times = "".join(f"{c.us:9.1f}" for c in choices)
                    me.print(
                        f"{shape.name:<16}{precision:<11}{tokens:>6}{times}"
                        f"{best.step_blocks or 'formula':>9}{over:9.1%}"
                    )
                    found += choices
                torch.cuda.empty_cache()
    if me.is_first:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / f"{args.name}.csv").open("w", newline="") as file:
            file.write(title + "\n")
            writer = csv.DictWriter(file, list(asdict(found[0])))
            writer.writeheader()
            writer.writerows(asdict(choice) for choice in found)
    return 0


def main() -> int:
    """Measure on all ranks; write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b")
    add("--local-experts-of", type=int, metavar="R", help="experts of one of R ranks")
    add("--direction", default="forward", choices=DIRECTIONS)
    add("--tokens", type=int, nargs="+", default=[8, 64, 512, 2048, 8192], help="per rank")
    add("--precision", nargs="+", default=["bf16"], choices=PRECISIONS)
    add("--steps", type=int, nargs="+", default=list(STEPS), help="blocks a step to try")
    add("--samples", type=int, default=10)
    add("--out", type=Path, default=Path("out"))
    add("--name", default="tune")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs Hopper GPUs: there is nothing to tune elsewhere")
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
