"""Build and run the model checker of protocol/edges.h: every scenario holds, every mutant is caught."""

import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Executions that the search cuts off leave fibers behind, and what their std::functions own.
SANITIZER_ENV = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}


def run(tmp_path, sources, flags=("-Og",), env=None):
    """Compile `sources`, run the program, return its lines; fail on its exit code or on any line that is not ok.

    As one translation unit: most of a scenario file's time is that of the headers. -Og compiles in half the time of
    -O2, and what it makes takes half a second longer.
    """
    program = tmp_path / "program"
    paths = [path for source in sources for path in sorted(HERE.glob(source))]
    text = "".join(f'#include "{path}"\n' for path in paths)
    command = [
        "g++",
        "-std=c++20",
        "-Wall",
        "-Wextra",
        "-Werror",
        *flags,
        f"-I{CSRC}",
        "-xc++",
        "-",
    ]
    subprocess.run([*command, "-o", program], input=text, text=True, check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=600, env=env)
    lines = result.stdout.splitlines()
    bad = [line for line in lines if not line.startswith(("ok ", "total: "))]
    assert not bad, "\n".join(bad)
    assert result.returncode == 0, result.stderr
    return lines


def test_scenarios_hold_and_mutants_are_caught(tmp_path):
    lines = run(tmp_path, ["main.cpp", "scenarios_*.cpp"])
    assert lines[-1].endswith(" 0 bad")
    # The program cannot pass by running nothing.
    assert sum(line.startswith("ok") and " / " not in line for line in lines) >= 35
    assert sum("mutant: " in line for line in lines) >= 500
    # The kernel's ring runs here, so its operations have mutants, and lanes that read alone are seen.
    ring = [line for line in lines if "two loaders of a stage / " in line]
    assert sum("mutant: " in line for line in ring) >= 10
    assert any(
        "no warp_sync before the release" in line and "race on scales" in line for line in ring
    )
    # Each loader of a weight tile has to cross proxies itself.
    for loader in ("load_a", "load_b"):
        found = [line for line in lines if f"grads_ready / flaw: no fence in {loader}" in line]
        assert len(found) == 1
        assert f"{loader} (async) is not ordered after the write" in found[0]
    # Without peers at the door, all of a launch's CTAs and a kernel that finds no SM wait for each other.
    for mutant in ("await_for dropped", "await_for of target - 1"):
        found = [line for line in lines if f"waits for NCCL / mutant: {mutant} at launched" in line]
        assert len(found) == 1
        assert "deadlock:" in found[0]
        assert "nccl@1 waits for left" in found[0]
    # Counters of few tokens that are not zeroed let a later launch read what the one before left.
    found = [
        line for line in lines if "few tokens: counters of three launches / flaw: gemm2's" in line
    ]
    assert len(found) == 1
    assert "read y_row[1] = 1, expected 2" in found[0]
    # Caught for the right reason: a partner that stops early is waited for.
    fewer = [line for line in lines if "walks one unit fewer" in line]
    assert fewer
    assert all("deadlock:" in line for line in fewer)


def test_checker_itself(tmp_path):
    """Litmus tests of the memory model, and reduced against full exploration on random programs."""
    assert len(run(tmp_path, ["self_test.cpp"])) >= 10


@pytest.mark.slow
def test_scenarios_under_sanitizers(tmp_path):
    run(tmp_path, ["main.cpp", "scenarios_*.cpp"], SANITIZE, SANITIZER_ENV)
