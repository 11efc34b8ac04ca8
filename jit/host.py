"""Variant -> shared object of the emulated kernel (csrc/fibers). Needs g++ and no GPU."""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from megamoe.core.errors import CompileError
from megamoe.jit import cache, paths
from megamoe.jit.grouped import GroupedVariant
from megamoe.jit.source import Variant

# -O1 compiles in 2.6 s where -O2 takes 3.9, and what it makes runs 5 to 20 % longer: the tensor cores' loops name their
# vectors themselves (csrc/fibers/wgmma.h) and pick the widest instructions at run time. Hidden symbols and no unique
# ones: each shared object has its own machine. Without float contraction, x * y + z rounds twice on every host.
FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-DMEGAMOE_EMULATE",
)


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, str]:
    """Return the path of g++ and its version."""
    path = shutil.which("g++")
    if path is None:
        raise CompileError("the emulator needs g++ (12 or later) on PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, version.splitlines()[0]


def build_source(source: str, flags: tuple[str, ...] = (), directory: Path | None = None) -> Path:
    """Compile a translation unit for the emulated machine; return the shared object, from the cache if it is there.

    flags: in addition to FLAGS.
    """
    compiler, version = _compiler()
    all_flags = (*FLAGS, *flags)

    def build(result: Path) -> dict[str, Any]:
        command = [compiler, *all_flags, "-x", "c++", "-", "-I", str(paths.CSRC), "-o", str(result)]
        run = subprocess.run(command, input=source, capture_output=True, text=True)
        if run.returncode:
            raise CompileError(f"g++ failed:\n{' '.join(command)}\n{run.stderr[-4000:]}")
        return {"compiler": version}

    key = cache.content_key(source, flags=all_flags, compiler=version)
    return cache.fetch(key, ".so", build, directory)[0]


def build_host(
    variant: Variant | GroupedVariant, flags: tuple[str, ...] = (), directory: Path | None = None
) -> Path:
    """Compile a kernel variant for the emulated machine; return the shared object."""
    return build_source(variant.source(), flags, directory)
