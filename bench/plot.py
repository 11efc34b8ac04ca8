"""Pictures of what was measured: tables of tools/latency_sweep.py beside the floors; how a figure is written."""

import csv
import io
import json
import re
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

FLOORS = {"gemm": ("GEMM floor", "--"), "hbm": ("HBM floor", ":"), "nvlink": ("NVLink floor", "-.")}
MARKERS = {"cool": "o", "clean": "s", "hot": "^"}


@dataclass
class Measurement:
    """One line of the result."""

    shape: str
    precision: str
    ranks: int
    tokens: int
    mode: str
    backend: str
    us: float
    tflops: float
    clock_ghz: float | None
    utilisation: float | None
    gemm_floor_us: float
    hbm_floor_us: float
    nvlink_floor_us: float
    direction: str = "forward"
    # Of weights: bf16, or main_grad, added to fp32; "of" so many passes at once, "by" which operands.
    gradients: str | None = None
    reserve_sms: int | None = None  # None: the default
    ctas: int | None = None  # that took part in the last call, on the rank with the fewest
    dram_read_gb: float | None = None  # of one call, by ncu
    routing: str = "uniform"  # of megamoe.testing.make_routing

    @property
    def contender(self) -> str:
        """What took turns with others."""
        parts = [self.backend, "quantizes" if self.direction == "quantize" else ""]
        label = self.gradients or ""
        parts += [f"+{label}" if any(s in label for s in ("main_grad", " of ", " by ")) else ""]
        parts += ["" if self.reserve_sms is None else f"-{self.reserve_sms} SMs"]
        parts += ["" if self.routing == "uniform" else self.routing]
        return " ".join(filter(None, parts))


def read(path: Path) -> tuple[str, list[Measurement]]:
    """Return a CSV's title and its measurements."""
    hints = get_type_hints(Measurement)

    def value(name: str, text: str) -> Any:
        kind, *_ = get_args(hints[name]) or (hints[name],)
        return kind(text) if text else None

    with path.open(newline="") as file:
        title = file.readline().strip()
        rows = list(csv.DictReader(file))
    # a CSV of before 2026-11-22 has fewer columns
    names = [field.name for field in fields(Measurement) if field.name in (rows or [{}])[0]]
    return title, [Measurement(**{name: value(name, row[name]) for name in names}) for row in rows]


def pyplot_or_none() -> Any:
    """Return matplotlib's, which draws to files; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, title: str, path: Path, figures: Any = None) -> None:
    """Write a figure of pyplot below its title as a PNG. figures: what it shows, kept in the file (`figures_in`)."""
    from matplotlib import pyplot
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    figure.suptitle(title, fontsize="small")
    buffer, info = io.BytesIO(), PngInfo()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    if figures is not None:
        info.add_text("figures", json.dumps(figures))
    # a palette: a third of the size, in a repository that keeps every picture
    picture = Image.open(buffer).convert("RGB").quantize(64)
    picture.save(path, format="png", optimize=True, pnginfo=info)


def wrote(drawn: bool, picture: Path, *files: Path) -> str:
    """Return what a command says of its files. drawn: whether there is a picture, too."""
    made = f" and {picture}" if drawn else "; no picture without matplotlib"
    return f"wrote {', '.join(map(str, files))}{made}"


def figures_in(path: Path) -> Any:
    """Return the figures that a PNG shows; None where it has none. Needs no library."""
    found = re.search(rb"tEXtfigures\0([^\0]*\})", path.read_bytes()) if path.exists() else None
    return json.loads(found[1]) if found else None


def draw_bars(found: dict[str, dict[str, dict[str, float]]], title: str, path: Path) -> bool:
    """Draw speed-ups by model and tokens, a panel for each contender; return whether matplotlib is there."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(1, len(found), figsize=(12, 3.9), layout="constrained")
    for axis, (what, models) in zip(axes, found.items(), strict=True):
        tokens = list(next(iter(models.values())))
        width = 0.85 / len(tokens)
        form = "%.1fx" if max(max(of.values()) for of in models.values()) > 3 else "%.2f"
        for i, count in enumerate(tokens):
            heights = [of[count] for of in models.values()]
            places = [m + (i - (len(tokens) - 1) / 2) * width for m in range(len(models))]
            shade = 0.25 + 0.7 * i / (len(tokens) - 1)
            bars = axis.bar(
                places, heights, width, color=pyplot.get_cmap("Blues")(shade), label=count
            )
            axis.bar_label(bars, fmt=form, fontsize=8, padding=1)
        axis.axhline(1, color="gray", linewidth=1, linestyle="--", zorder=0)
        axis.set_xticks(range(len(models)), models)
        axis.set_title(what, fontweight="bold")
        axis.set_ylabel("speed-up; dashed: equal")
        axis.legend(title="tokens per GPU", fontsize="small", ncols=len(tokens))
        axis.margins(y=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, title, path, found)
    return True


def draw_panel(axis: Any, here: list[Measurement], main: str) -> None:
    """Draw one shape in one precision: a line for each backend and mode, and the floors of `main`."""
    colours = {backend: f"C{i}" for i, backend in enumerate(sorted({m.contender for m in here}))}
    for backend, mode in sorted({(m.contender, m.mode) for m in here}):
        points = sorted(
            {m.tokens: m for m in here if (m.contender, m.mode) == (backend, mode)}.items()
        )
        axis.plot(
            [tokens for tokens, _ in points],
            [m.us for _, m in points],
            color=colours[backend],
            marker=MARKERS[mode],
            linestyle="-" if mode == "cool" else (0, (6, 2)),
            label=f"{backend} {points[0][1].precision}, {mode}",
        )
    own = sorted({m.tokens: m for m in here if m.contender == main}.items())
    for name, (label, style) in FLOORS.items():
        values = [getattr(m, f"{name}_floor_us") for _, m in own]
        if not any(values):
            continue
        if len(own) == 1:  # a line needs two points
            axis.axhline(values[0], linestyle=style, color="gray", label=label)
        else:
            axis.plot([tokens for tokens, _ in own], values, style, color="gray", label=label)
    axis.set(xlabel="tokens per rank", ylabel="us", yscale="log")
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="x-small")


def shorter(title: str, columns: int) -> str:
    """Return the title in lines of at most `columns`, without the commands, which the CSV has."""
    lines = (line.lstrip("# ").partition(": python ")[0] for line in title.splitlines())
    return "\n".join(textwrap.fill(line, columns) for line in dict.fromkeys(lines))


def plot(found: list[Measurement], title: str, path: Path) -> bool:
    """Draw a panel for each shape and direction of the first contender; return whether matplotlib is there."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return False
    found = [m for m in found if m.direction != "quantize"]
    main, backend = found[0].contender, found[0].backend
    of_main = [m for m in found if m.contender == main]
    panels = list(dict.fromkeys((m.shape, m.direction, m.precision) for m in of_main))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (shape, direction, precision) in zip(axes.flat, panels, strict=False):
        here = [
            m
            for m in found
            if (m.shape, m.direction) == (shape, direction)
            and (m.precision == precision or m.backend != backend)
        ]
        draw_panel(axis, here, main)
        what = "" if direction == "forward" else f" {direction},"
        axis.set_title(f"{shape},{what} {precision}, EP{here[0].ranks}")
    save(figure, shorter(title, 75 * columns), path)
    return True
