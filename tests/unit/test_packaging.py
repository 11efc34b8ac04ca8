"""What is packed: a source distribution holds every source, also the tests'; a wheel holds every header."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[2]
PLACES = ("csrc", "docs", "jit", "megamoe", "tests", "tools")


def sources(*places):
    """Every file of ours, relative to the root, without what running leaves behind."""
    found = [path.relative_to(ROOT) for place in places for path in (ROOT / place).rglob("*")]
    left = ("__pycache__", ".pytest_cache", ".hypothesis")
    return {str(p) for p in found if (ROOT / p).is_file() and not set(left) & set(p.parts)}


def build(folder, *command):
    """Run setup.py without leaving anything in the checkout; return what it built."""
    base = [sys.executable, "setup.py", "-q", "egg_info", "-e", folder, "build", "-b", folder / "b"]
    target = folder / "dist"
    command = [str(c) for c in (*base, *command, "-d", target)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120)
    return next(target.iterdir())


def test_the_source_distribution_holds_every_source(tmp_path):
    with tarfile.open(build(tmp_path, "sdist")) as archive:
        packed = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert sources(*PLACES) - packed == set()
    assert {"Makefile", "constraints.txt", "setup.py", "pyproject.toml", "LICENSE"} <= packed


def test_the_wheel_holds_every_header_and_module(tmp_path):
    with zipfile.ZipFile(build(tmp_path, "bdist_wheel")) as archive:
        packed = set(archive.namelist())
    headers = {name for name in sources("csrc") if not name.endswith(".md")}
    modules = sources("megamoe") | {f"megamoe/{name}" for name in sources("jit") | headers}
    assert modules - packed == set()
    assert not any("tests" in name for name in packed)
