"""Find the activation of megamoe that equals a library's, by comparing results. An unknown activation is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Activation, activation_by_name
from megamoe.core.errors import ConfigError

_GATED = ("swiglu", "geglu", "geglu_tanh")
_SAMPLES = 8192
_TOLERANCE = 1e-6  # beside the product of gate and up: both sides are fp32, by other formulas


def candidates(
    gated: bool, limits: Sequence[float | None] = (), alphas: Sequence[float] = ()
) -> list[Activation]:
    """Return the activations to try. limits, alphas: what the library states beside inf and 1."""
    if not gated:
        return [activation_by_name("relu2")]
    found = [activation_by_name(name) for name in _GATED]
    stated = [limit for limit in limits if limit is not None]
    for limit, alpha, offset in product(stated or [inf], [*alphas, 1.0], (0.0, 1.0)):
        found.append(Activation("clamped_swiglu", alpha=alpha, limit=limit, up_offset=offset))
    return found


def matching(
    gate: Callable[[Tensor], Tensor],
    tried: Sequence[Activation],
    owner: str,
    device: Any = "cpu",
) -> Activation:
    """Return the one of `tried` that gives what `gate` gives, on random pre-activations of all magnitudes.

    gate: [1, P*I] fp32, gate columns, then up columns -> [1, I]. tried: of one number of planes. owner: whose it is.
    Raises ConfigError where none does.
    """
    planes = tried[0].planes
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32}
    drawn = torch.randn(1, planes, _SAMPLES, **options)
    exponents = torch.rand(1, planes, _SAMPLES, **options) * 5 - 2
    drawn = (drawn * 10**exponents).to(device)  # far beyond any clamp
    with torch.no_grad():
        wanted = gate(drawn.flatten(1))
    factors = 1 + drawn.abs()
    tolerance = _TOLERANCE * (factors.prod(1) if planes == 2 else factors.flatten(1).square())
    for candidate in tried:
        if bool(((candidate(drawn.flatten(1)) - wanted).abs() <= tolerance).all()):
            return candidate
    expected = "one of " + ", ".join(dict.fromkeys(c.kind for c in tried))
    raise ConfigError("activation", f"that of {owner}", expected)
