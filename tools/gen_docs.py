#!/usr/bin/env python3
"""Write the generated parts of README.md (environment variables, options of the backends) and of docs/api.md.

    python tools/gen_docs.py            rewrites what lies between the markers
    python tools/gen_docs.py --check    exit code 1 when a part is stale, and says which

A part stands between `<!-- NAME: begin ... -->` and `<!-- NAME: end -->`. Sources: megamoe/core/env.py, the
constructors of the backends in megamoe/layer/functional.py, docstrings of what is public.
"""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from api_reference import reference
from common import ROOT

from megamoe.core import env
from megamoe.layer.functional import BACKENDS, OPTIONS

MEANINGS = {
    "window": "a window to share with other layers; their own otherwise",
    "reserve_sms": "SMs left to other kernels; unset: a launch that trains takes those that are free",
    "pool_rows": "rows held at a time; fewer cost passes, never results",
    "timeout_s": "longest wait for a flag, in seconds",
    "pdl": "programmatic dependent launch",
    "profile": "the variant with timestamps",
    "step_blocks": "blocks of a step of the tile order; 0: the kernel chooses",
    "num_ctas": "emulated CTAs of each rank",
    "rounding": '"kernel" rounds where the kernel does, "none" keeps fp32',
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("| --- ", "|---")


def environment() -> str:
    """Return one row a variable: name, default, meaning with the choices."""
    rows = []
    for v in env.TABLE.values():
        choices = " (" + ", ".join(f"`{c}`" for c in v.choices) + ")" if v.choices else ""
        rows.append(
            (f"`{v.name}`", f"`{v.default}`" if v.default else "empty", v.meaning + choices)
        )
    return table(("variable", "default", "meaning"), rows)


def options() -> str:
    """Return one row an option: name, default, the backends that take it."""
    if differing := set(OPTIONS) ^ set(MEANINGS):
        raise SystemExit(f"{__file__}: MEANINGS and functional.OPTIONS differ: {differing}")
    taken = {
        name: inspect.signature(getattr(importlib.import_module(module), cls)).parameters
        for name, (module, cls) in BACKENDS.items()
    }
    rows = []
    for option in OPTIONS:
        by = [name for name, parameters in taken.items() if option in parameters]
        defaults = {name: str(taken[name][option].default) for name in by}
        same = len(set(defaults.values())) == 1
        default = defaults[by[0]] if same else ", ".join(f"{d} ({n})" for n, d in defaults.items())
        rows.append(
            (f"`{option}`", f"`{default}`", ", ".join(f"`{b}`" for b in by), MEANINGS[option])
        )
    return table(("option", "default", "taken by", "meaning"), rows)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"environment": environment, "options": options},
    "api.md": {"api": reference},
}
FILES = [ROOT / "README.md", ROOT / "docs" / "api.md"]


def generated(text: str, parts: dict[str, Callable[[], str]]) -> tuple[str, list[str]]:
    """Return the document with fresh parts, and the names of those that were stale."""
    stale = []
    for name, make in parts.items():
        pattern = re.compile(
            rf"(<!-- {name}: begin[^\n]*-->\n\n)(.*?)(\n\n<!-- {name}: end -->)", re.DOTALL
        )
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"the markers of {name!r} are missing or not unique")
        fresh = make()
        if pattern.search(text)[2] != fresh:
            stale.append(name)
        text = pattern.sub(lambda m, fresh=fresh: m[1] + fresh + m[3], text)
    return text, stale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--file", type=Path, nargs="+", default=FILES)
    args = parser.parse_args(arguments)
    code = 0
    for file in args.file:
        text, stale = generated(file.read_text(), PARTS[file.name])
        if args.check:
            code |= bool(stale)
            for name in stale:
                print(f"{file}: {name!r} is stale: run python tools/gen_docs.py")
            continue
        if stale:
            file.write_text(text)
        print(f"{file}: " + (f"rewrote {', '.join(stale)}" if stale else "up to date"))
    return code


if __name__ == "__main__":
    sys.exit(main())
