"""tools/ops_bench.py: megamoe.ops in turns with others' operations, against the limits of the device."""

import argparse
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.ops_cases import Case, cases
from bench.plot import pyplot_or_none, save, shorter, wrote
from bench.tables import header, write_table
from bench.timing import Contender, Timer, modes_of

WARM_UP = 3


@dataclass(frozen=True)
class Row:
    """A line of the CSV. Ratios are 0 where the other contender did not run."""

    case: str
    sizes: str
    contender: str
    mode: str
    us: float
    tflops: float
    gb_s: float  # operands and results of the first contender, each once
    share: float  # of the limit: the least time of products or memory over this time
    speedup: float  # over torch
    over_product: float  # time over our product alone
    clock_mhz: int


HEADS = (
    f"{'case':<28}{'sizes':<22}{'contender':<11}{'mode':<6}{'us':>10}{'TFLOPS':>9}{'GB/s':>8}{'limit':>7}"
    f"{'x torch':>9}{'/ product':>10}{'MHz':>6}"
)


def line(row: Row) -> str:
    return (
        f"{row.case:<28}{row.sizes:<22}{row.contender:<11}{row.mode:<6}{row.us:>10.1f}{row.tflops:>9.1f}"
        f"{row.gb_s:>8.0f}{row.share:>7.0%}{row.speedup:>9.2f}{row.over_product:>10.2f}{row.clock_mhz or '-':>6}"
    )


def clock() -> int:
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0])


def bytes_of(found: Any) -> int:
    """Return the bytes of tensors, one or several."""
    tensors = (found,) if isinstance(found, Tensor) else found
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def told(case: Case, name: str, error: Exception) -> None:
    print(f"{case.name}, {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def ready(case: Case, timer: Timer) -> tuple[list[Contender], float]:
    """Return the contenders that run, and the bytes of operands and results; print what the others raise."""
    found, moved = [], 0
    for contender in case.contenders:
        try:
            for _ in range(WARM_UP):
                made = contender.timed(contender.before())
            timer.synchronize()
        except Exception as error:
            told(case, contender.name, error)
            continue
        moved = moved or bytes_of(case.reads) + bytes_of(made)
        found.append(contender)
        del made
    return found, moved


def measure(
    case: Case, sizes: str, modes: Iterable[str], timer: Timer, clocks: dict[str, int]
) -> Iterator[Row]:
    """Time a case's contenders in turns. clocks: in MHz behind each, where the timer was told to look at them."""
    running, moved = ready(case, timer)
    flops, limit = sum(case.flops.values()), case.limit_us(moved)
    for mode in modes if running else ():
        names = [c.name for c in running]
        us_of = dict(zip(names, timer.medians(running, mode), strict=True))
        for name, us in us_of.items():
            over_torch = us_of.get("torch", 0) / us
            over_product = us / us_of.get("product", float("inf"))
            yield Row(
                case.name, sizes, name, mode, round(us, 1), round(flops / us / 1e6, 1),
                round(moved / us / 1e3, 1), round(limit / us, 3), round(over_torch, 3),
                round(over_product, 3), clocks.get(name, 0),
            )  # fmt: skip


def draw(found: list[Row], title: str, path: Path) -> bool:
    """Draw shares of the limit, a panel for each size; return whether matplotlib is there."""
    pyplot = pyplot_or_none()
    if pyplot is None or not found:
        return False
    found = [row for row in found if row.mode == found[0].mode]
    panels = list(dict.fromkeys(row.sizes for row in found))
    contenders = list(dict.fromkeys(row.contender for row in found))
    counts = [len({row.case for row in found if row.sizes == sizes}) for sizes in panels]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3 + sum(counts), 4.5), squeeze=False, sharey=True,
        layout="constrained", width_ratios=counts,
    )  # fmt: skip
    for axis, sizes in zip(axes.flat, panels, strict=True):
        here = [row for row in found if row.sizes == sizes]
        names = list(dict.fromkeys(row.case for row in here))
        width = 0.85 / len(contenders)
        for i, contender in enumerate(contenders):
            shares = {row.case: row.share for row in here if row.contender == contender}
            places = [names.index(n) + (i - (len(contenders) - 1) / 2) * width for n in shares]
            axis.bar(places, shares.values(), width, color=f"C{i}", label=contender)
        axis.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize="small")
        axis.set_title(sizes or "GPT-OSS", fontsize="medium")
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].set_ylabel("share of the limit of products or memory")
    axes.flat[0].legend(fontsize="small")
    save(figure, shorter(title, 120), path)
    return True


def run(args: argparse.Namespace) -> int:
    """Time the cases that were asked for; print a line each, write the CSV and the picture."""
    title, end = header(), time.monotonic() + args.seconds
    print(f"{title}\n{HEADS}", flush=True)
    clocks: dict[str, int] = {}

    def watch(contender: Contender) -> None:
        if args.clock:
            clocks[contender.name] = clock()

    device = torch.device(args.device)
    timer, found, table = Timer(device, args.samples, watch), [], args.out / f"{args.name}.csv"
    for sizes, kind, made in cases(args):
        if time.monotonic() > end:
            print(f"{kind} {sizes}: not run, --seconds {args.seconds} are over", flush=True)
            continue
        try:
            for case in made:
                for row in measure(case, sizes, modes_of(args.mode), timer, clocks):
                    if args.eager and row.contender == "torch":
                        row = replace(row, contender="torch eager")
                    found.append(row)
                    print(line(row), flush=True)
                if found:
                    write_table(table, title, found)
        except Exception as error:
            print(f"{kind} {sizes}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        del made
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if found:
        picture = table.with_suffix(".png")
        print(wrote(draw(found, title, picture), picture, table))
    return 0 if found else 1
