"""tools/predict_bytes.py: the model of what tiles read from DRAM, over csrc/megamoe/schedule/order.h."""

from dataclasses import replace

import pytest
from programs import passes

from bench.memory_model.predict import Machine, meet_from, predict, rows_of_experts
from megamoe.launch.meetings import Meet
from megamoe.testing.shapes import SHAPES

SHAPE = replace(SHAPES["qwen3-235b"], num_experts=32)
MEET = Meet(many=4)


def once_gb(rows: list[int]) -> float:
    """Everything that tiles read, once: weights and x; h is found in an L2 of any size that holds all."""
    weights = 3 * SHAPE.hidden * SHAPE.intermediate * len(rows)
    # The last block of an odd run counts its own rows only, others whole blocks.
    blocks = [-(-r // 128) for r in rows]
    last = [128 - (-r % 128) if b % 2 else 128 for r, b in zip(rows, blocks, strict=True)]
    x = sum(SHAPE.hidden * (128 * (b - 1) + t) for b, t in zip(blocks, last, strict=True))
    return 2 * (weights + x) / 1e9


@pytest.mark.parametrize("meet", [None, MEET])
def test_a_large_l2_reads_everything_once(meet: Meet | None) -> None:
    rows = rows_of_experts(SHAPE, 2048, 1)
    found = predict(SHAPE, "bf16", rows, meet, Machine(l2_mb=100_000))
    assert found.read_gb == pytest.approx(once_gb(rows), rel=1e-3)


def test_meetings_and_the_order_by_rounds_read_less() -> None:
    """As on one H100 (2026-11-23): less is read where sharers meet, though more is where nobody waits in that order."""
    rows = rows_of_experts(SHAPE, 4096, 1)
    steps, met, alone = (
        predict(SHAPE, "bf16", rows, m, Machine()) for m in (None, MEET, replace(MEET, cycles=0))
    )
    assert once_gb(rows) < met.read_gb < 0.6 * steps.read_gb
    assert met.read_gb < 0.8 * alone.read_gb
    assert met.demand_gb == pytest.approx(steps.demand_gb, rel=0.02)
    assert met.spread_us < steps.spread_us


@pytest.mark.parametrize("slow", [0.1, 0.5])
def test_one_slow_pair_makes_others_wait_for_next_to_nothing(slow: float) -> None:
    rows = rows_of_experts(SHAPE, 4096, 1)
    machine = Machine(slow=slow)
    steps, met = (predict(SHAPE, "bf16", rows, m, machine).ms for m in (None, MEET))
    assert met <= 1.01 * steps


def test_who_meets_is_read() -> None:
    assert meet_from("steps") is None
    assert meet_from("rounds,many=6") == Meet(many=6)
    with pytest.raises(Exception, match="expected steps, or rounds"):
        meet_from("rounds,most=6")


def test_the_tool_prints_each_order():
    options = "--shape tiny --tokens 64 --meet steps rounds rounds,many=6,cycles=0"
    lines = passes("predict_bytes.py", *options.split()).splitlines()
    orders = ["steps", "rounds,many=4,cycles=170", "rounds,many=6,cycles=0"]
    assert [line.split()[3] for line in lines] == orders
    assert all("read" in line for line in lines)
