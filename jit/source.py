"""The kernel's variants: what is fixed at compile time. Everything else is a run-time argument."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

PRECISIONS = {"bf16": "Bf16", "fp8": "Fp8"}
ACTIVATIONS = {
    "swiglu": "SwiGlu",
    "clamped_swiglu": "ClampedSwiGlu",
    "geglu": "GeGlu",
    "relu2": "Relu2",
}


@dataclass(frozen=True)
class Variant:
    """One compiled forward kernel. `activation` is Activation.kind."""

    precision: str
    activation: str
    profile: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or self.activation not in ACTIVATIONS:
            raise ValueError(f"no such kernel: {self}")

    @property
    def entry(self) -> str:
        """Name of the kernel in the cubin."""
        return "megamoe_forward"

    def __str__(self) -> str:
        return f"{self.precision}-{self.activation}" + ("-profile" if self.profile else "")

    def source(self) -> str:
        """Render the translation unit; the emulator compiles the same text."""
        return f"""\
#include "megamoe/kernels/forward.cuh"

namespace megamoe {{
struct Traits {{
    using Precision = {PRECISIONS[self.precision]};
    using Activation = {ACTIVATIONS[self.activation]};
    static constexpr bool profile = {str(self.profile).lower()};
}};
}}  // namespace megamoe

MEGAMOE_FORWARD_KERNEL({self.entry}, megamoe::Traits)
"""


def variants(profile: bool = False) -> list[Variant]:
    """Return every kernel that a Problem can ask for."""
    return [Variant(p, a, profile) for p, a in product(PRECISIONS, ACTIVATIONS)]
