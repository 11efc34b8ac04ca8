"""Which kernel makes weight gradients by themselves: the rules, what is stated, and that operators launch it."""

import pytest
import torch

from megamoe import ops
from megamoe.jit.grouped import GroupedVariant
from megamoe.launch import weight_tiles
from megamoe.launch.weight_tiles import HALVES, WHOLE, Rule, chosen
from megamoe.ops import operators


@pytest.mark.parametrize("num_experts", [0, 1, 64])
def test_no_launch_takes_the_second_form_before_it_was_measured(num_experts: int) -> None:
    found = {chosen(rows, num_experts, size) for rows in (0, 1, 65536) for size in (2, 4)}
    assert found == {HALVES}


def test_a_rule_is_for_rows_in_the_mean_and_for_sizes_of_elements(monkeypatch) -> None:
    monkeypatch.setattr(weight_tiles, "RULES", (Rule(512), Rule(100, dw_bytes=(2,))))
    assert [chosen(64 * 511, 64, size) for size in (2, 4)] == [WHOLE, HALVES]
    assert [chosen(64 * 512, 64, size) for size in (2, 4)] == [WHOLE, WHOLE]
    assert [chosen(64 * 99, 64, size) for size in (2, 4)] == [HALVES, HALVES]
    monkeypatch.setattr(weight_tiles, "stated", HALVES)
    assert chosen(64 * 512, 64, 2) == HALVES


class Machine:
    """Notes what it would run."""

    def __init__(self) -> None:
        self.ran: list[GroupedVariant] = []

    def run(self, variant: GroupedVariant, fill: object) -> None:
        self.ran.append(variant)


def launched(monkeypatch) -> list[tuple[str, str]]:
    """Return the kernels that were (looked for, launched): bf16, fp32, added."""
    machine, asked = Machine(), []

    def machine_of(device: torch.device, variant: GroupedVariant) -> Machine:
        asked.append(variant)
        return machine

    monkeypatch.setattr(operators, "machine_of", machine_of)
    a, offs = torch.zeros(300, 8).bfloat16(), torch.tensor([100, 300], dtype=torch.int32)
    ops.grouped_mm_wgrad(a, a, offs)
    ops.grouped_mm_wgrad(a, a, offs, dtype=torch.float32)
    ops.grouped_mm_wgrad(a, a, offs, out=torch.zeros(2, 8, 8))
    pairs = zip(asked, machine.ran, strict=True)
    return [(looked_for.product, ran.product) for looked_for, ran in pairs]


def test_operators_launch_the_kernel_that_is_chosen(monkeypatch) -> None:
    assert launched(monkeypatch) == [(HALVES, HALVES)] * 3
    monkeypatch.setattr(weight_tiles, "RULES", (Rule(150, dw_bytes=(4,)),))
    assert launched(monkeypatch) == [(HALVES, HALVES), (WHOLE, WHOLE), (WHOLE, WHOLE)]
    monkeypatch.setattr(weight_tiles, "stated", WHOLE)
    assert launched(monkeypatch) == [(WHOLE, WHOLE)] * 3
