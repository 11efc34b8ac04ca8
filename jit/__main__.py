"""Warm the kernel cache: `python -m megamoe.jit --all`, or `--precision fp8 --activation swiglu`. Needs no GPU."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from megamoe import env
from megamoe.errors import CompileError, ConfigError
from megamoe.jit.compiler import CompileResult, check_installed, compile_variant
from megamoe.jit.source import ACTIVATIONS, PRECISIONS, Variant, variants


def _timed(build: Callable[[], CompileResult]) -> tuple[CompileResult | CompileError, float]:
    start = time.perf_counter()
    try:
        result: CompileResult | CompileError = build()
    except CompileError as error:
        result = error
    return result, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Compile the chosen variants; return 1 when one does not compile."""
    parser = argparse.ArgumentParser(prog="python -m megamoe.jit", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="every variant, and the FP8 quantization"
    )
    parser.add_argument("--precision", choices=PRECISIONS)
    parser.add_argument("--activation", choices=ACTIVATIONS)
    parser.add_argument("--profile", action="store_true", help="with in-kernel timestamps")
    parser.add_argument("--flag", action="append", default=[], help="extra compiler flag")
    parser.add_argument("--log", action="store_true", help="print the compiler's log")
    parser.add_argument("--save", metavar="FILE", help="also write the cubin of the last variant")
    chosen = parser.parse_args(arguments)
    if not (chosen.all or chosen.precision or chosen.activation):
        parser.error("say --all, or --precision and/or --activation")
    wanted: list[Variant] = [
        v
        for v in variants(chosen.profile)
        if chosen.precision in (None, v.precision) and chosen.activation in (None, v.activation)
    ]
    try:
        check_installed()
    except (CompileError, ConfigError) as error:
        print(f"megamoe.jit: {error}", file=sys.stderr)
        return 1
    print(f"cache {env.cache_dir()}, compiler {env.compiler()}")
    print(
        f"{'variant':26} {'regs':>5} {'stack':>6} {'spill':>6} {'cubin':>8} {'build':>7} {'total':>7}"
    )
    failed = 0
    builds = [(str(v), partial(compile_variant, v, chosen.flag)) for v in wanted]
    if chosen.all:  # the layer's other kernel; its module needs cuda.bindings, which may be missing
        from megamoe.jit.quantize import compile_quantize

        builds.insert(0, ("quantize-weights", compile_quantize))
    # NVRTC compiles in several threads at once.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = list(pool.map(_timed, [build for _, build in builds]))
    for (name, _), (result, total) in zip(builds, results, strict=True):
        if isinstance(result, CompileError):
            failed += 1
            print(f"{name:26} FAILED\n{result}")
            continue
        built = f"{result.seconds:.2f}s" if result.seconds else "cached"
        print(
            f"{name:26} {result.registers:5} {result.stack_bytes:6} {result.spill_bytes:6} "
            f"{len(result.cubin):8} {built:>7} {total:6.3f}s"
        )
        for remark in result.warnings:
            print(f"    {remark}")
        if chosen.log:
            print(result.log)
        if chosen.save:
            with open(chosen.save, "wb") as file:
                file.write(result.cubin)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
