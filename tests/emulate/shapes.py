"""Layers, calls and machines of any shape, for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from training_cases import least_pool

from megamoe.backends.emulate.emulation import Emulation
from megamoe.core.config import Problem


@dataclass(frozen=True)
class Case:
    """tokens: of each rank. options: of make_inputs()."""

    problem: Problem
    tokens: list[int]
    num_ctas: int
    small_pool: bool
    options: dict[str, Any]

    def emulation(self) -> Emulation:
        pool_rows = least_pool(self.problem) if self.small_pool else None
        return Emulation(self.problem, num_ctas=self.num_ctas, pool_rows=pool_rows)


@st.composite
def cases(
    draw: st.DrawFn,
    variants: Sequence[tuple[str, str]],
    routings: Sequence[str],
    *,
    tokens: int,
    experts: int,
) -> Case:
    """variants: precision and activation. tokens, experts: the most, of one case in four."""
    ep_size = draw(st.integers(1, 3))
    many = draw(st.integers(0, 3)) == 0  # more than a warp, or two, has lanes for
    most_tokens, most_experts, widest = (tokens, experts, 3) if many else (80, 7, 24)
    drawn = draw(st.lists(st.integers(0, most_tokens), min_size=ep_size, max_size=ep_size))
    precision, activation = draw(st.sampled_from(variants))
    problem = Problem(
        hidden=16 * draw(st.integers(1, widest)),
        intermediate=16 * draw(st.integers(1, widest)),
        num_experts=draw(st.integers(1, most_experts)),
        top_k=draw(st.integers(1, 5)),
        ep_size=ep_size,
        max_tokens=max(*drawn, 1) + draw(st.integers(0, 40)),
        precision=precision,
        activation=activation,
        bias=draw(st.booleans()),
    )
    options = {
        "routing": draw(st.sampled_from(routings)),
        "ids_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "seed": draw(st.integers(0, 1000)),
    }
    return Case(problem, drawn, draw(st.sampled_from((2, 4))), draw(st.booleans()), options)
