"""Validate the arguments of the operators, before memory is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.call import shares
from megamoe.core import transforms
from megamoe.core.config import MAX_LOCAL_EXPERTS
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import (
    STRIDE_BYTES,
    by_plane,
    check_kind,
    check_memory,
    check_strides,
    overlaps_itself,
)
from megamoe.core.uncompiled import uncompiled
from megamoe.formats.quantization import E4M3, num_groups
from megamoe.ops.scales import by_block as scales_by_block
from megamoe.ops.scales import num_places

MAX_ROWS = (1 << 31) - 256
MAX_WIDTH = 1 << 24


@uncompiled("an operator of megamoe refuses its arguments: call it outside of the graph to see why")
def refuse(name: str, value: object, expected: str) -> None:
    """Raise ArgumentError outside of torch.compile, which would retry smaller frames that do not see tangents."""
    raise ArgumentError(name, value, expected)


_OPTIONAL = ("bias", "b13", "b2", "out")


def check_given(**given: Any) -> None:
    """Raise ArgumentError unless every argument is a dense tensor whose storage was not freed."""
    for name, t in given.items():
        if not (isinstance(t, Tensor) or (t is None and name in _OPTIONAL)):
            refuse(name, type(t).__name__, "a tensor")
        if t is not None:
            check_kind(name, t)
            check_memory(name, t)


def check_mode(**given: Any) -> None:
    """Raise ArgumentError for non-tensors, forward-mode tangents and torch.func, which custom operators do not see."""
    compiling = torch.compiler.is_compiling()  # then nothing can be asked of tensors
    if not compiling:
        check_given(**given)
        if transforms.functional():
            refuse("a transform of torch.func", "active", "torch.autograd's backward()")
    if transforms.forward_mode() if compiling else transforms.has_tangent(list(given.values())):
        refuse("a forward-mode tangent", "given", "reverse mode: the operators have no other")


def check_rows(
    name: str, t: Tensor, like: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Raise ArgumentError unless t is [M, K], contiguous in K, aligned, and matches the rows and device of `like`."""
    if t.dim() != 2:
        refuse(f"{name}.shape", list(t.shape), "[rows, columns]")
    _check_type(name, t, like, dtype)
    if like is not None and t.shape[0] != like.shape[0]:
        refuse(f"{name}.shape", list(t.shape), f"{like.shape[0]} rows")
    if t.shape[0] > MAX_ROWS:
        refuse(f"{name}.shape", list(t.shape), f"at most {MAX_ROWS} rows")
    _check_width(f"{name}.shape", t.shape[1], t)
    check_strides(name, t)
    check_place(name, t)


def check_weights(name: str, w: Tensor, x: Tensor) -> None:
    """Raise ArgumentError unless w is [E, K, N] of x's dtype with K or N contiguous (e4m3: K)."""
    if w.dim() != 3:
        refuse(f"{name}.shape", list(w.shape), "[experts, K, N]")
    _check_type(name, w, x, x.dtype)
    if w.dtype == E4M3 and w.stride(1) != 1:
        refuse(f"{name}.stride()", w.stride(), "1 for K: e4m3 is multiplied K-major")
    check_experts(name, w.shape[0])
    for width in w.shape[1:]:
        _check_width(f"{name}.shape", width, w)
    check_strides(name, w if w.stride(2) == 1 else w.transpose(1, 2))
    check_place(name, w)


def check_planes(name: str, w: Tensor, planes: int, x: Tensor, width: int) -> Tensor:
    """w: [E, P*I, H] or [E, P, I, H] bf16, H contiguous and `width` -> [E, P, I, H]."""
    of = f"[experts, {planes} * I, {width}] or [experts, {planes}, I, {width}]"
    joined = w.dim() == 3 and w.shape[1] % planes == 0
    apart = w.dim() == 4 and w.shape[1] == planes
    if not (joined or apart) or w.shape[-1] != width:
        refuse(f"{name}.shape", list(w.shape), of)
    w = by_plane(w, planes)
    _check_type(name, w, x, x.dtype)
    check_experts(name, w.shape[0])
    _check_width(f"{name}.shape", w.shape[2], w)
    check_strides(name, w)
    check_place(name, w)
    return w


def check_offs(offs: Tensor | None, num_experts: int, x: Tensor) -> None:
    """offs: [E] int32, where the rows of each expert end; None with one expert alone."""
    if offs is None:
        if num_experts != 1:
            refuse("offs", None, f"the ends of {num_experts} experts: None is for one")
        return
    if not isinstance(offs, Tensor):
        refuse("offs", offs, "a tensor, int32")
    check_memory("offs", offs)
    _check_type("offs", offs, x, torch.int32)
    if tuple(offs.shape) != (num_experts,):
        refuse("offs.shape", list(offs.shape), f"[{num_experts}]: where each expert ends")
    if not offs.is_contiguous():
        refuse("offs.stride()", offs.stride(), "1")


def num_ends(offs: Tensor | None, x: Tensor) -> int:
    """Return the number of experts E, which `offs` determines."""
    num = offs.numel() if isinstance(offs, Tensor) else 1
    check_experts("offs", num)
    check_offs(offs, num, x)
    return num


def check_bias(
    name: str, bias: Tensor | None, num_experts: int, width: int, x: Tensor, planes: int = 1
) -> None:
    """bias: [E, width], or by plane [E, P, width / P], fp32 or bf16."""
    if bias is None:
        return
    _check_type(name, bias, x, torch.float32, torch.bfloat16)
    apart = (num_experts, planes, width // planes)
    if tuple(bias.shape) not in ((num_experts, width), apart):
        expected = f"[{num_experts}, {width}]" + (f" or {list(apart)}" if planes > 1 else "")
        refuse(f"{name}.shape", list(bias.shape), expected)


def is_dynamic(scales: object) -> bool:
    """Return True if the call quantizes its operands."""
    if isinstance(scales, str) and scales != "dynamic":
        refuse("scales", repr(scales), "two tensors, 'dynamic' or None")
    return isinstance(scales, str)


def type_of(scales: object) -> torch.dtype:
    """Return the dtype that operands must have for this value of `scales`."""
    return torch.bfloat16 if scales is None or is_dynamic(scales) else E4M3


def check_quantizable(name: str, w: Tensor, scales: object) -> None:
    """w: [E, ..., N, K] bf16, whose copies in e4m3, the transposed ones too, have rows of 16-byte units."""
    if is_dynamic(scales) and any(width % STRIDE_BYTES for width in w.shape[-2:]):
        refuse(f"{name}.shape", list(w.shape), f"widths that are multiples of {STRIDE_BYTES}")


def check_operands(
    scales: Any, x: Tensor, offs: Tensor | None, sizes: tuple[int, ...], grouped: bool = True
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return scales of x [M, K] by block and of w [E, P, N, K], and whether the call makes both. sizes: E, P, N.

    grouped: may rows beside weights by channel have scales of groups of columns? They have one a row else.
    """
    if scales is None or is_dynamic(scales):
        return None, None, scales is not None
    if not isinstance(scales, tuple | list) or len(scales) != 2:
        refuse("scales", type(scales).__name__, "two tensors: of rows, of weights")
    (of_rows, of_weights), (num, planes, height) = scales, sizes
    rows, groups, places = x.shape[0], num_groups(x.shape[1]), num_places(x.shape[0], num)
    blocks, channels = (num, planes * num_groups(height), groups), (num, planes * height, 1)
    _check_scales("scales[1]", of_weights, (blocks, channels), x)
    shapes: tuple[tuple[int, ...], ...] = ((groups, places),)
    if tuple(of_weights.shape) == channels:
        shapes = (1, places), (rows, 1), (rows,), *(shapes if grouped else ())
    _check_scales("scales[0]", of_rows, shapes, x)
    if of_rows.shape[-1] != places:
        of_rows = scales_by_block(of_rows.reshape(rows, 1), offs, num)
    return of_rows, of_weights, False


def check_experts(name: str, num_experts: int) -> None:
    if not 1 <= num_experts <= MAX_LOCAL_EXPERTS:
        refuse(f"experts of {name}", num_experts, f"1..{MAX_LOCAL_EXPERTS}")


def check_place(name: str, t: Tensor) -> None:
    """Refuse storage that is not 16-byte aligned. While torch.compile traces there is none: see arguments.py."""
    if not torch.compiler.is_compiling() and t.data_ptr() % STRIDE_BYTES:
        refuse(f"{name}.data_ptr()", hex(t.data_ptr()), f"a multiple of {STRIDE_BYTES}")


def _check_scales(
    name: str, scale: Tensor | None, shapes: Sequence[tuple[int, ...]], like: Tensor
) -> None:
    """scale: of one of these shapes, fp32, contiguous, 16-byte aligned."""

    # Not made unless it is said: dynamic sizes of torch.compile have no text.
    def expected() -> str:
        return " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))

    if not isinstance(scale, Tensor):
        refuse(name, scale, f"scales {expected()} of e4m3")
        return
    _check_type(name, scale, like, torch.float32)
    check_kind(name, scale)
    if tuple(scale.shape) not in shapes:
        refuse(f"{name}.shape", list(scale.shape), expected())
    if not scale.is_contiguous():
        refuse(f"{name}.stride()", scale.stride(), "those of a contiguous tensor")
    check_place(name, scale)
    check_memory(name, scale)


def _check_type(name: str, t: Tensor, like: Tensor | None, *types: torch.dtype) -> None:
    """Refuse other types, and another device than that of `like`."""
    if t.dtype not in types:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
        refuse(f"{name}.dtype", t.dtype, expected)
    if like is not None and t.device != like.device:
        refuse(f"{name}.device", t.device, str(like.device))


def _check_width(name: str, width: int, t: Tensor) -> None:
    unit = STRIDE_BYTES // t.element_size()
    if not 0 < width <= MAX_WIDTH or width % unit:
        refuse(name, list(t.shape), f"widths that are multiples of {unit}, up to {MAX_WIDTH}")


def check_sums(
    name: str, out: Tensor, shape: tuple[int, ...], like: Tensor, others: Sequence[Tensor | None]
) -> None:
    """out: of a shape, bf16 or fp32, as TMA writes it. like, others: what is read meanwhile."""
    _check_type(name, out, like, torch.bfloat16, torch.float32)
    if tuple(out.shape) != shape:
        refuse(f"{name}.shape", list(out.shape), str(list(shape)))
    if out.requires_grad:
        refuse(f"{name}.requires_grad", True, "False: it is written in place")
    check_strides(name, out)
    if overlaps_itself(out):
        refuse(f"{name}.stride()", out.stride(), f"places of their own for all of {list(shape)}")
    check_place(name, out)
    if torch.compiler.is_compiling():
        return
    if out.is_neg():
        refuse(name, "a negative view", "a tensor as it lies in memory")
    if shares(out, (like, *others)):
        refuse(name, "in a storage that the call reads", "a storage of its own")
