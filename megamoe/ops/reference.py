"""The operators by torch's own operations, rounded where the kernel rounds. For tensors that no kernel serves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megamoe.backends.reference.backward import activation_gradient
from megamoe.backends.reference.gemm import full_fp32
from megamoe.config import Activation
from megamoe.formats.quantization import dequantize_blockwise, dequantize_rows, quantize_rows
from megamoe.ops import scales


def experts_of(offs: Tensor | None, num_rows: int) -> Iterator[tuple[int, slice]]:
    """Return each expert that has rows, and which. Waits for the device that has offs."""
    start = 0
    for e, end in enumerate([num_rows] if offs is None else offs.tolist()):
        end = max(start, min(end, num_rows))
        if end > start:
            yield e, slice(start, end)
        start = end


def product(x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    """x: [M, K], w: [E, K, N], bias: [E, N] -> [M, N] in x's type; rows of no expert are zeros."""
    return _product(x, w, offs, bias).to(x.dtype)


def activation(
    x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None, act: Activation
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w: [E, P, I, H], bias: [E, P*I] -> h [M, I], pre-activations [M, P, I]."""
    gu = _product(x, w.flatten(1, 2).transpose(1, 2), offs, bias)
    return act(gu).to(x.dtype), gu.to(x.dtype).unflatten(1, (w.shape[1], w.shape[2]))


def numbers_of(
    x: Tensor, w: Tensor, offs: Tensor | None, x_scale: Tensor, w_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """x: [M, K] e4m3, scales by block, w: [E, P, N, K] e4m3 -> both in fp32."""
    by_row = scales.by_row(x_scale, offs, x.shape[0], w.shape[0])
    wide = dequantize_blockwise(w, w_scale, planes=w.shape[1]).view(w.shape)
    return dequantize_rows(x, by_row), wide


def quantized(h: Tensor, offs: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """h: [M, I] -> e4m3, and scales by block."""
    q, scale = quantize_rows(h)
    return q, scales.by_block(scale, offs, num_experts)


def gradient(
    dy: Tensor, w: Tensor, gu: Tensor, offs: Tensor | None, act: Activation
) -> tuple[Tensor, Tensor]:
    """dy: [M, H], w: [E, H, I], gu: [M, P, I] -> dgu [M, P, I], h [M, I]; rows of no expert are zeros."""
    dgu, h = activation_gradient(act, gu.flatten(1).float(), _product(dy, w, offs, None))
    end = gu.shape[0] if offs is None else offs.max().clamp(0, gu.shape[0])
    inside = (torch.arange(gu.shape[0], device=gu.device) < end)[:, None]
    return (
        torch.where(inside, dgu, 0).to(gu.dtype).view_as(gu),
        torch.where(inside, h, 0).to(gu.dtype),
    )


def weights(a: Tensor, b: Tensor, offs: Tensor | None, num: int) -> tuple[Tensor, Tensor]:
    """a: [M, N1], b: [M, N2] -> a^T b of each expert's rows [E, N1, N2] fp32, and sums of a's columns [E, N1] fp32."""
    fp32 = {"dtype": torch.float32, "device": a.device}
    out = torch.zeros(num, a.shape[1], b.shape[1], **fp32)
    sums = torch.zeros(num, a.shape[1], **fp32)
    with full_fp32(a.device):
        for e, rows in experts_of(offs, a.shape[0]):
            out[e] = a[rows].float().T @ b[rows].float()
            sums[e] = a[rows].float().sum(0)
    return out, sums


def _product(x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float32, device=x.device)
    with full_fp32(x.device):
        for e, rows in experts_of(offs, x.shape[0]):
            out[rows] = x[rows].float() @ w[e].float()
            if bias is not None:
                out[rows] += bias[e].reshape(-1).float()
    return out
