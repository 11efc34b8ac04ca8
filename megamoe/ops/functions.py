"""Grouped GEMMs without expert parallelism: the functions of megamoe.ops."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.config import Activation, activation_by_name
from megamoe.ops import checks, operators


def grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Multiply each row by its expert's matrix; differentiable.

    x: [M, K] bf16, sorted by expert. w: [E, K, N] bf16, contiguous in K (a transposed [E, N, K]) or in N. offs: [E]
    int32, where the rows of each expert end, as torch's: ascending, an expert without rows repeats the one before, the
    last may be less than M. None: one expert has all rows. bias: [E, N] fp32 or bf16. K and N: multiples of 8.
    Returns [M, N] bf16; rows behind offs[-1] are zeros. Raises ArgumentError.
    """
    checks.check_rows("x", x)
    checks.check_weights("w", w, x)
    if w.shape[1] != x.shape[1]:
        checks.refuse("w.shape", list(w.shape), f"[experts, {x.shape[1]}, N]")
    checks.check_offs(offs, w.shape[0], x)
    checks.check_bias("bias", bias, w.shape[0], w.shape[2], x)
    out: Tensor = operators.grouped_mm(x, w, offs, bias)
    return out


def grouped_mm_swiglu(
    x: Tensor,
    w_up: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | Activation = "swiglu",
    save_pre_activation: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply each row by its expert's gate and up projection, and apply the activation; differentiable.

    x: [M, H] bf16. w_up: [E, 2*I, H], gate rows and then up rows, or [E, 2, I, H] of any strides that TMA takes (gate
    and up interleaved are a view); without the 2 for an activation that is not gated. offs: as grouped_mm's. bias:
    [E, 2*I] or [E, 2, I], fp32 or bf16. activation: a name or an Activation. H and I: multiples of 8.
    Returns h [M, I] bf16, with save_pre_activation also the pre-activations [M, 2, I] bf16 (bias included) that
    grouped_mm_dswiglu takes. Rows behind offs[-1] are zeros. Raises ArgumentError, ConfigError.
    """
    act = activation_by_name(activation)
    checks.check_rows("x", x)
    w = checks.check_planes("w_up", w_up, act.planes, x, x.shape[1])
    checks.check_offs(offs, w.shape[0], x)
    checks.check_bias("bias", bias, w.shape[0], act.planes * w.shape[2], x)
    saves = save_pre_activation or _records(x, w, bias)
    h, gu = operators.grouped_activation(x, w, offs, bias, act.kind, _numbers(act), saves)
    return (h, gu) if save_pre_activation else h


def grouped_mm_downproj(
    h: Tensor, w_down: Tensor, offs: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Multiply each row by its expert's down projection; differentiable.

    h: [M, I] bf16. w_down: [E, H, I] bf16, the layer's w2, contiguous in I or in H. offs, bias [E, H]: as grouped_mm's.
    Returns [M, H] bf16; rows behind offs[-1] are zeros. Raises ArgumentError.
    """
    checks.check_rows("h", h)
    if w_down.dim() != 3 or w_down.shape[2] != h.shape[1]:
        checks.refuse("w_down.shape", list(w_down.shape), f"[experts, H, {h.shape[1]}]")
    checks.check_weights("w_down", w_down.transpose(1, 2), h)
    checks.check_offs(offs, w_down.shape[0], h)
    checks.check_bias("bias", bias, w_down.shape[0], w_down.shape[1], h)
    out: Tensor = operators.grouped_mm(h, w_down.transpose(1, 2), offs, bias)
    return out


def grouped_mm_dswiglu(
    dy: Tensor,
    w_down: Tensor,
    pre_activation: Tensor,
    offs: Tensor | None = None,
    *,
    activation: str | Activation = "swiglu",
) -> tuple[Tensor, Tensor]:
    """Return the gradient in the pre-activations, and h again: what a backward pass through an MLP begins with.

    dy: [M, H] bf16. w_down: [E, H, I] bf16, contiguous in I. pre_activation: [M, 2, I] bf16 (ungated [M, 1, I]), of
    grouped_mm_swiglu. offs, activation: as there.
    Returns dgu [M, 2, I] and h [M, I] bf16; rows behind offs[-1] are zeros. Not differentiable. Raises ArgumentError,
    ConfigError.
    """
    act = activation_by_name(activation)
    checks.check_rows("dy", dy)
    w = checks.check_planes("w_down", w_down.unsqueeze(1), 1, dy, w_down.shape[-1])[:, 0]
    if w.shape[1] != dy.shape[1]:
        checks.refuse("w_down.shape", list(w.shape), f"[experts, {dy.shape[1]}, I]")
    shape = [dy.shape[0], act.planes, w.shape[2]]
    if list(pre_activation.shape) != shape or not pre_activation.is_contiguous():
        checks.refuse("pre_activation.shape", list(pre_activation.shape), f"{shape}, contiguous")
    checks.check_rows("pre_activation", pre_activation.flatten(1), dy)
    checks.check_rows("pre_activation", pre_activation[:, 0], dy)
    checks.check_offs(offs, w.shape[0], dy)
    call = dy, w, pre_activation, offs, act.kind, _numbers(act)
    dgu, h = operators.grouped_activation_gradient(*call)
    return dgu, h


def grouped_mm_wgrad(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Sum the outer products of each expert's rows: its weight gradient.

    a: [M, N1], b: [M, N2] bf16. offs: as grouped_mm's. dtype: bf16 or fp32, of the result. out: [E, N1, N2] bf16 or
    fp32, contiguous in N2, that it is added to instead.
    Returns [E, N1, N2], or `out`; zeros for an expert without rows. Equal inputs give equal bits. Not differentiable.
    Raises ArgumentError.
    """
    checks.check_rows("a", a)
    checks.check_rows("b", b, a)
    num = 1 if offs is None else offs.numel()
    checks.check_experts("offs", num)
    checks.check_offs(offs, num, a)
    if dtype not in (torch.bfloat16, torch.float32):
        checks.refuse("dtype", dtype, "bfloat16 or float32")
    if out is None:
        made: Tensor = operators.grouped_wgrad(a, b, offs, num, dtype == torch.float32, False)[0]
        return made
    checks.check_sums("out", out, (num, a.shape[1], b.shape[1]), a)
    operators.grouped_wgrad_add(a, b, offs, out)
    return out


def grouped_mlp(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    activation: str | Activation = "swiglu",
) -> Tensor:
    """Run each row through its expert's MLP: grouped_mm_swiglu, then grouped_mm_downproj; differentiable.

    x: [M, H] bf16. w13: as grouped_mm_swiglu's w_up. w2: [E, H, I] bf16, contiguous in I. offs: as grouped_mm's; None
    for a dense MLP, w13 [1, 2*I, H], w2 [1, H, I]. b13: [E, 2*I], b2: [E, H], fp32 or bf16, or None.
    Its backward pass is one launch for dgu and h, one for x's gradient and one for each weight: the pre-activations are
    saved, h is not. Returns [M, H] bf16; rows behind offs[-1] are zeros. Raises ArgumentError, ConfigError.
    """
    act = activation_by_name(activation)
    checks.check_rows("x", x)
    w13 = checks.check_planes("w13", w13, act.planes, x, x.shape[1])
    num, planes, width = w13.shape[:3]
    if list(w2.shape) != [num, x.shape[1], width]:
        checks.refuse("w2.shape", list(w2.shape), f"[{num}, {x.shape[1]}, {width}]")
    checks.check_planes("w2", w2.unsqueeze(1), 1, x, width)
    checks.check_offs(offs, num, x)
    checks.check_bias("b13", b13, num, planes * width, x)
    checks.check_bias("b2", b2, num, x.shape[1], x)
    saves = _records(x, w13, w2, b13, b2)
    call = x, w13, w2, offs, b13, b2, act.kind, _numbers(act), saves
    y: Tensor = operators.grouped_mlp(*call)[0]
    return y


def _numbers(act: Activation) -> list[float]:
    return [act.alpha, act.limit, act.up_offset]


def _records(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
