"""Where pairs meet: by shape and machine, and what the launch is told."""

from dataclasses import replace

import pytest

from bench.shapes import problem_of
from megamoe.core.config import Problem
from megamoe.jit import abi
from megamoe.launch import meetings
from megamoe.launch.meetings import Meet, chosen, fill, units_of_block
from megamoe.testing.shapes import SHAPES

H100, H200 = 3352, 4917


class Rank:
    size, rank = 1, 0


def problem(name: str, precision: str = "bf16") -> Problem:
    shape = replace(SHAPES[name], num_experts=SHAPES[name].num_experts // 4)
    return problem_of(shape, 8192, Rank, precision)


@pytest.mark.parametrize(
    ("name", "precision", "where"),
    [
        *((n, "bf16", {H100}) for n in ("dsv3", "flash", "qwen3-235b", "qwen3-30b")),
        *(("dsv3", "fp8", {H100}), ("qwen3-30b", "fp8", set()), ("flash", "fp8", set())),
        *(("dsv3", "fp8_channel", {H100}), ("flash", "fp8_channel", set())),
        *(("dsv3", p, set()) for p in ("bf16xmxfp4", "fp8xmxfp4", "bf16xnvfp4")),
    ],
)
def test_who_meets_where(name: str, precision: str, where: set[int]) -> None:
    assert {m for m in (H100, H200, 0) if chosen(problem(name, precision), m) is not None} == where


def filled(p: Problem, gb_per_s: float, pool_rows: int = 1 << 16) -> list[int]:
    field = abi.STRUCTURES["Meet"]()
    fill(field, 4096, p, pool_rows, gb_per_s)
    assert field.came == 4096
    return [field.rows, field.cycles, field.many]


def test_what_a_launch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("dsv3")
    assert filled(p, H200)[0] == filled(p, 0)[0] == 0
    assert filled(p, H100)[0] == meetings.MEAN_ROWS * 64
    assert filled(p, H100, 1 << 28)[0] == 0, "more cells than a number has bits"
    monkeypatch.setattr(meetings, "chosen", lambda *_: Meet(6, 100, 50))
    assert filled(p, H200) == [50 * 64, 100, 6]
    assert filled(problem("dsv3", "fp8xmxfp4"), H100)[0] == 0, "panels follow the order by steps"


def test_nobody_meets_without_a_gpu() -> None:
    assert meetings.bandwidth() in (0, pytest.approx(H100, rel=0.3), pytest.approx(H200, rel=0.3))


def test_units_of_a_block() -> None:
    assert units_of_block(problem("dsv3")) == 8
    assert units_of_block(problem("nemotron3-super")) == 6
    assert units_of_block(Problem(272, 144, 4, 2, max_tokens=8)) == 1
