"""One table of formats: nothing else tells precisions apart, and a row that nobody knows is refused by name."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megamoe.backends import reference
from megamoe.backends.call import Call
from megamoe.backends.staged import StagedBackend
from megamoe.core import table
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.formats.quantization import codec
from megamoe.formats.weights import ExpertWeights, expected_weights
from megamoe.jit.source import Variant, variants
from megamoe.launch import layout
from megamoe.launch.cache import QuantizedCache
from megamoe.testing import gradients, intermediates, make_inputs, make_weights

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(
    p for folder in ("megamoe", "jit", "bench", "tools") for p in (ROOT / folder).rglob("*.py")
)


def comparisons(text: str) -> list[int]:
    """Return the lines that compare something with the name of a precision."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        constants = [n for side in compared for n in ast.walk(side) if isinstance(n, ast.Constant)]
        lines += [c.lineno for c in constants if c.value in table.PRECISIONS]
    return lines


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_compares_with_a_precision(path: Path) -> None:
    assert comparisons(path.read_text()) == []


def test_the_checker_sees_every_way_to_compare() -> None:
    found = (
        'p == "fp8"\n"bf16" != p\np in ("bf16", "fp8")\nmatch p:\n    case "fp8":\n        pass\n'
    )
    assert comparisons(found) == [1, 2, 3, 3, 5]
    assert comparisons('LIMIT = {"bf16": 1, "fp8": 2}\np == "fp16"') == []


def test_a_table_has_a_row_for_every_precision() -> None:
    found = table.by_precision({"bf16": 1, "fp8": 2, "fp8_channel": 3})
    assert list(found) == list(table.PRECISIONS)
    assert list(found.values()) == [1, 2, 3, 2, 1, 1]
    assert set(gradients.FP32_LIMIT) == set(table.TRAINED)


@pytest.mark.parametrize("precision", table.PRECISIONS.values(), ids=lambda p: p.name)
def test_rows_are_consistent(precision: table.Precision) -> None:
    for stored in (precision.x, precision.w, precision.h):
        assert stored.bytes == torch.empty(1, dtype=stored.dtype).element_size()
        assert stored.scaled == (codec(stored) is not None)
        if stored.scaled and stored.packed == 1:
            assert stored.largest == torch.finfo(stored.dtype).max
    assert precision.cpp is not None


# --- a row that nobody knows ---

FP5 = table.Format("fp5", torch.uint8, (1, 64), 57.0)
FP5_BLOCKS = replace(FP5, name="fp5 blocks", scale_block=(64, 64))
FP16 = table.Format("fp16", torch.float16)


def unknown(monkeypatch: pytest.MonkeyPatch, **formats: table.Format) -> Problem:
    row = replace(table.PRECISIONS["bf16"], name="dummy", **formats)
    monkeypatch.setitem(table.PRECISIONS, "dummy", row)
    return Problem(144, 80, 4, 2, max_tokens=16, precision="dummy")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="precision is 'dummy', expected bf16 or fp8 or fp8_channel or fp8xmxfp4 or bf16xmxfp4",
    ):
        Problem(144, 80, 4, 2, precision="dummy")


def test_layout_and_weights_follow_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = unknown(monkeypatch, x=FP5, w=FP5_BLOCKS)
    window = layout.window_regions(problem)
    assert (window["window_x"].dtype, window["window_x_scale"].shape) == (torch.uint8, (16, 3))
    workspace = layout.workspace_regions(problem, layout.default_pool_rows(problem))
    assert workspace["x_pool_scale"].shape == (3, layout.default_pool_rows(problem))
    assert workspace["h"].dtype == torch.bfloat16
    assert "h_scale" not in workspace
    assert expected_weights(problem)["w13"][1] == torch.uint8
    assert expected_weights(problem)["w13_scale"][0] == (4, 2 * 2, 3)


@pytest.mark.parametrize(("operand", "stored"), [("x", FP5), ("h", FP5), ("x", FP16), ("h", FP16)])
def test_backends_refuse_an_unknown_format(
    monkeypatch: pytest.MonkeyPatch, operand: str, stored: table.Format
) -> None:
    problem = unknown(monkeypatch, **{operand: stored})
    inputs = make_inputs(problem, 5)
    weights = make_weights(problem)
    arguments = (inputs.x, inputs.topk_ids, inputs.topk_weights, weights)
    with pytest.raises(ConfigError, match=f"format is '{stored.name}'"):
        StagedBackend(problem).forward(Call(*arguments))
    with pytest.raises(ValueError, match=f"format is '{stored.name}'"):
        reference.forward(problem, *[[a] for a in arguments])
    with pytest.raises(ConfigError, match="variant is dummy-swiglu, expected one of"):
        Variant(problem.precision, problem.activation.kind)  # what mega and emulate begin with
    with pytest.raises(KeyError, match="dummy"):
        intermediates.StageChecker(problem).limit(1)
    assert "dummy" not in {v.precision for v in variants()}


@pytest.mark.parametrize("stored", [FP5_BLOCKS, FP16])
def test_weights_of_an_unknown_format_are_refused(
    monkeypatch: pytest.MonkeyPatch, stored: table.Format
) -> None:
    problem = unknown(monkeypatch, w=stored)
    masters = make_weights(problem, quantize=False)
    with pytest.raises(ConfigError, match=f"format is '{stored.name}'"):
        masters.quantized(problem)
    with pytest.raises(ConfigError, match=f"format is '{stored.name}'"):
        QuantizedCache().weights(problem, masters)
    scales = {name: torch.ones(1) for name in ("w13_scale", "w2_scale")}
    with pytest.raises(ConfigError, match=f"format is '{stored.name}'"):
        ExpertWeights(masters.w13, masters.w2, **scales).dense(problem, torch.float32)
    inputs = make_inputs(problem, 5)
    arguments = (inputs.x, inputs.topk_ids, inputs.topk_weights, masters)
    with pytest.raises(ValueError, match=f"format is '{stored.name}'"):
        reference.forward(problem, *[[a] for a in arguments])
