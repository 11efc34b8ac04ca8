"""Which kernel makes weight gradients in a launch of their own: by shape, in one table.

Both have the same tiles and the same bits. One has the 16 warps of a layer's kernel and MMAs over half a tile; the
other has 12, which leaves each math thread registers for MMAs over a whole one (csrc/megamoe/cta/warps.h).
"""

from __future__ import annotations

from dataclasses import dataclass

HALVES, WHOLE = "weights", "weights-whole"  # of megamoe.jit.grouped.PRODUCTS


@dataclass(frozen=True)
class Rule:
    """Launches with MMAs over whole tiles: from so many rows of an expert on, in the mean; bytes of elements."""

    mean_rows: float
    dw_bytes: tuple[int, ...] = (2, 4)


# There is none before a GPU has measured it: tools/ops_bench.py has both forms.
RULES: tuple[Rule, ...] = ()

# For measurements: unless it is None, it takes the place of the rules.
stated: str | None = None


def chosen(rows: int, num_experts: int, dw_bytes: int) -> str:
    """Return the kernel for so many rows of all experts."""
    if stated is not None:
        return stated
    fits = (rows >= rule.mean_rows * num_experts and dw_bytes in rule.dw_bytes for rule in RULES)
    return WHOLE if any(fits) else HALVES
