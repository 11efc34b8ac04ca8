"""tools/timeline.py: a launch as time, by the kernel's own timestamps: table, Chrome trace, picture."""

import argparse
import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.layers import Entry, layers_of
from bench.plot import wrote
from bench.ranks import Rank
from bench.shapes import local_shapes, problem_of
from bench.tables import header, write_table
from bench.timing import Timer
from megamoe.backends.call import Call
from megamoe.backends.emulate.emulation import Emulation
from megamoe.jit.abi import GEMMS
from megamoe.jit.paths import CSRC
from megamoe.launch.arguments import PROFILE_SLOTS
from megamoe.testing import make_inputs, make_weights

WARM_UP = 5
# role -> its spans: name, the mark where it begins, the one where it ends. A span whose mark is missing is left out.
ROLES = {
    "crew 0": [("route", "start", "routed")],
    "crew 1": [("stage x", "start", "staged")],
    "transport": [
        ("plan", "routed", "planned"),
        ("dispatch", "planned", "dispatched"),
        ("reduce, combine", "dispatched", "combined"),
    ],
    "math": [
        ("wait for a slot", "staged", "first_slot"),
        ("tiles", "first_slot", "data_done|math_done"),
        ("tiles of weight gradients", "data_done", "math_done"),
        ("reduce, combine", "math_done", "combined"),
    ],
}
# of a CTA, one after the other
PHASES = [
    ("route", "start", "routed"),
    ("plan", "routed", "planned"),
    ("first rows", "planned", "first_slot"),
    ("tiles", "first_slot", "data_done|math_done"),
    ("tiles of weight gradients", "data_done", "math_done"),
    ("tail", "math_done", "combined"),
    ("exit", "combined", "end"),
]
WAITS = {"rows_wait": "load_a, for rows", "h_wait": "load_a, for h", "slot_wait": "math, for slots"}


def mark_names(of: str = "Mark") -> list[str]:
    """Return the names of a CTA's marks, or of a tile's (of="TileMark"), in the kernel's order."""
    text = (CSRC / "megamoe" / "cta" / "profile.cuh").read_text()
    (body,) = re.findall(rf"enum class {of} : int \{{(.*?)\}};", text, re.DOTALL)
    return re.findall(r"\w+", re.sub(r"//.*", "", body))


def columns() -> list[str]:
    """Return the names of all words of a CTA: its marks, then those of its first tiles."""
    marks, of_tile = mark_names(), mark_names("TileMark")
    tiles = (PROFILE_SLOTS - len(marks)) // len(of_tile)
    return marks + [f"tile{i}_{name}" for i in range(tiles) for name in of_tile]


@dataclass(frozen=True)
class Tile:
    """A tile: its GEMM, how many of that GEMM the CTA had before, and when it reached which mark, in us."""

    gemm: str
    number: int
    at: dict[str, float]


@dataclass(frozen=True)
class Cta:
    """The marks of one CTA that took part, by name, in us since the rank's first CTA began; waits in us."""

    rank: int
    index: int
    at: dict[str, float]
    waits: dict[str, float]
    ghz: dict[str, float]  # the SM clock, of all tiles or of rows' and weights' by themselves
    tiles: list[Tile]  # its first ones

    def spans(self, of: list[tuple[str, str, str]]) -> list[tuple[str, float, float]]:
        """Return (name, begin, end) of those that this CTA has."""
        found = []
        for name, first, last in of:
            end = next((self.at[mark] for mark in last.split("|") if mark in self.at), None)
            if first in self.at and end is not None and end >= self.at[first]:
                found.append((name, self.at[first], end))
        return found


def read_marks(rank: int, stamps: list[list[int]]) -> list[Cta]:
    """stamps: a line for each CTA, in the order of columns(). Marks before a CTA's start are of older launches."""
    names, marks, found = columns(), mark_names(), []
    for line in stamps:
        if len(line) != len(names):
            raise SystemExit(
                f"{len(line)} marks of a CTA, expected {len(names)}: {', '.join(names)}"
            )
    first = min((line[names.index("start")] for line in stamps), default=0)
    for index, line in enumerate(stamps):
        named = dict(zip(names, line, strict=True))
        start, end = named["start"], named["end"]
        if named["routed"] < start or end <= start:
            continue  # it came when the door was closed
        cycles = named["clock_end"] - named["clock_start"]
        us = (end - start) / 1e3 / max(cycles, 1)
        instants = [n for n in marks if n not in WAITS and not n.startswith("clock")]
        at = {n: (named[n] - first) / 1e3 for n in instants if start <= named[n] <= end}
        waits = {n: named[n] * us for n in WAITS}
        tiles = read_tiles(line[len(marks) :], start, end, first)
        found.append(Cta(rank, index, at, waits, clocks(named, "data_done" in at), tiles))
    return found


def read_tiles(words: list[int], start: int, end: int, first: int) -> list[Tile]:
    """Return the first tiles of a CTA that took part from start to end. words: behind its marks."""
    names = mark_names("TileMark")
    found: list[Tile] = []
    for i in range(0, len(words), len(names)):
        named = dict(zip(names, words[i : i + len(names)], strict=True))
        what = named.pop("what")
        at = {name: (time - first) / 1e3 for name, time in named.items() if start <= time <= end}
        if "asked" in at and what >> 8:  # not one that the CTA loads for its partner alone
            gemm = GEMMS[what & 0xFF]
            found.append(Tile(gemm, sum(tile.gemm == gemm for tile in found), at))
    return found


def clocks(named: dict[str, int], has_weights: bool) -> dict[str, float]:
    """Return the SM clock of a CTA in GHz, of each phase. named: its marks."""
    ends = {"GHz": ("start", "end")}
    if has_weights:
        ends = {"rows_GHz": ("start", "data_done"), "weights_GHz": ("data_done", "end")}
    clock = {"start": "clock_start", "data_done": "clock_data", "end": "clock_end"}
    return {
        name: (named[clock[last]] - named[clock[first]]) / max(named[last] - named[first], 1)
        for name, (first, last) in ends.items()
    }


def trace(ctas: list[Cta], chosen: int, title: str) -> dict[str, Any]:
    """Return a Chrome trace: of each rank a process with the roles of one CTA, and one with all CTAs' phases."""
    events: list[dict[str, Any]] = []

    def name(pid: int, tid: int | None, text: str) -> None:
        kind = "process_name" if tid is None else "thread_name"
        event = {"ph": "M", "name": kind, "pid": pid, "tid": tid or 0, "args": {"name": text}}
        events.append(event)

    def add(pid: int, tid: int, spans: list[tuple[str, float, float]], args: Any = None) -> None:
        for text, begin, end in spans:
            event = {"ph": "X", "name": text, "pid": pid, "tid": tid}
            event |= {"ts": begin, "dur": end - begin}
            events.append(event | ({"args": args} if args else {}))

    for rank in sorted({cta.rank for cta in ctas}):
        roles, all_ctas = 2 * rank, 2 * rank + 1
        name(roles, None, f"rank {rank}: roles of CTA {chosen}")
        name(all_ctas, None, f"rank {rank}: CTAs")
        for cta in (c for c in ctas if c.rank == rank):
            waits = {WAITS[n]: round(us, 3) for n, us in cta.waits.items()}
            name(all_ctas, cta.index, f"CTA {cta.index}")
            add(all_ctas, cta.index, cta.spans(PHASES), {"waits, us in the launch": waits})
            if cta.index == chosen:
                for tid, (role, spans) in enumerate(ROLES.items()):
                    name(roles, tid, role)
                    add(roles, tid, cta.spans(spans))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"title": title}}


def draw(ctas: list[Cta], chosen: int, title: str, path: Path) -> bool:
    """Draw rank by rank one CTA's roles above all CTAs' phases; False without matplotlib."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    ranks = sorted({cta.rank for cta in ctas})
    names = [name for name, *_ in PHASES] + [name for spans in ROLES.values() for name, *_ in spans]
    colours = {name: colormaps["tab20"](i) for i, name in enumerate(dict.fromkeys(names))}
    figure = Figure(figsize=(8 * len(ranks), 9), layout="constrained")
    axes = figure.subplots(2, len(ranks), squeeze=False, sharex="col", height_ratios=[1, 3])
    for column, rank in enumerate(ranks):
        mine = [c for c in ctas if c.rank == rank]
        seen: set[str] = set()

        def bars(
            axis: Any, y: float, spans: list[tuple[str, float, float]], seen: set[str] = seen
        ) -> None:
            for name, begin, end in spans:
                label = None if name in seen else name
                seen.add(name)
                bar = [(begin, end - begin)]
                axis.broken_barh(bar, (y - 0.4, 0.8), color=colours[name], label=label)

        above, below = axes[0][column], axes[1][column]
        for cta in mine:
            bars(below, cta.index, cta.spans(PHASES))
            if cta.index == chosen:
                for y, spans in enumerate(ROLES.values()):
                    bars(above, y, cta.spans(spans))
        above.set_yticks(range(len(ROLES)), list(ROLES))
        above.set_title(f"rank {rank}: roles of CTA {chosen}", fontsize=9)
        below.set_ylabel("CTA")
        below.yaxis.set_major_locator(MaxNLocator(integer=True))
        below.set_xlabel("us since the first CTA began")
        for axis in (above, below):
            axis.invert_yaxis()
        handles = [*above.get_legend_handles_labels()[0], *below.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=7)
    figure.suptitle(title, fontsize=6, wrap=True)
    figure.savefig(path, dpi=120)
    return True


def medians(launches: list[list[float]]) -> tuple[int, float, float]:
    """Return how many CTAs there are, the median and the latest of them, each the median over launches."""
    of_each = [(len(ctas), median_low(ctas), max(ctas)) for ctas in launches if ctas]
    count, middle, latest = map(median_low, zip(*of_each, strict=True))
    return count, middle, latest


def tile_summary(launches: list[list[Cta]], rank: int) -> list[str]:
    """Return a line for the first tiles of each GEMM: how many CTAs have one, and the medians of its marks."""
    names = [name for name in mark_names("TileMark") if name != "what"]
    by_tile: dict[tuple[str, int], list[list[Tile]]] = {}
    for ctas in launches:
        of_launch: dict[tuple[str, int], list[Tile]] = {}
        for tile in (tile for cta in ctas if cta.rank == rank for tile in cta.tiles):
            of_launch.setdefault((tile.gemm, tile.number), []).append(tile)
        for key, tiles in of_launch.items():
            by_tile.setdefault(key, []).append(tiles)
    lines = []
    for (gemm, number), found in sorted(by_tile.items()):
        line = f"{rank:<6}{f'{gemm} {number}':<12}{median_low(map(len, found)):>5}"
        for name in names:
            times = [[tile.at[name] for tile in tiles if name in tile.at] for tiles in found]
            line += f"{medians(times)[1]:>11.2f}" if any(times) else f"{'-':>11}"
        lines.append(line)
    head = f"{'rank':<6}{'tile':<12}{'CTAs':>5}" + "".join(f"{name:>11}" for name in names)
    return [head, *lines] if lines else []


def summary(launches: list[list[Cta]]) -> list[str]:
    """Return a line for each mark of each rank, and for its waits: `medians` of them."""
    lines = [f"{'rank':<6}{'mark':<12}{'CTAs':>5}{'median us':>11}{'latest us':>11}"]
    lines[0] += f", medians of {len(launches)} launches" * (len(launches) > 1)
    for rank in sorted({cta.rank for ctas in launches for cta in ctas}):
        mine = [[c for c in ctas if c.rank == rank] for ctas in launches]
        marks = [(n, [[c.at[n] for c in ctas if n in c.at] for ctas in mine]) for n in mark_names()]
        rows = sorted(((n, *medians(v)) for n, v in marks if any(v)), key=lambda row: row[2])
        rows += [(n, *medians([[c.waits[n] for c in ctas] for ctas in mine])) for n in WAITS]
        phases = next((c.ghz for ctas in mine for c in ctas), {})
        rows += [(n, *medians([[c.ghz[n] for c in ctas] for ctas in mine])) for n in phases]
        for name, count, middle, latest in rows:
            lines.append(f"{rank:<6}{name:<12}{count:>5}{middle:>11.2f}{latest:>11.2f}")
        lines += tile_summary(launches, rank)
    return lines


def show_emulated(args: argparse.Namespace) -> int:
    """Record launches on CPU fibers and show them."""
    (shape,), tokens = local_shapes(args), args.tokens
    precision = "bf16" if args.direction == "backward" else args.precision
    problem = problem_of(shape, tokens, Rank(0, args.ranks or 2, torch.device("cpu")), precision)
    ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
    inputs = [make_inputs(p, tokens, rank=p.rank) for p in ranks]
    masters = [make_weights(p, quantize=False) for p in ranks]
    emulation = Emulation(ranks[0], profile=True)
    calls = [
        Call(i.x, i.topk_ids, i.topk_weights, m.quantized(p))
        for i, m, p in zip(inputs, masters, ranks, strict=True)
    ]
    of_masters = [c._replace(weights=m) for c, m in zip(calls, masters, strict=True)]
    dys = [torch.randn_like(i.x) for i in inputs]
    recorded = []
    for seed in range(args.samples):
        if args.direction == "forward":
            emulation.forward_all(calls, seed=seed)
        else:
            _, states = emulation.train_all(calls, seed=seed)
            emulation.backward_all(of_masters, dys, states, seed=seed)
        recorded.append([marks.clone() for marks in emulation.profiles])
    return write(recorded, args)


def worker(me: Rank, args: argparse.Namespace) -> int:
    (shape,), entry = local_shapes(args), Entry("mega", args.precision, args.direction)
    timer = Timer(me.device, samples=1)
    with torch.no_grad(), layers_of(shape, [entry], args.tokens, me, profile=True) as layers:
        layer = layers[entry]
        contender = layer.contender(args.tokens)
        recorded = []
        for _ in range(WARM_UP + args.samples):
            before = contender.before()
            timer.flush()
            timer.synchronize()
            dist.barrier()
            contender.timed(before)
            recorded.append(layer.backend.profile.cpu())
        everyone = me.gather(recorded[WARM_UP:])
    return write(zip(*everyone, strict=True), args) if me.is_first else 0


def write(launches: Iterable[Sequence[Tensor]], args: argparse.Namespace) -> int:
    """Write the CSV, and what is made of it. launches: of every launch the marks of each rank."""
    table = args.out / f"{args.name}.csv"
    rows = [
        [sample, rank, cta, *line[: len(columns())]]
        for sample, marks in enumerate(launches)
        for rank, of_rank in enumerate(marks)
        for cta, line in enumerate(of_rank.tolist())
    ]
    write_table(table, header(), rows, ["sample", "rank", "cta", *columns()])
    return show(table, args)


def show(table: Path, args: argparse.Namespace) -> int:
    """Print the marks in a CSV, write trace and picture of the launch that takes the median time."""
    with table.open(newline="") as file:
        title = file.readline().strip()
        names, *rows = csv.reader(file)
    if "sample" not in names:  # a CSV of one launch, from before there were samples
        rows = [["0", *row] for row in rows]
    by_rank: dict[str, dict[int, list[list[int]]]] = {}
    for sample, rank, _, *line in rows:
        of_launch = by_rank.setdefault(sample, {})
        of_launch.setdefault(int(rank), []).append([int(mark) for mark in line])
    launches = [
        [cta for rank, lines in of_launch.items() for cta in read_marks(rank, lines)]
        for of_launch in by_rank.values()
    ]
    launches.sort(key=lambda ctas: max((cta.at["end"] for cta in ctas), default=0.0))
    ctas = launches[(len(launches) - 1) // 2]
    if not any(cta.index == args.cta for cta in ctas):
        raise SystemExit(f"--cta {args.cta}: not one of the {len(ctas)} CTAs that took part")
    print(title, *summary(launches), sep="\n")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name}.json"
    path.write_text(json.dumps(trace(ctas, args.cta, title)))
    picture = path.with_suffix(".png")
    print(wrote(draw(ctas, args.cta, title, picture), picture, table, path))
    return 0
