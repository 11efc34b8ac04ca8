"""How checkpoints name and arrange what experts are made of. One table; everything else asks it.

An expert has parts, "gate" [I, H] if it is gated, "up" [I, H] and "down" [H, I], and of each part tensors of a kind:
its weight, perhaps a bias [I] or [H], perhaps scales [ceil(I/128), ceil(H/128)] or the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.formats.table import SCALE_GROUP

FLOATS = ("BF16", "F16", "F32")  # as safetensors names them
SCALED = ("F8_E4M3",)
_UP = ("gate", "up")
_HF = "gate_proj up_proj down_proj"


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
    """Names stand behind `experts.`; `bare`: also behind any module's own name.

    needs: kinds that are always there. interleaved: rows of gate and up alternate. transposed: weights are [K, N].
    ambiguous: others arrange the same names and shapes in another way, so that config.json or the user has to say that
    this is it; the `model_type` that says so.
    """

    name: str
    entries: tuple[Entry, ...]
    needs: tuple[str, ...] = ("weight",)
    interleaved: bool = False
    transposed: bool = False
    bare: bool = False
    ambiguous: str | None = None

    @property
    def kinds(self) -> set[str]:
        """Return what it has a place for."""
        return {entry.kind for entry in self.entries}

    def join(self, parts: list[Tensor], kind: str) -> Tensor:
        """parts: of one expert, [N, ...] each -> what its tensor holds."""
        whole = torch.stack(parts, 1).flatten(0, 1) if self.interleaved else torch.cat(parts)
        return whole.T if self._turned(kind) else whole

    def split(self, whole: Tensor, kind: str, num: int) -> list[Tensor]:
        """Invert join()."""
        rows = whole.T if self._turned(kind) else whole
        if self.interleaved:
            return [rows[first::num] for first in range(num)]
        return list(rows.unflatten(0, (num, rows.shape[0] // num)))

    def shape(self, kind: str, parts: tuple[str, ...], hidden: int, inner: int) -> tuple[int, ...]:
        """Return the shape of what join() makes of these parts of an expert [inner, hidden]."""
        rows, *columns = (hidden, inner) if parts == ("down",) else (inner, hidden)
        if kind == "bias":
            columns = []
        elif kind == "scale":
            rows, columns = _blocks(rows), [_blocks(column) for column in columns]
        shape = (len(parts) * rows, *columns)
        return shape[::-1] if self._turned(kind) else shape

    def _turned(self, kind: str) -> bool:
        return self.transposed and kind == "weight"


def _blocks(numbers: int) -> int:
    return -(-numbers // SCALE_GROUP)


def _per_expert(names: str, kinds: dict[str, str], gated: bool | None = None) -> tuple[Entry, ...]:
    """names: of gate, up and down; kinds: their names behind these. gated: of up and down."""
    return tuple(
        Entry(f"{{n}}.{name}.{end}", (part,), kind, True if part == "gate" else gated)
        for name, part in zip(names.split(), ("gate", "up", "down"), strict=True)
        for kind, end in kinds.items()
    )


def _megatron(template: str) -> tuple[Entry, ...]:
    sides = (("linear_fc1", _UP), ("linear_fc2", ("down",)))
    kinds = ("weight", "bias")
    return tuple(
        Entry(template.format(linear=linear, kind=kind, n="{n}"), parts, kind)
        for linear, parts in sides
        for kind in kinds
    )


_LAYOUTS = (
    Layout(
        "hf-fused",
        (
            Entry("gate_up_proj", _UP, gated=True),
            Entry("up_proj", ("up",), gated=False),
            Entry("down_proj", ("down",)),
        ),
    ),
    Layout("hf-per-expert", _per_expert(_HF, {"weight": "weight"})),
    Layout("mixtral", _per_expert("w1 w3 w2", {"weight": "weight"}, gated=True)),
    Layout(
        "gpt-oss",
        (
            Entry("gate_up_proj", _UP, gated=True),
            Entry("gate_up_proj_bias", _UP, "bias", gated=True),
            Entry("down_proj", ("down",), gated=True),
            Entry("down_proj_bias", ("down",), "bias", gated=True),
        ),
        needs=("weight", "bias"),
        interleaved=True,
        transposed=True,
        ambiguous="gpt_oss",
    ),
    Layout(
        "deepseek-fp8",
        _per_expert(_HF, {"weight": "weight", "scale": "weight_scale_inv"}),
        needs=("weight", "scale"),
    ),
    Layout("megatron", _megatron("{linear}.{kind}{n}")),
    Layout("megatron-sequential", _megatron("local_experts.{n}.{linear}.{kind}")),
    Layout(
        "megamoe",
        (
            Entry("w13", _UP),
            Entry("w2", ("down",)),
            Entry("b13", _UP, "bias"),
            Entry("b2", ("down",), "bias"),
            Entry("w13_scale", _UP, "scale"),
            Entry("w2_scale", ("down",), "scale"),
        ),
        bare=True,
    ),
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _LAYOUTS}
