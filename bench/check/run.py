"""tools/rank_check.py: every configuration on every rank, in the directions asked for; a row and a line for each."""

import argparse
import csv
import time
from typing import Any

import torch

from bench.check.backward import check_backward
from bench.check.cases import Case, listed_cases, random_case, release_memory
from bench.check.forward import check_forward
from bench.ranks import Rank
from bench.tables import header
from megamoe.launch import panels
from megamoe.testing.gradients import BACKWARD_STAGES, GRADIENTS, OF_EXPERTS
from megamoe.testing.intermediates import STAGES, StageChecker

FORWARD_COLUMNS = [*STAGES, "y_fp32"]
BACKWARD_COLUMNS = [*BACKWARD_STAGES, *GRADIENTS, *(f"{name}_fp32" for name in GRADIENTS)]
BACKWARD_COLUMNS += [f"{name}_all" for name in ("dx_rows", *OF_EXPERTS)]  # of every expert
BACKWARD_COLUMNS += [f"{name}_added" for name in OF_EXPERTS]  # to fp32
COLUMNS = {"forward": FORWARD_COLUMNS, "backward": BACKWARD_COLUMNS}
COLUMNS["step"] = list(dict.fromkeys(FORWARD_COLUMNS + BACKWARD_COLUMNS))
SHOWN = {"forward": ("y",), "backward": ("dx", "dw13"), "step": ("y", "dx", "dw13")}


def check(case: Case, me: Rank, args: argparse.Namespace) -> list[StageChecker]:
    """Run one case on this rank in the directions asked for. Collective."""
    both = {"forward": check_forward, "backward": check_backward}
    return [one(case, me, args) for name, one in both.items() if args.direction in (name, "step")]


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
        reports = me.gather((all(c.good for c in checkers), lines, errors))
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


def figures(row: dict[str, Any], direction: str) -> str:
    """Return the errors that a line shows; a backend without a kernel's roundings has those against fp32 only."""
    parts = []
    for name in SHOWN[direction]:
        found = [f"{row[name]:.1e}"] if name in row else []
        if f"{name}_fp32" in row:
            found.append(f"against fp32 {row[f'{name}_fp32']:.1e}")
        parts.append(f"{name} {', '.join(found) or 'none'}")
    return "; ".join(parts)


def summarize(rows: list[dict[str, Any]], me: Rank, direction: str) -> int:
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
