"""View weights by plane, [L, P, I, K], in any strides that TMA can read in place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError

if TYPE_CHECKING:  # It takes 1.2 s to import (2026-11-24): only programs that use DTensors do so.
    from torch.distributed.tensor import DTensor

STRIDE_BYTES, MAX_STRIDE_BYTES = 16, 1 << 40  # of a tensor map
# Such an address may be an offset into storage that was freed. GPUs have no memory there.
SUSPECT_BELOW = 1 << 32
IN_MEMORY = (Tensor, torch.nn.Parameter)  # what subclasses hold is theirs


def by_plane(w: Tensor, planes: int) -> Tensor:
    """w: [L, P*I, K] or [L, P, I, K] -> [L, P, I, K], a view."""
    return w if w.dim() == 4 else w.unflatten(1, (planes, w.shape[1] // planes))


def rows_of(w: Tensor) -> Tensor:
    """Join the planes of one expert: [P*I, K] or [P, I, K] -> [P*I, K]. This copies planes that are not adjacent."""
    return w.flatten(0, -2)


def check_strides(name: str, w: Tensor) -> None:
    """Raise ArgumentError unless rows are contiguous and every other stride is one of a tensor map."""
    size = w.element_size()
    # Not by &=, which torch 2.11 writes into a graph as an assignment to True.
    before = zip(w.shape[:-1], w.stride()[:-1], strict=True)
    last = w.shape[-1] <= 1 or w.stride(-1) == 1
    if not last or not all(extent <= 1 or _is_legal(stride * size) for extent, stride in before):
        expected = (
            f"1 in the last dimension, positive multiples of {STRIDE_BYTES // size} before it"
        )
        raise ArgumentError(f"{name}.stride()", w.stride(), expected)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor."""
    if type(value) in IN_MEMORY or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def check_kind(name: str, t: Tensor) -> None:
    """Raise ArgumentError unless the tensor is dense and strided: no DTensor, no nested or sparse tensor."""
    if not torch.compiler.is_compiling() and is_dtensor(t):
        raise ArgumentError(name, "a DTensor", "a tensor of this rank: its to_local()")
    if t.is_nested or t.layout != torch.strided:
        kind = "nested" if t.is_nested else t.layout
        raise ArgumentError(f"{name}.layout", kind, "torch.strided: a dense tensor")


def spanned_bytes(t: Tensor) -> int:
    """Return the bytes from t's first element to the end of its last, including gaps between rows."""
    if t.is_contiguous():
        return t.nbytes
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def overlaps_itself(t: Tensor) -> bool:
    """Return True if elements of t may share memory."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _held(t: Tensor) -> int | None:
    """Return the size of t's storage if t does not fit into it, else None. FSDP frees storage by resize_(0)."""
    if type(t) not in IN_MEMORY or torch.compiler.is_compiling() or not t.numel():
        return None
    try:
        held = t.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func
        return None
    end = t.storage_offset() * t.element_size() + spanned_bytes(t)
    return held if held < end else None


def is_freed(t: Tensor) -> bool:
    """Return True if t's storage was freed. Only low addresses are examined: freed storage has no other."""
    return t.data_ptr() < SUSPECT_BELOW and _held(t) is not None


def check_memory(name: str, t: Tensor) -> None:
    """Raise ArgumentError for a tensor whose storage was freed."""
    held = _held(t)
    if held is not None:
        raise ArgumentError(
            f"{name}.untyped_storage()", f"of {held} bytes", "memory for its elements: it was freed"
        )


def map_strides(w: Tensor) -> tuple[int, ...]:
    """Return the bytes between rows, planes and experts of w [L, P, I, K], which check_strides() has accepted."""
    row = w.shape[-1] * w.element_size()
    found = [stride * w.element_size() for stride in w.stride()[-2::-1]]
    return tuple(s if _is_legal(s) else row for s in found)  # else one element: any will do


def plane_strides(w: Tensor, planes: int) -> tuple[int, ...]:
    """Return map_strides(by_plane(w, planes)) without creating the view, whose cost each call would pay."""
    if w.dim() == 4:
        return map_strides(w)
    size, (_, rows, width), (expert, row, _) = w.element_size(), w.shape, w.stride()
    found = (row * size, row * (rows // planes) * size, expert * size)
    return tuple(s if _is_legal(s) else width * size for s in found)


def _is_legal(stride_bytes: int) -> bool:
    return 0 < stride_bytes < MAX_STRIDE_BYTES and stride_bytes % STRIDE_BYTES == 0
