"""Draw the initial values of a layer's experts, each from its own seed, independent of the rank that holds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megamoe.core.errors import ArgumentError
from megamoe.experts.shards import Place


@torch.no_grad()
def draw(
    place: Place,
    init_seed: int | None,
    w13: Tensor,
    w2: Tensor,
    expert_of: Sequence[int] | None = None,
) -> None:
    """Fill both from (init_seed, global expert): truncated normal, std fan_in ** -0.5. None: a seed of torch's.

    expert_of: the expert of each slot, which are drawn alike.
    Raises ArgumentError for quantized weights, whose scales would stay.
    """
    if w13.element_size() == 1:
        raise ArgumentError("w13.dtype", w13.dtype, "masters in bf16: create a new layer instead")
    if w13.is_meta:
        return
    seed = int(torch.randint(2**31, (), device="cpu")) if init_seed is None else init_seed
    generator = torch.Generator(device=w13.device)
    (own13, begin), (own2, _) = place.rows(w13), place.rows(w2)
    for local in range(own13.shape[0]):
        expert = begin + local if expert_of is None else expert_of[begin + local]
        generator.manual_seed(seed * 1_000_003 + expert)
        for w in (own13[local], own2[local]):
            std = w.shape[1] ** -0.5
            drawn = torch.empty(w.shape, dtype=torch.float32, device=w.device)
            nn.init.trunc_normal_(drawn, 0.0, std, -2 * std, 2 * std, generator=generator)
            w.copy_(drawn)
