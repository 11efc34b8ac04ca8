"""List the variants of the grouped kernel (csrc/megamoe/kernels/grouped.cuh), for megamoe.ops and weight gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.core.errors import ConfigError
from megamoe.jit.source import ACTIVATIONS, TILE

_BF16, _E4M3 = "Bf16Rows, Bf16Weights", "E4m3Rows, E4m3Weights"
_TOKENS, _CHANNELS = (f"E4m3{rows}Rows, E4m3ChannelWeights" for rows in ("Token", ""))
_COLUMNS = "Bf16Columns, Bf16Columns"
_STASHED = {
    "": f"{_COLUMNS}, StashedWeightsKind",
    "e4m3-": f"{_E4M3}, StashedE4m3Kind",
}
# -> its layer type; those with {} are of an activation
PRODUCTS = {
    "product": f"GroupedProduct<{TILE}, {_BF16}>",
    "product-columns": f"GroupedProduct<{TILE}, Bf16Rows, Bf16Columns>",
    "product-e4m3": f"GroupedProduct<{TILE}, {_E4M3}>",
    "product-e4m3-tokens": f"GroupedProduct<{TILE}, {_TOKENS}>",
    "product-e4m3-channels": f"GroupedProduct<{TILE}, {_CHANNELS}>",
    "product-quantizes": f"GroupedProduct<{TILE}, {_BF16}, E4m3Rows>",
    "product-e4m3-quantizes": f"GroupedProduct<{TILE}, {_E4M3}, E4m3Rows>",
    "product-e4m3-tokens-quantizes": f"GroupedProduct<{TILE}, {_TOKENS}, E4m3Rows>",
    "product-e4m3-channels-quantizes": f"GroupedProduct<{TILE}, {_CHANNELS}, E4m3Rows>",
    "activation": f"GroupedActivation<{TILE}, {_BF16}, {{}}, Bf16Rows>",
    "activation-quantizes": f"GroupedActivation<{TILE}, {_BF16}, {{}}, E4m3Rows>",
    "activation-e4m3": f"GroupedActivation<{TILE}, {_E4M3}, {{}}, Bf16Rows>",
    "activation-e4m3-quantizes": f"GroupedActivation<{TILE}, {_E4M3}, {{}}, E4m3Rows>",
    "activation-e4m3-tokens": f"GroupedActivation<{TILE}, {_TOKENS}, {{}}, Bf16Rows>",
    "activation-e4m3-tokens-quantizes": f"GroupedActivation<{TILE}, {_TOKENS}, {{}}, E4m3Rows>",
    "activation-columns": f"GroupedActivation<{TILE}, Bf16Rows, Bf16Columns, {{}}, Bf16Rows>",
    "saving": f"GroupedSaving<{TILE}, Bf16Weights, {{}}>",
    "saving-columns": f"GroupedSaving<{TILE}, Bf16Columns, {{}}>",
    "gradient": f"GroupedGradient<{TILE}, Bf16Weights, {{}}>",
    "gradient-columns": f"GroupedGradient<{TILE}, Bf16Columns, {{}}>",
    "gradient-scales": f"GroupedGradient<{TILE}, Bf16Weights, {{}}, GroupedScalingKind>",
    "gradient-columns-scales": f"GroupedGradient<{TILE}, Bf16Columns, {{}}, GroupedScalingKind>",
    "weights": f"GroupedWeightGradients<{TILE}, 1, {_COLUMNS}, GroupedWeightsKind>",
    # the layer's, over rows that its backward passes have kept: by planes of w13
    **{
        f"kept-{name}{planes}": f"GroupedWeightGradients<{TILE}, {planes}, {of}>"
        for name, of in _STASHED.items()
        for planes in (1, 2)
    },
}


@dataclass(frozen=True)
class GroupedVariant:
    """One compiled kernel: a row of PRODUCTS, with Activation.kind where it has one."""

    product: str
    activation: str | None = None

    kernel = "grouped"
    entry = "megamoe_grouped"

    @classmethod
    def of_stash(cls, planes: int, weight_gradients: str = "bf16") -> GroupedVariant:
        """Return the layer's, of rows that were kept. planes: of w13. weight_gradients: the layer's option."""
        return cls(f"kept-e4m3-{planes}" if weight_gradients == "e4m3" else f"kept-{planes}")

    def __post_init__(self) -> None:
        if self.product not in PRODUCTS:
            raise ConfigError("product", repr(self.product), "one of " + ", ".join(PRODUCTS))
        known = ACTIVATIONS if "{}" in PRODUCTS[self.product] else (None,)
        if self.activation not in known:
            raise ConfigError("activation", repr(self.activation), f"one of {list(known)}")

    def __str__(self) -> str:
        return f"grouped-{self.product}" + (f"-{self.activation}" if self.activation else "")

    @property
    def precision(self) -> str:
        """Which of PRECISIONS has its main loop."""
        return "fp8" if "e4m3" in self.product else "bf16"

    @property
    def launch(self) -> str:
        """Which of abi.LAUNCHES it takes."""
        if self.product.startswith("kept"):
            return "stashed_weights"
        return "grouped_weights" if self.product == "weights" else "grouped"

    def source(self) -> str:
        """Render the translation unit; the emulator compiles the same text."""
        layer = PRODUCTS[self.product].format(ACTIVATIONS.get(self.activation or ""))
        return f"""\
#include "megamoe/kernels/grouped.cuh"

namespace megamoe {{
struct Traits : {layer} {{}};
}}  // namespace megamoe

MEGAMOE_KERNEL({self.entry}, megamoe::grouped, megamoe::Traits)
"""


def grouped_variants() -> list[GroupedVariant]:
    """Return every kernel of kernels/grouped.cuh."""
    found = []
    for product, layer in PRODUCTS.items():
        kinds = ACTIVATIONS if "{}" in layer else (None,)
        found += [GroupedVariant(product, kind) for kind in kinds]
    return found
