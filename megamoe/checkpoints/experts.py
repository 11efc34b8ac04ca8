"""Find the modules of experts in a checkpoint, their layout, and the place of each part of each expert."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from megamoe.checkpoints.files import Source
from megamoe.checkpoints.layouts import CODES, FLOATS, LAYOUTS, POWERS, SCALED, Entry, Layout
from megamoe.core.errors import ArgumentError

_NUMBER = r"(?P<n>0|[1-9]\d{0,5})"
_NUMBERS = re.compile(r"(?:(?<=[._])|(?<=weight)|(?<=bias))\d+")  # of layers and experts
_OPTIONAL_KINDS = {"bias", "rows"}  # of tensors that may be missing
# What the numbers of a module are, and in which types.
_KIND_DTYPES: dict[frozenset[str], dict[str, tuple[str, ...]]] = {
    frozenset({"weight"}): {"weight": FLOATS},
    frozenset({"weight", "scale"}): {"weight": SCALED, "scale": ("F32", "BF16")},
    frozenset({"weight", "channels"}): {"weight": SCALED, "channels": ("F32", "BF16")},
    frozenset({"codes", "powers"}): {"codes": CODES, "powers": POWERS},
}
_SHOWN = 12  # lines of what was seen


@dataclass
class Experts:
    """One module's experts. names: by entry and expert (None: of all). dtypes: by kind and part."""

    source: Source
    prefix: str
    layout: Layout
    names: dict[tuple[Entry, int | None], str]
    num: int = 0
    hidden: int = 0
    intermediate: int = 0
    gated: bool = True
    dtypes: dict[tuple[str, str], str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.layout.stem(self.prefix).rstrip('.')} ({self.layout.name})"

    @cached_property
    def kinds(self) -> set[str]:
        """Return what kinds of tensors there are."""
        return {entry.kind for entry, _ in self.names}

    def entries(self, layout: Layout) -> list[tuple[Entry, tuple[str, ...]]]:
        """Return the tensors that these experts have in a layout, and the parts that each holds."""
        found = [(entry, entry.held(self.gated)) for entry in layout.entries]
        return [(entry, parts) for entry, parts in found if parts and entry.kind in self.kinds]

    def shape(self, layout: Layout, entry: Entry, parts: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of one of these tensors."""
        shape = layout.shape(entry.kind, len(parts), *self._of_part(parts[0]))
        return shape if entry.of_each else (self.num, *shape)

    def _of_part(self, part: str) -> tuple[int, int]:
        sizes = self.intermediate, self.hidden
        return sizes[::-1] if part == "down" else sizes

    def read(self, kind: str, part: str, expert: int) -> Tensor:
        """Read one part of one expert."""
        for entry, parts in self.entries(self.layout):
            if entry.kind == kind and part in parts:
                name = self.names[entry, expert if entry.of_each else None]
                whole = self.source.tensor(name, None if entry.of_each else expert)
                whole = whole.view(torch.uint8) if kind in ("codes", "powers") else whole
                split = self.layout.split(whole, kind, len(parts), *self._of_part(part))
                return split[parts.index(part)]
        raise KeyError((kind, part))

    def measure(self) -> None:
        """Find out the sizes. Raises ArgumentError unless every tensor is there and fits the others."""
        (_, rows, _), (num, *down) = (self._sizes(part) for part in ("up", "down"))
        self.hidden, self.intermediate = down
        entries = [entry for entry, _ in self.names]
        self.gated = any(entry.gated for entry in entries)
        if any(e.gated is None and len(e.parts) == 2 for e in entries):  # joined with a gate or not
            self.gated = rows == 2 * self.intermediate
        self.num = num or max(n for _, n in self.names if n is not None) + 1
        expected = {}
        for entry, parts in self.entries(self.layout):
            for n in range(self.num) if entry.of_each else (None,):
                expected[entry, n] = parts
        if lacking := [place for place in expected if place not in self.names]:
            self._refuse_missing(*lacking[0])
        for place, name in self.names.items():
            if place not in expected:
                raise ArgumentError(f"tensor {name!r}", "there", f"none of this name in {self}")
            self._check(place[0], name, expected[place])

    def is_whole(self) -> bool:
        """Whether measure() finds nothing wrong."""
        try:
            self.measure()
        except ArgumentError:
            return False
        return True

    def _sizes(self, part: str) -> tuple[int, int, int]:
        """Return (experts or 0, rows, columns) of the first tensor of numbers that holds the part."""
        of_part = (
            (entry, name)
            for (entry, _), name in self.names.items()
            if entry.kind in ("weight", "codes") and part in entry.parts
        )
        entry, name = next(of_part)
        shape = self.source.shape(name)
        of_one = shape if entry.of_each else shape[1:]
        found = self.layout.sizes(entry.kind, of_one)
        if found is None or 0 in shape:
            expected = "rows and columns" if entry.of_each else "experts, rows and columns"
            raise ArgumentError(f"{name}.shape", list(shape), f"{expected} above 0, as in {self}")
        return 0 if entry.of_each else shape[0], *found

    def _refuse_missing(self, entry: Entry, n: int | None) -> None:
        name = f"{self.layout.stem(self.prefix)}{entry.name.format(n=n)}"
        of = "" if n is None else f" of expert {n} of {self.num}"
        raise ArgumentError(f"tensor {name!r}", "missing", f"the {entry.kind}{of} in {self}")

    def _check(self, entry: Entry, name: str, parts: tuple[str, ...]) -> None:
        dtype = self.source.dtype(name)
        allowed = _KIND_DTYPES[frozenset(self.kinds - _OPTIONAL_KINDS)].get(entry.kind, FLOATS)
        if dtype not in allowed:
            raise ArgumentError(f"{name}.dtype", dtype, f"{' or '.join(allowed)} in {self}")
        for part in parts:
            if self.dtypes.setdefault((entry.kind, part), dtype) != dtype:
                others = self.dtypes[entry.kind, part]
                raise ArgumentError(f"{name}.dtype", dtype, f"{others}, as other experts of {self}")
        shape, expected = self.source.shape(name), self.shape(self.layout, entry, parts)
        if (shape or (1,)) != expected:
            sizes = f"{self.num} experts, hidden {self.hidden}, intermediate {self.intermediate}"
            raise ArgumentError(f"{name}.shape", list(shape), f"{list(expected)}: {self}, {sizes}")


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[Layout, Entry, str, re.Pattern[str]]]:
    """Return for each entry also a part of its name: to look for it is faster than to match."""
    found = []
    for layout in LAYOUTS.values():
        for entry in layout.entries:
            name = re.escape(entry.name).replace(r"\{n\}", _NUMBER)
            stem = "" if layout.module_prefix else r"(?:experts\.)" + "?" * layout.allows_bare_names
            # lazy, so that a bare name's prefix ends before "experts."
            pattern = rf"(?P<prefix>(?:.+?\.)??{re.escape(layout.module_prefix)}){stem}{name}"
            certain = max(entry.name.split("{n}"), key=len)
            found.append((layout, entry, certain, re.compile(pattern)))
    return found


_Claims = dict[str, dict[tuple[Entry, int | None], str]]  # by layout, then by place


def _claims(source: Source) -> dict[str, _Claims]:
    """Return for each prefix, by layout, the names that could belong to it."""
    found: dict[str, _Claims] = {}
    known = set(source.names)
    for name in source.names:
        dtype, of_matrix = source.dtype(name), _is_of_matrix(source, known, name)
        for layout, entry, certain, pattern in _patterns():
            match = pattern.fullmatch(name) if certain in name else None
            packed = layout.types.get(entry.kind)
            if match is None or (dtype == "U8" if packed is None else dtype != packed):
                continue
            if layout.module_prefix and len(source.shape(name)) != 3:  # a dense module's
                continue
            if of_matrix != (layout.per_matrix_scale if entry.kind == "channels" else None):
                continue
            number = int(match["n"]) if entry.of_each else None
            places = found.setdefault(match["prefix"], {}).setdefault(layout.name, {})
            if other := places.get((entry, number)):
                raise ArgumentError(f"tensor {name!r}", f"there beside {other!r}", "one of them")
            places[entry, number] = name
    return {prefix: claims for prefix, claims in found.items() if _is_module(prefix, claims)}


def _is_of_matrix(source: Source, known: set[str], name: str) -> bool | None:
    """Return True for a scale of a whole matrix, False for scales of its rows, None for any other tensor."""
    of = name.removesuffix("_scale")
    if of == name or of not in known:
        return None
    shape, rows = source.shape(name), source.shape(of)[:-1]
    if shape in ((), (1,)):
        return True
    return False if shape == (*rows, 1) else None


def _is_module(prefix: str, claims: _Claims) -> bool:
    """Whether these are experts: a lone `w2` behind no `experts.` is somebody else's tensor."""
    names = {name for places in claims.values() for name in places.values()}
    known = any(name.startswith(f"{prefix}experts.") for name in names)
    return known or f"{prefix}w13" in names or any(LAYOUTS[of].module_prefix for of in claims)


def find(source: Source, stated: str | None, model_type: str | None) -> list[Experts]:
    """Return the modules of experts, measured.

    stated: the layout, where its user says which. model_type: that of config.json.
    Raises ArgumentError for names, shapes and types that are no layout's, or more than one's.
    """
    modules = []
    for prefix, claims in _claims(source).items():
        modules.append(_module(source, prefix, claims, stated, model_type))
    claimed = {name for module in modules for name in module.names.values()}
    unknown = [
        name
        for name in source.names
        if name not in claimed and {"experts", "local_experts"} & {*name.split(".")}
    ]
    if unknown:
        raise ArgumentError("layout", _seen(source, unknown), f"one of {', '.join(LAYOUTS)}")
    if not modules:
        raise ArgumentError("source", _seen(source, source.names), "tensors of experts")
    for module in modules:
        module.measure()
    return modules


def _module(
    source: Source, prefix: str, claims: _Claims, stated: str | None, model_type: str | None
) -> Experts:
    names = sorted({name for places in claims.values() for name in places.values()})
    fitting = []
    for name, places in claims.items():
        kinds = {entry.kind for entry, _ in places}
        parts = {p for e, _ in places if e.kind in ("weight", "codes") for p in e.parts}
        complete = frozenset(kinds - _OPTIONAL_KINDS) in _KIND_DTYPES and {"up", "down"} <= parts
        complete &= kinds >= set(LAYOUTS[name].needs)
        if complete and len(places) == len(names) and stated in (None, name):
            fitting.append(Experts(source, prefix, LAYOUTS[name], places))
    # Which way matrices lie shows even where one is square: up and gate have twice as many rows as down has columns.
    # In which order their rows lie does not.
    if len(fitting) > 1:
        fitting = [experts for experts in fitting if experts.is_whole()] or fitting
    types = {e.layout.name: e.layout.ambiguous for e in fitting}
    said = [e for e in fitting if stated or model_type in (types[e.layout.name] or (model_type,))]
    if len(said) == 1:
        return said[0]
    expected = stated or f"one of {', '.join(LAYOUTS)}"
    if fitting and not said:
        each = " or ".join(f"{name} of model_type {', '.join(of)}" for name, of in types.items())
        expected = (
            f"{each} in config.json, or stated (--from): names and shapes do not say the order"
        )
    raise ArgumentError(f"layout of {prefix}experts", _seen(source, names), expected)


def _seen(source: Source, names: list[str]) -> str:
    """Say which names there are, numbers as *, with type and shape of the first of each."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(_NUMBERS.sub("*", name), name)
    found = [f"{kind} {source.dtype(n)} {list(source.shape(n))}" for kind, n in kinds.items()]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join(found[:_SHOWN] + more)
