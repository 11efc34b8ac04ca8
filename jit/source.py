"""List the kernel's variants: what is fixed at compile time. Everything else is a run-time argument."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

from megamoe.core.errors import ConfigError
from megamoe.core.table import PRECISIONS

ACTIVATIONS = {
    "swiglu": "SwiGlu",
    "clamped_swiglu": "ClampedSwiGlu",
    "geglu": "GeGlu",
    "geglu_tanh": "GeGluTanh",
    "relu2": "Relu2",
}


# -> its layer type: precision, activation, tile
KERNELS = {
    "forward": "ForwardLayer",
    "train": "TrainLayer",
    "backward": "BackwardLayer",
    "few": "FewLayer",
    "push": "PushLayer",
}
FEW = ("few", "push")  # for few tokens, of one rank and of several
TILE = "Tile128x256"  # of csrc/megamoe/schedule/tile_shape.h

QUANTIZE = "quantize-weights"  # the other kernels, of jit/quantize.py
# of them: entry behind megamoe_ -> what it calls; its Args and threads of a CTA, by the beginnings of their names
_ONE_PASS = {
    "quantize_weights": ("quantize_weights<megamoe::Bf16x8>", "QuantizeWeights", "quantize"),
    "quantize_fp32_weights": ("quantize_weights<megamoe::Fp32x8>", "QuantizeWeights", "quantize"),
    "transpose_weights": ("quantize_weights<megamoe::E4m3x8>", "QuantizeWeights", "quantize"),
    "quantize_rows": ("quantize_rows", "QuantizeRows", "quantize"),
    "dequantize_rows": ("dequantize_rows", "QuantizeRows", "quantize"),
    "copy_tails": ("copy_tails", "CopyTails", "quantize"),
    "dequantize_mxfp4": ("dequantize_mxfp4", "DequantizeMxfp4", "dequantize"),
    "sum_rows": ("sum_rows_of_hosts", "SumRows", "sum_rows"),
}
QUANTIZE_SOURCE = """\
#include "megamoe/kernels/dequantize_mxfp4.cuh"
#include "megamoe/kernels/quantize_weights.cuh"
#include "megamoe/kernels/sum_rows.cuh"
""" + "".join(
    f"""
extern "C" __global__ void __launch_bounds__(megamoe::{threads}_threads)
megamoe_{entry}(const __grid_constant__ megamoe::{argument}Args args) {{
    megamoe::{function}(args);
}}
"""
    for entry, (function, argument, threads) in _ONE_PASS.items()
)


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. `activation` is Activation.kind; `kernel` names a file of csrc/megamoe/kernels."""

    precision: str
    activation: str
    profile: bool = False
    kernel: str = "forward"
    panels: bool = False  # launches of many rows may expand packed weights in memory
    weight_gradients: str = "bf16"  # what backward multiplies for them

    def __post_init__(self) -> None:
        if astuple(self) not in _every(self.profile):
            raise ConfigError("variant", self, "one of megamoe.jit.variants()")

    @staticmethod
    def expands(precision: str, kernel: str) -> bool:
        """Return whether there is a kernel with panels, too."""
        return kernel == "forward" and PRECISIONS[precision].panels

    @property
    def entry(self) -> str:
        """Name of the kernel in the cubin."""
        return f"megamoe_{self.kernel}"

    @property
    def launch(self) -> str:
        """Which of abi.LAUNCHES it takes."""
        kernel = "forward" if self.kernel == "few" else self.kernel
        return "packed" if self.expands(self.precision, kernel) else kernel

    def __str__(self) -> str:
        prefix = "" if self.kernel == "forward" else f"{self.kernel}-"
        panels, profile = "-panels" * self.panels, "-profile" * self.profile
        weights = "-e4m3-weights" * (self.weight_gradients == "e4m3")
        return f"{prefix}{self.precision}-{self.activation}{weights}{panels}{profile}"

    def source(self) -> str:
        """Render the translation unit; the emulator compiles the same text."""
        tile = f"{TILE}, true" if self.panels else TILE
        tile += ", E4m3Operands" * (self.weight_gradients == "e4m3")
        body = self.kernel if self.kernel in FEW else "two_gemm"
        return f"""\
#include "megamoe/kernels/{self.kernel}.cuh"

namespace megamoe {{
struct Traits
    : {KERNELS[self.kernel]}<{PRECISIONS[self.precision].cpp}, {ACTIVATIONS[self.activation]}, {tile}> {{
    static constexpr bool profile = {str(self.profile).lower()};
}};
}}  // namespace megamoe

MEGAMOE_KERNEL({self.entry}, megamoe::{body}, megamoe::Traits)
"""


def _every(profile: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of each Variant that a Problem can ask for."""
    known = [p for p in PRECISIONS.values() if p.cpp is not None]
    for kernel, p, activation in product(KERNELS, known, ACTIVATIONS):
        exists = kernel in p.few if kernel in FEW else p.trains or kernel == "forward"
        panels = (False, True) if Variant.expands(p.name, kernel) else (False,)
        products = p.weight_gradients if kernel == "backward" else ("bf16",)
        for last in product(panels, products) if exists else ():
            yield p.name, activation, profile, kernel, *last


def variants(profile: bool = False) -> list[Variant]:
    """Return every kernel that a Problem can ask for."""
    return [Variant(*fields) for fields in _every(profile)]
