"""tools/ops_bench.py: its contenders compute the same thing; a contender that fails is left out."""

import argparse
import csv
import sys
from dataclasses import replace

import pytest
import torch
from programs import tool

from bench import ops, ops_cases, timing
from bench.floors import GEMM_TFLOPS, HBM_BYTES_PER_US
from megamoe.formats.quantization import E4M3, dequantize_rows, dequantize_tokens
from megamoe.ops.groups import Groups
from megamoe.ops.scales import by_row
from megamoe.testing.compare import compare
from megamoe.testing.shapes import SHAPES

SIZES = ops_cases.Sizes("ragged", (24, 0, 9), 64, 96, "cpu")


def flat(found):
    """Return tensors of rows; of e4m3 its values, whose scales stand by block or by row."""
    found = found if isinstance(found, (tuple, list)) else (found,)
    if found[0].dtype == E4M3:
        q, scale = found
        if scale.shape[0] != q.shape[0]:
            scale = by_row(scale, Groups(SIZES.offs()), q, SIZES.num)
        found = [(dequantize_tokens if scale.shape[1] == 1 else dequantize_rows)(q, scale)]
    return [t.flatten(1).float() for t in found if t is not None and t.dim() > 1]


def arguments(**more):
    sizes = {"experts": 4, "tokens": 20, "size": 32, "no_bias": False, "eager": True}
    return argparse.Namespace(**sizes, device="cpu", backend="reference", **more)


def test_contenders_agree(monkeypatch):
    small = {"hidden": 64, "intermediate": 48, "num_experts": 8}
    monkeypatch.setattr(ops_cases, "SHAPES", {n: replace(s, **small) for n, s in SHAPES.items()})
    monkeypatch.setattr(ops_cases, "MODEL_ROWS", {"dsv3": (8, 24), "flash": (24,)})
    torch.manual_seed(0)
    args, names = arguments(), []
    made = [kind(SIZES, args) for kind in ops_cases.KINDS.values()]
    models = [n for n in ops_cases.MODELS if "qwen" not in n]
    for case in [c for cases in made for c in cases] + [
        c for n in models for c in ops_cases.MODELS[n](args)
    ]:
        names.append(case.name)
        found = {c.name: [t.clone() for t in flat(c.timed(c.before()))] for c in case.contenders}
        if case.name == "layer step":  # whose layer draws its own dy
            found.pop("megamoe")
        found.pop("product", None)
        first, *others = found.values()
        if case.name.endswith("+="):  # to one tensor, one after the other
            others = [[last - t for last, t in zip(others[0], first, strict=True)]]
        for a, b in ((a, b) for other in others for a, b in zip(first, other, strict=False)):
            limit = 8e-2 if case.name.startswith("fp8") else 2e-2  # other scales
            assert compare(a, b).relative < limit, case.name
    family = [n + a for a in ("swiglu", "geglu", "srelu") for n in ("", "d")]
    fp8 = [f"fp8 {n}" for n in ("quantize", "product", "swiglu", "dgrad")]
    mlps = [f"{n} {d}" for n in ("mlp", "fp8 mlp", "cute") for d in ("forward", "backward")]
    dw = [f"wgrad-{m} dw{i}{a}" for m in ("dsv3 8", "dsv3 24", "flash 24") for i in ("13", "2")
          for a in ("", " +=")]  # fmt: skip
    whole = [f"{n} {d}" for n in ("gpt-oss", "layer") for d in ("forward", "step")]
    assert names == [
        *("product", "dgrad", "wgrad"), *family, *fp8, "channel", *mlps, *whole, *dw
    ]  # fmt: skip


def test_sizes_are_names_or_numbers():
    s = ops_cases.sizes_of("10,3,64,96")
    assert (s.rows, s.total, s.k, s.n) == ((3, 3, 4), 10, 64, 96)
    assert ops_cases.sizes_of("quickstart").total == 864
    args = arguments(sizes=["8,2,16,32", "torchao"], only=None)
    run = [(text, kind) for text, kind, _ in ops_cases.cases(args)]
    assert {("8,2,16,32", "mlp"), ("torchao", "fp8")} < set(run)
    assert len(run) == 8
    args = arguments(sizes=None, only=["layer", "fp8"])
    kinds = [(text, kind) for text, kind, _ in ops_cases.cases(args)]
    assert kinds == [("", "layer"), *((n, "fp8") for n in ops_cases.NAMED)]


def test_a_figure_is_the_median_of_its_samples(monkeypatch, capsys):
    planted = {
        "megamoe": [10, 90, 20, 80, 30],
        "product": [25] * 5,
        "torch": [50, 990, 40, 400, 60],
    }
    result = torch.empty(500)

    def call(us):
        return us if measuring else result

    def fails(_):
        raise RuntimeError("no kernel")

    calls = [timing.Contender(name, lambda _, us=us: call(us)) for name, us in planted.items()]
    calls.append(timing.Contender("deepgemm", fails))

    def stopwatch(on_gpu, call, *given):
        nonlocal measuring
        measuring = True
        us = call(*given).pop(0)
        return lambda: us

    measuring = False
    monkeypatch.setattr(timing, "stopwatch", stopwatch)
    timer = timing.Timer(torch.device("cpu"), samples=5)
    case = ops.Case("case", {"bf16": 3e9}, (torch.empty(1000),), calls)
    ours, product, theirs = ops.measure(case, "sizes", ["cool"], timer, {"torch": 1980})
    assert "deepgemm: RuntimeError: no kernel" in capsys.readouterr().out
    assert (ours.clock_mhz, theirs.clock_mhz) == (0, 1980)
    assert (ours.us, product.us, theirs.us) == (30, 25, 60)
    assert (ours.tflops, theirs.tflops) == (100, 50)
    assert (ours.speedup, theirs.speedup, ours.over_product) == (2, 1, 1.2)
    assert ours.gb_s == 0.2  # 6000 bytes in 30 us
    assert ours.share == round(3e9 / (GEMM_TFLOPS["bf16"] * 1e6) / 30, 3)
    assert case.limit_us(HBM_BYTES_PER_US * 50) == 50


def test_a_case_that_fails_leaves_the_others(monkeypatch, tmp_path, capsys):
    def broken(s, args):
        raise RuntimeError("out of memory")
        yield

    monkeypatch.setitem(ops_cases.KINDS, "geglu", broken)
    command = "ops_bench.py --device cpu --sizes 9,2,16,32 --only geglu srelu --eager --samples 1"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--mode", "cool", "--out", str(tmp_path)])
    assert tool("ops_bench").main() == 0
    assert "geglu 9,2,16,32: RuntimeError: out of memory" in capsys.readouterr().out
    title, *table = (tmp_path / "ops.csv").read_text().splitlines()
    assert title.endswith(str(tmp_path))
    rows = [(row["case"], row["contender"]) for row in csv.DictReader(table)]
    assert rows == [
        (c, n) for c in ("srelu", "dsrelu") for n in ("megamoe", "product", "torch eager")
    ]
    assert (tmp_path / "ops.png").exists()


def test_without_a_gpu_there_is_nothing_to_time(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ops_bench.py", "--only", "swiglu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tool("ops_bench").main()
    assert "needs a Hopper GPU" in capsys.readouterr().err
