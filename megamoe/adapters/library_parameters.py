"""Read experts that are one parameter each as one tensor: in place if they are at equal distances, else by a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megamoe.formats.versions import invalidate, made_of
from megamoe.formats.weights import BF16_MASTERS, ExpertWeights
from megamoe.layer import main_grad

_ALIGNMENT = 16  # bytes, of TMA's strides


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
    starts, size = [t.data_ptr() for t in tensors], first.element_size()
    nbytes = first.numel() * size
    step = starts[1] - starts[0] if len(starts) > 1 else nbytes
    storage = first.untyped_storage()
    if (
        step < nbytes
        or step % _ALIGNMENT
        or step % size
        or starts != [starts[0] + i * step for i in range(len(starts))]
        or starts[-1] + nbytes > storage.data_ptr() + storage.nbytes()
        or not all(t.is_contiguous() for t in tensors)
    ):
        return None
    shape, stride = (len(tensors), *first.shape), (step // size, *first.stride())
    return first.detach().as_strided(shape, stride)


def joined(parameters: Sequence[Any], *, adding: bool = False) -> Tensor:
    """Return parameters of one shape and type as [L, ...]; the gradient goes back to each.

    adding: a layer with accumulate_into_main_grad adds the gradient to the `main_grad` of each parameter (see
        main_grad.py). Not inside torch.compile.
    """
    if torch.compiler.is_compiling():  # which knows no addresses
        return torch.stack(tuple(parameters))
    return main_grad.joined(
        parameters, as_one, torch.unbind, torch.stack, parameters if adding else None
    )


def local(parameter: Any) -> Tensor:
    """Return this rank's part of a DTensor; another tensor is its own."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def in_turn(t: Tensor) -> Tensor:
    """Rows g0, u0, g1, ... -> [L, 2, I, ...], a view."""
    return t.unflatten(1, (-1, 2)).transpose(1, 2)


def weights_from(
    matrices: Sequence[Tensor],
    sources: Sequence[Sequence[Any]],
    biases: Sequence[Tensor | None] = (),
    masters: Sequence[torch.dtype] = BF16_MASTERS,
) -> ExpertWeights:
    """Return experts as a layer takes them: cast to bf16 unless matrices have a dtype of `masters`, biases to fp32.

    matrices: w13 and w2, computed just now. sources: the parameters that each was computed from, so that an FP8 copy
        lives as long as they stay what they are; empty where there are no such copies. biases: b13 and b2.
    """
    made = []
    for w, parameters in zip(matrices, sources, strict=True):
        made.append(w if w.dtype in masters else w.bfloat16())
        if parameters:
            wanted = any(p.requires_grad for p in parameters)
            made_of(made[-1], [local(p) for p in parameters], trains=wanted)
    return ExpertWeights(*made, *[None if b is None else b.float() for b in biases])
