"""Validate the arguments of the operators, before memory is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from megamoe.backends.call import shares
from megamoe.core import transforms
from megamoe.core.config import MAX_LOCAL_EXPERTS, Activation
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import (
    STRIDE_BYTES,
    check_kind,
    check_memory,
    check_strides,
    overlaps_itself,
)
from megamoe.core.uncompiled import uncompiled
from megamoe.formats.quantization import E4M3, GROUP, num_groups
from megamoe.ops.calls import unless_known
from megamoe.ops.groups import Groups
from megamoe.ops.scales import by_block, num_places

Placed = tuple[Tensor | None, Tensor | None, bool]
MAX_ROWS = (1 << 31) - 256
MAX_WIDTH = 1 << 24
BIASES = torch.float32, torch.bfloat16
ALIGNMENTS = tuple(1 << bits for bits in range(9))


@uncompiled("an operator of megamoe refuses its arguments: call it outside of the graph to see why")
def refuse(name: str, value: object, expected: str) -> None:
    """Raise ArgumentError outside of torch.compile, which would retry smaller frames that do not see tangents."""
    raise ArgumentError(name, value, expected)


_OPTIONAL = ("bias", "b_up", "b_down", "row_scale")
_ROWS, _GROUPS = ScalingType.RowWise, ScalingType.BlockWise1x128
_BLOCKS = ScalingType.BlockWise128x128
_PAIRS = (_GROUPS, _BLOCKS), (_ROWS, _ROWS), (_GROUPS, _ROWS)  # recipes of rows and weights


def check_given(**given: Any) -> None:
    """Raise ArgumentError unless every argument is a dense tensor whose storage was not freed."""
    for name, t in given.items():
        if not (isinstance(t, Tensor) or (t is None and name in _OPTIONAL)):
            refuse(name, type(t).__name__, "a tensor")
        if t is not None:
            check_kind(name, t)
            check_memory(name, t)


@unless_known
def check_mode(**given: Any) -> None:
    """Raise ArgumentError for non-tensors, forward-mode tangents and torch.func, which custom operators do not see."""
    compiling = torch.compiler.is_compiling()  # then nothing can be asked of tensors
    if not compiling:
        check_given(**given)
        if transforms.functional():
            refuse("a transform of torch.func", "active", "torch.autograd's backward()")
    if transforms.forward_mode() if compiling else transforms.has_tangent(list(given.values())):
        refuse("a forward-mode tangent", "given", "reverse mode: the operators have no other")


@unless_known
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


@unless_known
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


def interleaved(glu: object, act: Activation) -> bool:
    """Return True if gate and up columns alternate; False if they are halves, or not gated."""
    if glu not in ("halves", "interleaved"):
        refuse("glu", repr(glu), "'halves' or 'interleaved': blocks of columns are not supported")
    return act.gated and glu == "interleaved"


@unless_known
def check_groups(groups: Groups, num_experts: int, x: Tensor) -> None:
    """offs: [E] int32, where the rows of each expert end; None with one expert alone."""
    offs, alignment = groups
    if type(alignment) is not int or alignment not in ALIGNMENTS:
        refuse("alignment", repr(alignment), "a power of two up to 256")
    if offs is None:
        if num_experts != 1:
            refuse("offs", None, f"the ends of {num_experts} experts: None is for one")
        return
    if not isinstance(offs, Tensor):
        refuse("offs", offs, "a tensor, int32")
    check_tensor("offs", offs, x, ((num_experts,),), torch.int32)
    if not offs.is_contiguous():
        refuse("offs.stride()", offs.stride(), "1")


def num_ends(groups: Groups, x: Tensor) -> int:
    """Return the number of experts E, which `offs` determines."""
    offs = groups.offs
    check_experts("offs", num := offs.numel() if isinstance(offs, Tensor) else 1)
    check_groups(groups, num, x)
    return num


class Given(NamedTuple):
    """Hold the operands of a product: x [M, K], w [E, K, N], whose columns are `planes`, halves or interleaved.

    row_scale: [M] fp32, contiguous. quantizes: the result is e4m3.
    """

    x: Tensor
    w: Tensor
    groups: Groups
    bias: Tensor | None = None
    row_scale: Tensor | None = None
    planes: int = 1
    interleaved: bool = False
    quantizes: bool = False
    names: tuple[str, str, str] = ("mat_a", "mat_b", "bias")
    num_recipes: int = len(_PAIRS)  # that have a kernel; the first ones

    def check(self, scales: tuple[Any, ...], recipe: object = None) -> Placed:
        """Return the scales of x by block and of w [E, P, N, K] as kernels read them, and whether the call makes both.

        scales: of x, its recipe, of w, its recipe, or empty.
        """
        x, w, (of_x, of_w, of_bias) = self.x, self.w, self.names
        if recipe not in (None, "blockwise") or (recipe is not None and scales):
            refuse("recipe", repr(recipe), "'blockwise' or None, and None with scales")
        if scales:
            a, recipe_a, b, recipe_b = scales
            recipes, known = (recipe_a, recipe_b), _PAIRS[: self.num_recipes]
            check_choice("(scale_recipe_a, scale_recipe_b)", recipes, known)
        check_rows(of_x, x, dtype=E4M3 if scales else torch.bfloat16)
        check_weights(of_w, w, x)
        (num, k, width), shape = w.shape, (f"{of_w}.shape", list(w.shape))
        if k != x.shape[1]:
            refuse(*shape, f"[experts, {x.shape[1]}, N]")
        check_groups(self.groups, num, x)
        if self.bias is not None:
            check_tensor(of_bias, self.bias, x, ((num, width),), *BIASES)
        if self.row_scale is not None:
            check_tensor("row_scale", self.row_scale, x, ((x.shape[0],),))
            if not self.row_scale.is_contiguous():
                refuse("row_scale.stride()", self.row_scale.stride(), "1")
        if width % (unit := self.planes * STRIDE_BYTES // w.element_size()):
            refuse(*shape, f"[experts, H, a multiple of {unit}]: gate and up")
        of_plane = width // self.planes
        if recipe is not None and (k % STRIDE_BYTES or of_plane % STRIDE_BYTES):
            # of copies in e4m3, the transposed ones too
            refuse(*shape, f"widths that are multiples of {STRIDE_BYTES}")
        if self.quantizes and of_plane % STRIDE_BYTES:
            refuse(*shape, f"{'N' if self.planes == 1 else 'I'} a multiple of 16, to quantize")
        if not scales:
            return None, None, recipe is not None
        planes, rows = 1 if self.interleaved else self.planes, x.shape[0]
        groups, places = num_groups(k), num_places(rows, num)
        blocks, per_row = recipes[1] == _BLOCKS, recipes[0] == _ROWS
        of_blocks = (num, groups, planes * num_groups(width // planes))
        check_tensor("scale_b", b, x, (of_blocks if blocks else (num, width),))
        shapes = ((rows,), (1, places)) if per_row else ((rows, groups), (groups, places))
        check_tensor("scale_a", a, x, shapes)
        if tuple(a.shape) == shapes[0]:
            a = by_block(a.reshape(rows, -1), self.groups, num)
        b = b.transpose(1, 2) if blocks else b.reshape(num, -1, 1)
        a, b = a.contiguous(), b.contiguous()
        check_place("scale_a", a)
        check_place("scale_b", b)
        return a, b, False


@unless_known
def check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raise ArgumentError unless the value, a dtype, a recipe or a pair of recipes, is known."""
    if value not in known:
        found = _text(value)
        why = ": NVFP4's and MXFP8's scales have no meaning on Hopper, whose MMAs take none"
        small = "BlockWise1x16" in found or "BlockWise1x32" in found
        refuse(name, found, " or ".join(map(_text, known)) + why * small)


def _text(recipe: Any) -> str:
    if isinstance(recipe, tuple):
        return f"({', '.join(map(_text, recipe))})"
    return str(getattr(recipe, "name", recipe))


def check_quantized(
    x: Tensor, recipe: object, offs: Tensor | None, glu: object, transposed: bool
) -> None:
    """x: rows [M, K] or weights [E, K, N]."""
    rows = x.dim() == 2
    if transposed and not rows:
        refuse("transposed", True, "False with weights: what reads them transposes them")
    if x.dim() not in (2, 3) or 0 in x.shape[1:] or (rows and x.shape[1] % 16):
        refuse("x.shape", list(x.shape), "rows [M, a multiple of 16] or weights [experts, K, N]")
    types = torch.bfloat16, torch.float16, torch.float32, torch.float64
    _check_type("x", x, None, *types[: 3 if rows else 4])
    known = (_GROUPS, _BLOCKS) if transposed else (_GROUPS if rows else _BLOCKS, _ROWS)
    check_choice("recipe", recipe, known)
    if offs is not None and not rows:
        refuse("offs", "given", "None with weights")
    if glu is not None and (glu != "halves" or recipe != _BLOCKS or x.shape[-1] % 2):
        refuse("glu", repr(glu), "None, or 'halves' with BlockWise128x128 and even columns")


def outer(mat_a: Tensor, mat_b: Tensor, groups: Groups) -> tuple[Tensor, Tensor, int]:
    """mat_a: [N1, M], mat_b: [M, N2] -> both as rows [M, N], and the number of experts E, which `offs` determines."""
    a, b = by_row(mat_a.mT if mat_a.dim() == 2 else mat_a), by_row(mat_b)
    check_rows("mat_a.mT", a)
    check_rows("mat_b", b, a)
    return a, b, num_ends(groups, a)


def outer_of_e4m3(
    mat_a: Tensor, mat_b: Tensor, scales: tuple[Any, ...], groups: Groups, out: Tensor
) -> list[Tensor]:
    """mat_a: [B, N1', 128], mat_b: [B, N2', 128], as quantize() transposes them -> both, and their scales."""
    scale_a, recipe_a, scale_b, recipe_b = scales
    check_choice("(scale_recipe_a, scale_recipe_b)", (recipe_a, recipe_b), _PAIRS[:1])
    shape = num_ends(groups, mat_a), *(*out.shape, 1, 1)[1:3]
    check_sums(out, shape, mat_a, mat_b, groups.offs, scale_a, scale_b)
    blocks, (n1, n2) = max(len(mat_a), shape[0]), map(num_groups, shape[1:])
    for name, t, n in ("mat_a", mat_a, n1), ("mat_b", mat_b, n2):
        check_tensor(name, t, out, ((blocks, n * GROUP, GROUP),), E4M3)
    check_tensor("scale_a", scale_a, mat_a, ((blocks + 1, n1 * GROUP),))
    check_tensor("scale_b", scale_b, mat_a, ((n2, blocks + 1),))
    return [t.contiguous() for t in (mat_a, mat_b, scale_a, scale_b)]


def by_row(t: Tensor) -> Tensor:
    """t: [M, N] -> itself, or a copy if it is not contiguous in N."""
    return t.contiguous() if t.dim() == 2 and t.stride(1) != 1 else t


def check_experts(name: str, num_experts: int) -> None:
    if not 1 <= num_experts <= MAX_LOCAL_EXPERTS:
        refuse(f"experts of {name}", num_experts, f"1..{MAX_LOCAL_EXPERTS}")


@unless_known
def check_place(name: str, t: Tensor) -> None:
    """Refuse storage that is not 16-byte aligned. While torch.compile traces there is none: see arguments.py."""
    if not torch.compiler.is_compiling() and t.data_ptr() % STRIDE_BYTES:
        refuse(f"{name}.data_ptr()", hex(t.data_ptr()), f"a multiple of {STRIDE_BYTES}")


@unless_known
def check_tensor(
    name: str, t: Any, like: Tensor, shapes: Sequence[tuple[int, ...]], *types: torch.dtype
) -> None:
    """t: dense, of one of these shapes and types; scales of fp32."""

    # Not made unless it is said: dynamic sizes of torch.compile have no text.
    def expected() -> str:
        return " or ".join(str(list(shape)) for shape in shapes)

    if not isinstance(t, Tensor):
        refuse(name, t, f"scales {expected()} of e4m3")
    check_kind(name, t)
    check_memory(name, t)
    _check_type(name, t, like, *(types or (torch.float32,)))
    if tuple(t.shape) not in shapes:
        refuse(f"{name}.shape", list(t.shape), expected())


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


def check_sums(out: Tensor, shape: tuple[int, ...], like: Tensor, *others: Tensor | None) -> None:
    """out: of a shape, bf16 or fp32, as TMA writes it. like, others: what is read meanwhile."""
    check_tensor("out", out, like, (shape,), torch.bfloat16, torch.float32)
    if out.requires_grad:
        refuse("out.requires_grad", True, "False: it is written in place")
    check_strides("out", out)
    if overlaps_itself(out):
        refuse("out.stride()", out.stride(), f"places of their own for all of {list(shape)}")
    check_place("out", out)
    if torch.compiler.is_compiling():
        return
    if out.is_neg():
        refuse("out", "a negative view", "a tensor as it lies in memory")
    if shares(out, (like, *others)):
        refuse("out", "in a storage that the call reads", "a storage of its own")
