"""Generate parts of README.md and docs/, for tools/gen_docs.py: what, and from which sources."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

from bench.api_reference import reference
from bench.figures import MEASUREMENTS, TITLE, speedups
from bench.figures import PARTS as FIGURES
from bench.plot import draw_bars, figures_in
from bench.tables import markdown
from bench.tree import ROOT
from megamoe.backends.hosts.backend import HostsBackend
from megamoe.backends.select import BACKENDS, OPTIONS
from megamoe.core import env

MEANINGS = {
    "window": "window to share with other layers; default: the layer creates its own",
    "reserve_sms": "SMs left to other kernels; default: a training launch takes the SMs that are free",
    "pool_rows": "rows of the pool; fewer rows cost more passes and never change results",
    "timeout_s": "longest wait in seconds for a flag or, over several hosts, for a rank",
    "chunks": "parts into which a call over hosts is split; default: by the layer's sizes",
    "exchange": "`exact`: only needed rows; `static`: fixed slots, which CUDA graphs can capture",
}


def environment() -> str:
    """Return one row per variable: name, default, meaning with the choices."""
    rows: list[tuple[str, ...]] = []
    for v in env.TABLE.values():
        choices = " (" + ", ".join(f"`{c}`" for c in v.choices) + ")" if v.choices else ""
        rows.append(
            (f"`{v.name}`", f"`{v.default}`" if v.default else "empty", v.meaning + choices)
        )
    return markdown(("variable", "default", "meaning"), rows)


def options() -> str:
    """Return one row per option: name, default, the backends that take it."""
    if differing := set(OPTIONS) ^ set(MEANINGS):
        raise SystemExit(f"{__file__}: MEANINGS and select.OPTIONS differ: {differing}")
    taken = {
        name: inspect.signature(getattr(importlib.import_module(module), cls)).parameters
        for name, (module, cls) in BACKENDS.items()
    }
    over_hosts = inspect.signature(HostsBackend).parameters
    rows: list[tuple[str, ...]] = []
    for option in OPTIONS:
        by = [name for name, parameters in taken.items() if option in parameters]
        if not by:
            default = str(over_hosts[option].default)
            rows.append((f"`{option}`", f"`{default}`", "over hosts", MEANINGS[option]))
            continue
        defaults = {name: str(taken[name][option].default) for name in by}
        same = len(set(defaults.values())) == 1
        default = defaults[by[0]] if same else ", ".join(f"{d} ({n})" for n, d in defaults.items())
        rows.append(
            (f"`{option}`", f"`{default}`", ", ".join(f"`{b}`" for b in by), MEANINGS[option])
        )
    return markdown(("option", "default", "taken by", "meaning"), rows)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    **FIGURES,
    "README.md": {**FIGURES["README.md"], "environment": environment, "options": options},
    "api.md": {"api": reference},
}
FILES = [ROOT / name if name == "README.md" else ROOT / "docs" / name for name in PARTS]
PICTURE = MEASUREMENTS / "speedup.png"


def generated(text: str, parts: dict[str, Callable[[], str]]) -> tuple[str, list[str]]:
    """Return the document with fresh parts, and the names of the parts that were stale."""
    stale = []
    for name, make in parts.items():
        pattern = re.compile(
            rf"(<!-- {name}: begin[^\n]*-->\n\n)(.*?)(\n\n<!-- {name}: end -->)", re.DOTALL
        )
        found = list(pattern.finditer(text))
        if len(found) != 1:
            raise SystemExit(f"the markers of {name!r} are missing or not unique")
        (_, begin), (end, _) = found[0].span(1), found[0].span(3)
        fresh = make()
        if text[begin:end] != fresh:
            stale.append(name)
        text = text[:begin] + fresh + text[end:]
    return text, stale


def write(files: list[Path], check: bool) -> int:
    """Rewrite the generated parts of these documents and README's picture; with `check` only report stale ones."""
    code = 0
    bars = speedups()
    if figures_in(PICTURE) != bars:
        drawn = not check and draw_bars(bars, TITLE, PICTURE)
        code = int(not drawn)
        print(
            f"{PICTURE}: "
            + ("drawn" if drawn else "stale: run python tools/gen_docs.py, with matplotlib")
        )
    for file in files:
        text, stale = generated(file.read_text(), PARTS[file.name])
        if check:
            code |= bool(stale)
            for name in stale:
                print(f"{file}: {name!r} is stale: run python tools/gen_docs.py")
            continue
        if stale:
            file.write_text(text)
        print(f"{file}: " + (f"rewrote {', '.join(stale)}" if stale else "up to date"))
    return code
