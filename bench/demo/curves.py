"""Loss curves of the demo in several precisions and backends: trained, judged, written, drawn."""

import argparse
import contextlib
import csv
import re
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.demo.training import WINDOW, Setup, final_loss, train
from bench.plot import pyplot_or_none, save, shorter, wrote
from bench.tables import PRINTED, header, write_table
from megamoe.core.table import PRECISIONS

FP8_TOLERANCE = 5e-3  # of BF16's final loss
Key = tuple[str, str, int]  # backend, precision, seed
Losses = dict[Key, list[float]]


def runs(backend: str, seeds: list[int]) -> list[Key]:
    """Return what is compared: the backend in both precisions, and staged in BF16 beside them."""
    kinds = [(backend, "bf16"), (backend, "fp8")]
    kinds += [("staged", "bf16")] * (backend != "staged")
    return [(*kind, seed) for seed in seeds for kind in kinds]


def compare_curves(
    this: Setup, seeds: list[int], path: Path, say: Callable[..., None]
) -> tuple[bool, Losses]:
    """Train every run from equal weights on equal data; write the losses behind each, draw them all. Collective.

    Returns whether FP8 ends within the tolerance of BF16; the losses by run.
    """
    found: Losses = {}
    title, table = header(), path.with_suffix(".csv")
    for key in runs(this.options["backend"], seeds):
        backend, precision, seed = key
        options = this.options | {"backend": backend, "precision": precision}
        setup = replace(this, options=options, recipe=replace(this.recipe, seed=seed))
        curves = train(setup, f"{backend} {precision}, seed {seed}")
        found[key] = curves.losses
        if this.rank == 0:  # each time: a later run may be cut off
            write(found, title, table)
        said = f"{final_loss(curves.losses):.4f}, {memory(this.device)}"
        say(f"{backend} {precision}, seed {seed}: {said}")
    if this.rank == 0:
        say(wrote(draw(found, title, path), path, table))
    return summarize(found, say), found


def differences(
    found: Losses, window: int
) -> tuple[tuple[str, str], dict[tuple[str, str], tuple[float, float, float, int]]]:
    """Return the first kind, and by kind its final loss, how far it is from the first's, the standard error, seeds.

    Of the seeds that the first kind has, too.
    """
    finals: dict[tuple[str, str], dict[int, float]] = {}
    for (backend, precision, seed), losses in found.items():
        finals.setdefault((backend, precision), {})[seed] = final_loss(losses, window)
    first, base = next(iter(finals.items()))
    made = {}
    for kind, of_seeds in finals.items():
        both = [seed for seed in of_seeds if seed in base]
        own = [of_seeds[seed] for seed in both]
        if both:
            pairs = paired(own, [base[seed] for seed in both])
            made[kind] = (statistics.mean(own), *pairs, len(both))
    return first, made


def write_differences(found: Losses, title: str, path: Path, window: int) -> None:
    """Write the differences of kinds from the first one, as printed.csv has them."""
    first, made = differences(found, window)
    rows = [
        ["recipes", " ".join(kind), of, value]
        for kind, (_, apart, error, seeds) in made.items()
        if kind != first
        for of, value in (
            ("difference, %", f"{100 * apart:.2f}"),
            ("standard error, %", f"{100 * error:.2f}"),
            ("seeds", seeds),
        )
    ]
    write_table(path, title, rows, PRINTED)


def summarize(found: Losses, say: Callable[..., None], window: int = WINDOW) -> bool:
    """Print the final losses, how far they are from the first kind's over the seeds of both, and its standard error.

    Returns whether the precisions that quantize are within the tolerance.
    """
    first, made = differences(found, window)
    most, good = made[first][3], True
    say(f"final losses, mean of the last {window} steps and of {most} seeds, nats per byte:")
    for kind, (loss, apart, error, seeds) in made.items():
        text = f"{' '.join(kind)}: {loss:.4f}, {apart:+.2%} from {' '.join(first)}"
        if seeds > 1 and kind != first:
            text += f", standard error {error:.2%}"
        if seeds < most:
            text += f", {seeds} seeds"
        if kind[1] in PRECISIONS and PRECISIONS[kind[1]].w.scaled:
            close = abs(apart) <= FP8_TOLERANCE  # NaN is not
            good &= close
            text = f"{'PASS' if close else 'FAIL'}: {text}, tolerance {FP8_TOLERANCE:.1%}"
        say(f"  {text}")
    return good


def paired(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the mean relative difference of pairs, and its standard error, which is NaN for one pair."""
    each = [own / other - 1 for own, other in zip(values, base, strict=True)]
    apart, n = statistics.mean(each), len(each)
    squares = sum((one - apart) ** 2 for one in each)  # of NaN too, unlike stdev()
    return apart, (squares / (n - 1) / n) ** 0.5 if n > 1 else float("nan")


def memory(device: torch.device) -> str:
    """Return the most memory that torch, or on a CPU the process, has held since this was asked last."""
    if device.type != "cuda":
        stated = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        kib = int(stated[1]) if stated else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with contextlib.suppress(OSError):  # where it is forbidden, peaks are those since the start
            Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: the peak is what it is now
        return f"peak memory of the process {kib / 2**10:.0f} MiB"
    peak = torch.cuda.max_memory_allocated(device) / 2**20
    torch.cuda.reset_peak_memory_stats(device)
    return f"peak memory {peak:.0f} MiB, the window's aside"


def write(
    found: Losses, title: str, path: Path, more: Mapping[str, Mapping[Key, Sequence[float]]] = {}
) -> None:
    """Write a row for each step of each run. more: further columns by name, for each run a figure a step."""
    rows = [
        [*key, step, *figures]
        for key, losses in found.items()
        for step, figures in enumerate(
            zip(losses, *(column[key] for column in more.values()), strict=True), start=1
        )
    ]
    write_table(path, title, rows, ["backend", "precision", "seed", "step", "loss", *more])


def read(path: Path) -> tuple[str, Losses]:
    """Return a CSV's title and its losses."""
    found: Losses = {}
    with path.open(newline="") as file:
        title = file.readline().strip()
        for row in csv.DictReader(file):
            key = row["backend"], row["precision"], int(row["seed"])
            found.setdefault(key, []).append(float(row["loss"]))
    return title, found


def draw(found: Losses, title: str, path: Path) -> bool:
    """Draw all curves, and how far each is from the first kind's; return whether matplotlib is there."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return False
    kinds = list(dict.fromkeys(key[:2] for key in found))
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 8), sharex=True, layout="constrained"
    )
    for (backend, precision, seed), losses in found.items():
        kind = backend, precision
        style: dict[str, Any] = {"color": f"C{kinds.index(kind)}", "alpha": 0.8, "linewidth": 1}
        steps = range(1, len(losses) + 1)
        first = seed == next(iter(found))[2]
        above.plot(steps, losses, label=f"{backend} {precision}" if first else None, **style)
        base = found[(*kinds[0], seed)]
        apart = [final_loss(losses[:n]) / final_loss(base[:n]) - 1 for n in steps]
        below.plot(steps, [100 * a for a in apart], **style)
    above.set(ylabel="loss, nats per byte")
    below.set(ylabel=f"% from {' '.join(kinds[0])}, mean of {WINDOW} steps", xlabel="step")
    above.legend(fontsize="small")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    save(figure, shorter(title, 110), path)
    return True


def draw_again(args: argparse.Namespace) -> int:
    """Judge the curves of CSVs, and draw them under the first one's name; return 1 without matplotlib."""
    titles, parts = zip(*map(read, args.csv), strict=True)
    found = {key: losses for part in parts for key, losses in part.items()}
    summarize(found, print, args.window)
    table = args.csv[0].with_name(f"{args.csv[0].stem}-differences.csv")
    write_differences(found, titles[0], table, args.window)
    return 0 if draw(found, titles[0], args.csv[0].with_suffix(".png")) else 1
