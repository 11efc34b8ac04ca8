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


@unless_known
def check_planes(name: str, w: Tensor, planes: int) -> None:
    """Raise ArgumentError unless w [E, H, P*I], checked, has columns for `planes` that TMA takes."""
    unit = planes * STRIDE_BYTES // w.element_size()
    if w.shape[2] % unit:
        refuse(f"{name}.shape", list(w.shape), f"[experts, H, a multiple of {unit}]: gate and up")


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
    check_memory("offs", offs)
    _check_type("offs", offs, x, torch.int32)
    if tuple(offs.shape) != (num_experts,):
        refuse("offs.shape", list(offs.shape), f"[{num_experts}]: where each expert ends")
    if not offs.is_contiguous():
        refuse("offs.stride()", offs.stride(), "1")


def num_ends(groups: Groups, x: Tensor) -> int:
    """Return the number of experts E, which `offs` determines."""
    offs = groups.offs
    check_experts("offs", num := offs.numel() if isinstance(offs, Tensor) else 1)
    check_groups(groups, num, x)
    return num


@unless_known
def check_bias(name: str, bias: Tensor | None, num_experts: int, width: int, x: Tensor) -> None:
    """bias: [E, width], fp32 or bf16."""
    if bias is None:
        return
    _check_type(name, bias, x, torch.float32, torch.bfloat16)
    if tuple(bias.shape) != (num_experts, width):
        refuse(f"{name}.shape", list(bias.shape), f"[{num_experts}, {width}]")


@unless_known
def check_row_scale(row_scale: Tensor | None, x: Tensor) -> None:
    """row_scale: [M] fp32, contiguous."""
    if row_scale is not None:
        _check_scales("row_scale", row_scale, ((x.shape[0],),), x)
        if x.shape[0] > 1 and row_scale.stride(0) != 1:
            refuse("row_scale.stride()", row_scale.stride(), "1")


class Given(NamedTuple):
    """Hold the operands of a product: x [M, K], w [E, K, N], whose columns are `planes`, halves or interleaved."""

    x: Tensor
    w: Tensor
    groups: Groups
    bias: Tensor | None
    planes: int = 1
    interleaved: bool = False
    names: tuple[str, str, str] = ("mat_a", "mat_b", "bias")
    num_recipes: int = len(_PAIRS)  # that have a kernel; the first ones

    def check(self, scales: tuple[Any, ...], recipe: object = None) -> Placed:
        """Return the scales of x by block and of w [E, P, N, K], and whether the call makes both.

        scales: of x, its recipe, of w, its recipe, or empty.
        """
        x, w, (of_x, of_w, of_bias) = self.x, self.w, self.names
        if recipe not in (None, "blockwise") or (recipe is not None and scales):
            refuse("recipe", repr(recipe), "'blockwise' or None, and None with scales")
        if scales:
            scale_a, recipe_a, scale_b, recipe_b = scales
            recipes, known = (recipe_a, recipe_b), _PAIRS[: self.num_recipes]
            check_choice("(scale_recipe_a, scale_recipe_b)", recipes, known)
        check_rows(of_x, x, dtype=E4M3 if scales else torch.bfloat16)
        check_weights(of_w, w, x)
        num, k, width = w.shape
        if k != x.shape[1]:
            refuse(f"{of_w}.shape", list(w.shape), f"[experts, {x.shape[1]}, N]")
        check_groups(self.groups, num, x)
        check_bias(of_bias, self.bias, num, width, x)
        if recipe is not None and (k % STRIDE_BYTES or width // self.planes % STRIDE_BYTES):
            # of copies in e4m3, the transposed ones too
            refuse(f"{of_w}.shape", list(w.shape), f"widths that are multiples of {STRIDE_BYTES}")
        if not scales:
            return None, None, recipe is not None
        return *self._placed(scale_a, scale_b, recipes), False

    def _placed(self, a: Any, b: Any, recipes: Any) -> tuple[Tensor, Tensor]:
        """Return scales as kernels read them."""
        (num, k, width), rows = self.w.shape, self.x.shape[0]
        planes = 1 if self.interleaved else self.planes
        groups, places = num_groups(k), num_places(rows, num)
        blocks, by_row = recipes[1] == _BLOCKS, recipes[0] == _ROWS
        of_blocks = (num, groups, planes * num_groups(width // planes))
        _check_scales("scale_b", b, (of_blocks if blocks else (num, width),), self.x)
        shapes = ((rows,), (1, places)) if by_row else ((rows, groups), (groups, places))
        _check_scales("scale_a", a, shapes, self.x)
        if tuple(a.shape) == shapes[0]:
            a = by_block(a.reshape(rows, -1), self.groups, num)
        b = b.transpose(1, 2) if blocks else b.reshape(num, -1, 1)
        a, b = a.contiguous(), b.contiguous()
        check_place("scale_a", a)
        check_place("scale_b", b)
        return a, b


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
    others = mat_b, groups.offs, scale_a, scale_b
    shape = num_ends(groups, mat_a), *(*out.shape, 1, 1)[1:3]
    check_sums("out", out, shape, mat_a, others)
    blocks, (n1, n2) = max(len(mat_a), shape[0]), map(num_groups, shape[1:])
    for name, t, n in ("mat_a", mat_a, n1), ("mat_b", mat_b, n2):
        _check_type(name, t, out, E4M3)
        if list(t.shape) != (expected := [blocks, n * GROUP, GROUP]):
            refuse(f"{name}.shape", list(t.shape), str(expected))
    _check_scales("scale_a", scale_a, ((blocks + 1, n1 * GROUP),), mat_a)
    _check_scales("scale_b", scale_b, ((n2, blocks + 1),), mat_a)
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
def _check_scales(
    name: str, scale: Tensor | None, shapes: Sequence[tuple[int, ...]], like: Tensor
) -> None:
    """scale: of one of these shapes, fp32."""

    # Not made unless it is said: dynamic sizes of torch.compile have no text.
    def expected() -> str:
        return " or ".join(str(list(shape)) for shape in shapes)

    if not isinstance(scale, Tensor):
        refuse(name, scale, f"scales {expected()} of e4m3")
        return
    check_kind(name, scale)
    check_memory(name, scale)
    _check_type(name, scale, like, torch.float32)
    if tuple(scale.shape) not in shapes:
        refuse(f"{name}.shape", list(scale.shape), expected())


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
