"""tools/tune.py: what it calls the best choice, and where it does not run."""

import argparse
import csv

import torch
from programs import run, run_code

from bench import layers, timing, tune
from bench.ranks import Rank


def test_the_formula_is_held_against_the_best():
    out = run_code("""
from bench.tune import Choice, over_best
of = lambda blocks, us: Choice("dsv3", "fp8", "forward", 1, 8, blocks, us)
print(over_best([of(0, 110.0), of(16, 120.0), of(32, 100.0)]))
print(over_best([of(0, 90.0), of(16, 120.0)]))
""")
    first, second = out.splitlines()
    assert "step_blocks=32" in first
    assert "0.1000" in first
    assert "step_blocks=0" in second
    assert second.endswith("0.0)")


def test_without_a_gpu_there_is_nothing_to_tune():
    done = run("tune.py")
    assert done.returncode == 2
    assert "needs Hopper GPUs" in done.stderr


SAMPLES = {0: [50.0, 990.0, 40.0], 16: [60.0, 61.0, 1.0], 32: [45.0, 5.0, 46.0]}


class Planted:
    """A contender whose samples are planted, by blocks a step."""

    now = 0.0

    def __init__(self, entry, *rest, **options):
        self.samples = iter(SAMPLES[entry.step_blocks])

    def contender(self, tokens):
        def timed(before):
            Planted.now += next(self.samples) * 1e-6

        return timing.Contender("planted", timed)

    def close(self):
        pass


def test_the_table_has_medians_and_names_the_best(alone, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layers, "TimedLayer", Planted)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: Planted.now)
    sizes = dict.fromkeys(("hidden", "intermediate", "num_experts", "top_k", "activation", "bias"))
    args = argparse.Namespace(
        **sizes, shape=["tiny"], local_experts_of=None, direction="forward", tokens=[8],
        precision=["bf16"], steps=[16, 32], samples=3, out=tmp_path, name="tune",
    )  # fmt: skip
    assert tune.worker(Rank(0, 1, torch.device("cpu")), args) == 0
    title, *rows = (tmp_path / "tune.csv").read_text().splitlines()
    found = [(r["step_blocks"], round(float(r["us"]), 3)) for r in csv.DictReader(rows)]
    assert found == [("0", 50.0), ("16", 60.0), ("32", 45.0)]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == title
    assert said[-1].split()[-2:] == ["32", "11.1%"]
