"""Gradients of w13 and w2 that are added to their `main_grad`, by the convention of Megatron and Transformer Engine.

Whoever owns the parameters gives them `main_grad`, fp32 or bf16; the backward pass adds to it. What autograd is given
in place of a gradient depends on the parameter's `grad_added_to_main_grad`:

- It has that attribute (Megatron's DDP makes it, False): it is set to True, and the gradient is a tensor of no meaning,
  one for all parameters of a shape and type, so that no step allocates it. Not None, since the hook of
  overlap_grad_reduce asserts that there is a gradient; it then sees the flag and drops it.
- It has none: the gradient is None. p.grad stays what it is, and nobody takes noise for a gradient.

`zero_out_wgrad` and `overwrite_main_grad` of a parameter mean what they mean there: zeros in place of noise, and a
main_grad that is written, not added to. Gradients of biases and routers come in the ordinary way, as they do there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.errors import ArgumentError
from megamoe.formats.weights import ExpertWeights, check_tensor

NAMES = ("w13", "w2")
_DTYPES = (torch.float32, torch.bfloat16)
_placeholders: dict[Any, Tensor] = {}


def check(weights: ExpertWeights) -> None:
    """Raise ArgumentError unless all weights that need a gradient have a main_grad to add it to."""
    for name in NAMES:
        p = getattr(weights, name)
        if not p.requires_grad:
            continue
        argument, main = f"weights.{name}.main_grad", getattr(p, "main_grad", None)
        if main is None:
            raise ArgumentError(
                argument, None, "a tensor like the weight, since accumulate_into_main_grad is True"
            )
        check_tensor(argument, main, tuple(p.shape), _DTYPES, p.device, contiguous=False)


def targets(weights: ExpertWeights, needs: Sequence[bool]) -> dict[str, Tensor]:
    """Return name -> the main_grad that a backward pass is to add to. needs: flags of w13 and w2."""
    check(weights)
    found = {}
    for name, need in zip(NAMES, needs, strict=True):
        if need:
            p: Any = getattr(weights, name)
            found[name] = p.main_grad.detach()
            if getattr(p, "overwrite_main_grad", False):
                found[name].zero_()
    return found


def added(p: Any) -> Tensor | None:
    """Say that p's gradient is in its main_grad; return what autograd is given."""
    if not hasattr(p, "grad_added_to_main_grad"):
        return None
    p.grad_added_to_main_grad = True
    key = p.shape, p.stride(), p.dtype, p.device
    if key not in _placeholders:
        _placeholders[key] = torch.empty_like(p, requires_grad=False)
    if getattr(p, "zero_out_wgrad", False):
        _placeholders[key].zero_()
    return _placeholders[key].detach()
