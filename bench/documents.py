"""Generate parts of README.md and docs/, for tools/gen_docs.py: what, and from which sources."""

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
from megamoe.backends.options import OF_LAYER, Options
from megamoe.backends.select import BACKENDS
from megamoe.core import env


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
    """Return one row per field of Options: name, default, who takes it, the meaning that its docstring has."""
    taken = {name: inspect.signature(made).parameters for name, made in BACKENDS.items()}
    rows: list[tuple[str, ...]] = []
    for option, meaning in re.findall(
        r"^        (\w+): (.*)$", Options.__doc__ or "", re.MULTILINE
    ):
        by = ", ".join(f"`{name}`" for name, parameters in taken.items() if option in parameters)
        by = "layer" if option in OF_LAYER else by or "over hosts"
        rows.append((f"`{option}`", f"`{getattr(Options(), option)}`", by, meaning))
    of_users = [row for row in rows if not row[-1].startswith("for developers")]
    if (found := [row[0].strip("`") for row in rows]) != list(vars(Options())):
        raise SystemExit(f"{__file__}: the docstring of Options has {found}")
    return markdown(("option", "default", "taken by", "meaning"), of_users)


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
