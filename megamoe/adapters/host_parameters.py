"""Experts that are a parameter each, read as one tensor: in place where they lie at equal distances, else copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.formats.versions import invalidate
from megamoe.frontend import main_grad

_ALIGNMENT = 16  # bytes, of TMA's strides
_scratch: dict[Any, Tensor] = {}


def tie(parameters: Sequence[Any]) -> None:
    """Move parameters of one shape into one tensor [L, ...], where `joined` reads them in place."""
    whole = torch.stack([p.data for p in parameters])
    for p, part in zip(parameters, whole, strict=True):
        p.data = part


def expect_writes(module: Any) -> None:
    """Have FP8 copies made again behind state_dict() and load_state_dict() of a module or of one around it.

    What FSDP2 gathers shows nothing of a write to its shards.
    """
    module.register_state_dict_post_hook(_invalidate)
    module.register_load_state_dict_post_hook(_invalidate)


def _invalidate(*_: Any) -> None:
    invalidate()


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view [L, ...] of contiguous tensors that lie at equal distances in one storage, in order; else None."""
    first = tensors[0]
    starts = [t.data_ptr() for t in tensors]
    size = first.element_size()
    step = starts[1] - starts[0] if len(starts) > 1 else first.numel() * size
    if step < first.numel() * size or step % _ALIGNMENT or step % size:
        return None
    if starts != [starts[0] + i * step for i in range(len(starts))]:
        return None
    storage = first.untyped_storage()
    if starts[-1] + first.numel() * size > storage.data_ptr() + storage.nbytes():
        return None
    if not all(t.is_contiguous() for t in tensors):
        return None
    shape, stride = (len(tensors), *first.shape), (step // size, *first.stride())
    return first.detach().as_strided(shape, stride)


def joined(parameters: Sequence[Any], *, adding: bool = False) -> Tensor:
    """Return parameters of one shape and type as [L, ...]; the gradient goes back to each.

    adding: the result has a `main_grad`, as a layer with accumulate_into_main_grad wants it; what is added to it
        reaches those of the parameters (see main_grad.py). Where these lie at equal distances it is they, else a
        tensor of fp32 that all of a shape share. Not inside torch.compile.
    """
    if torch.compiler.is_compiling():  # which knows no addresses
        return torch.stack(tuple(parameters))
    targets = _Targets(parameters) if adding and torch.is_grad_enabled() else None
    whole: Any = _Joined.apply(targets, *parameters)
    if targets is not None and whole.requires_grad:
        targets.give(whole)
    return whole


class _Targets:
    """Where the gradients of joined parameters are added."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        self._between: Tensor | None = None

    def give(self, whole: Any) -> None:
        """Give the joined tensor its main_grad; none where a parameter lacks one, which the layer refuses."""
        wanted = [p for p in self._parameters if p.requires_grad]
        mains = [getattr(p, "main_grad", None) for p in wanted]
        if any(main is None for main in mains):
            return
        plain = len(wanted) == len(self._parameters)
        plain = plain and not any(getattr(p, "overwrite_main_grad", False) for p in wanted)
        main = as_one(mains) if plain else None
        if main is None:
            key = whole.shape, whole.device
            if key not in _scratch:
                _scratch[key] = torch.empty(whole.shape, device=whole.device)
            main = self._between = _scratch[key]
            whole.overwrite_main_grad = True
        whole.main_grad = main
        whole.grad_added_to_main_grad = False  # so that autograd comes by

    def add(self) -> list[Tensor | None]:
        """Bring what was added to the parameters; return what autograd is given for them."""
        found: list[Tensor | None] = []
        for i, p in enumerate(self._parameters):
            if not p.requires_grad:
                found.append(None)
                continue
            if self._between is not None:
                if getattr(p, "overwrite_main_grad", False):
                    p.main_grad.copy_(self._between[i])
                else:
                    p.main_grad.add_(self._between[i])
            found.append(main_grad.added(p))
        return found


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, targets: _Targets | None, *parameters: Tensor) -> Tensor:
        ctx.targets = targets
        ctx.set_materialize_grads(False)
        whole = as_one(parameters)
        if whole is None:
            return torch.stack(parameters)
        ctx.save_for_backward(*parameters)  # the view counts writes to the first one only
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        _ = ctx.saved_tensors  # raises where one was written to
        if ctx.targets is not None:
            return None, *ctx.targets.add()
        parts = grad.unbind(0)
        return None, *(
            g if n else None for g, n in zip(parts, ctx.needs_input_grad[1:], strict=True)
        )
