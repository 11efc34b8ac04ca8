"""The command-line tools on two CPU ranks: they run, they pass on good code, they fail on bad code."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANTED = """
import megamoe.staged as staged
good = staged.StagedBackend.forward
def bad(self, *args, **kwargs):
    y = good(self, *args, **kwargs)
    y[3, 7] += 1
    return y
staged.StagedBackend.forward = bad
"""


def run(tool: str, *arguments: object, path: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / tool, *arguments]
    environment = os.environ | {
        "PYTHONPATH": f"{path}{os.pathsep}{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("LOCAL_RANK", None)
    return subprocess.run(
        [str(c) for c in command], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("backend", ["staged", "reference"])
def test_rank_check_passes(backend):
    done = run("rank_check.py", "--backend", backend, "--ranks", 2, "--tokens", 17, "--precision", "bf16",
               "--routing", "uniform", "dropped", "--repeat", 2)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 configurations are right" in done.stdout


def test_rank_check_random_configurations():
    done = run("rank_check.py", "--backend", "staged", "--ranks", 2, "--random", 8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 configurations are right" in done.stdout


def test_rank_check_finds_one_wrong_element(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    done = run("rank_check.py", "--backend", "staged", "--ranks", 2, "--tokens", 17, "--precision", "bf16",
               path=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL on ranks [0, 1]" in done.stdout
    assert "first at [3, 7]" in done.stdout


def test_latency_sweep_writes_a_table(tmp_path):
    done = run("latency_sweep.py", "--shape", "tiny", "--backend", "staged", "--ranks", 2, "--tokens", 8, 16,
               "--mode", "both", "--samples", 3, "--out", tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    comment, *table = (tmp_path / "latency.csv").read_text().splitlines()
    assert comment.startswith("# ")
    rows = list(csv.DictReader(table))
    assert [(r["tokens"], r["mode"]) for r in rows] == [
        ("8", "cool"), ("8", "hot"), ("16", "cool"), ("16", "hot"),
    ]  # fmt: skip
    assert all(float(r["us"]) > 0 for r in rows)


def test_train_step_equals_one_rank():
    done = run("train_step.py", "--ranks", 2, "--backend", "staged", "--steps", 6, "--batch", 4,
               "--target", 6)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 5


def test_train_step_misses_its_target():
    done = run("train_step.py", "--ranks", 1, "--backend", "staged", "--steps", 1, "--batch", 2,
               "--compare", "none", "--target", 1)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
