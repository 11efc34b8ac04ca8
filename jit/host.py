"""Compile a variant of the emulated kernel (csrc/fibers) into a shared object. Needs g++ and no GPU."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from megamoe.core.errors import CompileError
from megamoe.jit import cache, paths

# Hidden symbols and no unique ones: each shared object has its own machine. Without float contraction, x * y + z rounds
# twice on every host.
FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-DMEGAMOE_EMULATE",
)
# The largest kernel compiles in 0.85 s, with -O1 in 1.4 (2026-11-28), and runs 5 % longer: the machine takes most time.
KERNEL_FLAGS = (*FLAGS, "-Og", "-finline-functions-called-once")
# The machine, compiled once and linked to each kernel. Its loops name their vectors themselves (csrc/fibers/wgmma.h)
# and pick the widest instructions at run time.
MACHINE = '#define FIBERS_COMPILED\n#include "fibers/launch.h"\n'
MACHINE_FLAGS = (*FLAGS, "-O3", "-c")

STANDARD = "".join(f"#include <{h}>\n" for h in ("algorithm", "cmath", "mutex", "string", "vector"))


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, str]:
    """Return the path of g++ and its version."""
    path = shutil.which("g++")
    if path is None:
        raise CompileError("the emulator needs g++ (12 or later) on PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, version.splitlines()[0]


def _run(command: list[str], source: str | None = None) -> None:
    run = subprocess.run(command, input=source, capture_output=True, text=True)
    if run.returncode:
        raise CompileError(f"g++ failed:\n{' '.join(command)}\n{run.stderr[-4000:]}")


def _precompiled(compiler: str, version: str, directory: Path | None) -> str:
    """Return the path of a header with what csrc/fibers includes of the standard library: 0.5 of 2.1 s each time."""

    def build(result: Path) -> dict[str, Any]:
        text = result.with_suffix("")
        text.write_text(STANDARD)
        _run([compiler, *KERNEL_FLAGS, "-x", "c++-header", str(text), "-o", str(result)])
        return {"compiler": version}

    key = hashlib.sha256("\0".join((STANDARD, version, *KERNEL_FLAGS)).encode()).hexdigest()[:32]
    header = cache.fetch(key, ".h.gch", build, directory)[0].with_suffix("")
    if not header.exists():  # what g++ reads where it rejects the other
        header.write_text(STANDARD)
    return str(header)


def build_source(source: str, flags: tuple[str, ...] = (), directory: Path | None = None) -> Path:
    """Compile a translation unit for the emulated machine; return the shared object, from the cache if it is there.

    flags: in addition to KERNEL_FLAGS.
    """
    compiler, version = _compiler()

    def made(source: str, suffix: str, flags: tuple[str, ...], root: Path) -> Path:
        def build(result: Path) -> dict[str, Any]:
            command = [compiler, *flags, "-I", str(paths.CSRC)]
            if suffix == ".so":
                machine = made(MACHINE, ".o", MACHINE_FLAGS, root / "fibers")
                command += [str(machine), "-include", _precompiled(compiler, version, directory)]
            _run([*command, "-x", "c++", "-", "-o", str(result)], source)
            return {"compiler": version}

        key = cache.content_key(source, csrc=root, flags=flags, compiler=version)
        return cache.fetch(key, suffix, build, directory)[0]

    return made(source, ".so", (*KERNEL_FLAGS, *flags), paths.CSRC)
