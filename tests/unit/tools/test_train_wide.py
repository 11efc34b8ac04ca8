"""tools/train_hf.py --wide, tiny and on a CPU: its cases, its CSVs, and to which part time goes."""

import argparse
import csv
import re
import statistics
import time
from functools import partial

import pytest
import torch

import megamoe

transformers = pytest.importorskip("transformers", minversion="5.20")

from bench.hf import wide  # noqa: E402
from bench.hf.cases import CASES, LABELS  # noqa: E402
from bench.hf.model import Sizes, parts  # noqa: E402
from bench.ranks import Rank  # noqa: E402

SIZES = Sizes(
    *(32, 32, 4, 2),
    **{"layers": 2, "heads": 2, "context": 16, "batch": 2},
    **{"vocabulary": 300, "head_size": 24, "groups": 2},
)
RUN = {"backend": "reference", "cases": list(CASES), "masters": "bf16", "layers": None}
RUN |= {"compile": False, "steps": 3, "seeds": [1], "curves": None}
STEPS = wide.UNTIMED + RUN["steps"] + wide.TRACED


@pytest.fixture
def run(alone, monkeypatch, capsys, tmp_path):
    """Return a function that runs cases: arguments -> exit code, what was printed, figures by case, rows of steps."""
    monkeypatch.setattr(wide, "CPU_SIZES", SIZES)
    monkeypatch.setattr(wide, "shared_corpus", lambda: torch.arange(2048).mul(7).to(torch.uint8))

    def rows(path):
        _, *lines = path.read_text().splitlines()
        return list(csv.DictReader(lines))

    def call(**changed):
        given = RUN | {"curves": tmp_path / "wide.csv"} | changed
        code = wide.worker(Rank(0, 1, torch.device("cpu")), argparse.Namespace(**given))
        cases = {}
        for row in rows(tmp_path / "wide.csv"):
            cases.setdefault(row["case"], {})[row["table"], row["of"]] = row["value"]
        return code, capsys.readouterr().out, cases, rows(tmp_path / "wide-steps.csv")

    return call


def losses_of(steps, case):
    how = "(, fp32 masters, 2 layers)?(, compiled)?"
    return [float(row["loss"]) for row in steps if re.fullmatch(LABELS[case] + how, row["case"])]


def test_every_case_is_trained_from_one_start(run):
    code, said, cases, steps = run()
    assert code == 0, said
    assert cases.keys() == set(LABELS.values())
    losses = {case: losses_of(steps, case) for case in CASES}
    assert {len(of_case) for of_case in losses.values()} == {STEPS}
    first = [of_case[0] for of_case in losses.values()]
    assert max(first) - min(first) < 5e-3
    assert losses["fp8-e4m3"] == losses["fp8-e4m3-made"]
    assert len({tuple(of_case) for of_case in losses.values()}) == len(CASES) - 1
    for name, label in LABELS.items():
        of = cases[label]
        assert all(float(of["parts", part]) >= 0 for part in wide.PARTS)
        timed = [float(s["ms"]) for s in steps if s["case"] == label and s["ms"]]
        assert len(timed) == RUN["steps"]
        speed = 32e3 / statistics.median(timed)
        assert float(of["wide", "tokens/s"]) == pytest.approx(speed, abs=0.51)
        assert float(of["wide", "loss"]) == pytest.approx(statistics.mean(losses[name]), abs=1e-4)
        assert f"{name}: " in said
    quantizing = {
        case: float(cases[label]["parts", "quantizing"]) for case, label in LABELS.items()
    }
    assert min(ms for case, ms in quantizing.items() if case.startswith("fp8")) > 0.1
    assert max(quantizing["own"], quantizing["bf16"]) < 0.1


def test_fp32_masters_of_fp8_are_the_parameters(run, monkeypatch):
    seen, train = {}, wide.Wide._train

    def watched(self, model, quantizes):
        seen[quantizes] = {p.dtype for p in parts(model)["experts"]}
        return train(self, model, quantizes)

    monkeypatch.setattr(wide.Wide, "_train", watched)
    code, said, cases, steps = run(masters="fp32", cases=["bf16", "fp8-e4m3"])
    assert code == 0, said
    assert seen == {False: {torch.bfloat16}, True: {torch.float32}}
    assert all(case.endswith(", fp32 masters, 2 layers") for case in cases)
    both = (losses_of(steps, case) for case in ("bf16", "fp8-e4m3"))
    apart = [abs(a - b) for a, b in zip(*both, strict=True)]
    assert 0 < max(apart) < 0.02


def test_a_case_that_fails_leaves_the_others(run, monkeypatch):
    monkeypatch.setitem(CASES, "fp8", {"precision": "fp8", "transposes": "none"})
    code, said, cases, _ = run(cases=["fp8", "bf16"], steps=1)
    assert code == 1
    assert "FAIL: fp8" in said
    assert list(cases) == ["BF16"]


def test_a_loss_that_is_not_finite_is_no_result(run, monkeypatch):
    def spoiled(model, *given):
        return wide_backward(model, *given) * (float("nan") if hasattr(seen, "done") else 1.0)

    seen, wide_backward, quantize = argparse.Namespace(), wide.backward, megamoe.quantize_experts
    monkeypatch.setattr(wide, "backward", spoiled)
    behind = lambda m: (setattr(seen, "done", 1), quantize(m))  # noqa: E731
    monkeypatch.setattr(megamoe, "quantize_experts", behind)
    code, said, cases, _ = run(cases=["bf16", "fp8"], steps=1)
    assert code == 1
    assert "FAIL: fp8" in said
    assert list(cases) == ["BF16"]


def test_a_run_without_our_layers_is_no_run(run, monkeypatch):
    monkeypatch.setattr(wide, "OURS", "eager")
    monkeypatch.setattr(wide, "import_module", lambda name: argparse.Namespace(register=Stranger))
    code, said, cases, _ = run(cases=["own", "bf16"], steps=1)
    assert code == 1
    assert list(cases) == [LABELS["own"]]
    assert "FAIL: bf16" in said


class Stranger:
    """Experts that nobody calls."""

    num_layers = 0

    def __init__(self, *_, **__):
        pass

    def close(self):
        pass


def test_compiled_dense_parts_compute_the_same(run, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    code, said, cases, compiled = run(compile=True, cases=["own"])
    assert code == 0, said
    assert list(cases) == [f"{LABELS['own']}, compiled"]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 4 <= graphs <= 12  # of attention, norms, router and loss, not of each layer anew
    _, _, _, eager = run(cases=["own"])
    for a, b in zip(losses_of(compiled, "own"), losses_of(eager, "own"), strict=True):
        assert abs(a - b) < 0.02


def test_time_goes_to_the_part_that_takes_it():
    """Sleeps in one module's forward and in its backward pass; nothing else takes as long."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.02)
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            time.sleep(0.04)
            return dx

    class Slow(torch.nn.Module):
        def forward(self, x, *, scale):
            return Sleep.apply(x) * scale, None

    timeline, module = wide.Timeline(torch.device("cpu")), Slow()
    timeline.watch(module, "experts forward", "experts backward")
    x = torch.ones(3, requires_grad=True)
    for active in (False, True):
        timeline.active = active
        timeline.mark(wide.REST)
        y, nothing = module(x * 2, scale=3.0)
        (y * y).sum().backward()
        timeline.mark(wide.OPTIMIZER)
        timeline.mark(wide.REST)
    assert nothing is None
    assert x.grad.tolist() == [2 * 72.0] * 3
    found = timeline.ms()
    assert 20 <= found["experts forward"] < 35
    assert 40 <= found["experts backward"] < 55
    assert found[wide.REST] < 15
    assert found["attention"] == 0
