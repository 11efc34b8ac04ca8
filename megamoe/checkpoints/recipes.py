"""Validate the quantization recipe in config.json: tensors do not show how the rows they multiply were rounded.

A layer multiplies e4m3 weights with rows that it quantizes on the fly, and MXFP4 weights with bf16 rows
(docs/numerics.md). Weights made for other rows, such as bf16 rows or rows with a calibrated scale, would silently give
other results. So would weights whose rows have to be rotated first.

Experts without a recipe are accepted. The direction of their scales is known: every format with a `weight_scale` or
`weight_scale_inv` multiplies by it, and dtypes and shapes determine the rest. The user then chooses how rows are
rounded, by the layer's precision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from megamoe.checkpoints.experts import Experts
from megamoe.checkpoints.layouts import HF, MIXTRAL, Layout
from megamoe.core.errors import ArgumentError
from megamoe.core.table import SCALE_GROUP

CONFIG, MODELOPT = "config.json", "hf_quant_config.json"  # the second has a recipe of ModelOpt's
_KEYS = ("quantization_config", "compression_config")  # the second of older files
_SKIPPED = ("modules_to_not_convert", "ignored_layers")
# Of a recipe that does not say them.
_DEFAULTS = {
    **{"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False},
    **{"activation_scheme": "dynamic", "fmt": "e4m3"},
}
_Recipe = dict[str, tuple[Any, ...]]  # what each key of a recipe or scheme may be
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
_TOKEN = _E4M3 | {"strategy": "token", "dynamic": True}
_GROUP = _E4M3 | {"strategy": "group", "group_size": SCALE_GROUP, "dynamic": True}
_BLOCKS = {"strategy": "block", "block_structure": [SCALE_GROUP] * 2}


def _scheme(weights: dict[str, Any], rows: dict[str, Any]) -> _Recipe:
    weights = _E4M3 | weights | {"dynamic": False}
    return {"weights": (weights,), "input_activations": (rows,), "output_activations": (None,)}


# With a scale_fmt of ue8m0 weights have powers of two, which fp32 holds.
_OWN: _Recipe = {"activation_scheme": ("dynamic",), "fmt": ("e4m3", "float8_e4m3fn")}
# By quant_method and by how scales are arranged. "fp8" is DeepSeek's, Qwen's, MiniMax' and AutoFP8's own.
_EXPECTED: dict[str, dict[str, _Recipe]] = {
    "fp8": {
        "scale": _OWN | {"weight_block_size": ([SCALE_GROUP] * 2,)},
        "matrix": _OWN | {"weight_block_size": (None,)},
        "codes": {},  # DeepSeek-V4's, whose other modules are FP8
    },
    "compressed-tensors": {
        "scale": _scheme(_BLOCKS, _GROUP),
        "channels": _scheme({"strategy": "channel"}, _TOKEN),
        "matrix": _scheme({"strategy": "tensor"}, _TOKEN),
    },
    "modelopt": {"matrix": {"quant_algo": ()}},
    "mxfp4": {"codes": {}},
}
# Of matrices with one scale also rows with one for all tokens, where the user lets a layer give each its own.
_ROWS: _Recipe = {
    "activation_scheme": ("static",),
    "input_activations": tuple(
        _E4M3 | {"strategy": "tensor", "dynamic": dynamic} for dynamic in (False, True)
    ),
    "quant_algo": ("FP8",),
}
# A recipe has the names that modules had where it was made, and a checkpoint may have others for these.
_TREES = (("block_sparse_moe.", "mlp."), ("language_model.model.", "model.language_model."))
# A part whose recipe is of the tower that sees alone, and what names have there. What may be either is held against it.
_VISION, _IN_VISION = "vision_config", re.compile("vis|vit|vpm|image", re.IGNORECASE)
_CLASS = "Linear"  # that a projection is, as targets name it
_SHOWN = 500  # characters of a value in messages: targets may be all modules


def check_recipes(
    modules: list[Experts],
    files: dict[str, dict[str, Any]],
    folder: Path,
    to: Layout,
    dynamic_activations: bool,
) -> None:
    """Raise ArgumentError where recipes say that experts are not what a layer computes. Silence is accepted.

    files: what CONFIG and MODELOPT of `folder` hold. to: another library's layout must be one that the recipe, which
    stays beside it, is right for. dynamic_activations: rows that had one scale for all tokens are taken.
    """
    for experts in modules:
        rows = [name for (entry, _), name in experts.names.items() if entry.kind == "rows"]
        if rows and not dynamic_activations:
            expected = "no calibrated one, or dynamic_activations (--dynamic-activations)"
            _refuse(f"tensor {rows[0]!r}", "there", expected, experts)
        found = _recipes(files[CONFIG], _IN_VISION.search(experts.prefix) is not None)
        recipes = [(f"{folder / CONFIG}: {place}", recipe) for place, recipe in found]
        if beside := files[MODELOPT]:
            said = beside.get("quantization")
            said = {"quant_method": "modelopt"} | said if isinstance(said, dict) else said
            recipes.append((f"{folder / MODELOPT}: quantization", said))
        written = () if to.allows_bare_names or to is experts.layout else (to,)
        for layout in (experts.layout, *written):
            case = _Case(experts, layout, dynamic_activations)
            for name, recipe in recipes:
                _check_transforms(name, recipe, case)
                if case.arrangement is not None:
                    _check(name, recipe, case, case.arrangement)


def _recipes(config: dict[str, Any], vision: bool, place: str = "") -> Iterator[tuple[str, Any]]:
    """Return recipes and where they stand: in models of several parts also in the configuration of one of them.

    vision: of experts that may be in the vision tower; without, what only that has is left out.
    """
    for key, value in config.items():
        if key in _KEYS and value is not None:
            yield place + key, value
        elif isinstance(value, dict) and (vision or key != _VISION):
            yield from _recipes(value, vision, f"{place}{key}.")


@dataclass(frozen=True)
class _Case:
    """Experts whose recipe has to be right for this layout, their own or the one to write."""

    experts: Experts
    layout: Layout
    dynamic_activations: bool

    def __str__(self) -> str:
        same = self.layout is self.experts.layout
        return str(self.experts) if same else f"{self.experts} as {self.layout.name}"

    @cached_property
    def arrangement(self) -> str | None:
        """What the experts have of scales; None: their numbers are no quantized ones."""
        kinds = [kind for kind in ("scale", "channels", "codes") if kind in self.experts.kinds]
        return "matrix" if kinds and self.layout.per_matrix_scale else next(iter(kinds), None)

    @cached_property
    def modules(self) -> list[tuple[str, ...]]:
        """The experts' projections, each by its own name and those that recipes may have for it."""
        named = {entry.name for entry in self.layout.entries}
        known = [names.split() for names in (HF, MIXTRAL)]
        known.sort(key=lambda each: f"{{n}}.{each[-1]}.weight" not in named)
        prefixes = [self.experts.prefix]
        for pair in _TREES:
            for one, other in (pair, pair[::-1]):
                prefixes += [p.replace(one, other) for p in prefixes if f".{one}" in f".{p}"]
        return [
            tuple(dict.fromkeys(f"{p}experts.{n}.{name}" for p in prefixes for name in names))
            for n in range(self.experts.num)
            for names in list(zip(*known, strict=True))[0 if self.experts.gated else 1 :]
        ]

    def check(self, name: str, recipe: dict[str, Any], said: _Recipe) -> None:
        """Raise ArgumentError unless each key is one of what is said."""
        for key, every in said.items():
            if self.dynamic_activations and self.arrangement == "matrix":
                every += _ROWS.get(key, ())
            found = recipe.get(key, _DEFAULTS.get(key))
            if isinstance(found, dict):
                seen = [k for expected in every if isinstance(expected, dict) for k in expected]
                found = {k: found.get(k, _DEFAULTS.get(k)) for k in seen}
            if not any(_holds(found, expected) for expected in every):
                expected = " or ".join(map(repr, every)) or "rows whose scales are not calibrated"
                _refuse(f"{name}.{key}", found, expected, self)


def _holds(found: Any, expected: Any) -> bool:
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.items() >= expected.items()
    return bool(found == expected)


def _check_transforms(name: str, recipe: Any, case: _Case) -> None:
    """Raise ArgumentError if rows have to be transformed, such as rotated, before they are multiplied."""
    said = recipe.get("transform_config") if isinstance(recipe, dict) else None
    if said not in (None, {}, {"config_groups": {}}):
        expected = "none: rows are multiplied as they are"
        _refuse(f"{name}.transform_config", said, expected, case)


def _check(name: str, recipe: Any, case: _Case, arrangement: str) -> None:
    said = recipe.get("quant_method") if isinstance(recipe, dict) else recipe
    methods = {m: _EXPECTED[m] for m in case.layout.methods if arrangement in _EXPECTED[m]}
    if not isinstance(said, str) or said not in methods:
        _refuse(f"{name}.quant_method", said, " or ".join(map(repr, methods)), case)
    expected = methods[said][arrangement]
    if said == "compressed-tensors":
        _check_compressed(name, recipe, case, expected)
        return
    case.check(name, recipe, expected)
    modules = "".join(f".{module}.\n" for module, *_ in case.modules)
    for key in _SKIPPED:
        for skipped in sorted(_Targets(f"{name}.{key}", recipe.get(key), case).exact):
            if f".{skipped}." in modules:
                _refuse(f"{name}.{key}", skipped, "none that quantized experts are in", case)


def _check_compressed(name: str, recipe: dict[str, Any], case: _Case, said: _Recipe) -> None:
    ignored = _Targets(f"{name}.ignore", recipe.get("ignore"), case)
    for module, *_ in case.modules:
        found = (0, _CLASS) if _CLASS in ignored.exact else ignored.naming(module)
        if found is not None:
            _refuse(ignored.name, found[1], f"none that names {module}, which is e4m3", case)
    schemes = recipe.get("config_groups") or {}
    if not isinstance(schemes, dict) or not all(isinstance(s, dict) for s in schemes.values()):
        _refuse(f"{name}.config_groups", schemes, "schemes by the names of their groups", case)
    for group in sorted(_groups_of(f"{name}.config_groups", schemes, case)):
        case.check(f"{name}.config_groups.{group}", schemes[group], said)


def _groups_of(name: str, schemes: dict[str, Any], case: _Case) -> set[str]:
    """Return the groups of the experts' modules: for each those whose targets name it most closely, at last by class.

    Who loads a checkpoint takes one of several that are as close, by an order that is not the same everywhere, and by
    one of several names.
    """
    every = {
        group: _Targets(f"{name}.{group}.targets", scheme.get("targets"), case)
        for group, scheme in schemes.items()
    }
    groups = set()
    for names in case.modules:
        found = set()
        for module in names:
            ranks = {g: f[0] for g, t in every.items() if (f := t.naming(module)) is not None}
            found |= {group for group, rank in ranks.items() if rank == min(ranks.values())}
        found = found or {group for group, targets in every.items() if _CLASS in targets.exact}
        if not found:
            seen = {group: scheme.get("targets") for group, scheme in schemes.items()}
            _refuse(f"{name}, targets", seen, f"one of {names[0]}", case)
        groups |= found
    return groups


class _Targets:
    """What a list in a recipe names: modules, their class, and by patterns, which begin with "re:"."""

    def __init__(self, name: str, given: Any, case: _Case) -> None:
        self.name = name
        if not isinstance(given, list | None) or not all(isinstance(t, str) for t in given or ()):
            _refuse(name, given, "a list of names", case)
        patterns = {text for text in given or () if text.startswith("re:")}
        self.exact = set(given or ()) - patterns
        self._patterns = {text: self._compiled(text) for text in sorted(patterns)}

    def naming(self, module: str) -> tuple[int, str] | None:
        """Return how closely a module is named, least is closest, and by what: its name or a pattern."""
        if module in self.exact:
            return 0, module
        return next(
            ((1, t) for t, pattern in self._patterns.items() if pattern.match(module)), None
        )

    def _compiled(self, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text[3:])
        except re.error as error:
            expected = "a regular expression"
            raise ArgumentError(self.name, f"{text!r} ({error})", expected) from error


def _refuse(name: str, value: object, expected: str, of: object) -> NoReturn:
    text = repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    raise ArgumentError(name, shown, f"{expected}, for {of}")
