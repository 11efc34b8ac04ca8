"""List the kernel's variants: what is fixed at compile time. Everything else is a run-time argument."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from megamoe.core.errors import ConfigError
from megamoe.core.table import PRECISIONS, TRAINED

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
# of them: entry -> what it calls; its Args and threads of a CTA, by the beginnings of their names
_ONE_PASS = {
    "megamoe_quantize_weights": (
        "quantize_weights<megamoe::Bf16x8>",
        "QuantizeWeights",
        "quantize",
    ),
    "megamoe_quantize_fp32_weights": (
        *("quantize_weights<megamoe::Fp32x8>", "QuantizeWeights", "quantize"),
    ),
    "megamoe_transpose_weights": (
        "quantize_weights<megamoe::E4m3x8>",
        "QuantizeWeights",
        "quantize",
    ),
    "megamoe_quantize_rows": ("quantize_rows", "QuantizeRows", "quantize"),
    "megamoe_dequantize_rows": ("dequantize_rows", "QuantizeRows", "quantize"),
    "megamoe_copy_tails": ("copy_tails", "CopyTails", "quantize"),
    "megamoe_dequantize_mxfp4": ("dequantize_mxfp4", "DequantizeMxfp4", "dequantize"),
    "megamoe_sum_rows": ("sum_rows_of_hosts", "SumRows", "sum_rows"),
}
QUANTIZE_SOURCE = """\
#include "megamoe/kernels/dequantize_mxfp4.cuh"
#include "megamoe/kernels/quantize_weights.cuh"
#include "megamoe/kernels/sum_rows.cuh"
""" + "".join(
    f"""
extern "C" __global__ void __launch_bounds__(megamoe::{threads}_threads)
{entry}(const __grid_constant__ megamoe::{argument}Args args) {{
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
        if self.precision not in PRECISIONS or PRECISIONS[self.precision].cpp is None:
            raise ConfigError("precision", repr(self.precision), "one that has a kernel")
        if self.kernel in FEW and self.kernel not in PRECISIONS[self.precision].few:
            having = [repr(p.name) for p in PRECISIONS.values() if self.kernel in p.few]
            raise ConfigError("precision", repr(self.precision), " or ".join(having))
        if self.kernel != "forward" and not PRECISIONS[self.precision].trains:
            raise ConfigError(
                "precision", repr(self.precision), f"{' or '.join(TRAINED)}, to train"
            )
        if self.kernel not in KERNELS:
            raise ConfigError("kernel", repr(self.kernel), "one of " + ", ".join(KERNELS))
        if self.weight_gradients not in self._products(self.precision, self.kernel):
            expected = " or ".join(map(repr, self._products(self.precision, self.kernel)))
            raise ConfigError("weight_gradients", repr(self.weight_gradients), expected)
        if self.panels and not self.expands(self.precision, self.kernel):
            raise ConfigError("panels", True, f"False for {self.kernel} in {self.precision}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                "activation", repr(self.activation), "one of " + ", ".join(ACTIVATIONS)
            )

    @staticmethod
    def expands(precision: str, kernel: str) -> bool:
        """Return whether there is a kernel with panels, too."""
        return kernel == "forward" and PRECISIONS[precision].panels

    @staticmethod
    def _products(precision: str, kernel: str) -> tuple[str, ...]:
        """Return what weight gradients may be products of."""
        return PRECISIONS[precision].weight_gradients if kernel == "backward" else ("bf16",)

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


def variants(profile: bool = False) -> list[Variant]:
    """Return every kernel that a Problem can ask for."""
    have = [p.name for p in PRECISIONS.values() if p.cpp is not None]
    made = product(KERNELS, have, ACTIVATIONS)
    return [
        Variant(precision, activation, profile, kernel, panels, products)
        for kernel, precision, activation in made
        if kernel == "forward" or precision in TRAINED
        if kernel not in FEW or kernel in PRECISIONS[precision].few
        for panels in ((False, True) if Variant.expands(precision, kernel) else (False,))
        for products in Variant._products(precision, kernel)
    ]
