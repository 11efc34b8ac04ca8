"""What is packed, and that it runs: a source distribution, the wheel made from it, installed where nothing else is."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

import megamoe
from megamoe.jit import prebuilt

pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[3]
PLACES = ("bench", "csrc", "docs", "examples", "jit", "megamoe", "tests", "tools")


def sources(*places):
    """Every file of ours, relative to the root, without what running leaves behind."""
    found = [path.relative_to(ROOT) for place in places for path in (ROOT / place).rglob("*")]
    left = ("__pycache__", ".pytest_cache", ".hypothesis")
    return {str(p) for p in found if (ROOT / p).is_file() and not set(left) & set(p.parts)}


def build(root, folder, *command):
    """Run setup.py without leaving anything in the checkout; return what it built."""
    base = [sys.executable, "setup.py", "-q", "egg_info", "-e", folder, "build", "-b", folder / "b"]
    target = folder / "dist"
    command = [str(c) for c in (*base, *command, "-d", target)]
    subprocess.run(command, cwd=root, capture_output=True, check=True, timeout=120)
    return next(target.iterdir())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """One at a time, of all workers: it puts a tree of links into the checkout."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "sdist.lock"):
        return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Made from the source distribution, as `make dist` does."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    return build(next(folder.iterdir()), tmp_path_factory.mktemp("built"), "bdist_wheel")


def test_the_source_distribution_holds_every_source(sdist):
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert sources(*PLACES) - packed == set()
    assert {"Makefile", "constraints.txt", "setup.py", "pyproject.toml", "LICENSE"} <= packed


def test_the_wheel_holds_every_header_and_module(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    headers = {name for name in sources("csrc") if not name.endswith(".md")}
    modules = sources("megamoe") | {f"megamoe/{name}" for name in sources("jit") | headers}
    assert modules - packed == set()
    assert not [
        name for name in packed if {"bench", "examples", "tests", "tools"} & set(Path(name).parts)
    ]


def without_checkout():
    """Return the environment in which only what is installed can be imported."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the python of a virtual environment with the wheel; torch and others are taken from this one's folders."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    say = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", say], capture_output=True, text=True, check=True).stdout
    others = [
        p for p in sys.path if p.endswith("-packages")
    ]  # a line of a .pth runs none of theirs
    (Path(site.strip()) / "others.pth").write_text("\n".join(others))
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    # A checkout in PYTHONPATH with an egg-info would be taken for the wheel installed.
    command = [*pip, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, env=without_checkout())
    return python


def run(python, folder, *arguments):
    """Run the installed package in a folder without sources; return what it printed."""
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=without_checkout(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SMOKE = """
import importlib, runpy, sys
import torch, megamoe
from megamoe.jit import paths, prebuilt

assert str(paths.CSRC).startswith(sys.prefix), paths.CSRC
torch.manual_seed(0)
x = torch.randn(5, 128, dtype=torch.bfloat16)
weights, ids = torch.rand(5, 4).topk(2)
y = []
for backend in ("staged", "emulate"):  # which compiles the sources that the wheel holds
    torch.manual_seed(1)
    layer = megamoe.MegaMoE(128, 64, 4, 2, backend=backend, max_tokens=8)
    y.append(layer(x, ids, weights).float())
assert y[0].norm() > 0 and (y[0] - y[1]).norm() / y[0].norm() < 2e-2
for name in sys.argv[1:]:
    importlib.import_module("megamoe.adapters." + name)
print(megamoe.__version__, megamoe.__file__, prebuilt.sources())
sys.argv = ["megamoe.jit", "--help"]
runpy.run_module("megamoe.jit", run_name="__main__")
"""


def adapters():
    """Every adapter whose library is here; a file is named after it, and after a part of the adapter (x_weights)."""
    names = sorted(p.stem for p in (ROOT / "megamoe" / "adapters").glob("[a-z]*.py"))
    return [name for name in names if find_spec(name.split("_")[0]) is not None]


def test_the_installed_wheel_runs(installed, tmp_path):
    version, place, digest, *said = run(installed, tmp_path, "-c", SMOKE, *adapters()).split()
    assert version == megamoe.__version__
    assert place.startswith(str(installed.parents[2]))
    assert digest == prebuilt.sources()  # kernels exported from a checkout serve the wheel
    assert "[--export" in said
