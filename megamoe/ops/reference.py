"""Compute the operators with torch's own operations, for tensors that no kernel supports.

On CPUs it computes in fp32, expert by expert, and rounds where the kernel rounds. On GPUs it uses torch's grouped_mm,
whose products are rounded to bf16 before bias and activation; e4m3 operands are rounded to bf16, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.full_fp32 import full_fp32
from megamoe.ops import scales


def experts_of(offs: Tensor | None, num_rows: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and its rows. This waits for the device of `offs`."""
    start = 0
    for e, end in enumerate([num_rows] if offs is None else offs.tolist()):
        end = max(start, min(end, num_rows))
        if end > start:
            yield e, slice(start, end)
        start = end


def product(x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    """x: [M, K], w: [E, K, N], bias: [E, N] -> [M, N] fp32; rows of no expert are zeros."""
    if _grouped(x):
        return grouped_product(x, w, offs, bias)
    out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float32, device=x.device)
    with full_fp32(x.device):
        for e, rows in experts_of(offs, x.shape[0]):
            out[rows] = x[rows].float() @ w[e].float()
            if bias is not None:
                out[rows] += bias[e].reshape(-1).float()
    return out


def grouped_product(x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    """Do what product() does by torch's grouped_mm, in bf16, for any ends; the host waits for nothing."""
    ends = _ends(offs, x)
    with torch.autocast(x.device.type, enabled=False):
        out = torch._grouped_mm(x, w, offs=ends).float()
    expert = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
    if bias is not None:
        out += bias.flatten(1)[expert.clamp(max=len(ends) - 1)]
    return out.where((expert < len(ends))[:, None], 0)


def activation(
    x: Tensor, w: Tensor, offs: Tensor | None, bias: Tensor | None, act: Activation
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w: [E, P, I, H], bias: [E, P*I] -> h [M, I], pre-activations [M, P, I], both fp32."""
    gu = product(x, w.flatten(1, 2).transpose(1, 2), offs, bias)
    return act(gu), gu.unflatten(1, (w.shape[1], w.shape[2]))


def gradient(
    dy: Tensor, w: Tensor, gu: Tensor, offs: Tensor | None, act: Activation
) -> tuple[Tensor, Tensor]:
    """dy: [M, H], w: [E, H, I], gu: [M, P, I] -> dgu [M, P, I], h [M, I], both fp32; rows of no expert are zeros."""
    dgu, h = activation_gradient(act, gu.flatten(1).float(), product(dy, w, offs, None))
    inside = (torch.arange(gu.shape[0], device=gu.device) < _ends(offs, gu)[-1])[:, None]
    return torch.where(inside, dgu, 0).view_as(gu), torch.where(inside, h, 0)


def activation_gradient(act: Activation, gu: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """gu: [M, P*I], dh: [M, I], both fp32 -> the gradient of gu, and h [M, I]; differentiable.

    Clamps pass the gradient at equality, and NaN stays NaN, as in the kernel.
    """
    if act.kind == "relu2":
        r = F.relu(gu)
        return 2 * dh * r, r * r
    if act.kind not in ("swiglu", "clamped_swiglu", "geglu", "geglu_tanh"):
        raise NotImplementedError(f"no gradient of activation {act.kind!r} is implemented here")
    gate, up = gu.chunk(2, dim=-1)
    if act.kind in ("geglu", "geglu_tanh"):
        form = "tanh" if act.kind == "geglu_tanh" else "none"
        value = F.gelu(gate, approximate=form)
        slope = torch.ops.aten.gelu_backward(dh * up, gate, approximate=form)
        return torch.cat((slope, dh * value), -1), value * up
    inside, within = ~(gate > act.limit), ~(up.abs() > act.limit)
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit) + act.up_offset
    s = torch.sigmoid(act.alpha * gate)
    value = gate * s
    slope = dh * up * (s + act.alpha * value * (1 - s))
    return torch.cat((inside * slope, within * dh * value), -1), value * up


def weights(a: Tensor, b: Tensor, offs: Tensor | None, num: int, dtype: torch.dtype) -> Tensor:
    """a: [M, N1], b: [M, N2] -> a^T b of each expert's rows [E, N1, N2], in fp32 or, where `dtype` is, in bf16."""
    if _grouped(a) and dtype == a.dtype:
        return grouped_weights(a, b, offs)
    out = torch.zeros(num, a.shape[1], b.shape[1], dtype=torch.float32, device=a.device)
    with full_fp32(a.device):
        for e, rows in experts_of(offs, a.shape[0]):
            if _grouped(a):
                out[e] = torch.mm(a[rows].T, b[rows], out_dtype=torch.float32)
            else:
                out[e] = a[rows].float().T @ b[rows].float()
    return out


def grouped_weights(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """Do what weights() does by torch's grouped_mm, in bf16; the host waits for nothing."""
    ends = _ends(offs, a)
    with torch.autocast(a.device.type, enabled=False):
        out = torch._grouped_mm(a.T, b, offs=ends)
    empty = ends == torch.cat((ends.new_zeros(1), ends[:-1]))
    return out.masked_fill_(empty[:, None, None], 0)


def column_sums(a: Tensor, offs: Tensor | None) -> Tensor:
    """a: [M, N1] -> sums over each expert's rows [E, N1] fp32; the host waits for nothing."""
    ends = F.pad(_ends(offs, a), (1, 0))
    return torch.segment_reduce(a.float(), "sum", offsets=ends, axis=0, initial=0)


def _grouped(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _ends(offs: Tensor | None, rows: Tensor) -> Tensor:
    """Return where the rows of each expert end, [E] int32, as the kernel takes it."""
    if offs is None:
        return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)
    return scales.ends_of(offs, rows.shape[0]).int()
