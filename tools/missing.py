#!/usr/bin/env python3
"""Print the requirements of setup.py that this Python lacks, one a line. For tools/setup_env.sh on GPU machines.

    python tools/missing.py runtime    what the kernel needs; to be installed without dependencies, torch is there
    python tools/missing.py dev        what tests and linting need besides

Imports nothing that might be missing.
"""

import ast
import operator
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPARE = {">=": operator.ge, "<": operator.lt, "==": operator.eq}
HEADERS = ("cuda_bf16.h", "cccl/cuda/std/type_traits")


def requirements(setup: Path = ROOT / "setup.py") -> dict[str, list[str]]:
    """Return the lists of setup.py by their names there, without evaluating it."""
    tree = ast.parse(setup.read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            found[ast.unparse(node.targets[0])] = _strings(node.value)
        elif isinstance(node, ast.keyword) and node.arg == "install_requires":
            found["install_requires"] = _strings(node.value)
    return found


def _strings(node: ast.expr) -> list[str]:
    elements = node.elts if isinstance(node, ast.List) else []
    return [e.value for e in elements if isinstance(e, ast.Constant)]


def is_installed(requirement: str) -> bool:
    """Return whether the package is there, in a version that the requirement allows."""
    name, limits = re.match(r"([\w.-]+)(.*)", requirement).groups()
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


def has_toolkit() -> bool:
    """Return whether a CUDA toolkit gives the headers, and the compiler as a library."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return any(
        all((Path(home, "include", name)).exists() for name in HEADERS)
        and list(Path(home).glob("lib*/libnvrtc.so.13"))
        for home in homes
        if home
    )


def missing_runtime() -> list[str]:
    """Return what the kernel needs. Headers of CUDA come from one tree, so all of them or none."""
    lists = requirements()
    found = [r for r in lists["install_requires"] if not is_installed(r)]
    if any(r.startswith("cuda-bindings") for r in found):
        found.append("cuda-pathfinder")
    cu13 = lists["CU13"]
    return found if has_toolkit() or all(map(is_installed, cu13)) else found + cu13


def missing_dev() -> list[str]:
    """Return what tests, plots and linting need."""
    lists = requirements()
    return [r for name in ("TEST", "PLOT", "DEV") for r in lists[name] if not is_installed(r)]


if __name__ == "__main__":
    print("\n".join({"runtime": missing_runtime, "dev": missing_dev}[sys.argv[1]]()))
