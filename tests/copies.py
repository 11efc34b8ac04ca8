"""Check that FP8 copies follow their parameters: count uses of stale copies, and quantizations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megamoe.core.config import Problem
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.launch import cache
from megamoe.launch.cache import QuantizedCache


@contextmanager
def watched(trains: bool = True) -> Iterator[dict[str, int]]:
    """Yield a dict that counts uses of stale copies ("stale"), and quantizations made ("q").

    trains: every use asks for the transposes too, as behind a backend with a backward pass of its own.
    """
    seen = {"stale": 0, "q": 0}
    weights, quantize = QuantizedCache.weights, cache.quantize_weights

    def used(
        self: QuantizedCache, problem: Problem, masters: ExpertWeights, *_: bool, **__: bool
    ) -> ExpertWeights:
        got = weights(self, problem, masters, trains)
        fresh = masters.quantized(problem)
        pairs = [(getattr(got, n), t) for n, t in fresh.named().items() if n[0] == "w"]
        transposed = TransposedWeights.of(problem, fresh).named()
        kept: dict[str, Any] = {n: entry.transposed for n, entry in self._entries.items()}
        for n in kept if trains else ():
            pairs += zip(kept[n], (transposed[n], transposed[f"{n}_scale"]), strict=True)
        seen["stale"] += not all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs
        )
        return got

    def quantized(*args: Any) -> Any:
        seen["q"] += 1
        return quantize(*args)

    patched: Any = QuantizedCache
    module: Any = cache
    patched.weights, module.quantize_weights = used, quantized
    try:
        yield seen
    finally:
        patched.weights, module.quantize_weights = weights, quantize
