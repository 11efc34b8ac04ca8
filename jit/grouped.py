"""List the variants of the grouped kernel (csrc/megamoe/kernels/grouped.cuh), for megamoe.ops and weight gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megamoe.core.errors import ConfigError
from megamoe.jit.source import ACTIVATIONS, TILE

# Rows and weights, by what names of their kernels have
_OPERANDS = {
    "": "Bf16Rows, Bf16Weights",
    "-columns": "Bf16Rows, Bf16Columns",
    "-e4m3": "E4m3Rows, E4m3Weights",
    "-e4m3-tokens": "E4m3TokenRows, E4m3ChannelWeights",
    "-e4m3-channels": "E4m3Rows, E4m3ChannelWeights",
}
_COLUMNS = "Bf16Columns, Bf16Columns"
_STASHED = {
    "": f"{_COLUMNS}, StashedWeightsKind",
    "e4m3-": f"{_OPERANDS['-e4m3']}, StashedE4m3Kind",
}
_OUTPUTS = {"": "Bf16Rows", "-quantizes": "E4m3Rows"}
_KINDS = {"": "", "-scales": "Scaling", "-transposes": "Transposed"}
_ORDERS = {"": "{}", "-interleaved": "Interleaved<{}>"}  # of gate and up columns


def _products() -> Iterator[tuple[str, str]]:
    for operands, of in _OPERANDS.items():
        outputs = [name for name in _OUTPUTS if not (name and operands == "-columns")]
        for to in outputs:
            yield f"product{operands}{to}", f"GroupedProduct<{TILE}, {of}, {_OUTPUTS[to]}>"
        for order, act in _ORDERS.items() if operands != "-e4m3-channels" else ():
            blocks, of_h = operands == "-e4m3", [(to, "") for to in outputs]
            for to, kind in [*of_h, ("-quantizes", "-transposes")] if blocks else of_h:
                given = f"{TILE}, {of}, {act}, {_OUTPUTS[to]}, Grouped{_KINDS[kind]}Kind"
                yield f"activation{operands}{to}{kind}{order}", f"GroupedActivation<{given}>"
                yield f"saving{operands}{to}{kind}{order}", f"GroupedSaving<{given}>"
            # Scales by channel in its epilogue, too, would make it longer than epilogues may be.
            for scales in ("", "-scales") if operands != "-e4m3-tokens" else ():
                given = f"{TILE}, {of}, {act}, Grouped{_KINDS[scales]}"
                yield f"gradient{operands}{scales}{order}", f"GroupedGradient<{given}Kind>"
                if blocks and not order:
                    layer = f"GroupedTransposedGradient<{given}TransposedKind>"
                    yield f"gradient-e4m3-quantizes{scales}", layer


# -> its layer type; those with {} are of an activation
PRODUCTS = {
    **dict(_products()),
    "weights": f"GroupedWeightGradients<{TILE}, 1, {_COLUMNS}, GroupedWeightsKind>",
    "weights-e4m3": f"GroupedWeightGradients<{TILE}, 1, {_OPERANDS['-e4m3']}, GroupedE4m3WeightsKind>",
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
        if self.activation not in (known := _activations(self.product)):
            raise ConfigError("activation", repr(self.activation), f"one of {known}")

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
        return "grouped_weights" if self.product.startswith("weights") else "grouped"

    def source(self) -> str:
        """Render the translation unit; the emulator compiles the same text."""
        act, product = ACTIVATIONS.get(self.activation or ""), self.product
        if self.activation == "geglu" and (
            product.endswith(("interleaved", "transposes"))
            or ("saving" in product and "quantizes" in product)
        ):
            act = f"Rolled<{act}>"
        layer = PRODUCTS[product].format(act)
        return f"""\
#include "megamoe/kernels/grouped.cuh"

namespace megamoe {{
struct Traits : {layer} {{}};
}}  // namespace megamoe

MEGAMOE_KERNEL({self.entry}, megamoe::grouped, megamoe::Traits)
"""


def _activations(product: str) -> list[str | None]:
    """Return the kinds that a product is compiled for; None if it has no activation."""
    if "{}" not in PRODUCTS[product]:
        return [None]
    return [k for k in ACTIVATIONS if k != "relu2" or not product.endswith("interleaved")]


def grouped_variants() -> list[GroupedVariant]:
    """Return every kernel of kernels/grouped.cuh."""
    return [GroupedVariant(product, kind) for product in PRODUCTS for kind in _activations(product)]
