"""Formats: how x, the weights and h are stored in each precision. One table; everything else asks it.

Below config, which takes the names of the precisions from here. How a format is quantized: quantization.py beside
this file, the oracle's own quant.py, and csrc/. Each refuses by name a format that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

SCALE_GROUP = 128  # values along K that share a scale, in every format that has scales


@dataclass(frozen=True)
class Format:
    """How one operand's numbers are stored.

    dtype: of an element in memory. scale_block: rows x columns that share an fp32 scale; None: no scales.
    largest: magnitude of an element, which a scale maps the largest value to.
    cpp: its types in csrc/megamoe/formats are <cpp>Rows and <cpp>Weights; None: no kernel.
    """

    name: str
    dtype: torch.dtype
    scale_block: tuple[int, int] | None = None
    largest: float = inf
    cpp: str | None = None

    @property
    def scaled(self) -> bool:
        """Whether scales stand beside the elements."""
        return self.scale_block is not None

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a matrix; ragged last blocks count."""
        if self.scale_block is None:
            raise ValueError(f"{self.name} has no scales")
        height, width = self.scale_block
        return -(-rows // height), -(-columns // width)


_E4M3, _E4M3_MAX = torch.float8_e4m3fn, 448.0
BF16 = Format("bf16", torch.bfloat16, cpp="Bf16")
E4M3_ROWS = Format("e4m3 1x128", _E4M3, (1, SCALE_GROUP), _E4M3_MAX, cpp="E4m3")
E4M3_BLOCKS = Format("e4m3 128x128", _E4M3, (SCALE_GROUP, SCALE_GROUP), _E4M3_MAX, cpp="E4m3")


@dataclass(frozen=True)
class Precision:
    """The formats of one precision."""

    name: str
    x: Format  # staged x, x_pool
    w: Format  # w13 and w2 as the GEMMs read them
    h: Format

    @property
    def cpp(self) -> str | None:
        """Return the kernel's type for it, None where a format has none."""
        if None in (self.x.cpp, self.w.cpp, self.h.cpp):
            return None
        return f"Precision<{self.x.cpp}Rows, {self.w.cpp}Weights, {self.h.cpp}Rows>"


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("bf16", x=BF16, w=BF16, h=BF16),
        Precision("fp8", x=E4M3_ROWS, w=E4M3_BLOCKS, h=E4M3_ROWS),
    )
}
# What the backward pass computes in, whatever the layer's.
BACKWARD_PRECISION = PRECISIONS["bf16"]
