"""Find headers and tools, without importing the packages that contain them.

`cuda.pathfinder` does not search folders on PYTHONPATH (`pip install --target`), so import specs are tried first.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from megamoe.core.errors import CompileError

INSTALL = 'pip install "megamoe[cu13]"'
CSRC = Path(__file__).resolve().parent.parent / "csrc"  # the same in a checkout and in a wheel


def package_dirs(name: str) -> list[Path]:
    """Return the folders of a package, without importing it."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # the parent package is missing
        return []
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def _pathfinder(name: str) -> list[Path]:
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_header_directory(name)
    except Exception:  # the module is absent, or its version does not know `name`
        return []
    return [Path(found)] if found else []


def toolkits() -> list[Path]:
    """Return the folders where a CUDA toolkit may be."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [Path(home) for home in homes if home]


@lru_cache(maxsize=1)
def cutlass_include() -> Path:
    """Return the folder that holds cute/ and cutlass/, from the nvidia-cutlass package."""
    candidates = [d / "source" / "include" for d in package_dirs("cutlass_library")]
    candidates += _pathfinder("cutlass")
    for path in candidates:
        if (path / "cutlass" / "cutlass.h").is_file():
            return path
    raise CompileError(
        "the CUTLASS headers are missing: pip install nvidia-cutlass==4.2.0.0 "
        f"(looked at: {', '.join(map(str, candidates)) or 'no package cutlass_library'})"
    )


@lru_cache(maxsize=1)
def cuda_includes() -> tuple[Path, ...]:
    """Return the CUDA include folder and its cccl folder. Both from one tree: mixed trees do not compile."""
    candidates = [d / "include" for d in package_dirs("nvidia.cu13")]
    candidates += _pathfinder("cudart")
    candidates += [home / "include" for home in toolkits()]
    for path in candidates:
        if (path / "cuda_bf16.h").is_file() and (path / "cccl" / "cuda" / "std").is_dir():
            return (path, path / "cccl")
    raise CompileError(
        f"no complete set of CUDA 13 headers: {INSTALL}, or set CUDA_HOME to a CUDA 13 toolkit "
        f"(looked at: {', '.join(map(str, candidates))})"
    )


def include_dirs() -> list[Path]:
    """Return every include folder of a kernel, ours first."""
    return [CSRC, cutlass_include(), *cuda_includes()]


def headers(root: Path | None = None) -> list[Path]:
    """Return all source files under csrc (the kernels and the fiber machine), in a fixed order."""
    root = root or CSRC
    endings = {".h", ".cuh", ".inc"}
    return sorted(p for p in root.rglob("*") if p.suffix in endings and p.is_file())
