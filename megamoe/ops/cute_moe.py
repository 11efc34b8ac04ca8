"""Provide the functions of CuTe-MoE-Train under their names: a program changes only its import.

Gate and up columns alternate, gate first. Its keywords are swiglu_alpha (default: 1.702) and swiglu_limit (7.0). The
gradient of the down projection goes to the pre-activations, by the kernel that also multiplies by the activation's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.ops import checks, gradients
from megamoe.ops.functions import grouped_mm, grouped_mm_act, grouped_mm_dact

__all__ = ["grouped_mm", "grouped_mm_downproj", "grouped_mm_swiglu"]
Maybe = Tensor | None


def grouped_mm_swiglu(
    x: Tensor, w_up: Tensor, *, offs: Maybe = None, bias: Maybe = None, **swiglu: float
) -> tuple[Tensor, Tensor]:
    """x: [M, H], w_up: [E, H, 2*I], bias: [E, 2*I] -> swiglu_out [M, I], aux_biased_acc [M, 2*I]."""
    given: Any = {"offs": offs, "bias": bias, "glu": "interleaved", "return_pre": True}
    h, pre = grouped_mm_act(x, w_up, _activation(**swiglu), **given)
    return h, pre


def grouped_mm_downproj(
    swiglu_out: Tensor, w_down: Tensor, *, aux_biased_acc: Tensor, **given: Any
) -> Tensor:
    """swiglu_out: [M, I], w_down: [E, I, H], aux_biased_acc: [M, 2*I], offs, bias: [E, H] -> [M, H]."""
    checks.check_mode(swiglu_out=swiglu_out, aux_biased_acc=aux_biased_acc)
    of = given.pop("offs", None), given.pop("bias", None), _activation(**given)
    checks.check_rows("aux_biased_acc", aux_biased_acc, swiglu_out)
    if aux_biased_acc.shape[1] != 2 * swiglu_out.shape[1]:
        checks.refuse("aux_biased_acc.shape", list(aux_biased_acc.shape), "twice swiglu_out's")
    out: Tensor = _Down.apply(swiglu_out, w_down, aux_biased_acc, *of)
    return out


def _activation(swiglu_alpha: float = 1.702, swiglu_limit: float = 7.0) -> Activation:
    return Activation("clamped_swiglu", swiglu_alpha, swiglu_limit, up_offset=1.0)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, pre: Tensor, offs: Any, bias: Any, act: Any) -> Any:
        ctx.save_for_backward(w, pre, offs, bias)
        ctx.act = act
        return grouped_mm(h, w, offs=offs, bias=bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w, pre, offs, bias = ctx.saved_tensors
        dy, (_, of_w, *_, of_bias, _) = gradients.rows_of(dy), ctx.needs_input_grad
        d_pre, h = grouped_mm_dact(dy, w.mT, pre, ctx.act, offs=offs, glu="interleaved")
        needs = {"w": of_w, "bias": of_bias}
        call = SimpleNamespace(offs=offs, alignment=1, bias=bias, needs=needs)
        dw, db = gradients.of_weights(dy, h, w, ("w", "bias"), call)
        return None, dw, d_pre, None, db, None
