"""Compile kernels into the cache, or export them to a folder for machines without a compiler. Needs no GPU.

python -m megamoe.jit --all                      compile every kernel into the cache
python -m megamoe.jit --precision fp8 --activation swiglu
python -m megamoe.jit --export FOLDER            write every kernel to a folder; set MEGAMOE_PREBUILT to it
python -m megamoe.jit --export FOLDER --only fp8-swiglu quantize-weights
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megamoe.core import env
from megamoe.core.errors import CompileError, ConfigError
from megamoe.jit import prebuilt
from megamoe.jit.compiler import NVRTC_FLAGS, CompileResult, check_installed, compile_source
from megamoe.jit.grouped import grouped_variants
from megamoe.jit.source import ACTIVATIONS, PRECISIONS, QUANTIZE, QUANTIZE_SOURCE, variants


def _build(name: str, source: str) -> tuple[CompileResult | CompileError, float]:
    """Return the result, or why there is none, and the seconds that it took."""
    start = time.perf_counter()
    try:
        result: CompileResult | CompileError = compile_source(source, f"{name}.cu")
    except CompileError as error:
        result = error
    return result, time.perf_counter() - start


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megamoe.jit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--all", action="store_true", help="every variant, and the FP8 quantization")
    add("--precision", choices=PRECISIONS)
    add("--activation", choices=ACTIVATIONS)
    add("--only", nargs="+", metavar="NAME", help="these kernels, as --all lists them")
    add("--export", type=Path, metavar="FOLDER", help="write them to a new folder; all by default")
    add("--profile", action="store_true", help="with in-kernel timestamps")
    return parser


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """Return name -> source of what the arguments ask for; end with a message if they ask for nothing."""
    narrowed = args.precision or args.activation
    if not (args.all or narrowed or args.only or args.export):
        parser.error("say --all, --export FOLDER, --only, or --precision and/or --activation")
    units = {QUANTIZE: QUANTIZE_SOURCE} if args.all or not narrowed else {}
    units |= {
        str(v): v.source()
        for v in (*variants(args.profile), *grouped_variants())
        if args.precision in (None, v.precision) and args.activation in (None, v.activation)
    }
    if unknown := set(args.only or ()) - set(units):
        parser.error(f"--only {' '.join(sorted(unknown))}: expected some of {', '.join(units)}")
    return {name: source for name, source in units.items() if name in (args.only or units)}


def _print_row(name: str, result: CompileResult, total: float) -> None:
    built = f"{result.seconds:.2f}s" if result.seconds else result.origin
    print(
        f"{name} {result.registers:5} {result.stack_bytes:6} {result.spill_bytes:6} "
        f"{len(result.cubin):8} {built:>8} {total:6.3f}s"
    )
    for remark in result.warnings:
        print(f"    {remark}")


def _build_all(units: dict[str, str]) -> list[tuple[str, str, CompileResult]]:
    """Compile, print a row each, return name, source and result of those that compiled."""
    width = max(map(len, units))
    head = "kernel", "regs", "stack", "spill", "cubin", "build", "total"
    print("{:{width}} {:>5} {:>6} {:>6} {:>8} {:>8} {:>7}".format(*head, width=width))
    done = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # as NVRTC compiles
        made = pool.map(_build, units, units.values())
        for (name, source), (result, total) in zip(units.items(), made, strict=True):
            if isinstance(result, CompileError):
                print(f"{name:{width}} FAILED\n{result}")
                continue
            _print_row(f"{name:{width}}", result, total)
            done.append((name, source, result))
    return done


def main(arguments: list[str] | None = None) -> int:
    """Compile the chosen kernels; return 1 when one does not compile, and then export none."""
    parser = _parser()
    args = parser.parse_args(arguments)
    units = _chosen(parser, args)
    try:
        if args.export:
            prebuilt.check_target(args.export)
        if prebuilt.place() is None:  # else a kernel that is not there says what is missing
            check_installed()
        print(f"cache {env.cache_dir()}")
        built = _build_all(units)
        if len(built) < len(units):
            return 1
        if args.export:
            prebuilt.write(args.export, NVRTC_FLAGS, built)
            print(f"wrote {len(built)} kernels: MEGAMOE_PREBUILT={args.export}")
    except (CompileError, ConfigError, OSError) as error:
        print(f"megamoe.jit: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
