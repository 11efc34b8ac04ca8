"""Compute the operators with torch's own operations, for tensors that no kernel supports.

On CPUs it computes in fp32, expert by expert, and rounds where the kernel rounds. On GPUs it uses torch's grouped_mm,
whose products are rounded to bf16 before bias and activation; e4m3 operands are rounded to bf16, too. There the host
waits for nothing, except for weight gradients in fp32 or of e4m3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.core.config import GELU, Activation
from megamoe.core.full_fp32 import full_fp32
from megamoe.ops.groups import Groups


def product(x: Tensor, w: Tensor, groups: Groups, bias: Tensor | None) -> Tensor:
    """x: [M, K], w: [E, K, N], bias: [E, N] -> [M, N] fp32; rows of no expert are zeros."""
    expert, inside = groups.of_rows(x)
    if _grouped(x):
        with torch.autocast(x.device.type, enabled=False):
            out = torch._grouped_mm(x, w, offs=groups.bounds(x)[1].int()).float()
    else:
        out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float32, device=x.device)
        with full_fp32(x.device):
            for e, rows in groups.slices(x):
                out[rows] = x[rows].float() @ w[e].float()
    if bias is not None:
        out += bias.flatten(1)[expert]
    return out.where(inside[:, None], 0)


def activation(
    x: Tensor, w: Tensor, groups: Groups, bias: Tensor | None, act: Any, scale: Tensor | None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x: [M, H], w: [E, H, P*I], bias: [E, P*I] -> h [M, I], pre-activations [M, P*I], both fp32.

    interleaved: gate and up columns alternate.
    """
    gu = product(x, w, groups, bias)
    return groups.times(gu if act is None else act(_halves(gu, interleaved)), scale), gu


def gradient(
    dy: Tensor, w: Tensor, gu: Tensor, groups: Groups, act: Activation, scale: Tensor | None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dy: [M, H], w: [E, H, I], gu: [M, P*I] -> as through(); rows of no expert are zeros."""
    gu, dh = gu.where(groups.of_rows(gu)[1][:, None], 0), product(dy, w, groups, None)
    return through(act, gu, dh, groups, scale, interleaved)


def through(
    act: Activation, gu: Tensor, dh: Tensor, groups: Groups, scale: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """gu: [M, P*I], dh: [M, I], scale: [M] -> dgu, scaled h [M, I], d_scale [M]; fp32, differentiable."""
    dgu, h = activation_gradient(act, _halves(gu.float(), interleaved), groups.times(dh, scale))
    dgu = dgu.unflatten(1, (2, -1)).transpose(1, 2).flatten(1) if interleaved else dgu
    return dgu, groups.times(h, scale), (dh * h).sum(1) if scale is not None else dh.new_empty(0)


def _halves(gu: Tensor, interleaved: bool) -> Tensor:
    """Return gate columns, then up columns."""
    return gu.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1) if interleaved else gu


def activation_gradient(act: Activation, gu: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """gu: [M, P*I], dh: [M, I], both fp32 -> the gradient of gu, and h [M, I]; differentiable.

    Clamps pass the gradient at equality, and NaN stays NaN, as in the kernel.
    """
    if act.kind == "relu2":
        r = F.relu(gu)
        return 2 * dh * r, r * r
    if act.kind not in ("swiglu", "clamped_swiglu", *GELU):
        raise NotImplementedError(f"no gradient of activation {act.kind!r} is implemented here")
    gate, up = gu.chunk(2, dim=-1)
    if act.kind in GELU:
        value = F.gelu(gate, approximate=GELU[act.kind])
        slope = torch.ops.aten.gelu_backward(dh * up, gate, approximate=GELU[act.kind])
        return torch.cat((slope, dh * value), -1), value * up
    inside, within = ~(gate > act.limit), ~(up.abs() > act.limit)
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit) + act.up_offset
    s = torch.sigmoid(act.alpha * gate)
    value = gate * s
    slope = dh * up * (s + act.alpha * value * (1 - s))
    return torch.cat((inside * slope, within * dh * value), -1), value * up


def weights(a: Tensor, b: Tensor, groups: Groups, num: int, dtype: torch.dtype) -> Tensor:
    """a: [M, N1], b: [M, N2] -> a^T b of each expert's rows [E, N1, N2], in fp32 or, where `dtype` is, in bf16."""
    if _grouped(a) and dtype == a.dtype:
        begins, ends = groups.bounds(a)
        rows_of = _without_gaps(a, groups).T, _without_gaps(b, groups)
        with torch.autocast(a.device.type, enabled=False):
            made = torch._grouped_mm(*rows_of, offs=ends.int())
        return made.masked_fill_((begins == ends)[:, None, None], 0)
    out = torch.zeros(num, a.shape[1], b.shape[1], dtype=torch.float32, device=a.device)
    with full_fp32(a.device):
        for e, rows in groups.slices(a):
            if _grouped(a):
                out[e] = torch.mm(a[rows].T, b[rows], out_dtype=torch.float32)
            else:
                out[e] = a[rows].float().T @ b[rows].float()
    return out


def column_sums(a: Tensor, groups: Groups) -> Tensor:
    """a: [M, N1] -> sums over each expert's rows [E, N1] fp32; the host waits for nothing."""
    ends = F.pad(groups.bounds(a)[1].int(), (1, 0))
    rows = _without_gaps(a, groups).float()
    return torch.segment_reduce(rows, "sum", offsets=ends, axis=0, initial=0)


def _without_gaps(a: Tensor, groups: Groups) -> Tensor:
    """Return the rows, zeros where they are of no expert between two."""
    return a if groups.alignment == 1 else a.where(groups.of_rows(a)[1][:, None], 0)


def _grouped(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16
