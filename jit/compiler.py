"""Compile CUDA source to a cubin with NVRTC, which pip wheels provide. Needs no GPU."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

from megamoe.core import env
from megamoe.core.errors import CompileError, MegaMoEError
from megamoe.jit import cache, paths, prebuilt
from megamoe.jit.grouped import GroupedVariant
from megamoe.jit.source import Variant

logger = logging.getLogger("megamoe")
ARCH = "sm_90a"
# -default-device: CUTLASS headers hold functions without a decoration, which NVRTC would take for host code.
# --no-cache: a cubin from the driver's cache comes without ptxas' figures, and jit/cache.py keeps it anyway.
NVRTC_FLAGS = (
    f"--gpu-architecture={ARCH}",
    "-std=c++17",
    "-default-device",
    "--ptxas-options=-v",
    "--no-cache",
)


@dataclass(frozen=True)
class CompileResult:
    """A cubin and what the compiler said of it. `seconds` is 0 when it was not compiled now."""

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int  # static shared memory
    seconds: float
    warnings: tuple[str, ...] = ()  # ptxas remarks that cost speed, e.g. serialised WGMMA
    compiler: str = ""  # and its version
    origin: str = "cached"  # or "compiled", "prebuilt"


def compile_variant(variant: Variant | GroupedVariant, flags: Sequence[str] = ()) -> CompileResult:
    """Compile one variant, or take it from the prebuilt kernels or the cache."""
    return compile_source(variant.source(), name=f"{variant}.cu", flags=flags)


def compile_source(
    source: str, name: str = "kernel.cu", flags: Sequence[str] = (), directory: Path | None = None
) -> CompileResult:
    """Compile a translation unit with csrc/ on its include path, or take it from the prebuilt kernels or the cache.

    Raises CompileError for what does not compile, or that nothing here can compile and is not prebuilt.
    """
    found = _prebuilt(source, name, flags)
    return _compiled(source, name, flags, directory) if found is None else found


def _prebuilt(source: str, name: str, flags: Sequence[str]) -> CompileResult | None:
    """Return the prebuilt kernel; None where there is none and it can be compiled, which is logged."""
    try:
        found = prebuilt.lookup(source, name, (*NVRTC_FLAGS, *flags))
    except prebuilt.NotPrebuilt as error:
        try:
            _check_compiler()
        except CompileError as lacking:
            raise prebuilt.NotPrebuilt(f"{error}; to compile it here: {lacking}") from lacking
        _say_why(str(error))
        return None
    if found is None:
        return None
    cubin, entry = found
    figures = parse_log(entry.log)
    return CompileResult(
        cubin, entry.log, seconds=0.0, compiler=entry.compiler, origin="prebuilt", **figures
    )


@once
def _say_why(reason: str) -> None:
    logger.warning("kernels are compiled here, not taken as prebuilt: %s", reason)


def _compiled(
    source: str, name: str, flags: Sequence[str], directory: Path | None
) -> CompileResult:
    options, version = (*NVRTC_FLAGS, *flags), compiler_version()
    headers = _version_headers()
    key = cache.content_key(source, flags=options, compiler=version, extra_files=headers)
    seconds = 0.0

    def build(target: Path) -> dict[str, Any]:
        nonlocal seconds
        start = time.perf_counter()
        cubin, log = _nvrtc(source, name, options)
        seconds = time.perf_counter() - start
        target.write_bytes(cubin)
        return {"name": name, "log": log, "seconds": round(seconds, 3)}

    path, notes = cache.fetch(key, ".cubin", build, directory)
    log = str(notes["log"])
    origin = "compiled" if seconds else "cached"
    figures = parse_log(log)
    return CompileResult(
        path.read_bytes(), log, seconds=seconds, compiler=version, origin=origin, **figures
    )


@once
def compiler_version() -> str:
    """Return the compiler's name and version, as it enters the cache key."""
    try:
        from cuda.bindings import nvrtc

        major, minor = _check(nvrtc.nvrtcVersion())
    except (ImportError, OSError, RuntimeError) as error:  # no package, or one without its library
        raise CompileError(f"NVRTC is missing ({error}): {paths.INSTALL}") from error
    return f"nvrtc {major}.{minor}"


def _check_compiler() -> None:
    compiler_version()
    paths.include_dirs()


def check_installed(variant: Variant | GroupedVariant | None = None) -> None:
    """Raise before any work: CompileError without compiler or headers, ConfigError for an unsafe cache.

    variant: needs none of these if it is prebuilt.
    """
    if variant is not None and _prebuilt(variant.source(), str(variant), ()) is not None:
        return
    _check_compiler()
    cache.secure(env.cache_dir())


def why_not(variant: Variant | GroupedVariant | None = None) -> str | None:
    """Return what this machine lacks to compile kernels, or this one, or None. Compiles nothing."""
    try:
        check_installed(variant)
    except MegaMoEError as error:
        return str(error)
    return None


def parse_log(log: str) -> dict[str, Any]:
    """Read ptxas -v: the maxima over all kernels and functions in the log."""

    def most(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, log)), default=0)

    remarks = [
        line.strip()
        for line in log.splitlines()
        if re.search(r"warning|Potential Performance Loss|serializ|setmaxnreg", line)
    ]
    return {
        "registers": most(r"Used (\d+) registers"),
        "spill_bytes": most(r"(\d+) bytes spill stores") + most(r"(\d+) bytes spill loads"),
        "stack_bytes": max(
            most(r"(\d+) bytes stack frame"), most(r"(\d+) bytes cumulative stack size")
        ),
        "shared_bytes": most(r"(\d+) bytes smem"),
        "warnings": tuple(remarks),
    }


def _version_headers() -> list[Path]:
    """Return small files that tell one release of the foreign headers from another."""
    found = [paths.cutlass_include() / "cutlass" / "version.h"]
    cuda, cccl = paths.cuda_includes()
    found += [cuda / "cuda_fp8.hpp", cccl / "cuda" / "std" / "__cccl" / "version.h"]
    return [path for path in found if path.is_file()]


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)


def _nvrtc(source: str, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        folders = (f"-I{path}" for path in paths.include_dirs())
        options = [flag.encode() for flag in (*flags, *folders)]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        buffer = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.decode(errors="replace").strip("\0 \n")
        if int(status) != 0:
            lines = log.splitlines()  # the errors after the first ones are mostly consequences
            start = next((i for i, line in enumerate(lines) if "error" in line), 0)
            first = "\n".join(lines[start : start + 40])
            raise CompileError(f"{name} did not compile:\n{first}")
        cubin = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)
