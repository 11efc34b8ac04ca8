"""Run passes over rows outside of the layer's launches: by a kernel of jit/quantize.py if possible, else by torch."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import CompileError
from megamoe.core.planes import by_plane
from megamoe.formats import mxfp4
from megamoe.formats.quantization import Codec, quantize_rows

log = logging.getLogger("megamoe")
Pair = tuple[Tensor, Tensor]  # numbers and scales


@lru_cache(maxsize=1)
def fused_kernels() -> Any:
    """Return the module of kernels that make one pass over memory, if they can be compiled here."""
    try:
        from megamoe.jit import quantize

        quantize.compile_quantize()
    except (ImportError, CompileError) as error:
        log.warning(
            "tensors are quantized and summed by torch operations, not by one kernel: %s", error
        )
        return None
    return quantize


def on_hopper(t: Tensor) -> bool:
    """Return whether a tensor lies where the kernels run."""
    return t.is_cuda and torch.cuda.get_device_capability(t.device)[0] == 9


def kernels_for(x: Tensor, formulas: Codec | None = None) -> Any:
    """Return the module of kernels where rows [M, H], and formulas if they have some, are theirs."""
    known = formulas is None or formulas.quantize is quantize_rows
    fits = known and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0
    return fused_kernels() if fits and on_hopper(x) else None


def quantize_activations(x: Tensor, formulas: Codec) -> Pair:
    """x: [M, H] bf16, contiguous -> (q, scale): by groups in one kernel, as quantize_weights()."""
    kernels = kernels_for(x, formulas)
    return formulas.quantize(x) if kernels is None else kernels.quantize_rows(x)


def dequantize_activations(q: Tensor, scale: Tensor, formulas: Codec) -> Tensor:
    """q, scale: as quantize_activations() has them -> [M, H] bf16."""
    kernels = kernels_for(q, formulas)
    if kernels is None:
        return formulas.dequantize(q, scale).bfloat16()
    return kernels.dequantize_rows(q, scale)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, planes: int, out: Tensor) -> None:
    """packed, scale: as ExpertWeights has them -> out [L, P*I, K] bf16, contiguous in K."""
    packed = by_plane(packed, planes)
    fused = fused_kernels() if on_hopper(out) else None
    if fused is not None:
        fused.dequantize_mxfp4(packed, scale, out)
        return
    for expert in range(len(packed)):  # one by one: fp32 copies would be large
        of = slice(expert, expert + 1)
        out[of] = mxfp4.dequantize_mxfp4(packed[of], scale[of], planes, out.dtype)


def sum_rows(rows: Tensor, places: Tensor, begins: Tensor) -> Tensor:
    """rows: [R, H] bf16 or fp32; places: [T * N] int64; begins: [T], where each token's begin in it -> [T, H].

    Sums the N rows of a token in their order, in fp32, and rounds that once: no atomics. Row 0 counts as none.
    """
    fused = kernels_for(rows) if rows.dtype == torch.bfloat16 and len(begins) else None
    if fused is not None:
        return fused.sum_rows(rows, places, len(places) // len(begins))
    return torch.embedding_bag(rows, places, begins, False, 0, False, None, False, 0)[0]
