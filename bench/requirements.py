"""Which requirements of setup.py this Python lacks. Imports nothing that might be missing."""

import ast
import operator
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.tree import ROOT

COMPARE = {">=": operator.ge, "<": operator.lt, "==": operator.eq}
HEADERS = ("cuda_bf16.h", "cccl/cuda/std/type_traits")


def requirements() -> dict[str, list[str]]:
    """Return the lists of setup.py by their names there, without evaluating it."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            found[ast.unparse(node.targets[0])] = _strings(node.value)
        elif isinstance(node, ast.keyword) and node.arg == "install_requires":
            found["install_requires"] = _strings(node.value)
    return found


def _strings(node: ast.expr) -> list[str]:
    elements = node.elts if isinstance(node, ast.List) else []
    return [str(e.value) for e in elements if isinstance(e, ast.Constant)]


def is_installed(requirement: str) -> bool:
    """Return whether the package is there, in a version that the requirement allows, or not meant for this Python."""
    requirement, _, marker = requirement.partition(";")
    oldest = re.search(r'python_version >= "([\d.]+)"', marker)
    if oldest and sys.version_info < _numbers(oldest[1]):
        return True
    name, limits = re.findall(r"^([\w.-]+)(.*)", requirement)[0]
    try:
        found = _numbers(version(name))
    except PackageNotFoundError:
        return False
    return all(
        COMPARE[how](found, _numbers(limit))
        for how, limit in re.findall(r"([<>=]+)([\w.]+)", limits)
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0]))


def toolkits() -> list[Path]:
    """Return where CUDA toolkits may be."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [Path(home) for home in homes if home]


def missing_cuda(wheels: list[str]) -> list[str]:
    """Return the wheels of compiler and headers that no toolkit stands in for. Headers come from one tree."""
    missing = [r for r in wheels if not is_installed(r)]
    if any(all((home / "include" / name).exists() for name in HEADERS) for home in toolkits()):
        missing = [r for r in missing if "nvrtc" in r]
        return [] if any(list(home.glob("lib*/libnvrtc.so.13")) for home in toolkits()) else missing
    return wheels if missing else []


def missing_runtime() -> list[str]:
    """Return what the kernel needs."""
    lists = requirements()
    found = [r for r in lists["install_requires"] if not is_installed(r)]
    if any(r.startswith("cuda-bindings") for r in found):
        found.append("cuda-pathfinder")
    return found + missing_cuda(lists["CU13"])


def missing_dev() -> list[str]:
    """Return what tests, plots and linting need."""
    lists = requirements()
    names = ("TEST", "PLOT", "HF", "CHECKPOINTS", "DEV")
    found = [r for name in names for r in lists[name] if not is_installed(r)]
    has_disassembler = any((home / "bin" / "nvdisasm").exists() for home in toolkits())
    return [r for r in found if not (has_disassembler and "nvdisasm" in r)]


MISSING = {"runtime": missing_runtime, "dev": missing_dev}
