"""tools/train_hf.py, tiny and in this process: two runs that agree, faults that it sees, text step by step."""

import argparse
import csv
import math
import re
import statistics
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.20")
from programs import ROOT  # noqa: E402

from bench.demo.curves import paired, read  # noqa: E402
from bench.hf import generate, training  # noqa: E402
from bench.hf import model as hf_model  # noqa: E402
from bench.hf import run as train_hf  # noqa: E402
from bench.ranks import Rank  # noqa: E402
from megamoe.adapters import transformers as adapter  # noqa: E402
from megamoe.testing import launch  # noqa: E402

SIZES = hf_model.Sizes(32, 32, 4, 2, layers=2, heads=2, context=16, batch=2)
TEXT = torch.arange(2048).mul(7).to(torch.uint8)
RUN = {
    "backend": "staged",
    "compare": None,
    "steps": 4,
    "seeds": [1],
    "curves": None,
    "generate": 0,
    "cases": None,
    "window": 50,
}
RUN |= {"loss_tolerance": 5e-3, "gradient_tolerance": 0.05}


@pytest.fixture
def run(alone, monkeypatch, capsys):
    """Return a function that trains and compares: arguments -> exit code, what was printed."""
    monkeypatch.setattr(train_hf, "CPU_SIZES", SIZES)
    monkeypatch.setattr(train_hf, "shared_corpus", lambda: TEXT)
    monkeypatch.setattr(train_hf, "draw", lambda *_: False)  # test_tools_training.py has a picture

    def call(**changed):
        me = Rank(0, 1, torch.device("cpu"))
        code = train_hf.worker(me, argparse.Namespace(**RUN | changed))
        return code, capsys.readouterr().out

    return call


def test_both_runs_agree(run, tmp_path):
    code, said = run(curves=tmp_path / "curves.png", generate=20)
    assert code == 0, said
    assert "FAIL" not in said
    assert said.count("PASS") == 6
    assert "megamoe: " in said
    assert "eager: " in said
    assert "tokens/s, peak memory" in said
    assert "20 bytes by eager steps" in said
    title, *lines = (tmp_path / "curves.csv").read_text().splitlines()
    rows = list(csv.DictReader(lines))
    assert [r["backend"] for r in rows] == ["megamoe"] * RUN["steps"] + ["eager"] * RUN["steps"]
    assert title.startswith("# ")
    stated = re.findall(r"(?:megamoe|eager): ([\d,]+) tokens/s", said)
    for speed, steps in zip(stated, (rows[: RUN["steps"]], rows[RUN["steps"] :]), strict=True):
        late = statistics.median(float(r["tokens"]) / float(r["seconds"]) for r in steps[3:])
        assert f"{late:,.0f}" == speed


def test_seeds_are_compared_in_pairs(run, tmp_path):
    """The printed difference is that of the rows in the CSV; the first losses are another seed's, too."""
    code, said = run(seeds=[3, 8], steps=2, curves=tmp_path / "curves.png")
    assert code == 0, said
    assert said.count("PASS") == 2 * 6
    _, losses = read(tmp_path / "curves.csv")
    assert list(losses) == [(n, "bf16", seed) for seed in (3, 8) for n in ("megamoe", "eager")]
    assert len({found[0] for found in losses.values()}) >= 2
    ours, theirs = (
        [statistics.mean(losses[name, "bf16", seed]) for seed in (3, 8)]
        for name in ("megamoe", "eager")
    )
    each = [100 * (a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(each) / 2**0.5
    line = f"{statistics.mean(each):+.2f}% from eager, standard error {error:.2f}%, 2 seeds"
    assert line in said


def test_a_pairs_difference_has_a_standard_error():
    apart, error = paired([1.1, 1.1, 1.4], [1.0, 1.0, 1.0])
    assert (apart, error) == (pytest.approx(0.2), pytest.approx(0.1))
    assert math.isnan(paired([1.1], [1.0])[1])


def test_a_second_run_that_is_cut_leaves_the_first_one(run, tmp_path, monkeypatch):
    def cut(folder, name, *given):
        if name != hf_model.OURS:
            raise TimeoutError
        return training.train(folder, name, *given)

    monkeypatch.setattr(train_hf, "train", cut)
    with pytest.raises(TimeoutError):
        run(curves=tmp_path / "curves.png")
    _, *lines = (tmp_path / "curves.csv").read_text().splitlines()
    rows = list(csv.DictReader(lines))
    assert [(r["backend"], r["step"]) for r in rows] == [("megamoe", str(n)) for n in range(1, 5)]


def scaled_gradient(experts):
    """The right y, whose gradients are a tenth too large."""

    def call(self, *arguments):
        y = experts(self, *arguments)
        return y.detach() + 1.1 * (y - y.detach())

    return call


def scaled_output(experts):
    return lambda self, *arguments: 1.5 * experts(self, *arguments)


def scaled_weights(experts):
    """The right y, whose routers learn too slowly."""

    def call(self, module, x, ids, weights):
        return experts(self, module, x, ids, 0.8 * weights + 0.2 * weights.detach())

    return call


@pytest.mark.parametrize(
    ("fault", "part"),
    [(scaled_gradient, "experts'"), (scaled_output, "experts'"), (scaled_weights, "routers'")],
)
def test_planted_faults_are_seen(fault, part, run, monkeypatch):
    monkeypatch.setattr(adapter.Experts, "__call__", fault(adapter.Experts.__call__))
    code, said = run(steps=2)
    assert code == 1
    assert f"FAIL: {part} gradients" in said


def test_a_run_without_our_layers_is_no_run(run, monkeypatch):
    """Otherwise transformers' own experts would be compared with themselves."""
    for module in (hf_model, training, train_hf):
        monkeypatch.setattr(module, "OURS", "eager")
    code, said = run(compare="grouped_mm", steps=1)
    assert code == 1
    assert "FAIL: 0 of 2 layers by megamoe" in said


def load_both_ways(rank, folder):
    """Return the largest difference between the parameters that two ranks gather and those of one."""
    adapter.register(backend="staged")
    me = Rank(rank, 2, torch.device("cpu"))
    gathered = hf_model.whole(hf_model.load(folder, "megamoe", me))
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = dict(alone.named_parameters())
    assert gathered.keys() == expected.keys()
    return max((gathered[n] - p.detach()).abs().max().item() for n, p in expected.items())


@pytest.mark.slow
def test_two_ranks(tmp_path):
    pytest.importorskip("transformers", minversion="5.23")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(SIZES.config(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert launch(load_both_ways, 2, tmp_path) == [0.0, 0.0]
    tool = [sys.executable, ROOT / "tools" / "train_hf.py", "--cpu", "--ranks", "2"]
    done = subprocess.run(
        [*tool, "--steps", "5", "--generate", "5"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASS") == 6
    assert "5 bytes by eager steps" in done.stdout


class Replays:
    """What the decoder asks of a graph: a replay makes its step with the tensors it holds. Captures are for GPUs."""

    def __init__(self, decoder):
        self.decoder, self.count = decoder, 0

    def replay(self):
        self.count += 1
        self.decoder._step()


@pytest.mark.parametrize("captures", [False, True])
def test_the_decoder_writes_what_generate_writes(captures, monkeypatch):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(SIZES.config(), dtype=torch.float32)
    prompt = torch.randint(256, (5,))
    decoder = generate.Decoder(model, 25, temperature=0)
    decoder.captures = captures
    monkeypatch.setattr(decoder, "_capture", lambda: setattr(decoder, "graph", Replays(decoder)))
    text, speed = decoder.text(prompt, 20)
    expected = model.generate(prompt[None], max_new_tokens=20, do_sample=False)
    assert text.tolist() == expected[0, 5:].tolist()
    assert len(set(text.tolist())) > 3
    assert speed > 0
    if captures:
        assert decoder.graph.count == 19 - generate.EAGER_STEPS


def test_cases_are_compared_in_pairs(run, tmp_path):
    """Each begins with the same weights and text; FP8 rounds, so its losses are others."""
    cases = ["own", "bf16", "fp8-e4m3"]
    path = tmp_path / "cases.csv"
    given = {"cases": cases, "seeds": [3, 5], "steps": 3, "window": 2}
    code, said = run(**given, curves=path, backend="reference")
    assert code == 0, said
    _, losses = read(path)
    assert list(losses) == [("hf", case, seed) for seed in (3, 5) for case in cases]
    assert {len(found) for found in losses.values()} == {3}
    for seed in (3, 5):
        own, bf16, fp8 = (losses["hf", case, seed] for case in cases)
        assert own[0] == pytest.approx(bf16[0], abs=1e-3)
        assert 0 < abs(fp8[-1] - bf16[-1]) < 0.05
    of_cases = ([statistics.mean(losses["hf", c, s][-2:]) for s in (3, 5)] for c in cases[1:])
    ours, base = ([*of_cases][1], [statistics.mean(losses["hf", "own", s][-2:]) for s in (3, 5)])
    apart, error = paired(ours, base)
    assert f"hf fp8-e4m3: {statistics.mean(ours):.4f}, {apart:+.2%} from hf own" in said
    assert f"standard error {error:.2%}" in said
