#!/usr/bin/env python3
"""Check the layer on every rank against the fp32 oracle, stage by stage where the backend shows its stages.

    python tools/rank_check.py --backend staged --ranks 2                      small, anywhere
    python tools/rank_check.py --backend mega --shape dsv3 --tokens 8 1024 8192 --precision bf16 fp8
    python tools/rank_check.py --backend mega --random 200 --csv random.csv    random configurations, a row for each
    python tools/rank_check.py --backend mega --direction backward --shape dsv3    every gradient; step: both
    MEGAMOE_SHARE_GPUS=1 python tools/rank_check.py --backend mega --ranks 4   more ranks than GPUs, in time slices
    torchrun --nproc-per-node 4 tools/rank_check.py --backend mega             started by torchrun

Inputs and weights are drawn on the device from (seed, rank), so every rank can draw those of the others and needs no
communication to compute what it should have got. Large cases check a sample of tokens. Two oracles: one rounds where
the kernel does and gives the verdict on every stage; the other is fp32 throughout on the bf16 weights, and shows what
the roundings cost y, or a gradient. Exit code 1 on any failure.

Backward compares gradients of sampled tokens and experts, starting from the pre-activations that forward saved, where
the backend has a backward pass of its own; else torch's gradients of the layer, with fp32 alone.
"""

import argparse
import csv
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from common import Rank, add_launch_arguments, add_shape_arguments, header, launch, refuse_training
from rank_backward import check_backward
from rank_cases import Case, listed_cases, random_case, release_memory
from torch import Tensor

import megamoe
from megamoe.backends import reference
from megamoe.core.table import PRECISIONS, TRAINED
from megamoe.launch import panels
from megamoe.testing import OVERLOADED, ROUTINGS, same_bits
from megamoe.testing.gradients import BACKWARD_STAGES, GRADIENTS, OF_EXPERTS
from megamoe.testing.stages import ENOUGH, FP32_LIMIT, STAGES, StageChecker

FORWARD_COLUMNS = [*STAGES, "y_fp32"]
BACKWARD_COLUMNS = [*BACKWARD_STAGES, *GRADIENTS, *(f"{name}_fp32" for name in GRADIENTS)]
BACKWARD_COLUMNS += [f"{name}_all" for name in ("dx_rows", *OF_EXPERTS)]  # of every expert
BACKWARD_COLUMNS += [f"{name}_added" for name in OF_EXPERTS]  # to fp32
COLUMNS = {"forward": FORWARD_COLUMNS, "backward": BACKWARD_COLUMNS}
COLUMNS["step"] = list(dict.fromkeys(FORWARD_COLUMNS + BACKWARD_COLUMNS))
SHOWN = {"forward": ("y",), "backward": ("dx", "dw13"), "step": ("y", "dx", "dw13")}


class Oracle:
    """What a case should give on this rank."""

    def __init__(self, case: Case, me: Rank) -> None:
        self.case, self.me, self.problem = case, me, case.problem(me.rank)
        ranks = range(me.size)
        self.inputs = [case.inputs(rank, me.device) for rank in ranks]
        self.masters = [case.masters(rank, me.device) for rank in ranks]
        self.weights = [w.quantized(self.problem) for w in self.masters]
        self.kept = case.checked_tokens(me.device)
        columns = ("x", "topk_ids", "topk_weights")
        self.columns = [[getattr(i, name) for i in self.inputs] for name in columns]

    def compare_stages(self, checker: StageChecker, stages: dict[str, Tensor]) -> None:
        """Compare what this rank computed as expert rank, and as home rank x_q, y and the partials it was sent."""
        me, kept = self.me.rank, self.kept
        want = reference.forward(self.problem, *self.columns, self.weights, check_tokens=kept)
        # The oracle holds the kept tokens and their rows only.
        rows, home = want["rows"][me], kept[me]
        where = {"x_q": home, "x_scale": home, "y": home}
        names = [name for name in STAGES if name in stages and name in want]
        got = {
            name: stages[name][where.get(name, rows.pool_row)]
            for name in names
            if name != "partials"
        }
        expected = {name: want[name][me] for name in names}
        if "partials" in names:  # a partial exists for a token that has a row on that rank
            first = sum(len(k) for k in kept[:me])
            owed = [r.token[r.home == me].unique() for r in want["rows"]]
            got["partials"] = torch.cat(
                [stages["partials"][r][home[t - first]] for r, t in enumerate(owed)]
            )
            expected["partials"] = torch.cat([want["partials"][r][t] for r, t in enumerate(owed)])
        routes = {"y": sum(int((r.home == me).sum()) for r in want["rows"])}
        for name in names:
            checker.compare_stage(name, got, expected, routes.get(name, rows.token.numel()))

    def compare_fp32(self, checker: StageChecker, y: Tensor) -> None:
        """Compare y with fp32 throughout on unquantized weights and x: the price of all roundings."""
        me = self.me.rank
        problem = replace(self.problem, precision="bf16")
        own = [tokens if rank == me else tokens[:0] for rank, tokens in enumerate(self.kept)]
        want = reference.forward(
            problem, *self.columns, self.masters, rounding="none", check_tokens=own
        )
        routes = sum(rows.token.numel() for rows in want["rows"])
        elements = min(want["y"][me].numel(), routes * problem.intermediate)
        formats = self.problem.formats
        strict = not (formats.h.scaled or formats.w.scaled) and elements >= ENOUGH
        limit = FP32_LIMIT if strict else float("inf")
        checker.judge("y_fp32", y[own[me]], want["y"][me], limit)


def check(case: Case, me: Rank, args: argparse.Namespace) -> list[StageChecker]:
    """Run one case on this rank in the directions asked for. Collective."""
    checks = {"forward": (check_forward,), "backward": (check_backward,)}
    checks["step"] = checks["forward"] + checks["backward"]
    return [one(case, me, args) for one in checks[args.direction]]


def check_forward(case: Case, me: Rank, args: argparse.Namespace) -> StageChecker:
    """Run forward of one case on this rank. Collective."""
    problem, group = case.problem(me.rank), dist.group.WORLD if me.size > 1 else None
    # before the weights are drawn: a backend that cannot run here says so at once
    options = case.options()
    backend = megamoe.make_backend(args.backend, problem, group, device=me.device, **options)
    try:
        oracle = Oracle(case, me)
        checker = StageChecker(problem, args.verbose)
        own, mine = oracle.inputs[me.rank], oracle.weights[me.rank]
        arguments = (own.x, own.topk_ids, own.topk_weights, mine)
        backend.prepare(mine)
        y = backend.forward(*arguments).clone()
        oracle.compare_stages(checker, getattr(backend, "intermediates", dict)() | {"y": y})
        oracle.compare_fp32(checker, y)
        for call in range(1, args.repeat):
            again = backend.forward(*arguments)
            checker.require(same_bits(again, y), f"call {call + 1} gives other bits than the first")
        getattr(backend, "check", lambda: None)()
    finally:
        backend.close()
    dropped = ((own.topk_ids < 0) | (own.topk_ids >= problem.num_experts)).all(-1)
    checker.require(bool((y[dropped] == 0).all()), "y of a token without a route is not zero")
    checker.require(bool(y.isfinite().all()), "y has values that are not finite")
    return checker


def worker(me: Rank, args: argparse.Namespace) -> int:
    panels.MEAN_ROWS = args.mean_rows
    title = header()
    me.print(title)
    fields = ["case", "backend", "ranks", "direction", "precision", "verdict"]
    fields += [*COLUMNS[args.direction], "seconds"]
    if args.csv and me.is_first:
        args.csv.write_text(title + "\n" + ",".join(fields) + "\n")
    largest = 2048 if me.device.type == "cuda" else 320
    if args.random:
        cases = [random_case(i, me.size, args, largest) for i in range(args.random)]
    else:
        cases = listed_cases(me.size, args)
    rows = []
    for case in cases:
        start = time.monotonic()
        with torch.no_grad():
            checkers = check(case, me, args)
        errors = {name: error for c in checkers for name, error in c.errors.items()}
        lines = [line for c in checkers for line in c.lines]
        reports: list = [None] * me.size
        dist.all_gather_object(reports, (all(c.good for c in checkers), lines, errors))
        bad = [rank for rank, (good, _, _) in enumerate(reports) if not good]
        row = {
            "case": str(case),
            "backend": args.backend,
            "ranks": me.size,
            "direction": args.direction,
            "precision": case.precision,
            "verdict": f"FAIL on ranks {bad}" if bad else "ok",
            **worst_errors([errors for _, _, errors in reports]),
            "seconds": f"{time.monotonic() - start:.2f}",
        }
        rows.append(row)
        me.print(
            "{verdict}: {backend} x{ranks} {case}:".format(**row),
            f"{figures(row, args.direction)} ({row['seconds']} s)",
        )
        for rank, (_, lines, _) in enumerate(reports):
            for line in lines:
                me.print(f"  rank {rank}{line}")
        if args.csv and me.is_first:
            with args.csv.open("a", newline="") as file:  # a run that is cut off leaves its rows
                csv.DictWriter(file, fields).writerow(row)
        release_memory(me.device)
    return summarize(rows, me, args.direction)


def worst_errors(of_ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest error of each stage over the ranks, to four digits."""
    names = {name for errors in of_ranks for name in errors}
    worst = {name: max(errors.get(name, 0.0) for errors in of_ranks) for name in names}
    return {name: float(f"{error:.3e}") for name, error in worst.items()}


def figures(row: dict, direction: str) -> str:
    """Return the errors that a line shows; a backend without a kernel's roundings has those against fp32 only."""
    parts = []
    for name in SHOWN[direction]:
        found = [f"{row[name]:.1e}"] if name in row else []
        if f"{name}_fp32" in row:
            found.append(f"against fp32 {row[f'{name}_fp32']:.1e}")
        parts.append(f"{name} {', '.join(found) or 'none'}")
    return "; ".join(parts)


def summarize(rows: list[dict], me: Rank, direction: str) -> int:
    """Print the verdict on all configurations; return the exit code."""
    good = sum(row["verdict"] == "ok" for row in rows)
    me.print(f"{good} of {len(rows)} configurations are right on all ranks")
    for precision in dict.fromkeys(row["precision"] for row in rows):
        of_it = [row for row in rows if row["precision"] == precision]
        for name in ["y"] * (direction != "backward") + list(GRADIENTS) * (direction != "forward"):
            worst = [
                max((row[key] for row in of_it if key in row), default=None)
                for key in (name, f"{name}_fp32")
            ]
            if worst == [None, None]:
                continue
            kernel, fp32 = ("not compared" if w is None else f"{w:.2e}" for w in worst)
            me.print(
                f"{precision}: worst relative error of {name} {kernel}, against fp32 on unquantized inputs {fp32} "
                f"({len(of_it)} configurations)"
            )
    return int(good < len(rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate", "reference"))
    add("--direction", default="forward", choices=list(COLUMNS), help="step: both")
    add_shape_arguments(parser, default="tiny")
    add("--tokens", type=int, nargs="+", default=[64], help="tokens per rank")
    add("--precision", nargs="+", default=TRAINED, choices=PRECISIONS)
    add("--routing", nargs="+", default=["uniform"], choices=(*ROUTINGS, OVERLOADED))
    add("--int64-ids", action="store_true")
    add("--least-pool", action="store_true", help="the fewest pool rows: several passes")
    add("--random", type=int, default=0, metavar="N", help="N random configurations instead")
    add("--repeat", type=int, default=1, metavar="N", help="N calls must give the same bits")
    add("--fewer-sms", type=int, default=0, metavar="N",
        help="backward: a layer with N SMs reserved must give the same bits")  # fmt: skip
    add("--mean-rows", type=int, default=panels.MEAN_ROWS, metavar="N",
        help="rows of an expert above which MXFP4 weights are expanded in memory")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--csv", type=Path, metavar="FILE", help="write a row for each configuration")
    add("--verbose", "-v", action="store_true", help="print good stages too")
    add_launch_arguments(parser)
    args = parser.parse_args()
    if args.direction != "forward":
        refuse_training(parser, args.precision)
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
