"""tools/hosts_plan.py: the table and the plot of what a layer over hosts would take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from bench import plot
from bench.hosts.model import Fabric, Given, Prediction, interpolated, predict
from bench.shapes import shapes_from
from bench.tables import header
from megamoe.testing.shapes import Shape

HEAD = " tokens  hosts   MB out    back     launch       wire  two-level  chunks  staged's wire  state GiB"


def measured(path: Path | None, shape: Shape, precision: str) -> Callable[[float], float] | None:
    """Return the launches of a shape in a CSV of tools/latency_sweep.py, if there are some."""
    if path is None:
        return None
    _, table = plot.read(path)
    rows = [
        (m.tokens, m.us)
        for m in table
        if m.shape.split("/")[0] == shape.name
        and (m.precision, m.direction, m.backend) == (precision, "forward", "mega")
    ]
    if not rows:
        raise SystemExit(f"--sweep {path}: no forward of {shape.name} in {precision} by mega")
    return interpolated(rows)


def line(p: Prediction) -> str:
    """Return the figures of a prediction, in us and MB."""
    figures = (p.launch, p.wire, p.two_level)
    return (
        f"{p.tokens:7}{p.hosts:7}{p.out_mb:9.1f}{p.back_mb:8.1f}"
        + "".join(f"{us:11.0f}" for us in figures)
        + f"{p.chunks:8}{p.staged_wire:15.0f}{p.state_gib:11.2f}   {p.advice}"
    )


def run(args: argparse.Namespace) -> int:
    """Print the tables, and write a plot where one is asked for."""
    names = {field.name for field in fields(Fabric)} & vars(args).keys()
    fabric = Fabric(**{name: getattr(args, name) for name in names})
    title = header()
    print(title)
    print(
        f"# {fabric}; times in us of a forward pass on each rank; the wire is a model, never measured"
    )
    found: dict[str, list[Prediction]] = {}
    for shape in shapes_from(args):
        for precision in args.precision:
            launches = measured(args.sweep, shape, precision)
            given = Given(launches, args.groups)
            print(
                f"\n{shape.name} {precision}, launches {'modelled' if launches is None else 'measured'}"
            )
            print(HEAD)
            for tokens in args.tokens:
                for hosts in args.hosts:
                    p = predict(shape, precision, tokens, hosts, fabric, given)
                    found.setdefault(f"{shape.name} {precision}", []).append(p)
                    print(line(p))
    if args.plot is not None:
        drawn = draw(found, title, args.plot)
        print(f"wrote {args.plot}" if drawn else "no picture without matplotlib")
    return 0


def draw(found: dict[str, list[Prediction]], title: str, path: Path) -> bool:
    """Draw times over tokens, a panel for each layer, a colour for each number of hosts; False without matplotlib."""
    pyplot = plot.pyplot_or_none()
    if pyplot is None:
        return False
    size = 5 * len(found), 4
    figure, axes = pyplot.subplots(1, len(found), figsize=size, squeeze=False, layout="constrained")
    for (layer, of), axis in zip(found.items(), axes[0], strict=True):
        for i, hosts in enumerate(sorted({p.hosts for p in of})):
            points = [p for p in of if p.hosts == hosts]
            tokens = [p.tokens for p in points]
            for name, style in (("two_level", "o-"), ("wire", ":"), ("launch", "--")):
                label = f"{hosts} hosts" if name == "two_level" else None
                axis.plot(
                    tokens, [getattr(p, name) for p in points], style, color=f"C{i}", label=label
                )
        axis.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="us", title=layer)
        axis.legend(title="- layer, -- launch, : wire")
    plot.save(figure, plot.shorter(title, 75 * len(found)), path)
    return True
