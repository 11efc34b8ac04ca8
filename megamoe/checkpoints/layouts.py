"""Describe how checkpoints name and arrange experts, in one table that every other module reads.

An expert has the parts "gate" [I, H] (if it is gated), "up" [I, H] and "down" [H, I]. Each part has tensors of these
kinds, here for gate and up; for down exchange H and I:

    weight     [I, H]
    scale      [ceil(I/128), ceil(H/128)], multiplies an e4m3 weight
    channels   [I, 1], multiplies an e4m3 weight
    codes      [I, H/2], MXFP4 numbers; with powers [I, H/32]
    bias       [I], optional
    rows       [1], a calibrated scale of the rows of x or h, which no layer uses
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.core.table import MXFP4, MXFP4_GROUP, SCALE_GROUP
from megamoe.formats.mxfp4 import arrange_scales, plain_scales

FLOATS = ("BF16", "F16", "F32")  # as safetensors names them
SCALED = ("F8_E4M3",)
CODES, POWERS = ("U8", "I8"), ("U8", "F8_E8M0")
BLOCK = MXFP4_GROUP // 2  # bytes of a power's numbers
_UP = ("gate", "up")
HF = "gate_proj up_proj down_proj"  # of an expert: gate, up, down
MIXTRAL = "w1 w3 w2"
_FP8, _COMPRESSED, _MXFP4 = "fp8", "compressed-tensors", "mxfp4"
_PER_MATRIX = (_FP8, _COMPRESSED, "modelopt")


@dataclass(frozen=True)
class Entry:
    """A tensor of all experts [E, ...], or with {n} in its name one of each expert.

    parts: what it holds, one behind the other along rows. gated: of experts with a gate only, without one only, or
    (None) of both, and then without "gate" for those that have none.
    """

    name: str
    parts: tuple[str, ...]
    kind: str = "weight"
    gated: bool | None = None

    @property
    def of_each(self) -> bool:
        """Whether every expert has a tensor of its own."""
        return "{n}" in self.name

    def held(self, gated: bool) -> tuple[str, ...]:
        """Return the parts that it holds of experts with or without a gate; empty: they have no such tensor."""
        if self.gated not in (None, gated):
            return ()
        return tuple(part for part in self.parts if gated or part != "gate")


@dataclass(frozen=True)
class Layout:
    """Describe the names and the arrangement of a library's experts.

    Args:
        name: Name of the layout.
        entries: Tensors of a module of experts.
        needs: Kinds that are always there.
        interleaved: True: rows of gate and up alternate.
        transposed: True: weights are [K, N].
        blocked: True: codes are [N, K/32, 16].
        kernel_scale_order: True: powers are in the kernel's order (megamoe/formats/mxfp4.py).
        per_matrix_scale: True: a matrix has one scale, [1] or [], not one per row. The layout is only read.
        allows_bare_names: True: names of tensors need no `experts.` before them.
        module_prefix: What is before them instead of `experts.`. Default: `experts.`
        packed: Dtypes of codes and powers.
        methods: quant_method in config.json, if weights are quantized.
        ambiguous: Each model_type in config.json that has this layout. Other layouts have the same names and shapes, so
            config.json or the user has to name it. Default: none have.
    """

    name: str
    entries: tuple[Entry, ...]
    needs: tuple[str, ...] = ("weight",)
    interleaved: bool = False
    transposed: bool = False
    blocked: bool = False
    kernel_scale_order: bool = False
    per_matrix_scale: bool = False
    allows_bare_names: bool = False
    module_prefix: str = ""
    packed: tuple[str, str] = ("U8", "U8")
    methods: tuple[str, ...] = (_FP8, _COMPRESSED, _MXFP4)
    ambiguous: tuple[str, ...] = ()

    def stem(self, prefix: str) -> str:
        """Return what stands before the names of a module: `prefix` ends before "experts."."""
        return prefix if self.module_prefix else f"{prefix}experts."

    @property
    def types(self) -> dict[str, str]:
        """Return the types of packed numbers, by kind."""
        return dict(zip(("codes", "powers"), self.packed, strict=True))

    @property
    def kinds(self) -> set[str]:
        """Return what it has a place for."""
        return {entry.kind for entry in self.entries}

    def join(self, parts: list[Tensor], kind: str) -> Tensor:
        """parts: of one expert, [N, ...] each -> what its tensor holds."""
        whole = torch.stack(parts, 1).flatten(0, 1) if self.interleaved else torch.cat(parts)
        if kind == "codes" and self.blocked:
            whole = whole.unflatten(-1, (-1, BLOCK))
        if kind == "powers" and self.kernel_scale_order:
            whole = arrange_scales(whole[None], len(parts))[0]
        return whole.T if self._transposed(kind) else whole

    def split(self, whole: Tensor, kind: str, num: int, rows: int, columns: int) -> list[Tensor]:
        """Invert join(); rows, columns: sizes of a part."""
        if kind == "codes" and self.blocked:
            whole = whole.flatten(-2)
        if kind == "powers" and self.kernel_scale_order:
            whole = plain_scales(whole[None], num, rows, columns)[0]
        if kind == "channels" and self.per_matrix_scale:
            whole = whole.reshape(1, 1).expand(num * rows, 1)
        whole = whole.T if self._transposed(kind) else whole
        if self.interleaved:
            return [whole[first::num] for first in range(num)]
        return list(whole.unflatten(0, (num, whole.shape[0] // num)))

    def shape(self, kind: str, num: int, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of what join() makes of `num` parts of these sizes."""
        groups, n, k = columns // MXFP4_GROUP, _blocks(rows), _blocks(columns)
        blocked, arranged = (groups, BLOCK), (num * n, k, MXFP4.block_scales)
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (num * rows, columns),
            "bias": (num * rows,),
            "scale": (num * n, k),
            "channels": (1,) if self.per_matrix_scale else (num * rows, 1),
            "rows": (1,),
            "codes": (num * rows, *(blocked if self.blocked else (columns // 2,))),
            "powers": arranged if self.kernel_scale_order else (num * rows, groups),
        }
        return shapes[kind][::-1] if self._transposed(kind) else shapes[kind]

    def sizes(self, kind: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return rows and columns of one expert's numbers, of kind "weight" or "codes"; None: of no such shape."""
        shape = shape[::-1] if self._transposed(kind) else shape
        if kind == "codes" and self.blocked:
            shape = (shape[0], MXFP4_GROUP * shape[1]) if shape[2:] == (BLOCK,) else ()
        elif kind == "codes":
            shape = (*shape[:-1], 2 * shape[-1]) if shape else ()
        if len(shape) != 2 or 0 in shape or (kind == "codes" and shape[1] % MXFP4_GROUP):
            return None
        return shape[0], shape[1]

    def _transposed(self, kind: str) -> bool:
        return self.transposed and kind == "weight"


def _blocks(numbers: int) -> int:
    return -(-numbers // SCALE_GROUP)


def per_expert(names: str, kinds: dict[str, str], gated: bool | None = None) -> tuple[Entry, ...]:
    """names: of gate, up and down; kinds: their names behind these. gated: of up and down."""
    return tuple(
        Entry(f"{{n}}.{name}.{end}", (part,), kind, True if part == "gate" else gated)
        for name, part in zip(names.split(), ("gate", "up", "down"), strict=True)
        for kind, end in kinds.items()
    )


def _fp8(name: str, names: str, kind: str, end: str, *methods: str, single: bool = False) -> Layout:
    """kind, end: of its scales, and their name. single: a scale per matrix."""
    kinds = {"weight": "weight", kind: end} | ({"rows": "input_scale"} if single else {})
    entries = per_expert(names, kinds, gated=True if names == MIXTRAL else None)
    return Layout(name, entries, ("weight", kind), per_matrix_scale=single, methods=methods)


def _joined(
    gate_up: str, down: str, kinds: dict[str, str], gated: bool | None = True
) -> tuple[Entry, ...]:
    """gate_up, down: names of two tensors; kinds: their names behind these."""
    return tuple(
        Entry(f"{name}{end}", parts, kind, gated)
        for name, parts in ((gate_up, _UP), (down, ("down",)))
        for kind, end in kinds.items()
    )


_TRANSPOSED = _joined("gate_up_proj", "down_proj", {"weight": "", "bias": "_bias"})
_MXFP4_KINDS = {"codes": "_blocks", "powers": "_scales", "bias": "_bias"}
_GROUPED = {"weight": ".weight{n}", "bias": ".bias{n}"}  # Megatron-Core's
_SEQUENTIAL = {"weight": ".weight", "bias": ".bias"}
_LOCAL = "local_experts.{n}.linear_fc"
_LAYOUTS = (
    Layout(
        "hf-fused",
        (
            Entry("gate_up_proj", _UP, gated=True),
            Entry("up_proj", ("up",), gated=False),
            Entry("down_proj", ("down",)),
        ),
    ),
    Layout("hf-per-expert", per_expert(HF, {"weight": "weight"})),
    Layout("mixtral", per_expert(MIXTRAL, {"weight": "weight"}, gated=True)),
    Layout(
        "granite",
        _joined("input_linear", "output_linear", {"weight": ".weight"}),
        module_prefix="block_sparse_moe.",
    ),
    Layout(
        "step3",
        (
            Entry("gate_proj.weight", ("gate",), gated=True),
            Entry("up_proj.weight", ("up",), gated=True),
            Entry("down_proj.weight", ("down",), gated=True),
        ),
        module_prefix="moe.",
    ),
    Layout(
        "deepseek-mxfp4",
        per_expert(MIXTRAL, {"codes": "weight", "powers": "scale"}, gated=True),
        needs=("codes", "powers"),
        packed=("I8", "F8_E8M0"),
        methods=(_FP8,),
    ),
    Layout(
        "hf-transposed",
        _TRANSPOSED,
        transposed=True,
        ambiguous=(
            *("llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"),
            "openai_privacy_filter",  # the one with biases
        ),
    ),
    Layout(
        "gpt-oss",
        _TRANSPOSED,
        needs=("weight", "bias"),
        interleaved=True,
        transposed=True,
        ambiguous=("gpt_oss",),
    ),
    Layout(
        "gpt-oss-mxfp4",
        _joined("gate_up_proj", "down_proj", _MXFP4_KINDS),
        needs=("codes", "powers", "bias"),
        interleaved=True,
        blocked=True,
        methods=(_MXFP4,),
    ),
    _fp8("deepseek-fp8", HF, "scale", "weight_scale_inv", _FP8),
    _fp8("minimax-fp8", MIXTRAL, "scale", "weight_scale_inv", _FP8),
    _fp8("compressed-tensors-fp8", HF, "channels", "weight_scale", _COMPRESSED),
    _fp8("compressed-tensors-fp8-block", HF, "scale", "weight_scale", _COMPRESSED),
    _fp8("mixtral-fp8", MIXTRAL, "channels", "weight_scale", _COMPRESSED),
    _fp8("mixtral-fp8-block", MIXTRAL, "scale", "weight_scale", _COMPRESSED),
    _fp8("tensor-fp8", HF, "channels", "weight_scale", *_PER_MATRIX, single=True),
    _fp8("mixtral-tensor-fp8", MIXTRAL, "channels", "weight_scale", *_PER_MATRIX, single=True),
    Layout("megatron", _joined("linear_fc1", "linear_fc2", _GROUPED, gated=None)),
    Layout("megatron-sequential", _joined(f"{_LOCAL}1", f"{_LOCAL}2", _SEQUENTIAL, gated=None)),
    Layout(
        "megamoe",
        (
            Entry("w13", _UP),
            Entry("w2", ("down",)),
            Entry("b13", _UP, "bias"),
            Entry("b2", ("down",), "bias"),
            Entry("w13_scale", _UP, "scale"),
            Entry("w2_scale", ("down",), "scale"),
            Entry("w13_scale", _UP, "channels"),
            Entry("w2_scale", ("down",), "channels"),
            Entry("w13", _UP, "codes"),
            Entry("w2", ("down",), "codes"),
            Entry("w13_scale", _UP, "powers"),
            Entry("w2_scale", ("down",), "powers"),
        ),
        needs=(),
        kernel_scale_order=True,
        allows_bare_names=True,
    ),
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _LAYOUTS}
