"""Set-up on a machine with GPUs: over the python that has torch, installing what is missing, with and without wheels.

The machine is made of fakes: an `nvidia-smi` that finds a GPU, and a python whose torch says that it sees CUDA.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.requirements import is_installed, requirements

ROOT = Path(__file__).resolve().parents[3]
TORCH = "class cuda:\n    is_available = staticmethod(lambda: True)\n__version__ = {version!r}\n"
SETUP = """
CU13 = []
PLOT = []
HF = []
CHECKPOINTS = []
TEST = ["fake-checker>=2"]
DEV = []
setup(install_requires=["torch>=2.11", "fake-headers==4.2.0.0"])
"""


def add_package(folder, name, version, text=""):
    """Put a module and its metadata where Python finds them."""
    (folder / f"{name}.py").write_text(text)
    (folder / f"{name}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)


def write_wheel(folder, name, version, requires=""):
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}.py", f"version = {version!r}")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", metadata + (requires and f"Requires-Dist: {requires}\n"))
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class Machine:
    """A checkout, a python with torch (a virtual environment, as in many images), a GPU, no network."""

    def __init__(self, folder: Path, torch: str) -> None:
        self.root = folder / "checkout"
        (self.root / "tools").mkdir(parents=True)
        (self.root / "bench").mkdir()
        for name in (
            *("tools/setup_env.sh", "tools/pip_install.sh", "tools/missing.py", "tools/command.py"),
            *("bench/__init__.py", "bench/requirements.py", "bench/tree.py"),
        ):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "setup.py").write_text(SETUP)
        (self.root / "constraints.txt").write_text("")
        python = folder / "image"
        make = [sys.executable, "-m", "venv", "--without-pip", python]
        subprocess.run(make, check=True)
        self.python = python / "bin" / "python"
        self.packages = next(python.glob("lib/python*/site-packages"))
        add_package(self.packages, "torch", torch, TORCH.format(version=torch))
        pip = Path(find_spec("pip").origin).parent
        (self.packages / "pip").symlink_to(pip, target_is_directory=True)
        commands = folder / "commands"
        commands.mkdir()
        (commands / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: a fake\n")
        (commands / "nvidia-smi").chmod(0o755)
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.path = f"{commands}{os.pathsep}{os.environ['PATH']}"

    def set_up(self, pip_args: str = "") -> subprocess.CompletedProcess:
        environment = {
            "PATH": self.path,
            "HOME": str(self.root),
            "PYTHON": str(self.python),
            "PIP_ARGS": pip_args or "--index-url http://127.0.0.1:9/none",
            "CUDA_HOME": "",
        }
        return subprocess.run(
            [self.root / "tools" / "setup_env.sh"],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def python_says(self, code: str) -> str:
        command = [self.root / ".venv" / "bin" / "python", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def machine(tmp_path):
    if find_spec("pip") is None:
        pytest.skip("no pip")
    return Machine(tmp_path, "2.11.0+cu130")


def test_without_a_network_one_line_says_what_is_missing_and_a_folder_has_it(machine):
    done = machine.set_up()
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "could not install" in line]
    for words in ("fake-headers==4.2.0.0", "fake-checker>=2", "make -B setup PIP_ARGS=", "staged"):
        assert words in line
    assert "torch" not in line
    assert "setup: the package index cannot be reached from here" in done.stdout
    assert machine.python_says("import torch; print(torch.__version__)") == "2.11.0+cu130"
    # Then missing packages come from a folder, and torch stays.
    write_wheel(machine.wheels, "fake_headers", "4.2.0.0", requires="torch==3.0")
    write_wheel(machine.wheels, "fake_checker", "2.5")
    write_wheel(machine.wheels, "torch", "9.9")
    done = machine.set_up(f"--no-index --find-links {machine.wheels}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "could not install" not in done.stdout, (machine.root / ".venv/install.log").read_text()
    code = "import torch, fake_headers, fake_checker as c; print(torch.__version__, torch.__file__, c.version)"
    version, file, checker = machine.python_says(code).split()
    assert (version, checker) == ("2.11.0+cu130", "2.5")
    assert Path(file).parent == machine.packages, "torch was replaced"


def test_one_missing_wheel_costs_no_other(machine):
    write_wheel(machine.wheels, "fake_headers", "4.2.0.0")
    done = machine.set_up(f"--no-index --find-links {machine.wheels}")
    (line,) = [line for line in done.stdout.splitlines() if "could not install" in line]
    assert "fake-checker>=2" in line
    assert "fake-headers" not in line
    assert "setup: where pip looked there is no fake-checker>=2 for this Python" in done.stdout
    assert "cannot be reached" not in done.stdout
    assert "staged" not in line  # the kernel has what it needs
    assert machine.python_says("import fake_headers as f; print(f.version)") == "4.2.0.0"


def test_nothing_is_installed_where_nothing_is_missing(machine):
    add_package(machine.packages, "fake_headers", "4.2.0.0")
    add_package(machine.packages, "fake_checker", "2.0")
    done = machine.set_up()
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stdout + done.stderr
    assert f"using {machine.python}" in done.stdout
    code = "import site, fake_checker; print(*site.getsitepackages())"
    assert str(machine.packages) in machine.python_says(code)  # where cuda.pathfinder looks, too


@pytest.mark.parametrize(
    ("requirement", "installed"),
    [
        ("pytest>=8", True), ("pytest>=8,<9.0", False), ("pytest==1.0", False), ("pytest", True), ("no-such", False),
        ('no-such>=5; python_version >= "3.10"', False), ('no-such; python_version >= "4.0"', True),
        ('pytest>=99; python_version >= "3.10"', False),
    ],
)  # fmt: skip
def test_versions_count(requirement, installed):
    assert is_installed(requirement) == installed


def test_the_lists_of_setup_py_are_read():
    found = requirements()
    assert {"CU13", "DEV", "HF", "PLOT", "TEST"} < found.keys()
    for words in ("torch>=2.11", "nvidia-cutlass=="):
        assert any(words in name for name in found["install_requires"])
