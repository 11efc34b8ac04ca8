"""FP8 copies of bf16 parameters: when they are made, and by which code."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from megamoe.config import Problem
from megamoe.errors import CompileError
from megamoe.formats.quantization import quantize_blockwise
from megamoe.formats.weights import ExpertWeights

log = logging.getLogger("megamoe")


@lru_cache(maxsize=1)
def _fused_quantizer() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the kernel that quantizes in one pass over memory, if it can be compiled here."""
    try:
        module = importlib.import_module("megamoe.jit.quantize")
        module.compile_quantize()
    except (ImportError, CompileError) as error:
        log.warning("weights are quantized by torch operations, not by one kernel: %s", error)
        return None
    fused: Callable[..., tuple[Tensor, Tensor]] = module.quantize_weights
    return fused


def _quantize_weights(
    w: Tensor, planes: int, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Quantize by the fused kernel on Hopper where there is one, else by torch; the same bits."""
    on_hopper = w.is_cuda and torch.cuda.get_device_capability(w.device)[0] == 9
    if on_hopper and w.numel() and (fused := _fused_quantizer()) is not None:
        return fused(w, planes, out=out)
    return quantize_blockwise(w, planes, out=out)


class QuantizedCache:
    """FP8 copies of bf16 parameters, made once per parameter version and refreshed in place.

    A version is (address, tensor._version): an optimizer's in-place step makes a new one. Writes
    that bypass the counter (through `.data`, or FSDP2's all-gather) do not: call invalidate() after
    them. The entry keeps the source's storage alive, so that an address cannot come back with other
    contents.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Tensor, tuple[int, int], Tensor, Tensor]] = {}

    def get(self, name: str, w: Tensor, planes: int = 1) -> tuple[Tensor, Tensor]:
        """Return (q, scale) of w; the same storage on every call with the same name and shape."""
        version = (w.data_ptr(), -1 if w.is_inference() else w._version)
        entry = self._entries.get(name)
        if entry is not None and entry[1] == version and entry[0].shape == w.shape:
            return entry[2], entry[3]
        with torch.no_grad():
            out = None
            if entry is not None and (entry[2].shape, entry[2].device) == (w.shape, w.device):
                out = entry[2], entry[3]
            q, scale = _quantize_weights(w.detach(), planes, out)
        self._entries[name] = (w.detach(), version, q, scale)
        return q, scale

    def weights(self, problem: Problem, masters: ExpertWeights) -> ExpertWeights:
        """Return the FP8 weights of bf16 masters; biases are handed through."""
        q13, s13 = self.get("w13", masters.w13, problem.activation.planes)
        q2, s2 = self.get("w2", masters.w2)
        return ExpertWeights(q13, q2, masters.b13, masters.b2, s13, s2)

    def invalidate(self) -> None:
        """Forget all versions; the next get() quantizes again, into the same storage."""
        self._entries = {
            name: (w, (0, -2), q, scale) for name, (w, _, q, scale) in self._entries.items()
        }
