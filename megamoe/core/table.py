"""Define how x, the weights and h are stored in each precision. Every other module reads this table.

The table is below `config` in the import order, because `config` takes the names of the precisions from it. The code
that quantizes a format is in megamoe/formats/quantization.py, in the oracle's quant.py, and in csrc/. Each of them
rejects a format that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import torch

SCALE_GROUP = 128  # values along K that share a scale, where it is not all of a row
WHOLE_ROW = 1 << 31  # columns of a block that is a row, however wide


@dataclass(frozen=True)
class Format:
    """Describe how the numbers of one operand are stored.

    Args:
        name: Name of the format, for messages.
        dtype: Type of one element in memory, which holds `packed` numbers.
        scale_block: (rows, columns) of a block whose scales are stored together; None: the format has no scales.
        largest: The magnitude to which a scale maps the largest value of its group.
        cpp: Prefix of its types <cpp>Rows and <cpp>Weights in csrc/megamoe/formats; None: no kernel reads it.
        packed: Numbers per element. Default: 1.
        scale_dtype: Type of a scale. Default: fp32.
        block_scales: Scales per block, including the header of FP4 formats. Default: 1.
        multiple: The width of a row is a multiple of this. Default: 16.
        by_quads: True if each group of 128 columns is permuted in memory, see in_order().
    """

    name: str
    dtype: torch.dtype
    scale_block: tuple[int, int] | None = None
    largest: float = inf
    cpp: str | None = None
    packed: int = 1
    scale_dtype: torch.dtype = torch.float32
    block_scales: int = 1
    multiple: int = 16
    by_quads: bool = False

    @property
    def scaled(self) -> bool:
        """True if scales are stored next to the elements."""
        return self.scale_block is not None

    @property
    def whole_rows(self) -> bool:
        """True if one scale covers a whole row."""
        return self.scale_block is not None and self.scale_block[1] == WHOLE_ROW

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    def width(self, columns: int) -> int:
        """Return the number of elements that a row of `columns` numbers occupies in memory."""
        return -(-columns // SCALE_GROUP) * SCALE_GROUP if self.by_quads else columns // self.packed

    def in_order(self, rows: torch.Tensor, columns: int) -> torch.Tensor:
        """Return rows [M, width(columns)] as they are in memory -> [M, columns] in column order."""
        if not self.by_quads:
            return rows
        words = rows.unflatten(-1, (-1, 8, 4, 4))  # in each group [place, quad, number]
        return words.transpose(-3, -2).flatten(-4)[..., :columns]

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix. A partial block at the edge has scales, too."""
        if self.scale_block is None:
            raise ValueError(f"{self.name} has no scales")
        height, width = self.scale_block
        blocks = -(-rows // height), -(-columns // width)
        return blocks if self.block_scales == 1 else (*blocks, self.block_scales)


_E4M3, _E4M3_MAX = torch.float8_e4m3fn, 448.0
BF16 = Format("bf16", torch.bfloat16, cpp="Bf16")
E4M3_ROWS = Format("e4m3 1x128", _E4M3, (1, SCALE_GROUP), _E4M3_MAX, cpp="E4m3")
E4M3_QUADS = replace(E4M3_ROWS, name="e4m3 1x128 by quads", cpp="E4m3Quad", by_quads=True)
E4M3_TOKENS = Format("e4m3 by token", _E4M3, (1, WHOLE_ROW), _E4M3_MAX, cpp="E4m3Token")
E4M3_CHANNELS = Format("e4m3 by channel", _E4M3, (1, WHOLE_ROW), _E4M3_MAX, cpp="E4m3Channel")
E4M3_BLOCKS = Format("e4m3 128x128", _E4M3, (SCALE_GROUP, SCALE_GROUP), _E4M3_MAX, cpp="E4m3")
MXFP4_GROUP = 32  # values along K that share a power of two, by the OCP MX specification
FP4_HEADER = 16  # bytes before a block's scales, see arrange_scales() of either format
MXFP4 = Format(
    "mxfp4",
    torch.uint8,
    (SCALE_GROUP, SCALE_GROUP),
    6.0,
    packed=2,
    scale_dtype=torch.uint8,
    block_scales=FP4_HEADER + SCALE_GROUP * SCALE_GROUP // MXFP4_GROUP,
    multiple=MXFP4_GROUP,
    cpp="Mxfp4",
)
NVFP4_GROUP = 16  # values along K that share an e4m3
NVFP4 = replace(
    MXFP4,
    name="nvfp4",
    block_scales=FP4_HEADER + SCALE_GROUP * SCALE_GROUP // NVFP4_GROUP,
    multiple=32,  # a row of packed bytes is a multiple of 16, as TMA wants it
    cpp="Nvfp4",
)


@dataclass(frozen=True)
class Precision:
    """Describe the formats of one precision."""

    name: str
    x: Format  # staged x, x_pool
    w: Format  # w13 and w2 as the GEMMs read them
    h: Format
    trains: bool = True  # has a backward pass
    weight_gradients: tuple[str, ...] = ("bf16",)  # what they may multiply, the default first
    few: tuple[str, ...] = ()  # kernels for few tokens: "few", of one rank, and "push", of several

    @property
    def multiple(self) -> int:
        """The widths of a layer are multiples of this."""
        return max(self.x.multiple, self.w.multiple, self.h.multiple)

    @property
    def packed(self) -> bool:
        """True if weights are packed: they get no gradients, and backward multiplies them as bf16."""
        return self.w.packed > 1

    @property
    def transposes(self) -> bool:
        """True if backward multiplies transposed copies of the weights."""
        return self.trains and self.w.scaled and not self.packed

    @property
    def dy(self) -> Format:
        """Rows of dy and dgu that backward multiplies."""
        return BF16 if self.packed else self.x

    @property
    def panels(self) -> bool:
        """True if there are kernels that first expand the packed weights in memory, to e4m3 panels."""
        return self.packed and self.x.scaled

    @property
    def cpp(self) -> str | None:
        """The kernel's C++ type of this precision; None if one of its formats has no kernel."""
        if None in (self.x.cpp, self.w.cpp, self.h.cpp):
            return None
        return f"Precision<{self.x.cpp}Rows, {self.w.cpp}Weights, {self.h.cpp}Rows>"


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("bf16", x=BF16, w=BF16, h=BF16),
        Precision(
            *("fp8", E4M3_ROWS, E4M3_BLOCKS, E4M3_ROWS),
            weight_gradients=("e4m3", "bf16"),
            few=("few", "push"),
        ),
        Precision("fp8_channel", x=E4M3_TOKENS, w=E4M3_CHANNELS, h=E4M3_ROWS, trains=False),
        Precision("fp8xmxfp4", x=E4M3_QUADS, w=MXFP4, h=E4M3_QUADS, few=("few",)),
        Precision("bf16xmxfp4", x=BF16, w=MXFP4, h=BF16),
        Precision("bf16xnvfp4", x=BF16, w=NVFP4, h=BF16),
    )
}
# Names that somebody may look for, and what to say of them.
REFUSED = {
    "fp8xnvfp4": "bf16xnvfp4: an e2m1 times its e4m3 scale has up to six significant bits, which bf16 holds; e4m3, "
    "with four, would quantize the weights again"
}
TRAINED = [p.name for p in PRECISIONS.values() if p.trains]


def by_precision(of: dict[str, float]) -> dict[str, float]:
    """Return a value for each precision: its own, or that of "fp8" or "bf16", whose rows it multiplies."""
    return {n: of.get(n, of["fp8" if p.x.scaled else "bf16"]) for n, p in PRECISIONS.items()}
